"""What the ``http`` backend put to sleep in which server: what the servers do not tell. Outlives the agent."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from pydantic import Field, ValidationError

from timeslice.errors import BackendError, FaultKind
from timeslice.models import Id, Mode, Number, Url, Wire, Word


class Mark(Wire):
    """Written before an order is sent and again when it is answered."""

    url: Url
    run: Id  # of the server, as far as it tells: another one with the same address is awake
    process: Id = ""  # its own, where that was registered
    out: tuple[Word, ...] = Field(max_length=64)  # tags that sleep
    mode: Mode
    unsure: bool = False  # an order has not been answered: it may be done or not
    device_bytes: Number = 0  # that it had before
    host_bytes: Number = 0

    def is_of(self, run: str, process: str) -> bool:
        """One run of a server may be known by its own process at one time, and by one that stands in at another."""
        return self.run == run and (not self.process or not process or self.process == process)


class Marks:
    """One small file a server."""

    def __init__(self, folder: Path) -> None:
        """ValueError when others may write there."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.lstat()
        except OSError as error:
            raise ValueError(f"can't use {folder}: {error.strerror}") from error
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise ValueError(f"{folder} must be yours alone (chmod 700)")
        self._folder = folder

    def get(self, url: str) -> Mark | None:
        path = self._path(url)
        try:
            mark = Mark.model_validate_json(path.read_text())
        except FileNotFoundError:
            return None
        except ValidationError:
            path.unlink(missing_ok=True)  # not written by us: as good as none
            return None
        return mark if mark.url == url else None

    def put(self, mark: Mark) -> None:
        """BackendError(transient) when it can't be written, such as into a full folder."""
        draft = self._path(mark.url).with_suffix(".new")
        try:
            draft.write_text(mark.model_dump_json())
            draft.replace(self._path(mark.url))
        except OSError as error:
            message = f"server {mark.url}: what sleeps can't be written to {draft}: {error.strerror}"
            raise BackendError(
                f"{message}; make room there, or set the option state", kind=FaultKind.TRANSIENT
            ) from error

    def drop(self, url: str) -> None:
        self._path(url).unlink(missing_ok=True)

    def _path(self, url: str) -> Path:
        return self._folder / hashlib.sha256(url.encode()).hexdigest()[:32]


def default_folder() -> Path:
    """One of this user's that a reboot empties, as it ends the servers."""
    home = Path("/dev/shm")  # noqa: S108 - the folder's owner is checked
    return (home if home.is_dir() else Path(tempfile.gettempdir())) / f"timeslice-servers-{os.getuid()}"
