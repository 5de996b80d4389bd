"""What is so, and not what a server says, or what was noted under another name."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterator
from typing import Literal

import pytest

from tests.backends.http.conftest import ALL, DEADLINE_S, KV_CACHE, MIB, WEIGHTS, Lab, of_job
from tests.support.jobs import wait_until
from timeslice.arena import Arena
from timeslice.arena.process import start_time_of
from timeslice.backends.base import Job, Selection
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Residency

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"

Driver = subprocess.Popen[bytes]


@pytest.fixture
def driver() -> Iterator[Callable[[], Driver]]:
    """Start a process that can stand in for a server."""
    started: list[Driver] = []

    def start() -> Driver:
        started.append(subprocess.Popen(["sleep", "600"]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def stands_in(job: Job, process: Driver) -> Job:
    """The same servers, registered by a process that stands in for them."""
    return of_job(job, pid=process.pid, start=start_time_of(process.pid), channel=f"g/{process.pid}")


@pytest.mark.parametrize("fault", ["", "502 /sleep=1"])
async def test_a_server_that_only_pauses_is_not_asleep(lab: Lab, fault: str) -> None:
    """G18: vLLM says that it sleeps while its scheduler pauses, with all of its memory on the device. It is resident,
    and is put to sleep when it must leave; an order that a gateway dropped is not taken for done, either."""
    server = lab.start(faults=(fault,) if fault else ())
    job = lab.job(server)
    before = server.sample("why")
    server.ask("/pause", {})
    assert server.ask("/is_sleeping")[1] == {"is_sleeping": True}
    probe = await lab.backend.probe(job)
    assert (probe.state, probe.device_bytes) == (Residency.RESIDENT, WEIGHTS + KV_CACHE)
    await lab.out(job)
    assert lab.device.used_bytes() == 0
    assert await lab.state(job) is Residency.SUSPENDED
    await lab.back(job)
    assert server.sample("why") == before


async def test_what_was_noted_of_a_server_ends_when_somebody_else_wakes_it(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    """G18: the job itself woke its server after it was put to sleep, and pauses it later: that is no sleep. It is said
    once, for it may be another server with the same address and other weights."""
    server = lab.start()
    job = lab.job(server)
    await lab.out(job)
    server.ask("/wake_up", {})
    assert await lab.state(job) is Residency.RESIDENT
    server.ask("/pause", {})
    assert await lab.state(job) is Residency.RESIDENT
    assert [server.url in line for line in caplog.messages if "push its weights" in line] == [True]


async def test_a_server_without_statistics_is_believed(lab: Lab) -> None:
    """Its metrics tell nothing of sleep: what it says of itself is all there is."""
    server = lab.start(faults=("odd metrics",))
    job = lab.job(server)
    server.ask("/sleep?level=1", {})
    assert await lab.state(job) is Residency.SUSPENDED


async def test_metrics_that_nobody_can_read_break_nothing(lab: Lab) -> None:
    """A number that is none counts as none."""
    server = lab.start(faults=("odd metrics",))
    await lab.out(lab.job(server))
    assert lab.device.used_bytes() == 0


@pytest.mark.parametrize("spelling", ["", "/"])
async def test_a_server_that_is_registered_twice_is_asked_once(
    lab: Lab, driver: Callable[[], Driver], spelling: str
) -> None:
    """Every rank of a program registered it, or its starter and itself did: two releases at once would end it."""
    server = lab.start("sglang")
    own = lab.job(server, dialect="sglang")
    job = of_job(stands_in(own, driver()), endpoints=(server.url + spelling,))
    both = Job(group="g", job="a", node="n1", targets=(*job.targets, *own.targets))
    await lab.out(both)
    assert len(server.calls(RELEASE)) == 1
    await lab.back(both)
    assert len(server.calls(RESUME)) == 3
    assert await lab.state(both) is Residency.RESIDENT


@pytest.mark.parametrize("tags", [("kv_cache",), ("weights", "kv_cache", "cuda_graph")])
async def test_a_part_that_frees_nothing_is_no_success(lab: Lab, tags: tuple[str, ...]) -> None:
    """G06: named tags are measured, too: the server says 200, and all of its memory is where it was."""
    server = lab.start("sglang", faults=("keeps memory=1",))
    job = lab.job(server, dialect="sglang")
    with pytest.raises(BackendError, match=r"still have .* --enable-memory-saver") as caught:
        await lab.backend.suspend(job, Selection(tags=tags), deadline_s=2.0)
    assert caught.value.kind is FaultKind.TRANSIENT
    assert await lab.state(job) is Residency.RESIDENT
    await lab.out(job, Selection(tags=tags))
    assert await lab.state(job) is Residency.SUSPENDED


async def test_named_tags_that_are_all_there_is_are_measured_like_all(lab: Lab) -> None:
    """G06, G18: the weights stayed, though both tags were named."""
    server = lab.start(faults=("keeps memory=1",))
    with pytest.raises(BackendError, match="still have"):
        await lab.backend.suspend(lab.job(server), Selection(tags=("weights", "kv_cache")), deadline_s=2.0)
    assert await lab.state(lab.job(server)) is Residency.RESIDENT


async def test_who_speaks_for_a_server_next_knows_that_it_sleeps(lab: Lab, driver: Callable[[], Driver]) -> None:
    """The driver was killed while its server slept, and another one registers it: SGLang tells nothing, and is not
    taken for awake. Nor is it when its own process is registered later."""
    server = lab.start("sglang")
    own = lab.job(server, dialect="sglang")
    before = server.sample("why")
    await lab.out(stands_in(own, driver()))
    assert await lab.state(stands_in(own, driver())) is Residency.SUSPENDED
    assert await lab.state(own) is Residency.SUSPENDED
    await lab.back(stands_in(own, driver()))
    assert server.sample("why") == before


async def test_a_new_server_of_a_new_driver_is_awake(lab: Lab) -> None:
    """A job ended while its server slept. The next one has the same address and the same seed, which somebody chose,
    so what was noted might be of this one; but it has its memory, and a resume would end it."""
    channel = {"channel": "g/driver"}  # whose children the servers are, so that their bytes are known
    old = lab.start("sglang", "--random-seed", "7")
    await lab.out(lab.job(old, dialect="sglang", **channel))
    old.end()
    new = lab.start("sglang", "--random-seed", "7", "--port", old.url.rpartition(":")[2])
    job = lab.job(new, dialect="sglang", **channel)
    assert await lab.state(job) is Residency.RESIDENT
    await lab.back(job)
    assert new.calls(RESUME) == []
    await lab.out(job)
    assert len(new.calls(RELEASE)) == 1


async def test_a_driver_that_is_killed_in_the_middle_leaves_its_server_known(
    lab: Lab, driver: Callable[[], Driver]
) -> None:
    """Its end is not the server's: the step fails and may pass, and what sleeps is not forgotten."""
    server = lab.start("sglang")
    own = lab.job(server, dialect="sglang")
    first = driver()
    await lab.out(stands_in(own, first))
    server.fault(**{f"502 {RESUME}": -1})
    waking = asyncio.create_task(lab.backend.restore(stands_in(own, first), ALL, deadline_s=2.0))
    await asyncio.to_thread(wait_until, lambda: bool(server.calls(RESUME)), "it is asked to wake")
    first.kill()
    await asyncio.to_thread(first.wait)
    with pytest.raises(BackendError, match="502") as caught:
        await waking
    assert caught.value.kind is FaultKind.TRANSIENT
    server.fault(**{f"502 {RESUME}": 0})
    again = stands_in(own, driver())
    assert await lab.state(again) is Residency.SUSPENDED
    await lab.backend.restore(again, ALL, deadline_s=DEADLINE_S)
    assert server.sample("why")


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_where_there_is_no_room_nobody_is_woken(lab: Lab, kind: Literal["vllm", "sglang"]) -> None:
    """G07: a server may end of a wake that runs out of memory. Nothing is sent, and it wakes when there is room."""
    server = lab.start(kind)
    job = lab.job(server, dialect=kind)
    before = server.sample("why")
    await lab.out(job)
    with Arena(lab.device.path, label="squatter") as squatter:
        squatter.allocate(12 * MIB)
        with pytest.raises(BackendError, match=r"not woken: they need \d+ bytes .* are free") as caught:
            await lab.back(job)
    assert caught.value.kind is FaultKind.TRANSIENT
    assert server.calls("/wake_up", RESUME) == []
    await lab.back(job)
    assert server.sample("why") == before
