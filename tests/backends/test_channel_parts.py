"""The channel backend and a real workload whose state has tags and slots: only what is named moves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.backends.conftest import ALL, DEADLINE_S, MakeRig, Rig, Worker
from tests.backends.parts_worker import SIZES
from tests.support.jobs import JobProcess
from timeslice.backends.base import Job, Selection
from timeslice.errors import BackendError, FaultKind
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import Keys
from timeslice.models import Residency, Target

WHOLE = sum(SIZES.values())
BLUE = Selection(tags=("adapter",), slot="blue")


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    return make_rig("channel")


@pytest.fixture
def job(rig: Rig) -> Job:
    """With all of its parts on the device."""
    process = JobProcess("tests.backends.parts_worker")
    worker = Worker(process=process, target=process.target("a"))
    rig.workers.append(worker)
    record = process.call("parts", rig.device.path, rig.url, rig.prefix, rig.context.group, "a")
    worker.target, worker.digest = Target.model_validate_json(record), process.call("digest")
    return rig.job(worker)


@pytest.fixture
def driver(redis_url: str) -> Iterator[SyncDriver]:
    made = SyncDriver(redis_url)
    yield made
    made.close()


async def test_one_slot_leaves_and_comes_back(rig: Rig, job: Job) -> None:
    """The job counts as suspended, the rest stays on the device, and is told by tag; restored whole, all is back."""
    await rig.backend.prepare(job, BLUE, deadline_s=DEADLINE_S)
    out = await rig.backend.suspend(job, BLUE, deadline_s=DEADLINE_S)
    assert (out.moved_bytes, out.freed_bytes) == (SIZES["blue"], SIZES["blue"])
    assert rig.device.used_bytes() == WHOLE - SIZES["blue"]
    probe = await rig.backend.probe(job)
    assert (probe.state, probe.device_bytes) == (Residency.SUSPENDED, WHOLE - SIZES["blue"])
    assert probe.parts == {"base": SIZES["base"], "adapter": SIZES["red"]}
    await rig.backend.restore(job, ALL, deadline_s=DEADLINE_S)
    assert (await rig.backend.probe(job)).state is Residency.RESIDENT
    assert rig.workers[0].content_is_intact()


async def test_the_rest_leaves_after_a_part(rig: Rig, job: Job) -> None:
    """That some of it is out is no reason not to ask for all of it."""
    await rig.backend.suspend(job, BLUE, deadline_s=DEADLINE_S)
    out = await rig.backend.suspend(job, ALL, deadline_s=DEADLINE_S)
    assert out.moved_bytes == WHOLE - SIZES["blue"]
    assert rig.device.used_bytes() == 0


async def test_what_is_saved_is_told(rig: Rig, job: Job) -> None:
    """Bytes that host memory had already are told apart from those that were copied."""
    await rig.backend.suspend(job, ALL, deadline_s=DEADLINE_S)
    await rig.backend.restore(job, ALL, deadline_s=DEADLINE_S)
    again = await rig.backend.suspend(job, ALL, deadline_s=DEADLINE_S)
    assert (again.moved_bytes, again.saved_bytes) == (WHOLE - SIZES["base"], SIZES["base"])
    assert again.freed_bytes == WHOLE


async def test_a_part_needs_as_much_host_memory_as_it_has(rig: Rig, job: Job) -> None:
    """Where bytes are known by tag; else as much as the whole might."""
    assert await rig.backend.estimate(job, Selection(tags=("base",))) == SIZES["base"]
    assert await rig.backend.estimate(job, Selection(tags=("base", "adapter"))) == WHOLE
    assert await rig.backend.estimate(job, ALL) == WHOLE


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        (Selection(mode="discard"), "can't discard; it registered: offload"),
        (Selection(tags=("kv_cache",)), "no tag kv_cache; it registered: base, adapter"),
        (Selection(slot="green"), "no slot green; it registered: red, blue"),
    ],
)
async def test_what_was_not_registered_is_never_sent(
    rig: Rig, job: Job, driver: SyncDriver, selection: Selection, words: str
) -> None:
    """G21: refused by the agent, whatever the job's thread would say; its stream stays empty of it."""
    for step in (rig.backend.prepare, rig.backend.suspend, rig.backend.restore):
        with pytest.raises(BackendError, match=words) as caught:
            await step(job, selection, deadline_s=DEADLINE_S)
        assert caught.value.kind is FaultKind.UNSUPPORTED
    stream = Keys(rig.prefix).channel("a", job.targets[0].channel)
    assert not driver.client.exists(stream)
