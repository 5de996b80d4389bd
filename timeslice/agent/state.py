"""What an agent knows of a group's orders, and what follows from it. Pure: no I/O, no clock.

An order's life::

    unknown --begun()--> intent --finished()--> answered
                           |
                           +-- crash, redelivery --> intent again: run it again, from what is observed

An order that was answered gets the same answer for ever. Only the orders of the newest swap are kept: older ones
are behind the fence.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from pydantic import Field

from timeslice.locks.scripts import Observed
from timeslice.models import Command, JobName, Leave, Step, Wire

RECORDS_KEPT = 16  # a swap has three steps; more are retries
ERROR_LENGTH = 1000

Outcome = Literal["prepared", "done", "failed", "rolled back"]


class Seen(Wire):
    """What was observed of one job."""

    job: JobName
    state: str
    host_bytes: int = 0
    device_bytes: int = 0
    backend: str = ""
    discarded: bool = False  # its content was dropped, not kept
    saved_bytes: int = 0  # of a step: it did not have to copy them
    why: str = ""  # of one that is unknown: why nobody can see whether it is there

    @property
    def observed(self) -> Observed:
        return Observed(
            *(self.job, self.state, self.host_bytes, self.device_bytes, self.backend),
            discarded=self.discarded,
            saved_bytes=self.saved_bytes,
            why=self.why,
        )


class Answer(Wire):
    """What the group was told about an order."""

    outcome: Outcome
    kind: str = ""
    error: str = ""
    seen: tuple[Seen, ...] = ()
    undone: bool = False  # the node is as it was before the swap


class Record(Wire):
    """One order. ``answer`` None: it was begun, and nobody knows how far it came."""

    id: str
    step: Step
    answer: Answer | None = None


class Undo(Wire):
    """What the swap may have done here, written before it is done. A rollback works through it."""

    locked: tuple[JobName, ...] = ()  # prepared
    moved: tuple[JobName, ...] = ()  # were on the device when the commit began
    returned: JobName | None = None  # was suspended when the commit began
    force: bool = False  # by a backend that works from outside, so the same one undoes it
    leave: dict[JobName, Leave] = Field(default_factory=dict)  # what of each leaves, or had left: fixed for this swap

    @property
    def jobs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.locked, *self.moved, *((self.returned,) if self.returned else ()))))

    def merged(self, other: Undo) -> Undo:
        return Undo(
            locked=tuple(dict.fromkeys((*self.locked, *other.locked))),
            moved=tuple(dict.fromkeys((*self.moved, *other.moved))),
            returned=self.returned or other.returned,
            force=self.force or other.force,
            leave=other.leave | self.leave,
        )


class Note(Wire):
    """How a suspended job left: by which backend, what of it, what that freed on each device, and which processes it
    had."""

    backend: str
    leave: Leave = Leave()
    footprint: dict[str, int] = Field(default_factory=dict)
    processes: tuple[tuple[int, int], ...] = ()  # pid, start time


class Owed(Wire):
    """What a job that leaves has to free on the devices, written down before it leaves."""

    processes: tuple[tuple[int, int], ...]  # pid, start time
    had: int  # its bytes on the devices
    due: int | None = None  # of these have to become free; None: as many as its backend shows to be gone
    share: float  # of what is due, that is enough
    there: int  # bytes in use on the devices that could be its own
    free: dict[str, int] = Field(default_factory=dict)  # bytes of each device before it left
    beside: dict[str, int] = Field(default_factory=dict)  # what somebody who comes in meanwhile takes of each


class Ledger(Wire):
    """Everything that is on disk for one group."""

    version: Literal[1] = 1
    floor: int = 0  # the highest number seen
    fence: int = 0  # the highest grant or swap seen
    swap: int = 0  # whose records these are
    records: tuple[Record, ...] = ()
    undo: Undo = Undo()
    notes: dict[JobName, Note] = Field(default_factory=dict)
    owed: dict[JobName, Owed] = Field(default_factory=dict)  # not measured free yet

    def answer_to(self, command: Command) -> Answer | None:
        """The answer this order got. What it saw is left out once a later order may have changed it."""
        for record in self.records:
            if record.id == command.id and record.answer:
                last = record is self.records[-1]
                return record.answer if last else record.answer.model_copy(update={"seen": ()})
        return None

    def is_open(self, swap: int) -> bool:
        """Whether an order of a swap that is over (the group is at ``swap``, 0 for none) left something behind:
        a job that is still locked, or an order whose end is unknown."""
        if self.swap in (0, swap) or not self.records:
            return False
        answer = self.records[-1].answer
        return answer is None or answer.outcome == "prepared"


def begun(ledger: Ledger, command: Command, undo: Undo) -> Ledger:
    """The ledger with the intent to carry out an order."""
    same = ledger.swap == command.swap
    records = tuple(record for record in ledger.records if record.id != command.id) if same else ()
    return ledger.model_copy(
        update={
            "swap": command.swap,
            "fence": max(ledger.fence, command.swap),
            "floor": max(ledger.floor, command.swap),
            "records": (*records, Record(id=command.id, step=command.step))[-RECORDS_KEPT:],
            "undo": ledger.undo.merged(undo) if same else undo,
        }
    )


def finished(ledger: Ledger, command: Command, answer: Answer) -> Ledger:
    """The ledger with an order's answer. What could not be undone yet is kept for a rollback."""
    records = tuple(record for record in ledger.records if record.id != command.id)
    return ledger.model_copy(
        update={
            "records": (*records, Record(id=command.id, step=command.step, answer=answer))[-RECORDS_KEPT:],
            "undo": Undo() if answer.undone else ledger.undo,
        }
    )


def abandoned(ledger: Ledger) -> Ledger:
    """The ledger after what a swap that is over had left was tidied up."""
    return ledger.model_copy(update={"swap": 0, "records": (), "undo": Undo()})


def noted(ledger: Ledger, job: str, note: Note | None) -> Ledger:
    """The ledger with how ``job`` left; None when it is back or gone."""
    notes = {name: value for name, value in ledger.notes.items() if name != job}
    return ledger.model_copy(update={"notes": notes | ({job: note} if note else {})})


def owing(ledger: Ledger, job: str, owed: Owed | None) -> Ledger:
    """The ledger with what ``job`` has to free; None when that was measured free, or the job is back."""
    others = {name: value for name, value in ledger.owed.items() if name != job}
    return ledger.model_copy(update={"owed": others | ({job: owed} if owed else {})})


def kept(ledger: Ledger, jobs: Collection[str]) -> Ledger:
    """The ledger with what is known of these jobs only."""
    notes = {job: note for job, note in ledger.notes.items() if job in jobs}
    owed = {job: each for job, each in ledger.owed.items() if job in jobs}
    return ledger.model_copy(update={"notes": notes, "owed": owed})
