"""Which gang this process is a rank of: what its caller says, or what its launcher left in the environment."""

from __future__ import annotations

import hashlib
import numbers
import os
import platform
from dataclasses import dataclass
from typing import Any

from timeslice.errors import UsageError

MOST_RANKS = 1024  # one call of the server looks through all of them, while everybody else waits for it

# What a launcher gives all ranks of one start alike. With torchrun the port alone may stay the same over restarts.
_LAUNCH = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
# The same of launchers that start each rank as a task of theirs: how many tasks there are, and whose they are.
_TASKS = (
    ("SLURM_STEP_NUM_TASKS", ("SLURM_JOB_ID", "SLURM_STEP_ID")),
    ("OMPI_COMM_WORLD_SIZE", ("PMIX_NAMESPACE",)),
)


@dataclass(frozen=True)
class Gang:
    """This process is rank ``rank`` of ``world``. ``name`` tells the start of the program from every other."""

    rank: int
    world: int
    name: str


def find_gang(gang: bool | None, rank: int | None, world_size: int | None) -> Gang | None:
    """The gang that a hold is taken with; None: this process holds alone. Raises UsageError."""
    if gang is not None and not isinstance(gang, bool):
        raise UsageError(f"gang={gang!r}: give True, False, or None for what the launcher says")
    given = rank is not None or world_size is not None
    if gang is False:
        if given:
            raise UsageError("gang=False holds alone: leave out rank and world_size")
        return None
    if given:
        if rank is None or world_size is None:
            missing = "rank" if rank is None else "world_size"
            raise UsageError(f"a gang needs rank and world_size: {missing} is missing")
        number, world = _whole("rank", rank), _whole("world_size", world_size)
    elif gang or _is_launched():
        number, world = _variable("RANK"), _variable("WORLD_SIZE")
    else:
        return None
    if not 1 <= world <= MOST_RANKS:
        raise UsageError(
            f"a gang of {world} can't hold: it has 1 to {MOST_RANKS} ranks, for one call of the server looks through "
            "all of them. Of more, let one process of each node take the hold, and make these the gang."
        )
    if not 0 <= number < world:
        raise UsageError(f"rank {number} is none of {world}: ranks are 0 to {world - 1}")
    return Gang(number, world, _name(world)) if world > 1 else None


def _is_launched() -> bool:
    """Whether torchrun, or what is built on it, started this process beside others."""
    world = os.environ.get("WORLD_SIZE", "")
    return bool(os.environ.get("TORCHELASTIC_RUN_ID")) and world.isdecimal() and int(world) > 1


def _name(world: int) -> str:
    told = [os.environ.get(variable, "") for variable in _LAUNCH]
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE") == str(world):
        # Each node counts the restarts that it caused itself. With several nodes the counts differ, and an earlier
        # start is told apart by its ranks being replaced. With one node the address may be "localhost" on each.
        told += [os.environ.get("TORCHELASTIC_RESTART_COUNT", ""), platform.node()]
    elif not told[0]:
        # Not of a task that starts several ranks: those of other tasks may be told something else.
        for tasks, names in _TASKS:
            if os.environ.get(tasks) == str(world):
                told += [f"{name}={os.environ.get(name, '')}" for name in names]
    return hashlib.sha256("\0".join([*told, str(world)]).encode()).hexdigest()[:16]


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise UsageError(f"{name}={value!r} is no whole number")
    return int(value)


def _variable(name: str) -> int:
    value = os.environ.get(name, "")
    if not (value.isascii() and value.isdecimal()):
        what = f"is {value!r}" if value else "is not set"
        raise UsageError(
            f"gang=True takes the rank from RANK and WORLD_SIZE, and {name} {what}. Start the program with torchrun or "
            "accelerate, or give rank=R and world_size=W."
        )
    return int(value)
