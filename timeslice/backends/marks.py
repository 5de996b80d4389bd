"""What a backend has to know of a process and can't see of it: one small file each, which outlives the agent."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import ValidationError

from timeslice.arena.process import start_time_of
from timeslice.backends.base import Context
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Target, Wire

M = TypeVar("M", bound=Wire)


def marks_folder(context: Context, backend: str, name: str) -> Path:
    """The folder that the option ``state`` names, or one of this user's that a reboot empties as it ends the processes;
    made if need be. BackendError(unsupported) when it is not this user's alone."""
    home = Path("/dev/shm")  # noqa: S108 - the folder's owner is checked
    usual = (home if home.is_dir() else Path(tempfile.gettempdir())) / f"timeslice-{name}-{os.getuid()}"
    folder = Path(context.options.get("state") or usual)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise _unsupported(context, backend, f"can't use {folder}: {error.strerror}") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise _unsupported(context, backend, f"{folder} must be yours alone (chmod 700)")
    return folder


def _unsupported(context: Context, backend: str, reason: str) -> BackendError:
    return BackendError(
        f"group {context.group}, node {context.node}: {backend} backend: {reason}; or set its option state=DIR",
        kind=FaultKind.UNSUPPORTED,
        group=context.group,
        node=context.node,
    )


class Marks(Generic[M]):
    """Named by number and start time of the process."""

    def __init__(self, folder: Path, model: type[M]) -> None:
        self._folder, self._model = folder, model

    def get(self, target: Target) -> M | None:
        path = self._path(target)
        try:
            return self._model.model_validate_json(path.read_text())
        except FileNotFoundError:
            return None
        except ValidationError:
            path.unlink(missing_ok=True)  # not written by us: as good as none
            return None

    def put(self, target: Target, mark: M) -> None:
        """BackendError(transient) when it can't be written, such as into a full folder."""
        draft = self._path(target).with_suffix(".new")
        try:
            draft.write_text(mark.model_dump_json())
            draft.replace(self._path(target))
        except OSError as error:
            raise BackendError(
                f"job {target.job}: what has to be known of process {target.pid} can't be written to {draft}: "
                f"{error.strerror}; make room there, or set the backend's option state",
                kind=FaultKind.TRANSIENT,
                job=target.job,
            ) from error

    def drop(self, target: Target) -> None:
        self._path(target).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove the marks of processes that are gone."""
        for path in self._folder.iterdir():
            pid, _, start = path.name.partition("-")
            if pid.isdecimal() and start.isdecimal() and start_time_of(int(pid)) != int(start):
                path.unlink(missing_ok=True)

    def _path(self, target: Target) -> Path:
        return self._folder / f"{target.pid}-{target.start}"
