"""Random histories of a served group: whatever is late, doubled, refused or dead, no body ever starts beside another
job's state or without its own, tokens rise, and in the end everybody who lives has had a turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from tests.conftest import valkey_binary
from tests.locks.guards import when
from tests.locks.swap_world import Agent, World
from tests.locks.test_lock_machine import FAST, IN_CI
from timeslice.embedded import EmbeddedServer
from timeslice.locks import scripts
from timeslice.locks.scripts import Ended, Exited, Granted, Queued, Renewed

NODES, JOBS = ("n1", "n2"), ("a", "b", "c")
LOADS = {"a": ("n1", "n2"), "b": ("n1",), "c": ("n2",)}  # where a job's body puts its state


@dataclass
class Client:
    name: str
    job: str
    pid: int
    score: str = ""
    token: int = 0
    inside: bool = False
    over: bool = False
    dead: bool = False
    moves: int = 0  # how often its job's state had been moved out when its body started


class SwapMachine(RuleBasedStateMachine):
    url: ClassVar[str] = ""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.url, NODES)
        self.lab = self.world.lab
        self.clients: list[Client] = []
        self.floor = 0
        self.highest = 0
        self.began = time.monotonic()
        for agent in self.world.agents.values():
            self.world.beat(agent)

    def teardown(self) -> None:
        if self.fresh:
            self.drain()
        self.lab.lose_everything()
        self.lab.redis.close()

    @property
    def fresh(self) -> bool:
        return time.monotonic() - self.began < 3.0

    def living(self) -> list[Client]:
        return [client for client in self.clients if not client.over and not client.dead]

    def pick(self, n: int) -> Client | None:
        living = self.living()
        return living[n % len(living)] if living else None

    def agent(self, n: int) -> Agent:
        return self.world.agents[NODES[n % len(NODES)]]

    # clients

    @rule(job=st.sampled_from(JOBS))
    @when(lambda self: len(self.living()) < 6 and self.fresh)
    def arrive(self, job: str) -> None:
        client = Client(f"w{len(self.clients)}", job, len(self.clients) + 10)
        self.clients.append(client)
        self.ask(client)

    def refresh(self, n: int) -> None:
        client = self.pick(n)
        if client and not client.inside:
            self.ask(client)

    def ask(self, client: Client) -> None:
        reply = self.lab.ask(
            client.name,
            client.job,
            served=True,
            pid=client.pid,
            host=LOADS[client.job][0],
            score=client.score,
            floor=self.floor,
        )
        if isinstance(reply, Ended):
            client.over = True
            return
        self.floor = max(self.floor, reply.counter)
        if isinstance(reply, Queued):
            client.score = reply.score
        else:
            assert isinstance(reply, Granted)
            self.enter(client, reply.token)

    def confirm(self) -> None:
        holder = next((client for client in self.living() if client.name == self.lab.holder), None)
        if holder and not holder.inside:
            token = self.lab.number("token")
            if isinstance(self.renew(holder, token), Renewed):
                self.enter(holder, token)

    def renew(self, client: Client, token: int) -> object:
        return self.lab.renew(
            client.name,
            token,
            client.job,
            served=True,
            pid=client.pid,
            host=LOADS[client.job][0],
            floor=self.floor,
        )

    def keep(self, n: int) -> None:
        client = self.pick(n)
        if client and client.inside and not isinstance(self.renew(client, client.token), Renewed):
            client.inside, client.over = False, True

    def enter(self, client: Client, token: int) -> None:
        """The body starts: this is what all is for."""
        if client.inside:
            return
        assert token > self.highest, f"token {token} after {self.highest}"
        self.highest = token
        members = [self.world.agents[node] for node in self.lab.view.nodes]
        for agent in members:
            assert not agent.device - {client.job}, f"{client.job} enters beside {agent}: {self.world.why()}"
            assert client.job not in agent.saved, f"{client.job} enters without its state on {agent}"
        moves = sum(agent.suspended[client.job] for agent in self.world.agents.values())
        for other in self.clients:
            if other.inside and other is not client:
                still = other.job == client.job and other.moves == moves and bool(members)
                assert not still, f"{client.name} enters beside {other.name}, whose body was never stopped"
                other.inside, other.over = False, True  # its lease ran out; it will be told
        client.inside, client.token, client.moves = True, token, moves
        for agent in members:
            if agent.node in LOADS[client.job]:
                agent.device.add(client.job)

    def leave(self, n: int) -> None:
        client = self.pick(n)
        if client and client.inside:
            self.lab.release(client.name, client.token)
            client.inside, client.over = False, True

    def cancel(self, n: int) -> None:
        client = self.pick(n)
        if client and not client.inside:
            self.lab.cancel(client.name)
            client.over = True

    def die(self, n: int, seen: bool) -> None:
        """A process ends; its job's state goes with it, and perhaps an agent sees it at once."""
        client = self.pick(n)
        if client is None:
            return
        client.dead = True
        holds, client.inside = client.inside, False
        if holds:
            for agent in self.world.agents.values():
                agent.device.discard(client.job)
                agent.saved.discard(client.job)
                agent.suspended[client.job] += 1
        agent = self.world.agents[LOADS[client.job][0]]
        if seen and agent.up and agent.current is None:
            gone = [scripts.Observed(client.job, agent.state(client.job).replace("absent", "gone"))] if holds else []
            ended = [Exited(client.job, client.pid, 1)]
            self.world.tell(scripts.report(self.lab.group, agent.node, agent.floor, gone, ended, floor=agent.floor))

    # agents and coordinators

    def act(self, fault: str = "", echo: int = 0) -> None:
        """Every party that is there does its next thing; ``echo`` brings the echo-last message again after each."""
        self.world.drive("c1")
        for agent in self.world.agents.values():
            if agent.up:
                self.world.begin(agent)
                self.echo(echo)
                self.world.finish(agent, fault)
                self.echo(echo)

    def echo(self, back: int) -> None:
        if 0 < back <= len(self.world.sent):
            self.lab.send(self.world.sent[-back])

    @rule(
        job=st.sampled_from(JOBS),
        rounds=st.integers(2, 9),
        stays=st.booleans(),
        bad=st.sampled_from([0, 0, 3, 4, 5]),
        echo=st.integers(0, 9),
    )
    @when(lambda self: self.fresh)
    def have_a_turn(self, job: str, rounds: int, stays: bool, bad: int, echo: int) -> None:
        """A new process of a job asks, and things go on for a while: it may get in, and out again."""
        client = Client(f"w{len(self.clients)}", job, len(self.clients) + 10)
        self.clients.append(client)
        for other in self.living():
            if other.inside:
                self.lab.release(other.name, other.token)
                other.inside, other.over = False, True
        self.ask(client)
        for number in range(rounds):
            if number == 1:
                for agent in self.world.agents.values():
                    agent.up = True
                    self.world.beat(agent)
            self.act("busy" if bad and number == bad else "", echo)
            if not client.over and not client.inside:
                self.ask(client)
        if client.inside and not stays:
            self.lab.release(client.name, client.token)
            client.inside, client.over = False, True

    @rule(rounds=st.integers(1, 5))
    @when(lambda self: self.fresh)
    def go_on(self, rounds: int) -> None:
        for _ in range(rounds):
            self.act()

    def take_order(self, n: int) -> None:
        if self.agent(n).up:
            self.world.begin(self.agent(n))

    def finish_order(self, n: int, fault: str) -> None:
        if self.agent(n).up:
            self.world.finish(self.agent(n), fault)

    def look(self, n: int) -> None:
        """What it sees now it may report much later."""
        if self.agent(n).up and self.agent(n).current is None:
            self.world.look(self.agent(n))

    def report(self, n: int) -> None:
        if self.agent(n).up:
            self.world.report(self.agent(n))

    def agent_goes(self, n: int, leaves: bool) -> None:
        """It crashes, or is stopped cleanly; what it had accepted it finishes when it is back."""
        agent = self.agent(n)
        if agent.up:
            agent.up = False
            if leaves and agent.current is None:
                here = {client.job for client in self.living() if agent.node in LOADS[client.job]}
                absent = [job for job in JOBS if job not in here and agent.state(job) == "absent"]
                self.lab.run(scripts.leave(self.lab.group, agent.node, absent))

    def agent_returns(self, n: int) -> None:
        agent = self.agent(n)
        if not agent.up:
            agent.up = True
            self.world.beat(agent)

    def coordinate(self, name: str, times: int) -> None:
        for _ in range(times):
            self.world.drive(name)

    @rule(n=st.integers(0, 1000))
    @when(lambda self: self.world.sent and self.fresh)
    def an_old_message_arrives_again(self, n: int) -> None:
        """Any accepted, ack or report that was ever sent, the last ones more often."""
        sent = self.world.sent
        call = sent[-1 - n % min(len(sent), 12 if n % 4 else 1000)]
        self.lab.send(call)

    @rule(what=st.sampled_from(["refresh", "confirm", "keep", "leave", "cancel", "die"]), n=st.integers(0, 5))
    @when(lambda self: self.living() and self.fresh)
    def a_client_acts(self, what: str, n: int) -> None:
        acts: dict[str, Callable[[], None]] = {
            "refresh": lambda: self.refresh(n),
            "confirm": self.confirm,
            "keep": lambda: self.keep(n),
            "leave": lambda: self.leave(n),
            "cancel": lambda: self.cancel(n),
            "die": lambda: self.die(n, n % 2 == 0),
        }
        acts[what]()

    @rule(what=st.sampled_from(["take", "finish", "fail", "look", "report", "c1", "c2"]), n=st.integers(0, 1))
    @when(lambda self: self.fresh)
    def a_party_acts(self, what: str, n: int) -> None:
        acts: dict[str, Callable[[], None]] = {
            "take": lambda: self.take_order(n),
            "finish": lambda: self.finish_order(n, ""),
            "fail": lambda: self.finish_order(n, "busy"),
            "look": lambda: self.look(n),
            "report": lambda: self.report(n),
            "c1": lambda: self.coordinate("c1", 3),
            "c2": lambda: self.coordinate("c2", 3),
        }
        acts[what]()

    @rule(n=st.integers(0, 1), blind=st.sampled_from([True, False, False]))
    @when(lambda self: self.fresh)
    def an_agent_s_eyes(self, n: int, blind: bool) -> None:
        """Processes of jobs can not be seen for a while, as those of another pid namespace, nor the device measured."""
        self.agent(n).blind = blind and self.agent(n).current is None
        self.look(n)
        self.report(n)

    @rule(job=st.sampled_from(JOBS))
    @when(lambda self: self.fresh)
    def an_operator_looks(self, job: str) -> None:
        """Who sees that nothing of an unknown job is on any device says so."""
        view, agents = self.lab.view, self.world.agents.values()
        unknown = job in view.jobs and view.jobs[job].residency == "unknown" and not (view.swap or view.holder == job)
        if unknown and not any(job in agent.device for agent in agents):
            self.lab.run(scripts.repair(self.lab.group, "eve", "", out=[job]))

    @rule(n=st.integers(0, 1), how=st.sampled_from(["crashes", "leaves", "returns", "returns"]))
    @when(lambda self: self.fresh)
    def an_agent_comes_or_goes(self, n: int, how: str) -> None:
        if how == "returns":
            self.agent_returns(n)
        else:
            self.agent_goes(n, how == "leaves")

    # time

    @rule(seconds=st.sampled_from([1, 4, 8]))
    @when(lambda self: self.fresh)
    def time_passes(self, seconds: int) -> None:
        self.lab.pass_time(seconds)
        for agent in self.world.agents.values():
            if agent.up:
                self.world.beat(agent)

    @rule(seconds=st.sampled_from([30, -30]))
    @when(lambda self: self.fresh)
    def clock_jumps(self, seconds: int) -> None:
        self.lab.jump(seconds)

    # the end

    def drain(self) -> None:
        """Everybody behaves; all that live get their turn, and no swap is left."""
        agents = list(self.world.agents.values())
        for agent in agents:
            agent.up, agent.blind = True, False
            if agent.current is None:
                self.world.look(agent)
                self.world.report(agent)
        for _ in range(150):
            if not self.living() and not self.lab.swap:
                break
            self.lab.pass_time(4)
            unknown = any(job.residency == "unknown" for job in self.lab.view.jobs.values())
            for number, agent in enumerate(agents):
                self.world.beat(agent)
                if unknown:
                    self.look(number)
                    self.report(number)
            for client in self.living():
                if client.inside:
                    self.lab.release(client.name, client.token)
                    client.inside, client.over = False, True
                else:
                    self.ask(client)
            for _ in range(6):
                self.world.drive("c1")
                for agent in agents:
                    self.world.begin(agent)
                    self.world.finish(agent)
        for _ in range(5):
            self.lab.pass_time(4)
            self.world.beat(agents[0])
        assert self.living() == [], self.world.why()
        assert self.lab.swap == 0, self.world.why()
        assert self.lab.redis.hlen(self.lab.group.waiters) == 0


def test_random_swaps_keep_the_device_safe(server: EmbeddedServer) -> None:
    """Agents, coordinators and clients come and go; old messages return; bodies never share the device."""
    SwapMachine.url = server.url
    run_state_machine_as_test(SwapMachine, settings=settings(FAST, max_examples=90, stateful_step_count=40))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("binary", ["valkey", "redis7"])
def test_many_more_random_swaps_keep_the_device_safe(binary: str, request: pytest.FixtureRequest) -> None:
    """As above, other and longer ones each time, on both servers."""
    path = valkey_binary() if binary == "valkey" else request.getfixturevalue("needs_tool")("redis-server")
    long = settings(FAST, max_examples=120, stateful_step_count=80, derandomize=IN_CI)
    with EmbeddedServer(binary=path) as running:
        SwapMachine.url = running.url
        run_state_machine_as_test(SwapMachine, settings=long)
