"""Orders by force: who goes out is not asked. And a look that an operator asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.agent.knobs import KnobBackend
from tests.agent.rig import Rig, until
from timeslice.agent.choice import BackendSet
from timeslice.agent.state import Ledger, Note, kept, noted
from timeslice.backends.base import Backend, Capabilities, Context, Job, Probe
from timeslice.errors import BackendError, FaultKind
from timeslice.locks import scripts
from timeslice.models import Residency


class Asks(KnobBackend):
    """A backend that needs the workload's answer, and never gets it."""

    name = "asks"

    def capabilities(self) -> Capabilities:
        return Capabilities(freed_share=0.99)

    async def probe(self, job: Job) -> Probe:
        raise BackendError("the workload does not answer", kind=FaultKind.POISONED)


def make(name: str, context: Context) -> Backend:
    """Both write to the same fake device."""
    return Asks(context) if name == "asks" else KnobBackend(context)


def both(rig: Rig, *names: str) -> dict[str, Any]:
    return {"backends": {rig.name: [f"{name}:folder={rig.folder / 'fake'}" for name in names]}}


async def revoked(rig: Rig) -> int:
    """Job a has the device, and its group was taken from it; the swap that puts it out, planned."""
    process = await rig.job("a", 600)
    granted = await rig.acquire("a", pid=process.pid)
    lease = (await rig.view()).state["lease_id"]
    await rig.driver.run(scripts.revoke(rig.group, "a", lease, granted.token, "eve", ""))
    return await rig.plan("a", into=None)


async def test_a_backend_that_works_from_outside_is_preferred(rig: Rig) -> None:
    """The first of the list would have to ask; without force it is the one that fails."""
    async with rig.agent(make, **both(rig, "asks", "knobs")):
        swap = await revoked(rig)
        prepared = await rig.order(rig.command(swap, "prepare", "a", into=None, force=True))
        assert prepared["step"] == "prepared", prepared
        assert rig.fake.locked("a")
        await rig.step("prepare", "commit")
        done = await rig.order(rig.command(swap, "commit", "a", into=None, force=True))
        assert done["step"] == "done", done
        assert rig.fake.state("a") == "suspended"
        assert (await rig.member("a")).backend == "knobs"


async def test_without_force_the_workload_is_asked(rig: Rig) -> None:
    """And the order fails with what it did not say."""
    async with rig.agent(make, **both(rig, "asks", "knobs")):
        swap = await revoked(rig)
        failed = await rig.order(rig.command(swap, "prepare", "a", into=None))
        assert failed["step"] == "failed"
        assert "does not answer" in failed["error"]


async def test_where_none_works_from_outside_the_workload_is_asked_all_the_same(rig: Rig) -> None:
    """It may answer; if not, the group reads that."""
    async with rig.agent(make, **both(rig, "asks")):
        swap = await revoked(rig)
        failed = await rig.order(rig.command(swap, "prepare", "a", into=None, force=True))
        assert "does not answer" in failed["error"]


async def test_an_undo_takes_the_same_way(rig: Rig) -> None:
    """A job that was locked from outside is unlocked from outside, by the order to roll back and after a crash."""
    async with rig.agent(make, **both(rig, "asks", "knobs")):
        swap = await revoked(rig)
        await rig.order(rig.command(swap, "prepare", "a", into=None, force=True))
        assert rig.fake.locked("a")
        await rig.step("prepare", "rollback")
        undone = await rig.order(rig.command(swap, "rollback", "a", into=None))
        assert undone["step"] == "rolled back", undone
        assert not rig.fake.locked("a")
        assert rig.fake.state("a") == "resident"


def test_who_moved_a_job_out_brings_it_back(tmp_path: Path) -> None:
    """Whatever its processes ask for: nobody else has the copy."""
    context = Context(group="g", node="n1", options={"folder": str(tmp_path)})
    backends = BackendSet("g", "n1", {"asks": Asks(context), "knobs": KnobBackend(context)})
    assert backends.choose("a", []).name == "asks"
    assert backends.choose("a", [], force=True).name == "knobs"
    assert backends.choose("a", [], "asks", force=True).name == "asks"
    assert backends.choose("a", [], "knobs").name == "knobs"


def test_how_jobs_left_is_forgotten_with_their_processes() -> None:
    """Else the journal would grow with every job that ever was here."""
    ledger = noted(noted(Ledger(), "a", Note(backend="x")), "b", Note(backend="x"))
    assert set(kept(ledger, ("b", "c")).notes) == {"b"}


async def test_a_job_that_starts_again_is_no_longer_what_it_was(rig: Rig) -> None:
    """F05: its former run was suspended by a backend of which the new run knows nothing; and when no process of it
    is left the journal holds nothing of it."""
    async with rig.agent(make, ttl_s=0.9, **both(rig, "knobs")):
        swap = await revoked(rig)
        await rig.order(rig.command(swap, "prepare", "a", into=None, force=True))
        await rig.step("prepare", "commit")
        await rig.order(rig.command(swap, "commit", "a", into=None, force=True))
        journal = rig.folder / "state" / "groups" / rig.name / "journal.json"
        assert '"notes":{"a":' in journal.read_text()
        rig.processes[-1].kill()
        rig.processes[-1].wait()
        await until(lambda: '"notes":{}' in journal.read_text(), "the journal has forgotten it")


async def test_an_operators_look_asks_the_jobs_themselves(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job whose state could not be told is told again, long before the next heartbeat; the request leaves the
    stream."""
    silent = [True]

    async def probe(self: Asks, job: Job) -> Probe:
        if silent[0]:
            raise BackendError("the workload does not answer", kind=FaultKind.POISONED)
        return await KnobBackend.probe(self, job)

    monkeypatch.setattr(Asks, "probe", probe)
    monkeypatch.setattr(BackendSet, "observer", lambda *_: None)  # nothing can be seen from outside
    async with rig.agent(make, ttl_s=600.0, **both(rig, "asks")):
        swap = await revoked(rig)
        silent[0] = False
        await rig.order(rig.command(swap, "prepare", "a", into=None))
        await rig.step("prepare", "commit")
        silent[0] = True
        failed = await rig.order(rig.command(swap, "commit", "a", into=None))
        assert failed["step"] == "failed"
        assert await rig.member_state("a") == Residency.FAULTED
        await rig.settle(swap)
        silent[0] = False
        await rig.driver.client.xadd(rig.keys.commands(rig.node), {"look": rig.name})

        async def known() -> bool:
            return await rig.member_state("a") == Residency.RESIDENT

        await until(known, "its state is known again")
        await rig.idle()
