"""What the environment says, and where the server is.

Order of precedence everywhere: command-line flag, environment, value in code, default.
Nothing is cached: a test or a launcher may change the environment between two calls.
"""

from __future__ import annotations

import math
import os
import socket
import stat
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from timeslice.addresses import normalise_url, with_credentials
from timeslice.errors import UsageError
from timeslice.names import MAX_LENGTH, check_name, check_prefix, sanitise_name

_SLURM_OWN_STEPS = 0xFFFFFFF0  # from here on: batch script, interactive shell, extern, ...


class Settings(BaseSettings):
    """The ``TIMESLICE_*`` variables. ``Settings()`` reads them now; an empty variable counts as unset."""

    model_config = SettingsConfigDict(env_prefix="TIMESLICE_", env_ignore_empty=True, extra="ignore", frozen=True)

    url: str | None = None
    username: str | None = None
    password: str | None = Field(default=None, repr=False)
    job: str | None = Field(default=None, validation_alias=AliasChoices("TIMESLICE_JOB", "TIMESLICE_JOB_ID"))
    prefix: str = "ts"
    node: str | None = None
    disable: bool = False
    runtime_dir: Path | None = None
    patience: float | None = None

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors()[0]
            variable = "TIMESLICE_" + str(first["loc"][0]).upper().removeprefix("TIMESLICE_")
            if variable == "TIMESLICE_JOB" and not os.environ.get(variable):
                variable = "TIMESLICE_JOB_ID"
            cause = first.get("ctx", {}).get("error")
            if isinstance(cause, UsageError):
                raise type(cause)(f"{variable}: {cause}") from error
            raise UsageError(f"{variable}: {first['msg']}; got {first['input']!r}") from error

    @field_validator("prefix")
    @classmethod
    def _prefix(cls, value: str) -> str:
        return check_prefix(value)

    @field_validator("job")
    @classmethod
    def _job(cls, value: str | None) -> str | None:
        return None if value is None else check_name("job", value)

    @field_validator("patience")
    @classmethod
    def _patience(cls, value: float | None) -> float | None:
        return check_patience(value)

    @field_validator("node")
    @classmethod
    def _node(cls, value: str | None) -> str | None:
        return None if value is None else check_name("node", value)


def check_patience(value: float | None) -> float | None:
    """Seconds that a call which is no wait asks on without an answer; None for the default. Raises UsageError."""
    if value is not None and (isinstance(value, bool) or math.isnan(value) or value < 0):
        raise UsageError(f"a patience of {value!r} s: give 0 or more seconds")
    return value


def default_node() -> str:
    """Name of this machine: ``TIMESLICE_NODE``, else its host name made to fit the naming rule."""
    return Settings().node or sanitise_name(socket.gethostname(), fallback="node")


def shared_job() -> str | None:
    """Id that all processes of a job find: ``TIMESLICE_JOB``, the Slurm step's, torchrun's ``--rdzv-id``; else None."""
    if job := Settings().job:
        return job
    if slurm := os.environ.get("SLURM_JOB_ID"):
        step = os.environ.get("SLURM_STEP_ID") or os.environ.get("SLURM_STEPID", "")
        return check_name("job", slurm_job(slurm, step))
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")  # "none" is torchrun's word for none given
    return None if run in {"", "none"} else sanitise_name(run, fallback="run")


def slurm_job(number: str, step: str = "") -> str:
    """Id of what Slurm runs as one program: the tasks of a step (``srun``), or else what the allocation's own script or
    shell runs, which is a step without a number, or with one of the highest that Slurm keeps for such."""
    named = step.isdecimal() and int(step) < _SLURM_OWN_STEPS
    return f"slurm-{number}.{step}" if named else f"slurm-{number}"


def default_job() -> str:
    """Id of this job: one that all of its processes share, else node and process id."""
    if job := shared_job():
        return job
    tail = f"-{os.getpid()}"
    return sanitise_name(default_node(), fallback="node", room=MAX_LENGTH - len(tail)) + tail


def runtime_dir() -> Path:
    """Folder for this user's sockets and URL file, made if missing; nobody else may write to it.

    A folder that another user prepared could send every client to a server of theirs, so it is refused.
    """
    path = Settings().runtime_dir or _default_runtime_dir()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise UsageError(f"can't use {path} ({error.strerror}); set TIMESLICE_RUNTIME_DIR") from error
    if not stat.S_ISDIR(status.st_mode):
        problem = "it is a symbolic link"  # mkdir let it pass, so it is a link to a folder
    elif status.st_uid != os.getuid():
        problem = f"it belongs to user id {status.st_uid}, not to you ({os.getuid()})"
    elif status.st_mode & 0o022:
        problem = f"other users may write to it; run: chmod 700 {path}"
    else:
        return path
    raise UsageError(f"refusing to use {path}: {problem}. Or set TIMESLICE_RUNTIME_DIR to another folder.")


def _default_runtime_dir() -> Path:
    session = os.environ.get("XDG_RUNTIME_DIR")
    # After `su` or in cron the variable may point at a folder that is not there.
    if session and Path(session).is_dir():
        return Path(session) / "timeslice"
    return Path(f"/tmp/timeslice-{os.getuid()}")  # noqa: S108 - checked for its owner by runtime_dir


def url_file() -> Path:
    """Where ``timeslice up`` writes its URL, for this user's clients to find."""
    return runtime_dir() / "url"


def publish_url(url: str) -> None:
    """Write the URL file; a reader sees the old content or the new, never half of it."""
    path = url_file()
    draft = path.with_name(f"url.{os.getpid()}")
    draft.touch(mode=0o600)
    draft.write_text(url + "\n")
    draft.replace(path)


def withdraw_url(url: str) -> None:
    """Remove the URL file if it still holds ``url``; a newer server's is left alone."""
    path = url_file()
    if path.exists() and path.read_text().strip() == url:
        path.unlink(missing_ok=True)


_found: dict[Path, str] = {}  # URL file -> what this process read there last


def look_again(url: str) -> str:
    """Where the server of ``url`` is now: another `timeslice up` may have been started meanwhile. A URL that was given,
    and not found in the URL file, stays what it is."""
    for path, found in list(_found.items()):
        if found == url:
            try:
                return normalise_url(path.read_text().strip())
            except (OSError, UsageError):
                return url
    return url


def find_url(explicit: str | None = None, target: str | None = None) -> str:
    """URL of the server: flag, ``TIMESLICE_URL``, ``target`` in code, or what ``timeslice up`` left.

    ``TIMESLICE_USERNAME`` and ``TIMESLICE_PASSWORD`` complete one that was given without a password. While
    `timeslice up` starts again, its server is the one that this process found before.
    """
    for value in (explicit, target):
        if not isinstance(value, str | None):
            raise UsageError(f"{value!r} is no address of a server: give a text such as 'redis://host:6379'")
    settings = Settings()
    if given := explicit or settings.url or target:
        return with_credentials(given, settings.username, settings.password)
    path = url_file()
    try:
        _found[path] = normalise_url(path.read_text().strip())
        return _found[path]
    except FileNotFoundError:
        if path in _found:  # it is started again: an outage of the server that this process knows
            return _found[path]
        raise UsageError(
            "no server is known. Start one with `timeslice up`, "
            "or point at yours: export TIMESLICE_URL=redis://host:6379"
        ) from None
