"""A real agent beside the ranks of a gang: it vouches for each that runs, and sees each that ends."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.agent.conftest import rig  # noqa: F401 - a fixture
from tests.agent.rig import Rig, until
from tests.agent.test_liveness import HOLDS_THE_GIL
from timeslice.locks import scripts
from timeslice.locks.scripts import Granted, Party, Queued, Renewed, Request


async def _ranks(rig: Rig, codes: list[str], lease_ms: int) -> list[tuple[Request, int]]:  # noqa: F811
    """A gang that holds, each rank a process; their requests as renewals send them, and their pids."""
    found, gang = [], ""
    for rank, code in enumerate(codes):
        process = rig.spawn(code)
        target = rig.target("a", process.pid)
        await rig.register(target)
        party = Party("x", rank, len(codes))
        request = Request(f"w{rank}", "a", rig.node, process.pid, target.start, lease_ms=lease_ms, party=party)
        reply = await rig.driver.run(scripts.join(rig.group, request))
        assert isinstance(reply, Granted | Queued)
        gang = reply.gang
        found.append((request, process.pid))
    return [(replace(request, waiter=gang), pid) for request, pid in found]


@pytest.mark.timing
async def test_a_rank_that_can_not_renew_keeps_the_lease_for_all(rig: Rig) -> None:  # noqa: F811
    """Its process runs; it is killed, and the lease is over when the other's term is, for a reason that names it."""
    async with rig.agent(ttl_s=0.9):
        ranks = await _ranks(rig, [HOLDS_THE_GIL, HOLDS_THE_GIL], 2000)
        await until(partial(rig.holds, "a"), "the gang holds")
        token = (await rig.view()).number("token")
        for request, _ in ranks:
            reply: Any = await rig.driver.run(scripts.renew(rig.group, request, token))
            assert isinstance(reply, Renewed)

        async def three_leases_old() -> bool:
            view = await rig.view()
            assert view.holder == "a", await rig.events("LeaseReclaimed")
            return view.now_ms > view.number("granted_at_ms") + 6000

        await until(three_leases_old, "three leases have passed")
        victim = next(process for process in rig.processes if process.pid == ranks[1][1])
        victim.kill()
        victim.wait()

        async def lost() -> bool:
            return bool(await rig.events("LeaseReclaimed"))

        await until(lost, "the lease ends")
        event = (await rig.events("LeaseReclaimed"))[0]
        assert event["why"] == f"rank 1 (process {victim.pid} on node {rig.node}) ended"
