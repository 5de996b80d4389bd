"""Circles of waits: many clients on one server, their calls interleaved at random, each flow driven by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from timeslice.embedded import EmbeddedServer
from timeslice.errors import DeadlockError, RedisUnreachableError
from timeslice.locks import flows, scripts
from timeslice.locks.cycles import Held, Watch, place
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.flows import Op, Wait
from timeslice.locks.keys import GroupKeys, Keys
from timeslice.locks.scripts import Call, Granted, Queued, Request, text

GROUPS = ("trainers", "critics", "rewards", "samplers")


@pytest.fixture
def driver(anywhere: str) -> Iterator[SyncDriver]:
    made = SyncDriver(anywhere)
    yield made
    made.close()


@pytest.fixture
def near(server: EmbeddedServer) -> Iterator[SyncDriver]:
    """To one server, which is fast."""
    made = SyncDriver(server.url)
    yield made
    made.close()


@dataclass
class Actor:
    """A job that takes groups one after the other and then lets them go; one call of it is one step."""

    driver: SyncDriver
    keys: Keys
    job: str
    dice: random.Random
    ordered: bool
    held: list[Held] = field(default_factory=list)
    rounds: int = 0
    circles: int = 0
    _work: Generator[Op, Any, None] | None = None
    _op: Op | None = None

    def step(self) -> None:
        if self._work is None:
            self._work = self._round()
            self._op = next(self._work)
        op, answer = self._op, None
        if isinstance(op, Wait):
            reply: Any = self.driver.client.xread({op.key: op.after}) or []
            answer = [
                (text(entry), {text(k): text(v) for k, v in fields.items()})
                for _, entries in reply
                for entry, fields in entries
            ]
        elif op is not None:
            answer = self.driver.run(op)
        try:
            self._op = self._work.send(answer)
        except StopIteration:
            self._work = None

    def _round(self) -> Generator[Op, Any, None]:
        self.rounds += 1
        wants = self.dice.sample(GROUPS, self.dice.randint(2, 3))
        if self.ordered:
            wants.sort(key=lambda name: place(name, 0))
        try:
            for number, name in enumerate(wants):
                group = self.keys.group(name)
                request = Request(f"{self.job}-{self.rounds}-{number}", self.job, "n1", 7, 1, lock_only=True)
                grant = yield from flows.acquire(group, request, held=lambda: self.held)
                self.held = [*self.held, Held(group, request.waiter, grant.counter)]
        except DeadlockError:
            self.circles += 1
        for each in self.held:
            yield scripts.yield_(each.keys, each.lease, None)
        self.held = []


def play(driver: SyncDriver, prefix: str, dice: random.Random, rounds: int, *, ordered: bool) -> list[Actor]:
    """Let four jobs take their groups so often, in the order of all or in any."""
    actors = [Actor(driver, Keys(prefix), job, dice, ordered) for job in "abcd"]
    for _ in range(rounds * 400):
        if sum(actor.rounds for actor in actors) >= rounds:
            return actors
        dice.choice(actors).step()
    raise AssertionError("they stand still: " + ", ".join(f"{actor.job} has {actor.held}" for actor in actors))


@pytest.mark.parametrize("seed", range(4))
def test_jobs_in_order_are_never_said_to_be_in_a_circle(near: SyncDriver, prefix: str, seed: int) -> None:
    """L16: a thousand rounds in all; whatever is read between whatever calls of others, there is no false alarm."""
    actors = play(near, prefix, random.Random(seed), 250, ordered=True)
    assert [actor.circles for actor in actors] == [0] * 4


@pytest.mark.parametrize("seed", range(4))
def test_jobs_in_any_order_always_go_on(near: SyncDriver, prefix: str, seed: int) -> None:
    """L16: circles come up all the time, of two and of more; each is broken, and no job stands still."""
    actors = play(near, prefix, random.Random(seed), 100, ordered=False)
    assert all(actor.rounds for actor in actors)
    assert sum(actor.circles for actor in actors)


# one circle by hand


class Party:
    """One job by hand: what it holds, and its look-out for circles."""

    def __init__(self, driver: SyncDriver, keys: Keys, job: str) -> None:
        self.driver, self.keys, self.job = driver, keys, job
        self.held: list[Held] = []
        self.calls: list[str] = []  # verb and group of what the look-out sent

    def ask(self, name: str, *, ttl_ms: int = 15_000) -> Any:
        group = self.keys.group(name)
        request = Request(f"{self.job}-{name}", self.job, "n1", 7, 1, lock_only=True, ttl_ms=ttl_ms)
        return self.driver.run(scripts.acquire(group, request))

    def take(self, *names: str) -> None:
        for name in names:
            assert isinstance(self.ask(name), Granted)
            self.held.append(Held(self.keys.group(name), f"{self.job}-{name}", 0))

    def look(self, name: str) -> DeadlockError | None:
        """Ask, and look out for a circle."""
        assert isinstance(self.ask(name), Queued)
        error: DeadlockError | None = self.drive(self.watch(name).look())
        return error

    def watch(self, name: str) -> Watch:
        return Watch(self.keys.group(name), f"{self.job}-{name}", lambda: self.held)

    def drive(self, steps: Generator[Call[Any], Any, Any], before: Callable[[Call[Any]], None] | None = None) -> Any:
        answer = None
        try:
            while True:
                call = steps.send(answer)
                if before:
                    before(call)
                self.calls.append(call.script.name)
                answer = self.driver.run(call)
        except StopIteration as stop:
            return stop.value

    def let_go(self, name: str) -> None:
        self.driver.run(scripts.yield_(self.keys.group(name), f"{self.job}-{name}", None))
        self.held = [each for each in self.held if each.keys.name != name]

    def notes(self, name: str) -> Sequence[str]:
        return self.driver.view(self.keys.group(name)).state.get("waits_on", "").split()


@pytest.fixture
def parties(driver: SyncDriver, prefix: str) -> tuple[Party, Party, Party]:
    x, y, z = (Party(driver, Keys(prefix), job) for job in "xyz")
    return x, y, z


def mail(party: Party, name: str) -> list[str]:
    entries: Any = party.driver.client.xrange(party.keys.group(name).grant(f"{party.job}-{name}"))
    return [text(fields[b"kind"]) for _, fields in entries]


def test_the_one_out_of_order_is_told_and_the_other_waits_on(parties: tuple[Party, Party, Party]) -> None:
    """L16: the error names jobs, groups and the way out; the one in order learns nothing, whoever came last."""
    x, y, _ = parties
    x.take("trainers")
    y.take("samplers")
    assert x.look("samplers") is None
    error = y.look("trainers")
    assert error is not None
    assert str(error) == (
        "group trainers: nobody in this circle could ever go on: job y waits for trainers, which job x holds; job x "
        "waits for samplers, which job y holds. So this wait is withdrawn; what job y holds stays held. Take both in "
        'one go, or everywhere in this order: hold("trainers", "samplers").'
    )
    assert (error.group, error.job) == ("trainers", "y")


def test_who_closes_the_circle_in_order_has_the_other_look_at_once(parties: tuple[Party, Party, Party]) -> None:
    """L16: the one out of order waited first; it need not wait for its next refresh to learn of the circle."""
    x, y, _ = parties
    x.take("trainers")
    y.take("samplers")
    assert y.look("trainers") is None
    assert x.look("samplers") is None
    assert mail(y, "trainers") == ["poke"]
    assert y.look("trainers") is not None


def test_the_configured_order_says_who_is_out_of_order(parties: tuple[Party, Party, Party], driver: SyncDriver) -> None:
    """Where samplers come first by configuration, it is the other one that gets the error."""
    x, y, _ = parties
    driver.run(scripts.configure(x.keys.group("samplers"), {"order": "-1"}, mode="lock"))
    x.take("trainers")
    y.take("samplers")
    assert y.look("trainers") is None
    error = x.look("samplers")
    assert error is not None
    assert 'hold("samplers", "trainers")' in str(error)


def test_a_circle_of_three_has_one_loser(parties: tuple[Party, Party, Party]) -> None:
    """L16: each waits for the next one's group; the wait for the first group of the circle ends, no other."""
    x, y, z = parties
    for party, group in zip(parties, ("trainers", "critics", "samplers"), strict=True):
        party.take(group)
    assert x.look("critics") is None
    assert y.look("samplers") is None
    error = z.look("trainers")
    assert error is not None
    for job in ("job z waits for trainers", "job x waits for critics", "job y waits for samplers"):
        assert job in str(error)
    assert (x.look("critics"), y.look("samplers")) == (None, None)
    assert mail(z, "trainers") == ["poke", "poke"]


def test_a_circle_of_waits_all_out_of_order_has_one_loser_too(parties: tuple[Party, Party, Party]) -> None:
    """Two of three are out of order; one of them has to give way, and that is enough."""
    x, y, z = parties
    for party, group in zip(parties, ("trainers", "critics", "samplers"), strict=True):
        party.take(group)
    errors = [x.look("samplers"), z.look("critics"), y.look("trainers"), z.look("critics"), x.look("samplers")]
    assert [error is not None for error in errors] == [False, False, True, False, False]


def test_two_processes_of_one_job_can_close_a_circle(parties: tuple[Party, Party, Party]) -> None:
    """Leases are compared, not job ids: two processes of one job that wait for each other are a circle, and one that
    merely waits for its sister is not."""
    x, y, _ = parties
    y.job = "x2"
    x.take("trainers")
    assert isinstance(y.ask("trainers"), Queued)
    y.take("samplers")
    assert y.look("trainers") is None
    assert x.look("samplers") is None
    assert y.look("trainers") is not None


def test_a_note_of_a_wait_that_is_over_proves_nothing(parties: tuple[Party, Party, Party]) -> None:
    """The waiter was cancelled, or died, or got in and let go: its note is still there, and there is no circle."""
    x, y, _ = parties
    x.take("trainers")
    y.take("samplers")
    assert x.look("samplers") is None
    x.driver.run(scripts.cancel(x.keys.group("samplers"), "x-samplers"))
    assert x.notes("trainers") == ["samplers/x-samplers"]
    assert y.look("trainers") is None


def test_a_dead_waiter_is_no_link(parties: tuple[Party, Party, Party], driver: SyncDriver) -> None:
    """A waiter that gave no sign of life within its time waits no more, even before anybody has removed it."""
    x, y, _ = parties
    x.take("trainers")
    y.take("samplers")
    assert x.look("samplers") is None
    driver.client.zadd(x.keys.group("samplers").alive, {"x-samplers": 1})
    assert y.look("trainers") is None


def test_the_note_goes_with_the_lease_and_with_the_wait(parties: tuple[Party, Party, Party]) -> None:
    """Who comes after the holder inherits no note, and a wait that ended takes its own back and no other."""
    x, y, z = parties
    x.take("trainers")
    y.take("samplers")
    z.take("critics")
    watches = [x.watch("samplers"), x.watch("critics")]
    for name, watch in zip(("samplers", "critics"), watches, strict=True):
        x.ask(name)
        x.drive(watch.look())
    assert x.notes("trainers") == ["samplers/x-samplers", "critics/x-critics"]
    x.drive(watches[0].clear())
    assert x.notes("trainers") == ["critics/x-critics"]
    x.let_go("trainers")
    assert y.ask("trainers")
    assert x.notes("trainers") == []


def test_a_link_that_ends_between_two_looks_is_no_circle(parties: tuple[Party, Party, Party]) -> None:
    """Each group is read at its own moment. What was true of one when the other was not any more is not believed."""
    x, y, _ = parties
    x.take("trainers")
    y.take("samplers")
    assert x.look("samplers") is None
    y.ask("trainers")
    looks = 0

    def interfere(call: Call[Any]) -> None:
        nonlocal looks
        looks += call.script.name == "look"
        if looks == 3:  # the circle was seen once: now x gives up, from another thread of its own
            x.let_go("trainers")

    assert y.drive(y.watch("trainers").look(), interfere) is None
    assert looks >= 3


def test_what_no_client_of_ours_wrote_is_passed_over(parties: tuple[Party, Party, Party], driver: SyncDriver) -> None:
    """Odd words in the note lead nowhere, and hide no circle."""
    x, y, _ = parties
    x.take("trainers")
    y.take("samplers")
    assert x.look("samplers") is None
    odd = "}{/x ../../etc/passwd /w samplers samplers/ samplers/x-samplers"
    driver.client.hset(x.keys.group("trainers").state, "waits_on", odd)
    assert y.look("trainers") is not None


def test_the_notes_of_a_holder_are_bounded(parties: tuple[Party, Party, Party], driver: SyncDriver) -> None:
    """However many threads of a holder wait, the state keeps sixteen; the same one twice counts once."""
    x, _, _ = parties
    x.take("trainers")
    for number in range(40):
        for _ in range(2):
            driver.run(scripts.waits(x.keys.group("trainers"), "x-trainers", "samplers", f"w{number}", still=True))
    assert x.notes("trainers") == [f"samplers/w{number}" for number in range(24, 40)]


def test_only_the_holder_notes(parties: tuple[Party, Party, Party], driver: SyncDriver) -> None:
    """A note from a lease that is over is refused."""
    x, _, _ = parties
    x.take("trainers")
    assert not driver.run(scripts.waits(x.keys.group("trainers"), "other", "samplers", "w", still=True))
    assert x.notes("trainers") == []


def test_who_holds_nothing_else_sends_nothing(parties: tuple[Party, Party, Party]) -> None:
    """A wait of somebody who holds nothing costs no call more than before."""
    x, y, _ = parties
    x.take("trainers")
    assert y.look("trainers") is None
    assert y.calls == []


def test_a_server_that_does_not_answer_ends_the_look_not_the_wait(parties: tuple[Party, Party, Party]) -> None:
    """It is looked again at the next refresh."""
    x, y, _ = parties
    x.take("trainers")
    y.take("samplers")
    y.ask("trainers")
    watch = y.watch("trainers")
    steps = watch.look()
    next(steps)
    with pytest.raises(StopIteration) as stopped:
        steps.throw(RedisUnreachableError("down"))
    assert stopped.value.value is None


def test_groups_are_told_apart_by_their_keys_only(parties: tuple[Party, Party, Party]) -> None:
    """Each call of a look touches one group, so that it works where groups lie on several cluster slots."""
    x, y, _ = parties
    x.take("trainers")
    y.take("samplers")
    x.ask("samplers")
    y.ask("trainers")
    for party, name in ((x, "samplers"), (y, "trainers")):
        steps, answer = party.watch(name).look(), None
        while True:
            try:
                call: Call[Any] = steps.send(answer)
            except StopIteration:
                break
            groups: set[GroupKeys] = {x.keys.group(each) for each in GROUPS if call.keys == x.keys.group(each).all}
            assert len(groups) == 1
            answer = party.driver.run(call)
