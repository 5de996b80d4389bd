"""The callback on its own: what each call holds and lets go."""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from tests.client.faces import in_thread
from tests.integrations.conftest import Pools
from tests.support.jobs import DEADLINE_S, wait_until
from timeslice import (
    CancelledByOperatorError,
    Client,
    InvalidNameError,
    LeaseLostError,
    LeaseUncertainError,
    UsageError,
    hold,
)
from timeslice.errors import ServerUnsuitableError
from timeslice.integrations import patience
from timeslice.integrations.phases import PhaseCallback


@pytest.mark.parametrize(
    ("role", "held"), [("trainer", ("mine", "")), ("sampler", ("", "mine")), ("both", ("mine", "mine"))]
)
def test_a_role_is_held_between_begin_and_end(
    pools: Pools, callback: PhaseCallback, role: str, held: tuple[str, str]
) -> None:
    """Each role's groups are held under the job's id and the phase's name, and free before and after."""
    callback.on_phase_begin("save", role, {"rollout_id": 3})
    assert pools.holders() == held
    callback.on_phase_end("save", role, {"rollout_id": 3})
    assert pools.holders() == ("", "")
    assert pools.grants("trainers") + pools.grants("samplers") == [("mine", "save")] * sum(map(bool, held))


def test_the_trainer_is_taken_before_the_sampler(pools: Pools, callback: PhaseCallback) -> None:
    """Who needs both and finds the trainer's taken does not sit on the sampler's meanwhile."""
    with Client(job="rival") as rival, rival.hold("trainers"):
        both = in_thread(lambda: callback.on_phase_begin("weight_sync", "both"))
        pools.until_queued("mine", group="trainers")
        assert pools.holders() == ("rival", "")
    both.result(DEADLINE_S)
    assert pools.holders() == ("mine", "mine")


def test_half_of_both_is_let_go(pools: Pools, callback: PhaseCallback) -> None:
    """When the second group can't be had, the error comes through, the first is free, and the phase has not begun."""
    with Client(job="rival") as rival, rival.hold("samplers"):
        both = in_thread(lambda: callback.on_phase_begin("weight_sync", "both"))
        pools.until_queued("mine", group="samplers")
        pools.cancel("samplers")
        with pytest.raises(CancelledByOperatorError):
            both.result(DEADLINE_S)
        assert pools.holders() == ("", "rival")
    with pytest.raises(UsageError, match="phase weight_sync of both ends but has not begun; open: none"):
        callback.on_phase_end("weight_sync", "both")


def test_a_lease_that_is_lost_in_the_wait_for_the_other_group_is_had_anew(
    pools: Pools, callback: PhaseCallback
) -> None:
    """The phase begins with both; until then what was had is given back and asked for in order."""
    with Client(job="rival") as rival, Client(job="third") as third:
        blocker = rival.acquire("samplers")
        both = in_thread(lambda: callback.on_phase_begin("weight_sync", "both"))
        pools.until_queued("mine", group="samplers")
        pools.take_away("trainers")
        taken = third.acquire("trainers")
        blocker.yield_()
        pools.until_queued("mine", group="trainers")
        assert pools.holders() == ("third", "")
        taken.yield_()
        both.result(DEADLINE_S)
        assert pools.holders() == ("mine", "mine")
        callback.on_phase_end("weight_sync", "both")


def test_a_group_that_phases_share_is_looked_at_after_the_wait_for_the_other(
    pools: Pools, callback: PhaseCallback
) -> None:
    """What a phase of another thread had, and lost meanwhile, is not built on."""
    callback.on_phase_begin("train", "trainer")
    with Client(job="rival") as rival:
        blocker = rival.acquire("samplers")
        both = in_thread(lambda: callback.on_phase_begin("weight_sync", "both"))
        pools.until_queued("mine", group="samplers")
        pools.take_away("trainers")
        blocker.yield_()
        with pytest.raises(LeaseLostError, match=r"ops revoked it \(drill\)"):
            both.result(DEADLINE_S)
        assert pools.holders()[1] == ""
    with pytest.raises(LeaseLostError):
        callback.on_phase_end("train", "trainer")


def test_phases_that_overlap_share_a_hold(pools: Pools, callback: PhaseCallback) -> None:
    """The group stays held, under one lease, until the last phase that needs it has ended, in whatever order."""
    callback.on_phase_begin("train", "trainer")
    callback.on_phase_begin("weight_sync", "both")
    callback.on_phase_end("train", "trainer")
    assert pools.holders() == ("mine", "mine")
    callback.on_phase_end("weight_sync", "both")
    assert pools.holders() == ("", "")
    assert pools.grants("trainers") == [("mine", "train")]


def test_a_phase_that_begins_twice_ends_twice(pools: Pools, callback: PhaseCallback) -> None:
    """The second begin waits for nobody; the first end lets nothing go."""
    for _ in range(2):
        callback.on_phase_begin("generate", "sampler")
    callback.on_phase_end("generate", "sampler")
    assert pools.holders() == ("", "mine")
    callback.on_phase_end("generate", "sampler")
    assert pools.holders() == ("", "")


def test_an_end_without_a_begin_is_an_error(pools: Pools, callback: PhaseCallback) -> None:
    """It names the phase and what is open, and lets nothing go."""
    callback.on_phase_begin("train", "trainer")
    with pytest.raises(UsageError, match="phase train of both ends but has not begun; open: train of trainer"):
        callback.on_phase_end("train", "both")
    assert pools.holders() == ("mine", "")


@pytest.mark.parametrize(("phase", "role", "kind"), [("train", "critic", UsageError), ("{}", "both", InvalidNameError)])
def test_a_wrong_word_is_told_before_anything_is_held(
    pools: Pools, callback: PhaseCallback, phase: str, role: str, kind: type[UsageError]
) -> None:
    """A role or name that can't be is an error, and nothing was asked for."""
    with pytest.raises(kind):
        callback.on_phase_begin(phase, role)
    assert pools.grants("trainers") == []


def test_another_thread_may_end_what_one_began(pools: Pools, callback: PhaseCallback) -> None:
    """The end counts whoever calls it, and the thread that began can begin anew."""
    callback.on_phase_begin("train", "trainer")
    in_thread(lambda: callback.on_phase_end("train", "trainer")).result(DEADLINE_S)
    assert pools.holders() == ("", "")
    callback.on_phase_begin("train", "trainer")
    assert pools.holders() == ("mine", "")


def test_two_threads_that_begin_at_once_share_the_grant(pools: Pools, callback: PhaseCallback) -> None:
    """A phase that begins while another one waits for the same group waits with it, as one waiter."""
    begun = threading.Barrier(2)

    def begin(phase: str) -> None:
        begun.wait(DEADLINE_S)
        callback.on_phase_begin(phase, "trainer")

    with Client(job="rival") as rival, rival.hold("trainers"):
        waiting = [in_thread(partial(begin, phase)) for phase in ("train", "save")]
        pools.until_queued("mine", group="trainers")
    for each in waiting:
        each.result(DEADLINE_S)
    assert [job for job, _ in pools.grants("trainers")] == ["rival", "mine"]


def test_holds_inside_a_phase_join_it(pools: Pools, callback: PhaseCallback) -> None:
    """A loop that has holds of its own may run under the callback: they do not wait for it."""
    callback.on_phase_begin("train", "trainer")
    with hold("trainers", timeout=0):
        pass
    assert pools.holders() == ("mine", "")


def test_close_ends_all_phases(pools: Pools, callback: PhaseCallback) -> None:
    """After an exception in mid-phase one close lets everything go; a second does nothing, and a phase can begin."""
    callback.on_phase_begin("train", "trainer")
    callback.on_phase_begin("generate", "sampler")
    callback.close()
    assert pools.holders() == ("", "")
    callback.close()
    callback.on_phase_begin("save", "trainer")
    assert pools.holders() == ("mine", "")


def test_a_lost_lease_is_not_built_on(pools: Pools, callback: PhaseCallback, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a phase runs on a lease that was revoked, no other begins on it; when it has ended, one waits anew."""
    monkeypatch.setattr(Client.hold, "__kwdefaults__", {**(Client.hold.__kwdefaults__ or {}), "lease": 6.0})
    callback.on_phase_begin("train", "trainer")
    pools.take_away("trainers")
    with pytest.raises(LeaseLostError, match=r"ops revoked it \(drill\)"):
        until_refused(callback)
    with pytest.raises(LeaseLostError, match=r"ops revoked it \(drill\)"):
        callback.on_phase_end("train", "trainer")
    callback.on_phase_begin("train", "trainer")
    assert pools.holders() == ("mine", "")


def test_what_was_computed_without_the_lease_is_told(pools: Pools, callback: PhaseCallback) -> None:
    """A phase whose group another job got in the middle ends with an error, also before any renewal has told of it;
    all its groups are let go, and the next phase waits anew."""
    callback.on_phase_begin("weight_sync", "both")
    pools.take_away("trainers")
    with Client(job="rival") as rival:
        rival.acquire("trainers")
        with pytest.raises(LeaseLostError, match=r"trainers: the lease of job mine .* is over"):
            callback.on_phase_end("weight_sync", "both")
        assert pools.holders() == ("rival", "")
    callback.on_phase_begin("train", "trainer")
    assert pools.holders() == ("mine", "")
    callback.on_phase_end("train", "trainer")


def test_a_phase_beside_another_waits_while_nobody_can_say(
    pools: Pools, callback: PhaseCallback, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A phase does not begin on a lease that can't be confirmed for the moment: it waits for the server, not without
    end, and where it is given up the phase before it goes on."""
    callback.on_phase_begin("train", "trainer")
    (lease,) = callback._open[0].leases
    answers = iter([False, True, False])

    def ensure_held() -> None:
        if not next(answers):
            raise LeaseUncertainError("nobody answers")

    monkeypatch.setattr(lease, "ensure_held", ensure_held)
    monkeypatch.setattr(patience, "_ASK_S", 0.01)
    callback.on_phase_begin("save", "trainer")
    monkeypatch.setattr(patience, "UNCERTAIN_S", 0.0)
    with pytest.raises(LeaseUncertainError):
        callback.on_phase_begin("eval", "trainer")
    callback.on_phase_end("save", "trainer")
    assert pools.holders() == ("mine", "")


def test_no_phase_begins_while_all_are_ended(
    pools: Pools, callback: PhaseCallback, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A phase that has its grant when another thread calls close does not begin without it: it is an error, and nothing
    is held. The next one holds."""
    enter = PhaseCallback._enter

    def enter_and_close(*arguments: Any) -> Any:
        lease = enter(*arguments)
        in_thread(callback.close).result(DEADLINE_S)
        return lease

    with monkeypatch.context() as patch:
        patch.setattr(PhaseCallback, "_enter", enter_and_close)
        with pytest.raises((UsageError, LeaseLostError)):
            callback.on_phase_begin("train", "trainer")
    assert pools.holders() == ("", "")
    callback.on_phase_begin("weight_sync", "trainer")
    assert pools.holders() == ("mine", "")


def test_a_phase_that_waits_does_not_begin_after_close(pools: Pools, callback: PhaseCallback) -> None:
    """It waits on, as no thread can be stopped, but lets go what it gets."""
    with Client(job="rival") as rival, rival.hold("trainers"):
        waiting = in_thread(lambda: callback.on_phase_begin("train", "trainer"))
        pools.until_queued("mine", group="trainers")
        callback.close()
    with pytest.raises(UsageError, match=r"train of trainer: close\(\) was called while it began"):
        waiting.result(DEADLINE_S)
    assert pools.holders() == ("", "")


def test_close_may_interrupt_itself(pools: Pools, callback: PhaseCallback, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal's handler that closes, while the program closes at its end, does not wait for itself."""
    callback.on_phase_begin("train", "both")
    close = Client.close

    def interrupted(client: Client) -> None:
        monkeypatch.setattr(Client, "close", close)
        signal.raise_signal(signal.SIGUSR1)
        client.close()

    monkeypatch.setattr(Client, "close", interrupted)
    before = signal.signal(signal.SIGUSR1, lambda *_: callback.close())
    callback.close()
    signal.signal(signal.SIGUSR1, before)
    assert pools.holders() == ("", "")


def until_refused(callback: PhaseCallback) -> None:
    """The loss shows at the next renewal."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        callback.on_phase_begin("save", "trainer")
        callback.on_phase_end("save", "trainer")


def test_one_name_for_both_is_one_hold(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    """Colocated: a phase of both, and generation inside training, take the one group once."""
    monkeypatch.setenv("TIMESLICE_SAMPLER_GROUP", "trainers")
    callback = PhaseCallback()
    callback.on_phase_begin("weight_sync", "both")
    callback.on_phase_begin("generate", "sampler")
    callback.on_phase_end("weight_sync", "both")
    assert pools.holders() == ("mine", "")
    callback.on_phase_end("generate", "sampler")
    assert pools.holders() == ("", "")
    assert pools.grants("trainers") == [("mine", "weight_sync")]


def test_a_role_without_a_group_holds_nothing(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samplers of one's own: only the trainer's group is held, also by phases of both. What the samplers do is recorded
    there."""
    monkeypatch.delenv("TIMESLICE_SAMPLER_GROUP")
    with closing(PhaseCallback()) as callback:
        callback.on_phase_begin("generate", "sampler")
        assert pools.holders() == ("", "")
        callback.on_phase_end("generate", "sampler")
        wait_until(lambda: "PhaseEnded" in pools.event_types("trainers"), "the phase is recorded")
        (ended,) = [event for event in pools.events("trainers") if event["type"] == "PhaseEnded"]
        assert (ended["job"], ended["phase"]) == ("mine", "generate")
        callback.on_phase_begin("weight_sync", "both")
        assert pools.holders() == ("mine", "")


def test_without_groups_nothing_happens(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The same image runs without timeslice: no server is asked for, no call fails, and one line of log says why."""
    with caplog.at_level(logging.INFO, "timeslice"):
        callback = PhaseCallback()
        for _ in range(2):
            callback.on_phase_begin("train", "trainer")
        callback.on_phase_end("generate", "sampler")
        callback.close()
    assert [record.message for record in caplog.records] == [
        "neither TIMESLICE_TRAINER_GROUP nor TIMESLICE_SAMPLER_GROUP is set: phases hold nothing"
    ]


def answer(orchestrator: socket.socket) -> None:
    """As a server does that speaks something else."""
    while True:
        with orchestrator.accept()[0] as guest:
            guest.recv(1)
            guest.sendall(b"HTTP/2.0 400 Bad Request\r\n\r\n")


def test_llm_ds_address_is_a_redis_server(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    """TIMESLICE_ORCH_ADDR is read as host and port of a Redis. What llm-d's orchestrator listens on is none: the error
    says what overrides it, and TIMESLICE_URL does."""
    with socket.create_server(("127.0.0.1", 0)) as orchestrator:
        in_thread(lambda: answer(orchestrator))
        monkeypatch.setenv("TIMESLICE_ORCH_ADDR", f"127.0.0.1:{orchestrator.getsockname()[1]}")
        with closing(PhaseCallback()) as callback:
            callback.on_phase_begin("train", "trainer")
            assert pools.holders() == ("mine", "")
        monkeypatch.delenv("TIMESLICE_URL")
        with (
            closing(PhaseCallback()) as callback,
            pytest.raises(ServerUnsuitableError, match=r"127\.0\.0\.1") as caught,
        ):
            callback.on_phase_begin("train", "trainer")
        orchestrator.shutdown(socket.SHUT_RDWR)
    assert "The address is that of TIMESLICE_ORCH_ADDR; TIMESLICE_URL overrides it." in caught.value.__notes__
