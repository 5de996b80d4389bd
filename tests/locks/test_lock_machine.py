"""Random histories of a lock-only group on a real server, compared step by step with the model."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.conftest import valkey_binary
from tests.locks.guards import when
from tests.locks.lab import Lab
from tests.locks.model import LEASE, Model
from timeslice.embedded import EmbeddedServer
from timeslice.locks import scripts
from timeslice.locks.scripts import Call, Ended, Granted, Lost, NotHolder, Queued, Renewed, Yielded, text

STEPS_S = [4, 8]  # multiples of 4 keep every deadline (15, 30 s) at least a second from any moment
JUMPS_S = [20, 100, -8, -52]
DRIFT_S = 0.9  # an example that took longer than this in real time is not carried on


@dataclass
class Client:
    """What one waiter knows and believes."""

    name: str
    band: int
    number: int
    crashed: bool = False
    over: bool = False  # cancelled, yielded or told that it lost
    score: str = ""
    order: float | None = None
    token: int = 0  # of its grant, confirmed or read from its stream
    inside: bool = False
    heard: float = 0.0  # elapsed time at which its last renewal was answered
    jumps: int = 0  # forward jumps of the clock until then


class LockMachine(RuleBasedStateMachine):
    """Clients that ask, renew, yield, cancel, die; a clock that moves and jumps; replies that are lost; data too."""

    url: ClassVar[str] = ""

    def __init__(self) -> None:
        super().__init__()
        self.lab = Lab(self.url)
        self.model = Model()
        self.clients: dict[str, Client] = {}
        self.grants: dict[int, int] = {}  # the server's token -> the model's
        self.floor = 0
        self.elapsed = 0.0
        self.jumps = 0
        self.went_back = False  # then, and with data lost too, newcomers may overtake
        self.began = time.monotonic()

    @property
    def fresh(self) -> bool:
        return time.monotonic() - self.began < DRIFT_S

    def teardown(self) -> None:
        if self.fresh:
            self.drain()
        self.lab.lose_everything()
        self.lab.redis.close()

    # plumbing

    def send(self, call: Call[Any], twice: bool) -> Any:
        """Send once or twice; the second answer is taken, as after a lost reply."""
        reply = self.lab.send(call)
        if twice:
            first, reply = reply, self.lab.send(call)
            assert text(first[0]) == text(reply[0])
            if text(first[0]) == "granted":
                assert int(first[1]) == int(reply[1])
        return call.parse(reply)

    def expect(self, call: Callable[[bool], str], twice: bool) -> str:
        """What the model says; the server has heard the news when a call comes the second time."""
        first = call(self.floor > self.lab.counter)
        if twice:
            assert call(False) == first
        return first

    def entered(self, client: Client, token: int) -> None:
        """A body starts: every other one must be over by its own count of time. Two outages without a word between
        them may also end it."""
        if not client.inside:
            for other in self.clients.values():
                if other.inside and other is not client:
                    over = self.elapsed - other.heard >= LEASE or self.jumps - other.jumps > 1
                    assert over, f"{client.name} entered beside {other.name}"
                    other.inside = False
        client.inside, client.token, client.heard, client.jumps = True, token, self.elapsed, self.jumps

    def living(self) -> list[Client]:
        return [client for client in self.clients.values() if not client.crashed and not client.over]

    def pick(self, n: int) -> Client | None:
        living = self.living()
        return living[n % len(living)] if living else None

    # rules

    @rule(band=st.sampled_from([0, 0, 0, 5, -5]), twice=st.booleans())
    @when(lambda self: len(self.clients) < 12 and self.fresh)
    def arrive(self, band: int, twice: bool) -> None:
        number = len(self.clients)
        client = Client(f"w{number}", band, number)
        self.clients[client.name] = client
        self.ask(client, twice)

    @rule(n=st.integers(0, 11), twice=st.booleans())
    @when(lambda self: self.living() and self.fresh)
    def refresh(self, n: int, twice: bool) -> None:
        client = self.pick(n)
        if client and not client.inside:
            self.ask(client, twice)

    def ask(self, client: Client, twice: bool = False) -> None:
        request = self.lab.request(client.name, f"job{client.number % 4}", priority=client.band)
        call = scripts.acquire(self.lab.group, request, floor=self.floor, score=client.score)
        said = self.expect(lambda news: self.model.acquire(client.name, client.band, client.order, news), twice)
        reply = self.send(call, twice)
        if isinstance(reply, Ended):
            assert said == "ended"
            client.over = True
            return
        self.floor = max(self.floor, reply.counter)
        if isinstance(reply, Granted):
            assert said == "granted"
            self.match_tokens()
            self.entered(client, reply.token)
            return
        assert isinstance(reply, Queued)
        assert said == "queued"
        place = [waiter.name for waiter in self.model.queue].index(client.name)
        assert reply.position == place
        assert not client.score or client.score == reply.score
        client.score, client.order = reply.score, self.model.queue[place].order

    @rule(twice=st.booleans())
    @when(lambda self: self.living() and self.fresh)
    def confirm(self, twice: bool) -> None:
        """The client whose grant lies in its stream reads and confirms it."""
        client = self.clients.get(self.lab.holder)
        if client is None or client.crashed or client.over:
            return
        mails = [int(mail["token"]) for mail in self.lab.mail(client.name) if mail["kind"] == "grant"]
        if mails and not client.inside:
            self.say_renew(client, mails[-1], twice)

    @rule(n=st.integers(0, 11), twice=st.booleans())
    @when(lambda self: self.living() and self.fresh)
    def renew(self, n: int, twice: bool) -> None:
        client = self.pick(n)
        if client and client.inside:
            self.say_renew(client, client.token, twice)

    def say_renew(self, client: Client, token: int, twice: bool = False) -> None:
        request = self.lab.request(client.name, f"job{client.number % 4}", priority=client.band)
        call = scripts.renew(self.lab.group, request, token, floor=self.floor, mode="lock")
        self.match_tokens()
        said = self.expect(lambda news: self.model.renew(client.name, self.grants[token], news), twice)
        reply = self.send(call, twice)
        self.floor = max(self.floor, reply.counter)
        assert said == ("ok" if isinstance(reply, Renewed) else "lost")
        if isinstance(reply, Renewed):
            self.entered(client, token)
        else:
            assert isinstance(reply, Lost)
            client.over, client.inside = client.inside, False  # a refused confirmation asks again

    @rule(n=st.integers(0, 11), twice=st.booleans())
    @when(lambda self: self.living() and self.fresh)
    def leave(self, n: int, twice: bool) -> None:
        client = self.pick(n)
        if client and client.inside:
            self.match_tokens()
            token, more = self.grants[client.token], client.token > self.lab.counter
            said = self.expect(lambda news: self.model.release(client.name, token, news and more), twice)
            reply = self.send(scripts.yield_(self.lab.group, client.name, client.token), twice)
            assert isinstance(reply, Yielded if said == "ok" else NotHolder)
            client.over, client.inside = True, False

    @rule(n=st.integers(0, 11), twice=st.booleans())
    @when(lambda self: self.living() and self.fresh)
    def cancel(self, n: int, twice: bool) -> None:
        """Its caller gave up, be it queued or granted without knowing."""
        client = self.pick(n)
        if client and not client.inside:
            for _ in range(1 + twice):
                self.model.cancel(client.name)
            self.send(scripts.cancel(self.lab.group, client.name), twice)
            client.over = True

    @rule(n=st.integers(0, 11))
    @when(lambda self: self.living() and self.fresh)
    def crash(self, n: int) -> None:
        if client := self.pick(n):
            client.crashed = True

    @rule(seconds=st.sampled_from(STEPS_S))
    @when(lambda self: self.fresh)
    def time_passes(self, seconds: int) -> None:
        """The group is in use meanwhile, so the server sees no jump."""
        self.lab.pass_time(seconds)
        self.model.pass_time(seconds)
        self.elapsed += seconds

    @rule(seconds=st.sampled_from(JUMPS_S))
    @when(lambda self: self.fresh)
    def clock_jumps(self, seconds: int) -> None:
        self.lab.jump(seconds)
        self.model.now += seconds
        self.jumps += seconds > 0
        self.went_back = self.went_back or seconds < 0

    @rule()
    @when(lambda self: self.fresh)
    def scripts_are_forgotten(self) -> None:
        self.lab.redis.script_flush()

    @rule()
    @when(lambda self: self.fresh and self.floor and not self.went_back)
    def data_is_lost(self) -> None:
        """Everything; whoever comes next knows of numbers that the server does not."""
        self.match_tokens()
        # Places are numbered ahead of the clock when several come in one millisecond; who comes in the very millisecond
        # of a loss may share a number with them, and no promise says which of the two is first.
        while self.lab.view.now_ms <= self.lab.number("seq"):
            pass
        self.lab.lose_everything()
        self.model.lose()

    # what must hold

    def match_tokens(self) -> None:
        """The server's token of the last grant is the model's, and higher than any before it."""
        token = self.lab.number("token")
        if self.model.token and token not in self.grants:
            assert token > max(self.grants, default=0)
            self.grants[token] = self.model.token
        assert self.grants.get(token, 0) == self.model.token

    @invariant()
    def server_and_model_agree(self) -> None:
        if not self.fresh:
            return
        view = self.lab.view
        assert view.state.get("lease_id", "") == self.model.lease
        assert [waiter.waiter for waiter in view.queue] == [waiter.name for waiter in self.model.queue]
        if self.model.lease:
            assert (view.state["confirmed"] == "1") == self.model.confirmed
            self.match_tokens()
        assert self.lab.redis.hlen(self.lab.group.waiters) <= 12 * len(self.model.queue)

    def drain(self) -> None:
        """Everybody behaves from now on: all that live are granted, in the order of bands and of their coming."""
        served: list[Client] = []
        for _ in range(200):
            waiting = [client for client in self.living() if not client.inside]
            holders = [client for client in self.living() if client.inside]
            if not waiting and not holders:
                break
            self.lab.pass_time(4)
            self.model.pass_time(4)
            self.elapsed += 4
            for client in holders:
                self.say_renew(client, client.token)
                if client.inside:
                    self.model.release(client.name, self.grants[client.token])
                    self.lab.release(client.name, client.token)
                    client.over, client.inside = True, False
            for client in sorted(waiting, key=lambda client: (-client.band, client.order or 1e9)):
                if not client.over:
                    self.ask(client)
                    served += [client] if client.inside else []
            self.server_and_model_agree()
        assert self.living() == []
        assert all(client.over for client in served)


IN_CI = os.environ.get("CI") == "true"  # there a red test must mean a change, not luck
FAST = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    report_multiple_bugs=False,
    phases=[Phase.explicit, Phase.generate],
    database=None,
    suppress_health_check=list(HealthCheck),
)


def test_random_histories_agree_with_the_model(server: EmbeddedServer) -> None:
    """One holder, rising tokens, order, nobody lost: over clock steps, lost replies and lost data."""
    LockMachine.url = server.url
    run_state_machine_as_test(LockMachine, settings=FAST)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("binary", ["valkey", "redis7"])
def test_many_more_random_histories_agree_with_the_model(binary: str, request: pytest.FixtureRequest) -> None:
    """As above, other and longer ones each time, on both servers."""
    path = valkey_binary() if binary == "valkey" else request.getfixturevalue("needs_tool")("redis-server")
    long = settings(FAST, max_examples=250, stateful_step_count=60, derandomize=IN_CI, phases=set(Phase))
    with EmbeddedServer(binary=path) as running:
        LockMachine.url = running.url
        run_state_machine_as_test(LockMachine, settings=long)
