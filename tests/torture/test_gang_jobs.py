"""Ranks of a gang as a torture run has them: they hold together, and the judge takes them for one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.torture.test_faults_living import Stage, stage
from timeslice.torture.checker import Terms, check
from timeslice.torture.history import Entered, read_so_far
from timeslice.torture.processes import Child
from timeslice.torture.stage import LOCK_GROUP

__all__ = ["stage"]


@pytest.mark.timeout(120)
def test_two_ranks_are_in_together_and_nothing_is_wrong(stage: Stage) -> None:
    """Both enter with one token, again and again, also after one of them was killed."""
    ranks = [add_rank(stage, rank, asynchronous=rank == 1) for rank in range(2)]
    parts = stage.folder / "parts"
    await_turns(stage, parts, {rank.label for rank in ranks})
    stage.world.processes.kill(ranks[0], again_at=0.0)
    stage.until(lambda: ranks[0].count == 2 and ranks[0].running, "it comes again")
    await_turns(stage, parts, {rank.label for rank in ranks})
    report = check(list(read_so_far(parts)), Terms())
    assert report.violations == []
    assert report.grants >= 4


def add_rank(stage: Stage, rank: int, *, asynchronous: bool) -> Child:
    spec: dict[str, Any] = {"rank": rank, "ranks": 2, "gang_group": LOCK_GROUP, "lock_group": LOCK_GROUP}
    return stage.add_job(f"a-{rank}", **spec, devices={}, asynchronous=asynchronous)


def await_turns(stage: Stage, parts: Path, labels: set[str]) -> None:
    """Until each of them has entered with a token of the others'."""
    since = time.monotonic_ns()

    def together() -> bool:
        tokens: dict[int, set[str]] = {}
        for line in read_so_far(parts):
            if isinstance(line, Entered) and line.at > since:
                tokens.setdefault(line.token, set()).add(line.who)
        return labels in tokens.values()

    stage.until(together, f"{labels} are in together")
