"""A workload that hangs past the deadline of an order, and answers again: its state is known then, with no operator."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.rig import Rig, until
from tests.agent.test_stuck import StartJob, configure, coordinated, inside, start
from timeslice.locks import scripts

__all__ = ["start"]


@pytest.mark.parametrize("restarted", [pytest.param(False, marks=pytest.mark.slow), True])
async def test_what_answers_again_is_known_again(rig: Rig, start: StartJob, tmp_path: Path, restarted: bool) -> None:
    """The order to suspend is not answered: the job's state is unknown, and nobody is let in. When the workload comes
    back from it, the agent hears where the state is, and the rival gets in without `timeslice repair`. The same where
    the agent is another one meanwhile, which got no answer either."""
    await configure(rig, suspend_timeout_ms="1500", restore_timeout_ms="1500")
    free = tmp_path / "free"

    async def waits() -> bool:
        return len((await rig.view()).queue) == 1

    async def unknown() -> bool:
        return await rig.member_state("a") == "faulted"

    async with coordinated(rig):
        first = start("a", "hang", str(free))
        await inside(first)
        second = start("b")
        await until(waits, "the rival waits")
        state = (await rig.view()).state
        await rig.driver.run(scripts.revoke(rig.group, "a", state["lease_id"], int(state["token"]), "eve", ""))
        await until(unknown, "its state is unknown", 60)
        if not restarted:
            free.touch()
            await inside(second)
    if restarted:
        async with coordinated(rig):
            assert await unknown()
            free.touch()
            await inside(second)
