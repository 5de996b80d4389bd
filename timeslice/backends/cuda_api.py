"""The flags of cuda-checkpoint on the driver API: ``python -m timeslice.backends.cuda_api``.

A process of its own for each call, because a call of the driver may never return. It needs ``cuda-bindings`` (the extra
``timeslice-rl[cuda]``) and driver 570 or newer.
"""

# ruff: noqa: T201  (printing is its job)
from __future__ import annotations

import argparse
import ctypes
import re
import sys
from types import ModuleType
from typing import Any

ACTIONS = ("lock", "checkpoint", "restore", "unlock")
STATES = ("running", "locked", "checkpointed", "failed")
SINCE, MAPS_SINCE = 12080, 13000  # cuDriverGetVersion of drivers 570 and 580

_COMPLAINTS = {
    "get-state": "Error getting process state for process ID {}",
    "get-restore-tid": "Could not find restore thread for process ID {}",
}


class DriverError(Exception):
    """The driver's own word for what went wrong."""


class MissingError(Exception):
    """Something that this program needs is not there."""


def load() -> ModuleType:
    """The bindings, with the driver's library behind them."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise MissingError(f"cuda-bindings is not installed; pip install 'timeslice-rl[cuda]' ({error})") from error
    try:
        code, version = driver.cuDriverGetVersion()
    except RuntimeError as error:  # what the bindings raise without libcuda.so.1
        raise MissingError(f"libcuda.so.1 was not found; is the NVIDIA driver installed? ({error})") from error
    if int(code) or version < SINCE:
        raise MissingError(f"driver API {version} is too old; it needs 12.8, that is driver 570 or newer")
    return driver  # type: ignore[no-any-return]


def call(driver: ModuleType, name: str, *arguments: Any) -> Any:
    """One function of the driver; its result, if it has one."""
    code, *rest = getattr(driver, name)(*arguments)
    if int(code):
        _, text = driver.cuGetErrorString(code)
        raise DriverError(text.decode() if text else str(code))
    return rest[0] if rest else None


def has_maps(driver: ModuleType) -> bool:
    return hasattr(driver, "CUcheckpointGpuPair") and int(driver.cuDriverGetVersion()[1]) >= MAPS_SINCE


def pairs_of(driver: ModuleType, text: str) -> list[Any]:
    """GPU-...=GPU-...,... as the driver takes it."""
    found = []
    for word in text.split(","):
        old, _, new = word.partition("=")
        pair = driver.CUcheckpointGpuPair()
        pair.oldUuid, pair.newUuid = (_uuid(driver, each) for each in (old, new))
        found.append(pair)
    return found


def _uuid(driver: ModuleType, text: str) -> Any:
    digits = text.partition("-")[2].replace("-", "")
    if not re.fullmatch("[0-9A-Fa-f]{32}", digits):
        raise MissingError(f"{text} is no UUID of a device")
    raw = bytes.fromhex(digits)
    made = driver.CUuuid()
    ctypes.memmove(made.getPtr(), raw, 16)  # the bindings let nobody set its bytes
    return made


def act(driver: ModuleType, asked: argparse.Namespace) -> None:
    pid = asked.pid
    if asked.action == "lock":
        arguments = driver.CUcheckpointLockArgs()
        arguments.timeoutMs = asked.timeout
        call(driver, "cuCheckpointProcessLock", pid, arguments)
    elif asked.action == "checkpoint":
        call(driver, "cuCheckpointProcessCheckpoint", pid, driver.CUcheckpointCheckpointArgs())
    elif asked.action == "restore":
        arguments = driver.CUcheckpointRestoreArgs()
        if asked.device_map:
            pairs = pairs_of(driver, asked.device_map)
            arguments.gpuPairs, arguments.gpuPairsCount = pairs, len(pairs)
        call(driver, "cuCheckpointProcessRestore", pid, arguments)
    elif asked.action == "unlock":
        call(driver, "cuCheckpointProcessUnlock", pid, driver.CUcheckpointUnlockArgs())
    elif asked.get_state:
        print(STATES[int(call(driver, "cuCheckpointProcessGetState", pid))])
    else:
        print(call(driver, "cuCheckpointProcessGetRestoreThreadId", pid))


def parser(*, maps: bool) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="cuda_api", description=__doc__, allow_abbrev=False)
    made.add_argument("--pid", type=int, required=True)
    operation = made.add_mutually_exclusive_group(required=True)
    operation.add_argument("--get-state", action="store_true")
    operation.add_argument("--get-restore-tid", action="store_true")
    operation.add_argument("--action", choices=ACTIONS)
    made.add_argument("--timeout", type=int, default=0, metavar="MS")
    hidden = None if maps else argparse.SUPPRESS
    made.add_argument("--device-map", default="", metavar="OLD=NEW,...", help=hidden)
    return made


def main() -> int:
    """The command; returns its exit status."""
    try:
        driver = load()
        asked = parser(maps=has_maps(driver)).parse_args()
        try:
            call(driver, "cuInit", 0)
        except DriverError as error:
            raise MissingError(f'Error initializing CUDA: "{error}"') from error
    except MissingError as error:
        print(error, file=sys.stderr)
        return 1
    operation = "get-state" if asked.get_state else asked.action or "get-restore-tid"
    complaint = _COMPLAINTS.get(operation, f"Could not {operation} on process ID {{}}").format(asked.pid)
    try:
        act(driver, asked)
    except (DriverError, MissingError) as error:
        print(f'{complaint}: "{error}"', file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
