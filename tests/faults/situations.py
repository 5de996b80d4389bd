"""The situations that a fault meets, each in a group of its own, and how each must end."""

from __future__ import annotations

from tests.faults.jobs import SIZE, Hold
from tests.faults.stack import Stack
from tests.support.jobs import wait_until

SITUATIONS = ("idle", "waiting", "prepare", "commit", "yielding", "heartbeat")


class Situations:
    """Six groups: a holder alone, waiters behind one, a swap that is locking, a swap that is copying, a yield under
    way, an agent's heartbeat under way."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        stack.serve("n1", *(name for name in SITUATIONS if name != "heartbeat"))
        stack.serve("n2", "heartbeat")
        stack.coordinate()
        self.first = {group: stack.enter(group, "a") for group in SITUATIONS}
        self.second: dict[str, Hold] = {}
        self.third: Hold | None = None

    def arrange(self) -> None:
        """Bring every group into its situation."""
        stack = self.stack
        for group in SITUATIONS:
            if group != "idle":
                self.second[group] = stack.queue(group, "b")
        self.third = stack.queue("waiting", "c")
        for group, operation in (("prepare", "prepare"), ("commit", "suspend")):
            stack.fake(group).knob(operation, hang=True)
            stack.leave(self.first[group])
            wait_until(lambda g=group, o=operation: f"{o} a" in stack.fake(g).calls(), f"{operation} is under way")  # type: ignore[misc]
        for way in ("yielding", "n2"):
            stack.proxy(way).stall()
        stack.let_go(self.first["yielding"])

    def release(self) -> None:
        """What was under way may go on."""
        for way in ("yielding", "n2"):
            self.stack.proxy(way).heal()
        for group in ("prepare", "commit"):
            (self.stack.fake(group).folder / "release").touch()

    def _is_passed_over(self) -> bool:
        """Whether the one behind got in first: a waiter that does not answer when its swap is to start is passed over,
        and keeps its place."""
        first, third = self.second["waiting"], self.third
        assert third
        self.stack.await_any(first, third)
        return not first.inside.is_set()

    def converge(self) -> None:
        """Everybody gets a turn, in order, with state intact, and then the first ones once more."""
        stack = self.stack
        stack.leave(*(hold for hold in self.first.values() if not hold.over.is_set()))
        self.second["idle"] = stack.hold("idle", "b")
        assert self.third
        passed_over = self._is_passed_over()
        if passed_over:
            stack.leave(self.third)
        for group in SITUATIONS:
            stack.await_inside(self.second[group])
            self.check_device(group, "b", "a")
        stack.leave(*self.second.values())
        if not passed_over:
            stack.await_inside(self.third)
            self.check_device("waiting", "c", "a", "b")
            stack.leave(self.third)
        again = [stack.hold(group, "a") for group in SITUATIONS]
        for hold in again:
            stack.await_inside(hold)
            self.check_device(hold.group, "a", *(("b", "c") if hold.group == "waiting" else ("b",)))
        stack.leave(*again)
        stack.judge()

    def check_device(self, group: str, inside: str, *out: str) -> None:
        """The holder's state is in, all others' is out, none is locked, and nothing of it was lost."""
        fake = self.stack.fake(group)
        expected = {inside: "resident", **dict.fromkeys(out, "suspended")}
        assert {job: fake.state(job) for job in expected} == expected, group
        assert {fake.read(job)["bytes"] for job in expected} == {SIZE}, group
        assert not any(fake.locked(job) for job in expected), group
