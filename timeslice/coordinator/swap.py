"""What a swap needs next, from what is observed. Pure: no I/O, no clock of its own.

The stored state is enough to decide, so a new owner that takes over half-way goes on where the last one was.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from pydantic import ValidationError

from timeslice.locks.view import GroupView, NodeView
from timeslice.models import Plan, Residency, Step

ASK_MS = 1000  # a waiter that gives no sign of life for so long is passed over
GRACE_MS = 1000  # a node's own "too late" may take so long to arrive
AGAIN_MS = 3000  # an order that a living node has not answered is given again: what carried it may be lost
FIRST_PAUSE_MS, LONGEST_PAUSE_MS = 1000, 30_000  # a refused waiter is put off for so long; doubles each time
SILENT_PAUSE_MS = 15_000  # a waiter's time to live: by then it has spoken or is reaped

_FINAL = frozenset({"failed", "rolled back"})
_SAVED = frozenset({Residency.SUSPENDING, Residency.SUSPENDED, Residency.RESTORING})
# What nobody can see of the job itself is no reason against it: it finds what it left.
_GRANTABLE = frozenset({Residency.RESIDENT, Residency.ABSENT, Residency.GONE, Residency.UNKNOWN})
_RETURNS = "goes on by itself when its agent returns"
_REACHED = {"prepare": "prepared", "commit": "done"}


@dataclass(frozen=True)
class Memory:
    """What the owner of a swap did itself and the state does not tell. A new owner starts with none of it."""

    sent: Mapping[str, int] = field(default_factory=dict)  # node -> when it was last sent the order of the current step
    attempt: int = 1  # of the current step
    answered: bool = False  # the waiter gave a sign of life
    asked: int = 0  # it was asked for one so often
    asked_until_ms: int = 0  # and may answer until then
    why: str = ""  # the swap is being undone
    refusals: int = 0  # of this waiter before, in a row


@dataclass(frozen=True)
class Ask:
    """Poke the waiter."""


@dataclass(frozen=True)
class Store:
    """Store the plan: from here on the swap is carried out or undone, never planned anew."""

    plan: Plan
    budget_ms: int


@dataclass(frozen=True)
class Send:
    """Send the order of a step to nodes that have not answered it: the first time, or again."""

    step: Step
    nodes: tuple[str, ...]
    plan: Plan


@dataclass(frozen=True)
class Move:
    """Go from one step to another, or from ``rollback`` to ``rollback`` with a new deadline. ``why``: what is wrong."""

    before: str
    after: Step
    budget_ms: int
    why: str = ""


@dataclass(frozen=True)
class Hang:
    """Show why the step does not go on; nothing when it does again."""

    step: str
    reason: str


@dataclass(frozen=True)
class Promote:
    """Close a swap that went well, and grant."""

    how: str


@dataclass(frozen=True)
class Settle:
    """Close a swap that was refused or undone, and put its waiter off."""

    reason: str
    pause_ms: int


@dataclass(frozen=True)
class Wait:
    """Nothing to do before a wake, or ``until_ms`` of the server's clock.

    ``reports`` more nodes have to report before anything but a fault can change that.
    """

    until_ms: int | None = None
    reports: int = 0


Action: TypeAlias = Ask | Store | Send | Move | Hang | Promote | Settle | Wait


def make_plan(view: GroupView) -> Plan:
    """Who goes out and who comes in: a job whose lease was reclaimed or revoked goes out too, wherever its state seems
    to be. An operator may have ordered that by force."""
    job = view.state.get("swap_job", "")
    out = {*view.resident, view.state.get("evict", "")} - {job, ""}
    saved = _is_saved(view, job)
    return Plan(
        out=tuple(sorted(out)),
        into=job if saved else None,
        nodes=tuple(sorted(view.nodes)),
        force=view.state.get("force") == "1",
    )


def stored_plan(view: GroupView) -> Plan | None:
    """The plan in the state, or None if it can't be read."""
    try:
        return Plan.model_validate_json(view.state.get("plan", ""))
    except ValidationError:
        return None


def moved(view: GroupView, step: str, plan: str, budget_ms: int) -> GroupView:
    """The view after a script took the swap to ``step``, to save reading it again."""
    state = {
        **view.state,
        "swap_step": step,
        "plan": plan,
        "swap_budget_ms": str(budget_ms),
        "swap_deadline_ms": str(view.now_ms + budget_ms),
        "reason": "",
    }
    return replace(view, state=state)


def asked(memory: Memory, view: GroupView, seen_ms: int) -> Memory:
    """After the waiter was asked, and the reply was that it gave a sign of life ``seen_ms`` ago.

    The first time it is known not to have given one for ASK_MS, so what is younger the second time is its answer.
    """
    return replace(
        memory,
        answered=seen_ms <= ASK_MS * (memory.asked + 1),
        asked=memory.asked + 1,
        asked_until_ms=memory.asked_until_ms or view.now_ms + ASK_MS,
    )


def decide(view: GroupView, memory: Memory) -> Action:
    """The next action of the group's owner. ``Wait`` when there is none."""
    if not view.swap:
        return Wait()
    step = view.state.get("swap_step", "")
    if step == "new":
        return _begin(view, memory)
    if step == "rollback":
        return _roll_back(view, memory)
    plan = stored_plan(view)
    if plan is None or step not in _REACHED:
        return undo(view, memory, "what is stored of the swap can't be read")
    if not view.nodes:
        return undo(view, memory, "no agent serves this group any more")
    # A node that came later was not asked to prepare, and what is on its devices is not in the plan.
    known = set(plan.nodes) if step == "prepare" else {node.node for node in _begun(view)} & set(plan.nodes)
    if strangers := sorted(set(view.nodes) - known):
        return undo(view, memory, f"node {strangers[0]} joined while the swap was under way")
    if any(node.step == "failed" for node in _begun(view)):
        return undo(view, memory, "")
    return _prepare(view, memory, plan) if step == "prepare" else _commit(view, memory, plan)


def undo(view: GroupView, memory: Memory, why: str) -> Action:
    """Leave a step that can't be finished. A swap that nobody began, or everybody undid already, ends at once."""
    reason = why or memory.why or _what_failed(view)
    if all(node.step in _FINAL for node in _begun(view)):
        return Settle(reason, pause_ms(memory.refusals))
    return Move(view.state.get("swap_step", ""), "rollback", swap_budget_ms(view), reason)


def pause_ms(refusals: int) -> int:
    """For how long to put a waiter off that was refused ``refusals`` times before."""
    return min(FIRST_PAUSE_MS << min(refusals, 10), LONGEST_PAUSE_MS)


def swap_budget_ms(view: GroupView) -> int:
    """The time that moving one job out and another in may take; undoing that takes no longer."""
    return view.config.suspend_timeout_ms + view.config.restore_timeout_ms


def _begin(view: GroupView, memory: Memory) -> Action:
    """Before the plan: is there still anybody to swap for?"""
    if not view.nodes:
        return Settle("no agent serves this group any more", pause_ms(memory.refusals))
    if view.state.get("swap_waiter") and not memory.answered:
        if memory.asked and view.now_ms < memory.asked_until_ms:
            return Wait(memory.asked_until_ms)
        # Asked a second time: its answer to the first may have passed unseen.
        return Ask() if memory.asked < 2 else Settle("silent", SILENT_PAUSE_MS)
    return Store(make_plan(view), view.config.prepare_timeout_ms)


def _prepare(view: GroupView, memory: Memory, plan: Plan) -> Action:
    due = view.number("swap_deadline_ms")
    missing = [node for node in view.nodes.values() if node.swap != view.swap]
    busy = [node for node in _begun(view) if node.step != "prepared"]
    if missing and view.now_ms >= due:
        return undo(view, memory, _never_took(missing[0], view))
    if busy and view.now_ms >= due + GRACE_MS:
        return undo(view, memory, f"node {busy[0].node} was not ready within {_seconds(view)}")
    if not missing and not busy:
        return Move("prepare", "commit", swap_budget_ms(view))
    until = due + (0 if missing else GRACE_MS)
    return _send(view, memory, plan, "prepare", [*missing, *busy]) or _watch(view, [*missing, *busy], until)


def _commit(view: GroupView, memory: Memory, plan: Plan) -> Action:
    due = view.number("swap_deadline_ms")
    missing = [node for node in _begun(view) if node.step == "prepared"]
    busy = [node for node in _begun(view) if node.step not in ("prepared", "done")]
    if missing and view.now_ms >= due:
        return undo(view, memory, _never_took(missing[0], view))
    if busy and view.now_ms >= due + GRACE_MS:
        reason = _overdue(busy[0], view, plan)
        if view.state.get("reason") != reason:
            return Hang("commit", reason)
        return _send(view, memory, plan, "commit", busy) or Wait(view.now_ms + AGAIN_MS)
    if not missing and not busy:
        unfit = _unfit(view)
        return undo(view, memory, unfit) if unfit else Promote(_how(view, plan))
    until = due + (0 if missing else GRACE_MS)
    return _send(view, memory, plan, "commit", [*missing, *busy]) or _watch(view, [*missing, *busy], until)


def _roll_back(view: GroupView, memory: Memory) -> Action:
    """Undo until every node that began has said so. An order that was too late is given again, for as long as it takes:
    nothing else makes the state known."""
    due, plan = view.number("swap_deadline_ms"), stored_plan(view) or Plan()
    unfinished = [node for node in _begun(view) if node.step not in _FINAL]
    if not unfinished:
        return undo(view, memory, "")
    if view.now_ms >= due + GRACE_MS:
        return Move("rollback", "rollback", swap_budget_ms(view), _overdue(unfinished[0], view, plan))
    return _send(view, memory, plan, "rollback", unfinished) or _watch(view, unfinished, due + GRACE_MS)


def _send(view: GroupView, memory: Memory, plan: Plan, step: Step, nodes: list[NodeView]) -> Send | None:
    """Orders that are due. One that a node has begun is no exception: its agent may have died over it, and the stream
    have been trimmed or lost before it came back. One that is out of reach gets it when it beats again."""
    due = tuple(sorted(node.node for node in nodes if _is_due(node, memory.sent.get(node.node), view.now_ms)))
    return Send(step, due, plan) if due else None


def _is_due(node: NodeView, sent_ms: int | None, now_ms: int) -> bool:
    return sent_ms is None or (node.alive and not sent_ms <= now_ms < sent_ms + AGAIN_MS)


def sent(memory: Memory, nodes: Collection[str], now_ms: int) -> Memory:
    """After the order of the current step was sent to ``nodes``."""
    return replace(memory, sent={**memory.sent, **dict.fromkeys(nodes, now_ms)})


def command_id(view: GroupView, memory: Memory, step: Step, node: str) -> str:
    """Of the order of a step. One that the node has begun keeps its id, whoever gave it: it is finished, or answered
    from the node's journal. Else the id names the owner's epoch: another owner's order is another attempt."""
    at = view.nodes.get(node)
    if at and at.swap == view.swap and at.step == f"begun {step}" and at.command:
        return at.command
    return f"{view.swap}/{node}/{step}/{view.epoch}.{memory.attempt}"


def _watch(view: GroupView, unfinished: list[NodeView], until_ms: int) -> Hang | Wait:
    """Wait for the nodes' reports, and say so when one of them can't report now, and when it can again. What was said
    of a step beyond its deadline stays. A heartbeat that stays out wakes nobody: the owner looks when it renews."""
    lost = next((node for node in unfinished if node.swap == view.swap and not node.alive), None)
    shown = view.state.get("reason", "")
    if lost and (reason := _unreachable(lost, view)) != shown:
        return Hang(view.state["swap_step"], reason)
    if not lost and shown.endswith(_RETURNS):
        return Hang(view.state["swap_step"], "")
    return Wait(until_ms, len(unfinished))


def _begun(view: GroupView) -> list[NodeView]:
    """Nodes that took an order of this swap."""
    return [node for node in view.nodes.values() if node.swap == view.swap]


def _residency(view: GroupView, job: str) -> str:
    return view.jobs[job].residency if job in view.jobs else Residency.ABSENT


def _unfit(view: GroupView) -> str:
    """Why the swap's job can't be granted although every node is done, or ''."""
    job = view.state.get("swap_job", "")
    for other in view.resident:
        if other != job:
            return f"job {other} is still on the device"
    if job and ((where := _residency(view, job)) not in _GRANTABLE or _is_saved(view, job)):
        return f"the state of job {job} is not back on the device, it is {where}"
    return ""


def _is_saved(view: GroupView, job: str) -> bool:
    """Whether state of the job is in host memory, on all its nodes or some of them."""
    return _residency(view, job) in _SAVED or any(
        member.job == job and (member.state in _SAVED or member.has_left) for member in view.members
    )


def _how(view: GroupView, plan: Plan) -> str:
    """What the granted job finds: its state brought back, its state untouched, or nothing. Or that none was meant."""
    if not view.state.get("swap_job"):
        return "out"
    if _residency(view, view.state.get("swap_job", "")) != Residency.RESIDENT:
        return "first load"
    return "restored" if plan.into else "no-op"


def _what_failed(view: GroupView) -> str:
    faults = [f"node {node.node}: {node.error or node.kind}" for node in _begun(view) if node.step == "failed"]
    return "; ".join(faults)[:1000] or "the swap was undone"


def _never_took(node: NodeView, view: GroupView) -> str:
    if not node.alive:
        return f"node {node.node} is unreachable, its last heartbeat is {node.heartbeat_age_s:.0f} s overdue"
    return f"node {node.node} did not take its order within {_seconds(view)}; is its agent stuck?"


def _overdue(node: NodeView, view: GroupView, plan: Plan) -> str:
    """``@`` marks a time of the server's clock, as in the scripts' reasons."""
    since = view.number("swap_since_ms")
    jobs = " and ".join((*plan.out, *([plan.into] if plan.into else []))) or "(none)"
    return (
        f"node {node.node} has not finished moving job {jobs} since @{since}; "
        f"this goes on by itself when the node reports. See: timeslice nodes"
    )


def _unreachable(node: NodeView, view: GroupView) -> str:
    since = view.now_ms - round(node.heartbeat_age_s * 1000)
    return f"node {node.node} unreachable since @{since}; {_RETURNS}"


def _seconds(view: GroupView) -> str:
    return f"{view.number('swap_budget_ms') / 1000:g} s"
