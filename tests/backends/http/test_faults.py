"""G29: what passes is tried again, visibly, until the deadline; what stays so is not. And all servers or none."""

from __future__ import annotations

import logging
import os
import signal
import socket

import pytest

from tests.backends.http.conftest import ALL, DEADLINE_S, DISCARD, Lab, of_job
from tests.support.jobs import process_state, wait_until
from timeslice.backends.base import Job
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Residency

ORDERS = {
    "vllm": ("/sleep", "/wake_up"),
    "sglang": ("/release_memory_occupation", "/resume_memory_occupation"),
}


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_gateway_that_is_away_for_a_moment_ends_nothing(
    lab: Lab, caplog: pytest.LogCaptureFixture, kind: str, times: int
) -> None:
    """502 once, or three times: each order is sent again, each time with a line in the log, and all goes well."""
    caplog.set_level(logging.WARNING)
    out, back = ORDERS[kind]
    server = lab.start(kind, faults=(f"502 {out}={times}", f"502 {back}={times}"))  # type: ignore[arg-type]
    job = lab.job(server, dialect=kind)
    before = server.sample("why")
    await lab.out(job)
    assert await lab.state(job) is Residency.SUSPENDED
    await lab.back(job)
    assert server.sample("why") == before
    tried = [line for line in caplog.messages if "502" in line and "trying again" in line]
    assert len(tried) == 2 * times
    assert all(server.url in line and "job a" in line for line in tried)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_gateway_that_stays_away_is_a_fault_at_the_deadline(lab: Lab, kind: str) -> None:
    """502 for ever: transient, the server was not touched and runs on."""
    out, _ = ORDERS[kind]
    server = lab.start(kind, faults=(f"502 {out}",))  # type: ignore[arg-type]
    job = lab.job(server, dialect=kind)
    # The last try may have too little time left for an answer.
    with pytest.raises(BackendError, match=r"answered 502: bad gateway|no answer within 0\.") as caught:
        await lab.backend.suspend(job, ALL, deadline_s=2.0)
    assert caught.value.kind is FaultKind.TRANSIENT
    assert len(server.calls(out)) > 1
    assert await lab.state(job) is Residency.RESIDENT
    assert server.sample("why")


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_refusal_is_never_tried_again(lab: Lab, kind: str) -> None:
    """400: one request, and its text in the fault."""
    out, _ = ORDERS[kind]
    server = lab.start(kind, faults=(f"400 {out}",))  # type: ignore[arg-type]
    with pytest.raises(BackendError, match="answered 400: what do you mean") as caught:
        await lab.out(lab.job(server, dialect=kind))
    assert caught.value.kind is FaultKind.UNSUPPORTED
    assert len(server.calls(out)) == 1


async def test_a_lost_answer_is_not_taken_for_a_failure(lab: Lab) -> None:
    """vLLM: the order was done and its answer lost. The server is looked at, and not asked a second time."""
    server = lab.start(faults=("lost /sleep=1",))
    await lab.out(lab.job(server))
    assert len(server.calls("/sleep")) == 1
    assert await lab.state(lab.job(server)) is Residency.SUSPENDED


async def test_a_server_that_hangs_is_not_taken_for_absent(lab: Lab) -> None:
    """Its process lives, so nothing is known: a transient fault, and it answers again afterwards."""
    server = lab.start()
    lab.backend = lab.make(timeout="0.2")
    job = lab.job(server)
    os.kill(server.pid, signal.SIGSTOP)
    wait_until(lambda: process_state(server.pid) == "T", "stopped")
    try:
        with pytest.raises(BackendError, match="no answer within") as caught:
            await lab.backend.probe(job)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert caught.value.kind is FaultKind.TRANSIENT
    lab.backend = lab.make()
    assert await lab.state(job) is Residency.RESIDENT


async def test_a_refused_connection_is_absence_only_when_the_process_is_gone(lab: Lab) -> None:
    """Nobody listens: while the process lives that may change; when it ended the job is absent, and every step has
    nothing to do (F02)."""
    server = lab.start()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    job = of_job(lab.job(server), endpoints=(url,))
    with pytest.raises(BackendError, match="no connection") as caught:
        await lab.backend.probe(job)
    assert caught.value.kind is FaultKind.TRANSIENT
    server.end()
    assert await lab.state(job) is Residency.ABSENT
    await lab.out(job)
    await lab.back(job)


async def test_a_server_that_ends_in_the_middle_counts_as_out(lab: Lab) -> None:
    """F02: one of two ended after it went to sleep; the other comes back, and nothing is a fault."""
    dead, alive = lab.start(), lab.start(seed=2)
    job = lab.job(dead, alive)
    await lab.out(job)
    dead.end()
    assert await lab.state(job) is Residency.SUSPENDED
    await lab.back(job)
    assert await lab.state(job) is Residency.RESIDENT


@pytest.mark.parametrize("path", ["/metrics", "/sleep", "/health"])
async def test_a_server_that_ends_while_it_is_asked_counts_as_out(lab: Lab, path: str) -> None:
    """F02: its process ends in the middle of a request. Nobody tries on until the deadline; the other one sleeps."""
    dead, alive = lab.start(faults=(f"die {path}",)), lab.start(seed=2)
    job = lab.job(dead, alive)
    await lab.out(job)
    assert dead.process.wait(60) == 131
    assert await lab.state(job) is Residency.SUSPENDED
    await lab.back(job)
    assert await lab.state(job) is Residency.RESIDENT


async def test_several_servers_sleep_together_or_none(lab: Lab) -> None:
    """One of two refuses: the other is woken again, with its weights; later both sleep."""
    good, bad = lab.start(), lab.start(seed=2, faults=("400 /sleep=1",))
    job = lab.job(good, bad)
    before = good.sample("why")
    with pytest.raises(BackendError, match="400"):
        await lab.out(job)
    assert await lab.state(job) is Residency.RESIDENT
    assert good.calls("/sleep", "/wake_up")[-1] == "/wake_up?tags=kv_cache"
    assert good.sample("why") == before
    await lab.out(job)
    assert lab.device.used_bytes() == 0
    assert await lab.state(job) is Residency.SUSPENDED


async def test_several_servers_of_one_process_wake_together_or_none(lab: Lab) -> None:
    """Two addresses in one registration; one refuses to wake: the other sleeps again."""
    one, other = lab.start("sglang"), lab.start("sglang", seed=2)
    job = of_job(lab.job(one, dialect="sglang"), endpoints=(one.url, other.url))
    await lab.out(job)
    other.fault(**{"400 /resume_memory_occupation": 1})
    with pytest.raises(BackendError, match="400"):
        await lab.back(job)
    assert await lab.state(job) is Residency.SUSPENDED
    assert lab.device.used_bytes() == 0
    await lab.back(job)
    assert await lab.state(job) is Residency.RESIDENT
    assert one.sample("why") != other.sample("why")


async def test_a_server_that_can_not_be_put_back_is_said(lab: Lab) -> None:
    """vLLM passes over a sleep while a part of it sleeps: weights awake, no room for the cache. That is poisoned and
    tells what to do; nothing is guessed."""
    server = lab.start(faults=("400 /collective_rpc",))
    lab.backend = lab.make(reload="1")
    job = lab.job(server, modes=("discard",))
    await lab.out(job, DISCARD)
    with pytest.raises(BackendError, match=r"400.*can't put weights back to sleep alone") as caught:
        await lab.back(job, DISCARD)
    assert caught.value.kind is FaultKind.POISONED
    assert await lab.state(job) is Residency.SUSPENDED


async def test_residual_memory_is_told(lab: Lab) -> None:
    """G33: what a sleeping server still has on the device is in every probe."""
    server = lab.start(faults=("keeps memory=1",))
    job: Job = lab.job(server)
    server.ask("/sleep?level=1", {})  # by somebody else's hand, and it freed nothing
    probe = await lab.backend.probe(job)
    assert (probe.state, probe.device_bytes) == (Residency.SUSPENDED, lab.device.used_bytes())
    assert probe.device_bytes > 0
    with pytest.raises(BackendError, match="no dialect 'tgi'"):
        await lab.backend.restore(of_job(job, dialect="tgi"), ALL, deadline_s=DEADLINE_S)
