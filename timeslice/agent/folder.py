"""The agent's folder on disk: its own alone, and locked while it runs.

What stands there is believed (the fence, what was done to whom), so nobody else may write there or put a link in the
way. Modes do not depend on the umask.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from pathlib import Path

from timeslice.agent.journal import read_whole, write_whole
from timeslice.errors import RefusedError, UsageError

_FOLDER, _FILE = 0o700, 0o600


def private_folder(folder: Path) -> None:
    """Make a folder that is ours alone, or see to it that it is. OSError, and UsageError that says what is wrong."""
    missing = [folder, *folder.parents]
    for each in reversed(missing[: next((n for n, path in enumerate(missing) if os.path.lexists(path)), len(missing))]):
        each.mkdir(mode=_FOLDER)
        each.chmod(_FOLDER)
    _check(folder, is_folder=True)


def claim_folder(folder: Path) -> int:
    """Lock the state folder; the lock ends with the process. RefusedError and UsageError say why not."""
    try:
        private_folder(folder)
        for above in folder.resolve().parents:
            mode = above.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                raise UsageError(f"refusing to use {folder}: everybody may write to {above}, and so replace it")
        for place, folders, files in os.walk(folder):
            for name in folders:
                _check(Path(place, name), is_folder=True)
            for name in files:
                _check(Path(place, name), is_folder=False)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, _FILE)
    except OSError as error:
        raise UsageError(f"can't use {folder} ({error.strerror}); give this agent another --state-dir") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(lock, 32, 0).decode().strip()
        os.close(lock)
        raise RefusedError(
            f"{folder} is used by another agent (process {owner or '?'}); stop it, or give this one --state-dir"
        ) from None
    os.fchmod(lock, _FILE)
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def instance_of(folder: Path) -> str:
    """Identity of this agent, kept in its state folder: after a crash the next run is the same instance."""
    path = folder / "instance"
    if not path.exists():
        write_whole(path, secrets.token_hex(8).encode())
    return read_whole(path).decode()


def _check(path: Path, *, is_folder: bool) -> None:
    """Refuse what is not ours alone to write, and take others' right to read."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        problem = "it is a symbolic link"
    elif found.st_uid != os.geteuid():
        problem = f"it belongs to user id {found.st_uid}, not to this agent's ({os.geteuid()})"
    elif is_folder and not stat.S_ISDIR(found.st_mode):
        problem = "it is no folder"
    elif not is_folder and not stat.S_ISREG(found.st_mode):
        problem = "it is no plain file"
    elif found.st_mode & 0o022:
        problem = f"other users may write to it; look what they wrote, then: chmod {_FOLDER if is_folder else _FILE:o}"
    else:
        if found.st_mode & 0o077:
            path.chmod(_FOLDER if is_folder else _FILE)
        return
    raise UsageError(f"refusing to use {path}: {problem}. Or give this agent another --state-dir.")
