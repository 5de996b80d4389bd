"""``timeslice-arena-checkpoint``: the checkpoint tool of the emulated device.

Flags, printed states and error texts are those of NVIDIA's cuda-checkpoint (as of driver r570), so that whatever
drives the one can be tried with the other. Exit status: 0 done, 1 failed, 2 usage.
"""

# ruff: noqa: T201  (printing is its job)
from __future__ import annotations

import sys

from timeslice.arena import operations
from timeslice.arena.errors import EmulatedDeviceError
from timeslice.arena.process import Target
from timeslice.errors import UsageError

HELP = """\
Checkpoint and restore utility for timeslice's emulated device.
Takes the flags of cuda-checkpoint as of driver 570; no accelerator is involved.

Operations:
--get-state --pid <pid>
        Prints the current checkpoint state of the process specified by <pid>

--action lock | checkpoint | restore | unlock --pid <pid> [--timeout <ms>]
        Performs the specified action on <pid>.
        For the lock action a timeout can be provided: it waits up to <ms> milliseconds (default 10000).

--toggle --pid <pid>
        Toggles the state of the specified process between running and checkpointed

--get-restore-tid --pid <pid>
        Prints the restore thread ID of the process specified by <pid>

Options:
--pid|-p <pid>
        The process to work on

--timeout|-t <timeout>
        Optional timeout of the lock action in milliseconds

--help|-h
        Print this help message

Environment:
TIMESLICE_VISIBLE_ARENAS=/path[,/path]
        Work only on the memory that the process has on these emulated devices
TIMESLICE_ARENA_FAULTS=ACTION:FAULT[,...]
        Misbehave on request, for tests; see timeslice/arena/README.md
"""

_VALUED = {
    "--pid": "pid",
    "-p": "pid",
    "--action": "action",
    "--timeout": "timeout",
    "-t": "timeout",
    "--free-late": "free-late",  # not in the help: the second half of an injected fault
}
_PLAIN = {"--get-state": "get-state", "--get-restore-tid": "get-restore-tid", "--toggle": "toggle"}
_ACTIONS = ("lock", "checkpoint", "restore", "unlock")


class _WrongUsageError(Exception):
    pass


def _parse(words: list[str]) -> tuple[str, dict[str, str]]:
    operations_asked: list[str] = []
    options: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if word in _PLAIN:
            operations_asked.append(_PLAIN[word])
        elif name in _VALUED:
            value = value if equals else next(rest, "")
            if not value:
                raise _WrongUsageError(f"{name} needs a value")
            options[_VALUED[name]] = value
        else:
            raise _WrongUsageError(f"unknown option {word}")
    operations_asked += [name for name in ("action", "free-late") if name in options]
    if len(operations_asked) != 1:
        raise _WrongUsageError("exactly one of --get-state, --action, --toggle, --get-restore-tid is needed")
    if "pid" not in options:
        raise _WrongUsageError("--pid is needed")
    if options.get("action", "lock") not in _ACTIONS:
        raise _WrongUsageError(f"unknown action {options['action']}; one of {', '.join(_ACTIONS)}")
    for name in ("pid", "timeout"):
        if not options.get(name, "0").isdecimal():
            raise _WrongUsageError(f"--{name} {options[name]} is no number")
    if "timeout" in options and options.get("action") != "lock":
        raise _WrongUsageError("--timeout is for --action lock only")
    return operations_asked[0], options


def _run(operation: str, options: dict[str, str]) -> None:
    target = Target(int(options["pid"]))
    if operation == "get-state":
        print(operations.get_state(target))
    elif operation == "get-restore-tid":
        operations.get_state(target)
        print(target.pid)  # any thread would do: the operations need none in the process
    elif operation == "toggle":
        _toggle(target)
    elif operation == "free-late":
        operations.free_late(target, float(options["free-late"]))
    elif options["action"] == "lock":
        operations.lock(target, int(options.get("timeout", operations.DEFAULT_TIMEOUT_MS)))
    else:
        {
            "checkpoint": operations.checkpoint,
            "restore": operations.restore,
            "unlock": operations.unlock,
        }[options["action"]](target)


def _toggle(target: Target) -> None:
    state = operations.get_state(target)
    if state == "running":
        operations.lock(target)
        operations.checkpoint(target)
    else:
        if state == "checkpointed":
            operations.restore(target)
        operations.unlock(target)


def _complaint(operation: str, options: dict[str, str], reason: str) -> str:
    pid = options["pid"]
    return {
        "get-state": f'Error getting process state for process ID {pid}: "{reason}"',
        "get-restore-tid": f'Error getting restore thread ID for process ID {pid}: "{reason}"',
        "toggle": f'Error toggling CUDA in process ID {pid}: "{reason}"',
    }.get(operation, f'Could not {options.get("action", operation)} on process ID {pid}: "{reason}"')


def main(words: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    words = sys.argv[1:] if words is None else words
    if not words or "--help" in words or "-h" in words:
        print(HELP, end="")
        return 0 if words else 2
    try:
        operation, options = _parse(words)
    except _WrongUsageError as error:
        print(f"{error}; see --help", file=sys.stderr)
        return 2
    try:
        _run(operation, options)
    except UsageError as error:  # of the faults asked for
        print(error, file=sys.stderr)
        return 2
    except (EmulatedDeviceError, OSError) as error:
        reason = error.reason if isinstance(error, EmulatedDeviceError) else str(error.strerror or error)
        # First the line that callers know from the real tool, then what to do about it.
        print(_complaint(operation, options, reason), file=sys.stderr)
        print(f"  {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
