"""vLLM servers: what is sent, in which order, and what is believed of the answers."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from tests.backends.http.conftest import ALL, DEADLINE_S, DISCARD, KV_CACHE, WEIGHTS, Lab
from tests.support.jobs import wait_until
from timeslice.backends.base import Selection
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Residency

BOTH = ("offload", "discard")


async def test_a_server_sleeps_and_wakes_with_its_weights(lab: Lab) -> None:
    """G21: level 1 by default, drained first, the device measured free; then each tag by itself, and the same text."""
    server = lab.start()
    job = lab.job(server)
    before = server.sample("why")
    assert (await lab.backend.probe(job)).device_bytes == WEIGHTS + KV_CACHE
    await lab.out(job)
    probe = await lab.backend.probe(job)
    assert (probe.state, probe.device_bytes, lab.device.used_bytes()) == (Residency.SUSPENDED, 0, 0)
    await lab.back(job)
    assert await lab.state(job) is Residency.RESIDENT
    assert server.sample("why") == before
    asked = server.calls("/sleep", "/wake_up", "/collective_rpc")
    assert asked == ["/sleep?level=1&mode=wait", "/wake_up?tags=weights", "/wake_up?tags=kv_cache"]


async def test_dropped_weights_are_not_what_they_were(lab: Lab) -> None:
    """G21: level 2 only where it was registered, and then the server talks nonsense until somebody pushes weights."""
    server = lab.start()
    before = server.sample("why")
    with pytest.raises(BackendError, match="can't discard; it registered: offload") as caught:
        await lab.out(lab.job(server), DISCARD)
    assert caught.value.kind is FaultKind.UNSUPPORTED
    assert server.calls("/sleep") == []
    job = lab.job(server, modes=BOTH)
    await lab.out(job, DISCARD)
    assert (await lab.backend.probe(job)).host_bytes == 0
    await lab.back(job)
    assert server.calls("/sleep", "/collective_rpc") == ["/sleep?level=2&mode=wait"]
    assert server.sample("why") != before
    assert server.ask("/collective_rpc", {"method": "push", "args": ["1"]})[0] == 200
    assert server.sample("why") == before


async def test_dropped_weights_are_loaded_again_where_that_is_asked_for(lab: Lab) -> None:
    """The option reload=1: weights wake, they are loaded, and only then the cache takes its room."""
    server = lab.start()
    before = server.sample("why")
    lab.backend = lab.make(reload="1")
    job = lab.job(server, modes=BOTH)
    await lab.out(job, DISCARD)
    await lab.back(job)
    reload = '/collective_rpc?{"method":"reload_weights"}'
    asked = server.calls("/wake_up", "/collective_rpc")
    assert asked == ["/wake_up?tags=weights", reload, "/wake_up?tags=kv_cache"]
    assert server.sample("why") == before


async def test_kept_weights_are_never_loaded_again(lab: Lab) -> None:
    """G21: the option reload=1 is for dropped weights alone: those that a trainer pushed would be lost."""
    server = lab.start()
    server.ask("/collective_rpc", {"method": "push", "args": ["7"]})
    before = server.sample("why")
    lab.backend = lab.make(reload="1")
    await lab.out(lab.job(server))
    await lab.back(lab.job(server))
    assert server.sample("why") == before


async def test_a_server_of_which_a_part_sleeps_is_not_resident(lab: Lab) -> None:
    """G18: weights alone awake: still suspended. The next wake asks for the cache only, since another ask for the
    weights would let the server pass over all of it."""
    server = lab.start()
    job = lab.job(server)
    await lab.out(job)
    await lab.back(job, Selection(tags=("weights",)))
    probe = await lab.backend.probe(job)
    assert (probe.state, probe.device_bytes) == (Residency.SUSPENDED, WEIGHTS)
    lab.backend = lab.make()  # an agent that was started again still knows
    await lab.back(job)
    assert await lab.state(job) is Residency.RESIDENT
    assert server.calls("/wake_up") == ["/wake_up?tags=weights", "/wake_up?tags=kv_cache"]


async def test_what_the_job_itself_woke_is_no_obstacle(lab: Lab) -> None:
    """G18: a trainer woke the weights for its own push. The server passes over our ask for them, and the rest wakes."""
    server = lab.start()
    job = lab.job(server)
    await lab.out(job)
    server.ask("/wake_up?tags=weights", {})
    assert server.ask("/wake_up?tags=weights&tags=kv_cache", {})[0] == 200
    assert server.ask("/is_sleeping")[1] == {"is_sleeping": True}  # that one call did nothing
    await lab.back(job)
    assert await lab.state(job) is Residency.RESIDENT


@pytest.mark.parametrize("tags", [(), ("weights", "kv_cache")])
async def test_no_tags_and_all_tags_mean_the_same(lab: Lab, tags: tuple[str, ...]) -> None:
    """G18: the same requests leave."""
    server = lab.start()
    job = lab.job(server)
    await lab.out(job, Selection(tags=tags))
    assert await lab.state(job) is Residency.SUSPENDED
    await lab.back(job, Selection(tags=tags))
    asked = server.calls("/sleep", "/wake_up")
    assert asked == ["/sleep?level=1&mode=wait", "/wake_up?tags=weights", "/wake_up?tags=kv_cache"]
    assert await lab.state(job) is Residency.RESIDENT


@pytest.mark.parametrize(
    ("selection", "why"),
    [
        (Selection(tags=("lora",)), "knows no tag lora"),
        (Selection(tags=("kv_cache",)), "all to sleep at once"),
        (Selection(slot="a"), "knows no slot a"),
    ],
)
async def test_what_vllm_can_not_do_is_refused_before_anything_is_sent(
    lab: Lab, selection: Selection, why: str
) -> None:
    """G18: an unknown tag is an error that changes nothing, and so is a part, which this server has no way to name."""
    server = lab.start()
    with pytest.raises(BackendError, match=why) as caught:
        await lab.out(lab.job(server), selection)
    assert caught.value.kind is FaultKind.UNSUPPORTED
    assert server.calls("/sleep") == []


async def test_work_in_flight_is_waited_for(lab: Lab) -> None:
    """G19: as long as a request runs nothing is put to sleep; it is answered whole."""
    server = lab.start("vllm", "--token-s", "0.3")
    job = lab.job(server)
    answers: list[str] = []
    asking = threading.Thread(target=lambda: answers.append(server.sample("why", 10)))
    asking.start()
    wait_until(lambda: server.ask("/stand-in")[1]["running"] == 1, "the request runs")
    with pytest.raises(BackendError, match="1 requests running") as caught:
        await lab.backend.prepare(job, ALL, deadline_s=0.8)
    assert caught.value.kind is FaultKind.BUSY
    assert server.calls("/sleep") == []
    await lab.out(job)
    await asyncio.to_thread(asking.join)
    assert len(answers[0].split()) == 10


async def test_a_busy_server_that_tells_no_more_stayed_busy(lab: Lab) -> None:
    """G19: the last question gets no answer within the little time that is left: what keeps the job is its work."""
    server = lab.start("vllm", "--token-s", "0.5")
    asking = threading.Thread(target=lambda: server.sample("why", 10))
    asking.start()
    wait_until(lambda: server.ask("/stand-in")[1]["running"] == 1, "the request runs")
    leaving = asyncio.create_task(lab.backend.prepare(lab.job(server), ALL, deadline_s=2.0))
    await asyncio.to_thread(wait_until, lambda: len(server.calls("/metrics")) > 1, "it was asked")
    os.kill(server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(BackendError, match="stayed busy: 1 requests running") as caught:
            await leaving
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert caught.value.kind is FaultKind.BUSY
    await asyncio.to_thread(asking.join)


async def test_work_in_flight_is_aborted_where_that_is_asked_for(lab: Lab) -> None:
    """The option drain=abort: the request ends early, and says so."""
    server = lab.start("vllm", "--token-s", "0.1")
    lab.backend = lab.make(drain="abort")
    answers: list[tuple[int, object]] = []
    ask = {"prompt": "why", "max_tokens": 300}
    asking = threading.Thread(target=lambda: answers.append(server.ask("/v1/completions", ask)))
    asking.start()
    wait_until(lambda: server.ask("/stand-in")[1]["running"] == 1, "the request runs")
    await lab.out(lab.job(server))
    await asyncio.to_thread(asking.join)
    assert "abort" in str(answers[0])


async def test_a_request_to_a_sleeper_waits_and_is_answered_after_the_wake(lab: Lab) -> None:
    """G20: this is what a client has to know: no refusal and no answer until then."""
    server = lab.start()
    job = lab.job(server)
    before = server.sample("why")
    await lab.out(job)
    answers: list[str] = []
    asking = threading.Thread(target=lambda: answers.append(server.sample("why")))
    asking.start()
    wait_until(lambda: server.ask("/stand-in")[1]["waiting"] == 1, "the request is parked")
    assert await lab.state(job) is Residency.SUSPENDED
    await lab.back(job)
    await asyncio.to_thread(asking.join)
    assert answers == [before]


async def test_memory_that_is_still_held_is_no_success(lab: Lab) -> None:
    """G06: the server says 200 and that it sleeps, and nothing is free: a fault with the number, and it is woken."""
    server = lab.start(faults=("keeps memory=1",))
    job = lab.job(server)
    with pytest.raises(BackendError, match=f"{WEIGHTS + KV_CACHE} of {WEIGHTS + KV_CACHE} bytes") as caught:
        await lab.backend.suspend(job, ALL, deadline_s=2.0)
    assert caught.value.kind is FaultKind.TRANSIENT
    assert await lab.state(job) is Residency.RESIDENT
    await lab.out(job)
    assert lab.device.used_bytes() == 0


async def test_an_engine_that_dies_while_the_server_says_200_is_noticed(lab: Lab) -> None:
    """vLLM reports it by /health alone: poisoned, never taken for asleep."""
    server = lab.start(faults=("dies on sleep=1",))
    with pytest.raises(BackendError, match="engine has died") as caught:
        await lab.out(lab.job(server))
    assert caught.value.kind is FaultKind.POISONED


async def test_a_forward_pass_between_two_wakes_is_noticed(lab: Lab) -> None:
    """Some versions serve after the weights alone woke, and crash: the restore fails, and is not taken for done."""
    server = lab.start(faults=("early forward",))
    job = lab.job(server)
    await lab.out(job)
    await lab.back(job, Selection(tags=("weights",)))
    assert server.ask("/v1/completions", {"prompt": "why"})[0] == 500
    with pytest.raises(BackendError, match=r"EngineDead|engine has died"):
        await lab.back(job)


async def test_a_server_without_the_routes_is_refused_with_the_remedy(lab: Lab) -> None:
    """Started without VLLM_SERVER_DEV_MODE."""
    server = lab.start(VLLM_SERVER_DEV_MODE="0")
    with pytest.raises(BackendError, match="VLLM_SERVER_DEV_MODE=1") as caught:
        await lab.backend.prepare(lab.job(server), ALL, deadline_s=DEADLINE_S)
    assert caught.value.kind is FaultKind.UNSUPPORTED
