"""First come, first served inside a priority band, read from what the scripts themselves tell.

The event stream of a group is its scripts' own order, so the queue can be rebuilt from it exactly, without knowing
which process waits: who is dead stays in the queue until it is reaped, and that is told. Who goes next is decided in
two places (``lua/include/advance.lua``): when the group is free, by a grant or by the start of a swap; and at the end
of a swap, whose grant goes to the waiter it was for, else to the next of that job, else to who is next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from timeslice.torture.checks.story import SECOND, Story, Terms, Violation
from timeslice.torture.history import Told

_BACK_S = 12.0  # an agent's node is heard of again so soon after a fault or its death, also on a busy machine

Place = tuple[int, int]  # band, number of arrival


@dataclass
class _Queue:
    """A group's queue as its events tell it."""

    places: dict[str, Place] = field(default_factory=dict)  # of every waiter ever told of: who re-enters keeps his
    jobs: dict[str, str] = field(default_factory=dict)  # who waits now -> job
    put_off: set[str] = field(default_factory=set)
    unsure: set[str] = field(default_factory=set)  # their place may be an older one that was lost
    swap: tuple[str, str] | None = None  # waiter and job of the swap under way
    closed: tuple[str, str] | None = None  # of the swap that was finished last, until somebody is granted

    def forget(self) -> None:
        self.jobs.clear()
        self.put_off.clear()
        self.swap = self.closed = None

    def leave(self, waiter: str) -> None:
        self.jobs.pop(waiter, None)
        self.put_off.discard(waiter)

    def ahead_of(self, waiter: str, job: str = "") -> list[str]:
        """Who waits, was told of before ``waiter``, and was not put off; of one job, or of any."""
        mine = self.places.get(waiter)
        if waiter in self.unsure:
            return []
        return [
            other
            for other, its_job in self.jobs.items()
            if other != waiter
            and other not in self.unsure
            and other not in self.put_off
            and (not job or its_job == job)
            and (mine is None or self.places[other] < mine)
        ]


def overtaken(story: Story, terms: Terms) -> Iterator[Violation]:
    """Nobody is served before a living waiter of his band, or of a higher one, that came earlier.

    Legal exceptions: one that was put off (a refused swap, or silent) may be passed until it is tried again. A grant
    that moves nothing may pass a waiter whose swap a silent node keeps from beginning. No script tells that: either
    something was done to the group's agents a moment ago, or the run read from the server that a heartbeat was overdue,
    as happens where a busy machine lets an agent stand still. Data loss empties the queue: who comes back
    has his old place, and who is first told of soon after a loss may have one that nobody knows.
    """
    for group in story.groups:
        yield from _of_group(story, terms, group)


def _of_group(story: Story, terms: Terms, group: str) -> Iterator[Violation]:
    queue = _Queue()
    # Both ends of each loss: what is told in between may be from before or after it.
    marks = sorted(time for loss in story.losses(group) for time in (loss.at, loss.until))
    unsure_until = 0.0
    for event in story.told[group]:
        while marks and marks[0] <= event.at:
            unsure_until = marks.pop(0) + terms.waiter_ttl_s * SECOND
            queue.forget()
        waiter, job = event.fields.get("waiter", ""), event.fields.get("job", "")
        match event.type:
            case "StateLost":
                unsure_until = max(unsure_until, event.at + terms.waiter_ttl_s * SECOND)
                queue.forget()
            case "WaiterQueued":
                if waiter not in queue.places:
                    queue.places[waiter] = (-int(event.fields.get("priority", "0")), len(queue.places))
                    if event.at < unsure_until:
                        queue.unsure.add(waiter)
                queue.leave(waiter)
                queue.jobs[waiter] = job
            case "WaiterCancelled" | "WaiterReaped":
                queue.leave(waiter)
            case "SwapStarted" if not waiter:
                queue.swap = (waiter, job)  # by an operator's order, which goes before everybody
            case "SwapStarted" if _was_lost(story, group, queue, event):
                queue.unsure.add(waiter)
                queue.swap = (waiter, job)
            case "SwapStarted":
                yield from _passed(story, group, queue, event, queue.ahead_of(waiter))
                queue.put_off.discard(waiter)
                queue.swap = (waiter, job)
            case "SwapDeferred":
                queue.put_off.add(waiter)
                queue.swap = None
            case "SwapFinished":
                queue.closed, queue.swap = queue.swap, None
            case "LeaseGranted" if _was_lost(story, group, queue, event):
                queue.closed = None
            case "LeaseGranted":
                yield from _passed(story, group, queue, event, _had_to_be_first(queue, waiter, job))
                queue.leave(waiter)
                queue.closed = None
            case _:
                pass


def _was_lost(story: Story, group: str, queue: _Queue, event: Told) -> bool:
    """Whether what told of a waiter's arrival was lost, and its place with it: no swap begins for one that was not
    queued, and no other grant was waited for."""
    queued = event.type == "SwapStarted" or int(event.fields.get("waited_ms", "0")) > 0
    return queued and event.fields.get("waiter", "") not in queue.places and bool(story.losses(group))


def _had_to_be_first(queue: _Queue, waiter: str, job: str) -> list[str]:
    """Whom this grant has overtaken. After a swap its own waiter has the first claim, and was the first when the swap
    began; then come the others of its job."""
    if queue.closed is None or queue.closed[1] != job:
        return queue.ahead_of(waiter)
    first = queue.closed[0]
    if waiter == first:
        return []
    return [first] if first in queue.jobs else queue.ahead_of(waiter, job)


def _passed(story: Story, group: str, queue: _Queue, event: Told, others: list[str]) -> Iterator[Violation]:
    job = event.fields.get("job", "")
    for other in others:
        may_be_blocked = event.fields.get("how") == "no-op" and queue.jobs[other] != job
        silent = story.was_silent(group, event.at) or _agents_disturbed(story, group, event.at)
        if may_be_blocked and silent and _served(story, group):
            continue
        yield Violation(
            "order",
            event.at,
            group,
            f"{event.type} for waiter {event.fields.get('waiter')} of job {job} although waiter {other} of job "
            f"{queue.jobs[other]} came earlier and waits",
        )


def _served(story: Story, group: str) -> bool:
    return any(event.type == "NodeJoined" for event in story.told[group])


def _agents_disturbed(story: Story, group: str, at: int) -> bool:
    """Whether a node of the group may be silent: something is done to an agent or to the server, or was a moment ago.

    The next agent has to start, also where the last one killed itself or went on purpose, which is no fault; and what
    the stream tells is read a moment later.
    """
    since = at - _BACK_S * SECOND
    ends = (died.at for label, died in story.died.items() if label in story.born and story.born[label].role == "agent")
    if any(since <= end <= at for end in ends):
        return True
    return any(
        harm.at <= at and harm.until >= since
        for harm in story.harms_to(group)
        if harm.fault.label not in story.born or story.born[harm.fault.label].role not in {"job", "coordinator"}
    )
