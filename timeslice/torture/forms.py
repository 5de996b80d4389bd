"""Forms in which a job's process may come that make it hard to know: in namespaces of its own, with a title, without
threads. Each is what containers and serving engines do in earnest."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

HOST_NAME = "3fa9c1d2e4b5"  # as containers have them: no node's
BOOT_OFFSET_S = 100_000
_IN_NAMESPACES: Mapping[str, tuple[str, ...]] = {
    "host-name": ("unshare", "--uts", "sh", "-c", f'hostname {HOST_NAME}; exec "$@"', "-"),
    "pid-namespace": ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
    "time-namespace": ("unshare", "--time", "--boottime", str(BOOT_OFFSET_S), "--fork", "--kill-child"),
}
_FORKS = frozenset({"pid-namespace", "time-namespace"})  # what we started waits for its child, which is the process
FORMS = (*_IN_NAMESPACES, "title", "threads")
_CHECK_S = 10.0


def missing() -> dict[str, str]:
    """The forms that no process can have on this machine, each with the reason."""
    return {form: why for form, line in _IN_NAMESPACES.items() if (why := _fails(line))}


def line_in(form: str, line: Sequence[str]) -> list[str]:
    """The command that starts ``line`` in that form."""
    return [*_IN_NAMESPACES.get(form, ()), *line]


def environment_in(form: str, environment: Mapping[str, str]) -> dict[str, str]:
    """A container knows nothing of the node but what it is told, and nobody told it."""
    hidden = {"TIMESLICE_NODE"} if form == "host-name" else set()
    return {name: value for name, value in environment.items() if name not in hidden}


def process_in(form: str, started: int) -> int:
    """The process itself, of what was started for it. ProcessLookupError while there is none."""
    if form not in _FORKS:
        return started
    return next(iter(children_of(started)), 0) or _none(started)


def wears(form: str, pid: int) -> bool:
    """Whether a process has that form, as the kernel shows it."""
    match form:
        case "host-name":
            return _namespace(pid, "uts") != _namespace("self", "uts")
        case "pid-namespace":
            return _namespace(pid, "pid") != _namespace("self", "pid")
        case "time-namespace":
            return _namespace(pid, "time") != _namespace("self", "time")
        case "title":
            return any(_is_wiped(each) for each in children_of(pid))
    return False


def children_of(pid: int) -> list[int]:
    """Children of a process, and theirs; [] when it has ended."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        found = [int(each) for task in tasks for each in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [one for each in found for one in (each, *children_of(each))]


def _is_wiped(pid: int) -> bool:
    try:
        shown = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return bool(shown) and not shown.strip(b"\0")


def _namespace(pid: int | str, name: str) -> str:
    return str(Path(f"/proc/{pid}/ns/{name}").readlink())


def _none(started: int) -> int:
    raise ProcessLookupError(f"process {started} has started none yet")


def _fails(line: Sequence[str]) -> str:
    """Why a command can't be started so; '' if it can."""
    if shutil.which("unshare") is None:
        return "there is no unshare (util-linux) on PATH"
    try:
        done = subprocess.run([*line, "true"], capture_output=True, text=True, timeout=_CHECK_S, check=False)
    except subprocess.TimeoutExpired:
        return f"{' '.join(line[:2])} does not end"
    return "" if done.returncode == 0 else done.stderr.strip() or f"{' '.join(line[:2])} ends with {done.returncode}"
