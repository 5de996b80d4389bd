"""SGLang servers: they tell little and die easily."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.backends.http.conftest import ALL, DISCARD, KV_CACHE, WEIGHTS, Lab
from tests.support.jobs import wait_until
from timeslice.arena.process import start_time_of
from timeslice.backends.base import Context, Selection
from timeslice.backends.http import HttpBackend
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Residency

BOTH = ("offload", "discard")
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
HAD = WEIGHTS + KV_CACHE + 4096


async def test_a_server_releases_and_resumes_with_its_weights(lab: Lab) -> None:
    """Idle first, all tags in one order, and back tag by tag; three times over, by the same and by a new agent."""
    server = lab.start("sglang")
    job = lab.job(server, dialect="sglang")
    before = server.sample("why")
    for _ in range(3):
        await lab.out(job)
        lab.backend = lab.make()
        probe = await lab.backend.probe(job)
        assert (probe.state, probe.device_bytes, probe.host_bytes) == (Residency.SUSPENDED, 0, HAD)
        await lab.back(job)
        assert await lab.state(job) is Residency.RESIDENT
        assert server.sample("why") == before
    tags = ("weights", "kv_cache", "cuda_graph")
    once = [
        f'{RELEASE}?{{"tags":["weights","kv_cache","cuda_graph"]}}',
        *(f'{RESUME}?{{"tags":["{tag}"]}}' for tag in tags),
    ]
    assert server.calls(RELEASE, RESUME) == once * 3


@pytest.mark.parametrize(
    ("version", "mode"),
    [
        ("0.4.9", DISCARD),
        ("0.4.10", DISCARD),
        ("0.5.1", DISCARD),
        ("0.5.3", ALL),
        ("0.5.9", ALL),
        ("0.5.10", ALL),
        ("0.5.23", ALL),
    ],
    ids=lambda value: value if isinstance(value, str) else value.mode,
)
async def test_no_version_is_asked_for_a_token_while_it_sleeps(lab: Lab, version: str, mode: Selection) -> None:
    """A health check computes a token: on released memory that ends newer servers, and older ones leave it without an
    answer. Whether a server lives it is asked by a route that computes nothing, all at once and part by part."""
    server = lab.start("sglang", "--version", version)
    job = lab.job(server, dialect="sglang", modes=(mode.mode,))
    for selection in (Selection(mode=mode.mode, tags=("kv_cache",)), mode):
        await lab.out(job, selection)
        assert await lab.state(job) is Residency.SUSPENDED
    assert lab.device.used_bytes() == 0
    await lab.back(job, Selection(mode=mode.mode, tags=("weights",)))
    await lab.back(job, mode)
    assert await lab.state(job) is Residency.RESIDENT
    assert server.sample("why")
    assert server.calls("/health", "/health_generate") == []


@pytest.mark.parametrize(
    ("version", "flag", "answer"),
    [
        ("0.4.9", "true", 200),
        ("0.4.10", "true", 0),
        ("0.5.9", "true", 503),
        ("0.5.10", "true", 0),
        ("0.5.10", "false", 200),
    ],
)
async def test_what_a_probe_of_a_sleeping_server_meets(lab: Lab, version: str, flag: str, answer: int) -> None:
    """The stand-in is as the servers are, so that a test sees who asks: nothing (0) comes from one that died of it."""
    server = lab.start(
        "sglang",
        "--version",
        version,
        SGLANG_HEALTH_CHECK_TIMEOUT="0.1",
        SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=flag,
    )
    assert server.ask("/health")[0] == 200
    server.ask(RELEASE, {"tags": ["kv_cache"]})
    if answer:
        assert server.ask("/health")[0] == answer
        assert server.process.poll() is None
    else:
        with pytest.raises(OSError, match=r"closed|reset"):
            server.ask("/health")
        assert server.process.wait(60) == 131


async def test_a_server_whose_scheduler_hangs_after_its_release_is_not_out(lab: Lab) -> None:
    """It answered the order and nothing since: a fault, and the next job is not told that there is room."""
    server = lab.start("sglang", faults=("hangs after release",))
    job = lab.job(server, dialect="sglang")
    with pytest.raises(BackendError):
        await lab.backend.suspend(job, ALL, deadline_s=2.0)
    with pytest.raises(BackendError) as caught:
        await lab.backend.probe(job)
    assert caught.value.kind is FaultKind.TRANSIENT


async def test_a_server_without_parts_is_refused(lab: Lab) -> None:
    """Before 0.4.8 any release is one of everything, and waking the second part would end the server."""
    server = lab.start("sglang", "--version", "0.4.7")
    with pytest.raises(BackendError, match=r"use SGLang 0\.4\.8 or newer") as caught:
        await lab.out(lab.job(server, dialect="sglang", modes=BOTH), DISCARD)
    assert caught.value.kind is FaultKind.UNSUPPORTED
    assert server.calls(RELEASE) == []


async def test_without_a_copy_of_the_weights_offload_is_refused(lab: Lab) -> None:
    """G21: the server would answer 200 and talk nonsense. Its own word is asked for; nothing is released."""
    server = lab.start("sglang", flags=("--enable-memory-saver",))
    before = server.sample("why")
    with pytest.raises(BackendError, match="--enable-weights-cpu-backup") as caught:
        await lab.out(lab.job(server, dialect="sglang"))
    assert caught.value.kind is FaultKind.UNSUPPORTED
    assert server.calls(RELEASE) == []
    await lab.out(lab.job(server, dialect="sglang"), Selection(tags=("kv_cache",)))  # that has nothing to lose
    await lab.back(lab.job(server, dialect="sglang"))
    assert server.sample("why") == before
    job = lab.job(server, dialect="sglang", modes=BOTH)
    await lab.out(job, DISCARD)
    await lab.back(job)
    assert server.sample("why") != before
    server.ask("/push", {"seed": 1})
    assert server.sample("why") == before


async def test_a_server_that_can_free_nothing_is_refused(lab: Lab) -> None:
    """Started without --enable-memory-saver: named, before anything is sent."""
    server = lab.start("sglang", flags=())
    with pytest.raises(BackendError, match="start it with --enable-memory-saver"):
        await lab.out(lab.job(server, dialect="sglang"))
    assert server.calls(RELEASE) == []


async def test_a_part_leaves_and_only_it_comes_back(lab: Lab) -> None:
    """G18: the cache alone; then the rest too, and only what sleeps is asked for each time. Anything else would end
    the server."""
    server = lab.start("sglang")
    job = lab.job(server, dialect="sglang")
    await lab.out(job, Selection(tags=("kv_cache",)))
    probe = await lab.backend.probe(job)
    assert (probe.state, probe.device_bytes) == (Residency.SUSPENDED, HAD - KV_CACHE)
    await lab.out(job)
    assert (await lab.backend.probe(job)).device_bytes == 0
    await lab.back(job, Selection(tags=("weights",)))
    assert await lab.state(job) is Residency.SUSPENDED
    await lab.back(job)
    assert await lab.state(job) is Residency.RESIDENT
    assert server.calls(RELEASE) == [
        f'{RELEASE}?{{"tags":["kv_cache"]}}',
        f'{RELEASE}?{{"tags":["weights","cuda_graph"]}}',
    ]
    assert server.sample("why")


async def test_a_wake_that_fails_halfway_is_taken_back(lab: Lab) -> None:
    """The weights are awake, and the cache is refused: both sleep again, and the next wake asks for each of them once.
    A resume of what is awake would end the server."""
    server = lab.start("sglang", faults=("refuses kv_cache=1",))
    job = lab.job(server, dialect="sglang")
    before = server.sample("why")
    await lab.out(job)
    with pytest.raises(BackendError, match=r"400: .*not now"):
        await lab.back(job)
    assert (await lab.state(job), lab.device.used_bytes()) == (Residency.SUSPENDED, 0)
    await lab.back(job)
    assert server.sample("why") == before


async def test_an_unknown_part_wakes_nothing(lab: Lab) -> None:
    """G18: refused, and nothing is sent."""
    server = lab.start("sglang")
    job = lab.job(server, dialect="sglang")
    await lab.out(job)
    with pytest.raises(BackendError, match="knows no tag lora") as caught:
        await lab.back(job, Selection(tags=("weights", "lora")))
    assert caught.value.kind is FaultKind.UNSUPPORTED
    assert server.calls(RESUME) == []


async def test_nothing_is_released_while_it_works(lab: Lab) -> None:
    """G19: the scheduler would die of its assertion. Busy is said when time is up; afterwards it works."""
    server = lab.start("sglang", "--token-s", "0.3")
    job = lab.job(server, dialect="sglang")
    asking = threading.Thread(target=lambda: server.sample("why", 8))
    asking.start()
    wait_until(lambda: server.ask("/stand-in")[1]["running"] == 1, "the request runs")
    with pytest.raises(BackendError, match="stayed busy") as caught:
        await lab.backend.suspend(job, ALL, deadline_s=0.8)
    assert caught.value.kind is FaultKind.BUSY
    assert server.calls(RELEASE) == []
    await lab.out(job)
    asking.join()
    assert await lab.state(job) is Residency.SUSPENDED


async def test_memory_that_is_freed_late_is_waited_for(lab: Lab) -> None:
    """G06: release answers before the memory is free; the step ends when it is."""
    server = lab.start("sglang", faults=("frees late=1",))
    outcome = await lab.backend.suspend(lab.job(server, dialect="sglang"), ALL, deadline_s=20.0)
    assert (outcome.freed_bytes, lab.device.used_bytes()) == (HAD, 0)


@pytest.mark.parametrize("fault", ["lost", "504"])
async def test_a_lost_answer_is_settled_by_measuring(lab: Lab, fault: str) -> None:
    """The order was done and its answer lost, or a gateway did not wait for it: asked again, the server would die. What
    is free tells that it was."""
    server = lab.start("sglang", faults=(f"{fault} {RELEASE}=1",))
    job = lab.job(server, dialect="sglang")
    before = server.sample("why")
    await lab.out(job)
    assert await lab.state(job) is Residency.SUSPENDED
    assert len(server.calls(RELEASE)) == 1
    await lab.back(job)
    assert server.sample("why") == before


async def test_an_order_that_is_late_is_taken_back(lab: Lab) -> None:
    """It was done, and no answer came until the deadline: what is free tells so, and the server is woken again."""
    server = lab.start("sglang", faults=(f"late {RELEASE}=1",))
    job = lab.job(server, dialect="sglang")
    before = server.sample("why")
    with pytest.raises(BackendError, match="no answer within") as caught:
        await lab.backend.suspend(job, ALL, deadline_s=1.0)
    assert caught.value.kind is FaultKind.TRANSIENT
    assert await lab.state(job) is Residency.RESIDENT
    assert server.sample("why") == before


@pytest.mark.parametrize("fault", ["lost", "504"])
async def test_where_nothing_can_be_measured_a_lost_answer_stays_unknown(lab: Lab, tmp_path: Path, fault: str) -> None:
    """Without devices to look at the state is unknown, and nothing more is sent."""
    options = {"allow": "http://127.0.0.1:*", "state": str(tmp_path / "blind")}
    server = lab.start("sglang", faults=(f"{fault} {RELEASE}=1",))
    job = lab.job(server, dialect="sglang")
    blind = HttpBackend(Context(group="g", node="n1", options=options))
    with pytest.raises(BackendError, match="nobody can tell") as caught:
        await blind.suspend(job, ALL, deadline_s=20.0)
    assert caught.value.kind is FaultKind.POISONED
    assert (await blind.probe(job)).state is Residency.FAULTED
    assert len(server.calls(RELEASE)) == 1


async def test_a_new_server_with_the_old_address_is_awake(lab: Lab) -> None:
    """What was released in an earlier run says nothing of this one: a resume of it would end the server. Also where
    one process stands in for both, and lives on."""
    server = lab.start("sglang")
    me = {"pid": os.getpid(), "start": start_time_of(os.getpid()), "channel": "g/me"}
    job = lab.job(server, dialect="sglang", **me)
    await lab.out(job)
    assert await lab.state(job) is Residency.SUSPENDED
    server.end()
    again = lab.start("sglang", "--port", server.url.rpartition(":")[2])
    assert again.url == server.url
    assert await lab.state(job) is Residency.RESIDENT
    await lab.back(job)
    assert again.calls(RESUME) == []
