"""A served group played by scripted parties: devices that really are empty or full, agents, coordinators.

What is on the devices is known here and nowhere else; parties tell the scripts what they see, early, late or twice.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.locks.lab import Lab
from timeslice.errors import StaleCommandError
from timeslice.locks import scripts
from timeslice.locks.scripts import Call, Mine, Observed, text

FINAL = {"failed", "rolled back"}


@dataclass
class Order:
    """A coordinator's command to a node."""

    id: str
    node: str
    swap: int
    epoch: int
    step: str
    out: tuple[str, ...]
    into: str


@dataclass
class Agent:
    """One node: its device, its orders, and what it knows of the group."""

    node: str
    device: set[str] = field(default_factory=set)  # jobs whose state is on it
    saved: set[str] = field(default_factory=set)  # jobs whose state is in its host memory
    orders: list[Order] = field(default_factory=list)
    current: Order | None = None  # accepted, not finished
    moved: dict[str, str] = field(default_factory=dict)  # what this swap did here: job -> where it was before
    swap: int = 0
    floor: int = 0
    fence: int = 0
    up: bool = True
    looked: Call[Any] | None = field(default=None, repr=False)  # a report that is still under way
    suspended: Counter[str] = field(default_factory=Counter)  # how often a job's state was moved out
    known: tuple[str, ...] = ()  # jobs it has ever seen
    blind: bool = False  # it can neither see processes nor measure its device
    presumed: set[str] = field(default_factory=set)  # jobs that the group says are here, which a blind one can't deny

    def state(self, job: str) -> str:
        """As the agent tells it."""
        if self.blind and (job in self.device or job in self.presumed):
            return "unknown"
        return self.truth(job)

    def truth(self, job: str) -> str:
        return "resident" if job in self.device else "suspended" if job in self.saved else "absent"

    def observe(self, *jobs: str) -> list[Observed]:
        found = {job: self.state(job) for job in jobs}
        return [Observed(job, state, why="blind" if state == "unknown" else "") for job, state in found.items()]

    def move(self, job: str, where: str) -> None:
        self.moved.setdefault(job, self.truth(job))
        self.suspended[job] += where == "suspended"
        for place, name in ((self.device, "resident"), (self.saved, "suspended")):
            place.add(job) if name == where else place.discard(job)

    def undo(self) -> None:
        for job, where in self.moved.items():
            if self.truth(job) != "absent":
                self.move(job, where)


class World:
    """Calls go to a real server; every ack and report is kept, to be sent again at any time."""

    def __init__(self, url: str, nodes: tuple[str, ...] = ("n1", "n2")) -> None:
        self.lab = Lab(url)
        self.agents = {node: Agent(node) for node in nodes}
        self.sent: list[Call[Any]] = []
        self.epochs: dict[str, int] = {}
        self.attempts = 0

    def tell(self, call: Call[Any]) -> Any:
        self.sent.append(call)
        return self.lab.run(call)

    # agents

    def beat(self, agent: Agent) -> None:
        beat = scripts.heartbeat(self.lab.group, agent.node, 15_000, fence=agent.fence, floor=agent.floor)
        pulse = self.lab.run(beat)
        agent.floor, agent.fence = max(agent.floor, pulse.counter), max(agent.fence, pulse.token)
        if not pulse.known and agent.current is None:
            self.look(agent)
            self.report(agent)

    def look(self, agent: Agent) -> None:
        view = self.lab.view
        agent.presumed = {member.job for member in view.members if member.node == agent.node} - {view.holder}
        jobs = sorted({*agent.known, *agent.device, *agent.saved, *agent.presumed})
        agent.known = tuple(jobs)
        agent.looked = scripts.report(self.lab.group, agent.node, agent.floor, agent.observe(*jobs), floor=agent.floor)

    def report(self, agent: Agent) -> None:
        if agent.looked and agent.current is None:
            reply = self.tell(agent.looked)
            agent.looked = None
            if reply is None:  # it is no member any more: it joins by its next beat
                return
            agent.floor = max(agent.floor, reply.counter)

    def begin(self, agent: Agent) -> None:
        """Take the next order and ask whether it stands."""
        if agent.current or not agent.orders:
            return
        order = agent.orders.pop(0)
        call = scripts.accepted(
            self.lab.group, agent.node, order.swap, order.epoch, order.step, order.id, floor=agent.floor
        )
        try:
            self.tell(call)
        except StaleCommandError as error:
            agent.floor = max(agent.floor, error.token or 0)
            return
        agent.looked = None
        agent.current, agent.fence = order, max(agent.fence, order.swap)
        if agent.swap != order.swap:
            agent.swap, agent.moved = order.swap, {}

    def finish(self, agent: Agent, fault: str = "") -> None:
        """Do what was accepted, or fail at it, and say so."""
        order = agent.current
        if order is None:
            return
        jobs = tuple(dict.fromkeys((*order.out, *([order.into] if order.into else []))))
        if agent.blind and order.step != "rollback" and any(agent.state(job) == "unknown" for job in jobs):
            fault = fault or "can't see"
        if order.step == "rollback":
            agent.undo()
            self.ack(agent, order, jobs, "rolled back")
        elif fault:
            if order.step == "commit" and order.out:
                for job in order.out:
                    if agent.state(job) == "resident":
                        agent.move(job, "suspended")
                self.ack(agent, order, jobs, "")
            agent.undo()
            self.ack(agent, order, jobs, "failed", fault)
        elif order.step == "prepare":
            self.ack(agent, order, jobs, "prepared")
        else:
            for job in order.out:
                if agent.state(job) == "resident":
                    agent.move(job, "suspended")
            self.ack(agent, order, jobs, "")
            if order.into and agent.state(order.into) == "suspended":
                assert not agent.device - {order.into}, f"{order.into} restored beside {agent.device} on {agent.node}"
                agent.move(order.into, "resident")
            self.ack(agent, order, jobs, "done")
        agent.current = None

    def ack(self, agent: Agent, order: Order, jobs: tuple[str, ...], outcome: Any, error: str = "") -> None:
        seen = agent.observe(*jobs)
        agent.known = tuple(sorted({*agent.known, *jobs}))
        call = scripts.ack(
            self.lab.group, agent.node, order.swap, order.id, seen, outcome=outcome, error=error, floor=agent.floor
        )
        self.tell(call)

    # coordinators

    def drive(self, name: str) -> None:
        """One decision of one coordinator; what is stale is dropped."""
        reply = self.lab.run(scripts.own(self.lab.group, name))
        if not isinstance(reply, Mine):
            return
        try:
            self._decide(name, reply.epoch)
        except StaleCommandError:
            return

    def _decide(self, name: str, epoch: int) -> None:
        lab = self.lab
        view = lab.view
        swap, step = view.swap, view.state.get("swap_step", "")
        if not swap:
            return
        job = view.state.get("swap_job", "")
        if step == "new":
            silent = bool(view.state.get("swap_waiter")) and lab.run(scripts.poke(lab.group, swap, epoch)) > 9_000
            if silent:
                lab.run(scripts.settle(lab.group, swap, epoch, "silent", 15_000))
                return
            out = sorted({*view.resident, view.state.get("evict", "")} - {job, ""})
            lab.run(scripts.plan(lab.group, swap, epoch, ",".join([job, *out]), 60_000))
            return
        job, *out = view.state["plan"].split(",")
        begun = [node for node in view.nodes.values() if node.swap == swap]
        if step == "rollback":
            if all(node.step in FINAL for node in begun):
                lab.run(scripts.settle(lab.group, swap, epoch, "undone", 5_000))
                return
            lab.run(scripts.step(lab.group, swap, epoch, step, step, 60_000, reason="undoing"))
            self._order(swap, epoch, step, job, out, [node.node for node in begun if node.step not in FINAL])
            return
        reached = {"prepare": "prepared", "commit": "done"}[step]
        late = view.now_ms > view.number("swap_deadline_ms")
        if any(node.step == "failed" for node in begun) or late:
            lab.run(scripts.step(lab.group, swap, epoch, step, "rollback", 60_000))
        elif len(begun) == len(view.nodes) and all(node.step == reached for node in begun):
            if step == "prepare":
                lab.run(scripts.step(lab.group, swap, epoch, "prepare", "commit", 60_000))
            elif isinstance(lab.run(scripts.promote(lab.group, swap, epoch, "restored")), scripts.Open):
                lab.run(scripts.step(lab.group, swap, epoch, "commit", "rollback", 60_000))
        else:
            undone = [node.node for node in view.nodes.values() if node.swap != swap or node.step != reached]
            self._order(swap, epoch, step, job, out, undone)

    def _order(self, swap: int, epoch: int, step: str, job: str, out: list[str], nodes: list[str]) -> None:
        for node in nodes:
            agent = self.agents[node]
            if len(agent.orders) < 3 and agent.current is None:
                self.attempts += 1
                command = f"{swap}/{node}/{step}/{self.attempts}"
                agent.orders.append(Order(command, node, swap, epoch, step, tuple(out), job))

    def why(self) -> str:
        """The group in one line, for a failure's message."""
        view = self.lab.view
        return f"{view.state} {view.jobs} {[(n.node, n.step) for n in view.nodes.values()]} {text(str(self.agents))}"
