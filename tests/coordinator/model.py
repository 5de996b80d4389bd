"""A group in memory, with nodes that do what chance says: as far as a coordinator can tell, like the real one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from timeslice.coordinator import swap
from timeslice.locks.view import GroupView, JobView, NodeView
from timeslice.models import GroupConfig, Plan

OUT = {"absent", "gone", "suspended"}
NOW = 1_700_000_000_000


def view_of(
    *,
    state: dict[str, Any] | None = None,
    jobs: dict[str, str] | None = None,
    nodes: dict[str, tuple[int, str]] | None = None,
    now_ms: int = NOW,
    config: GroupConfig | None = None,
) -> GroupView:
    """A view with little in it: residency by job, swap and step by node."""
    return GroupView(
        name="trainers",
        now_ms=now_ms,
        state={name: str(value) for name, value in (state or {}).items()},
        queue=(),
        jobs={job: JobView(job, where, 0, 0.0, 0.0, 0) for job, where in (jobs or {}).items()},
        members=(),
        nodes={
            name: NodeView(name, True, -1.0, number, step, "transient" if step == "failed" else "", "")
            for name, (number, step) in (nodes or {}).items()
        },
        config=config or GroupConfig(),
    )


@dataclass
class Model:
    """What the scripts would do to one swap of job ``b``, in which job ``a`` has to go."""

    nodes: dict[str, tuple[int, str]]
    saved: bool  # b has saved state
    now: int = NOW
    step: str = "new"
    plan: str = ""
    deadline: int = NOW
    budget: int = 0
    reason: str = ""
    lively: bool = True  # the waiter answers
    intruder: bool = False
    orders: dict[str, list[str]] = field(default_factory=dict)  # node -> steps ordered, oldest first
    running: set[str] = field(default_factory=set)  # nodes whose agent has what they began in hand
    where: dict[tuple[str, str], str] = field(default_factory=dict)  # (node, job) -> residency
    ended: str = ""
    memory: swap.Memory = field(default_factory=swap.Memory)
    actions: int = 0

    def __post_init__(self) -> None:
        for node in self.nodes:
            self._arrive(node)

    def join(self, node: str) -> None:
        """A node comes that has nothing of either job."""
        if node not in self.nodes:
            self.nodes[node] = (0, "")
            self.where |= {(node, "a"): "absent", (node, "b"): "absent"}

    def leave(self, node: str) -> None:
        """Its orders stay in its stream, for when it comes again."""
        self.nodes.pop(node, None)
        self.running.discard(node)

    def _arrive(self, node: str) -> None:
        self.where |= {(node, "a"): "resident", (node, "b"): "suspended" if self.saved else "absent"}

    def jobs(self) -> dict[str, str]:
        found = {}
        for job in ("a", "b"):
            seen = {self.where[node, job] for node in self.nodes}
            found[job] = "restoring" if seen == {"resident", "suspended"} else max(seen, default="absent")
        if self.intruder:
            found["c"] = "resident"
        return found

    def view(self) -> GroupView:
        state = {
            "mode": "served",
            "swap_id": 7 if not self.ended else 0,
            "swap_waiter": "w",
            "swap_job": "b",
            "swap_step": self.step,
            "swap_since_ms": NOW,
            "swap_deadline_ms": self.deadline,
            "swap_budget_ms": self.budget,
            "plan": self.plan,
            "reason": self.reason,
        }
        return view_of(state=state, jobs=self.jobs(), nodes=self.nodes, now_ms=self.now)

    def act(self, action: swap.Action) -> None:
        """What the actor and the scripts do with an action."""
        self.actions += 1
        match action:
            case swap.Ask():
                self.memory = swap.asked(
                    self.memory, self.view(), 200 if self.lively else 5000 * (self.memory.asked + 1)
                )
            case swap.Store(plan, budget):
                assert self.step == "new"
                self.step, self.plan, self.memory = "prepare", plan.model_dump_json(), swap.Memory()
                self._rearm(budget)
            case swap.Send(step, nodes):
                assert step == self.step
                for node in nodes:
                    self.orders.setdefault(node, []).append(step)
                self.memory = swap.sent(self.memory, nodes, self.now)
            case swap.Move(before, after, budget, why):
                assert before == self.step
                again = before == after
                self.memory = replace(
                    self.memory,
                    sent={},
                    attempt=self.memory.attempt + 1 if again else 1,
                    why=self.memory.why if again else why,
                )
                self.step, self.reason = after, why if again else ""
                self._rearm(budget)
            case swap.Hang(step, reason):
                assert step == self.step
                assert self.reason != reason
                self.reason = reason
            case swap.Promote():
                assert self.nodes
                assert all(seen == (7, "done") for seen in self.nodes.values()), self.nodes
                jobs = self.jobs()
                assert jobs.pop("b") in ("resident", "absent")
                assert set(jobs.values()) <= OUT, jobs
                self.ended = "promoted"
            case swap.Settle(reason, pause):
                assert reason
                assert 1000 <= pause <= 30_000
                assert not [n for n in self.nodes.values() if n[0] == 7 and n[1] not in ("failed", "rolled back")]
                self.ended = f"settled: {reason}"

    def _rearm(self, budget: int) -> None:
        self.budget, self.deadline = budget, self.now + budget

    def take(self, node: str) -> bool:
        """The node reads its next order and asks whether it still stands."""
        if node not in self.nodes or not self.orders.get(node) or node in self.running:
            return False
        step = self.orders[node].pop(0)
        if self.nodes[node] == (7, f"begun {step}") and step == self.step:
            self.running.add(node)  # again: it finishes what it has begun, however late
        elif not self.ended and step == self.step and self.now < self.deadline:
            self.nodes[node] = (7, f"begun {step}")
            self.running.add(node)
        return True

    def die(self, node: str) -> None:
        """Its agent ends, and with it what is in its hands; what it began it takes up when it is ordered again."""
        self.running.discard(node)

    def report(self, node: str, *, well: bool) -> bool:
        """The node ends what it began. What failed was undone there; a rollback always succeeds."""
        if node not in self.nodes or node not in self.running:
            return False
        self.running.discard(node)
        step = self.nodes[node][1].removeprefix("begun ")
        if step == "rollback" or not well:
            self._arrive(node)
            self.nodes[node] = (7, "rolled back" if step == "rollback" else "failed")
        elif step == "prepare":
            self.nodes[node] = (7, "prepared")
        else:
            self.progress(node)
            self.nodes[node] = (7, "done")
        return True

    def progress(self, node: str) -> None:
        """The node has moved all there is to move, and acked that, but not yet ended the step."""
        if self.nodes.get(node) == (7, "begun commit"):
            plan = Plan.model_validate_json(self.plan)
            self.where[node, "a"] = "suspended"
            if plan.into:
                self.where[node, "b"] = "resident"

    def settle_down(self, *, rounds: int = 200) -> None:
        """From here on nobody misbehaves: decide, and let orders, reports and time come, until the swap is over."""
        for _ in range(rounds):
            action = swap.decide(self.view(), self.memory)
            if self.ended:
                return
            if not isinstance(action, swap.Wait):
                self.act(action)
                continue
            moved = [self.take(node) or self.report(node, well=True) for node in sorted(self.nodes)]
            if not any(moved):
                assert action.until_ms is not None, "it waits for nothing"
                self.now = max(self.now, action.until_ms)
        raise AssertionError(f"no end in sight: {self}")
