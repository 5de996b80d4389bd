"""What happened in a torture run: one JSON object a line, one file a process, judged by ``checker.py``.

Times are CLOCK_MONOTONIC in nanoseconds, which all processes of one machine share and no clock step moves.
A line is written before what it announces (``asked``, ``moved begin``) or after what it reports (``entered``),
so that a process that is killed in between leaves an unknown outcome, never a wrong one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    at: int = Field(default_factory=time.monotonic_ns)
    who: str  # the process that wrote it: its label, unique in the run, also after a restart (``agent-n1.2``)


class _OfTry(_Line):
    job: str
    group: str
    request: str  # one try to hold, made by the writer


class Asked(_OfTry):
    """A job's process asks for a group."""

    kind: Literal["asked"] = "asked"
    node: str = ""
    lock_only: bool = False
    ranks: int = 1  # of the gang that asks; all of them hold one lease


class Entered(_OfTry):
    """The grant was confirmed; the body begins."""

    kind: Literal["entered"] = "entered"
    token: int
    how: str = ""  # no-op, first load, restored


class Checked(_OfTry):
    """The job's device memory was read inside the hold and compared with what the job left there last."""

    kind: Literal["checked"] = "checked"
    expected: str
    found: str


class Cramped(_OfTry):
    """The body found no room for the job's memory on the device, though its lease stood."""

    kind: Literal["cramped"] = "cramped"
    error: str


class Surveyed(_Line):
    """The bytes of each job on a node's device of a group, read from the job's processes between ``since`` and this
    time. No part of the product was asked.

    ``request``: the try whose body looked, before it used the device; "" when the run looked. Then ``own`` is what its
    process had left there.
    """

    kind: Literal["surveyed"] = "surveyed"
    node: str
    group: str
    since: int
    found: dict[str, int]
    request: str = ""
    own: int = 0


class Silent(_Line):
    """A node's heartbeat was overdue in a group, by the server's clock, from ``since`` to this time at least."""

    kind: Literal["silent"] = "silent"
    node: str
    group: str
    since: int


class Lost(_OfTry):
    """The body was told that its lease is over. From here on nothing of it counts."""

    kind: Literal["lost"] = "lost"
    token: int


class Left(_OfTry):
    """The body ended by itself; the yield comes next."""

    kind: Literal["left"] = "left"
    token: int


class GaveUp(_OfTry):
    """The hold raised before its body ran. What the server did of it is unknown."""

    kind: Literal["gave up"] = "gave up"
    error: str


class Moved(_Line):
    """A step of a backend. ``begin`` of ``prepare`` freezes the job's bodies on that node until ``release``."""

    kind: Literal["moved"] = "moved"
    node: str
    group: str
    job: str
    step: Literal["prepare", "suspend", "restore", "release", "abort"]
    stage: Literal["begin", "done", "failed"]
    error: str = ""


class OnDevice(_Line):
    """Jobs whose bytes were measured on a node's device of a group."""

    kind: Literal["on device"] = "on device"
    node: str
    group: str
    jobs: tuple[str, ...]


class Born(_Line):
    """The run started a process."""

    kind: Literal["born"] = "born"
    label: str
    role: Literal["job", "agent", "coordinator", "server"]
    job: str = ""
    node: str = ""


class Died(_Line):
    """A process that the run started has ended, between ``ran`` and this time. ``code`` as subprocess gives it.

    ``ran``: when the run saw last that it had not ended, which may be long before; 0 if that is not known.
    ``meant``: the run killed it, or its work was done. A job that touches its device memory after its lease is over and
    it was moved away dies of SIGBUS (-7), which is right. Any other end is a fault of the product.
    """

    kind: Literal["died"] = "died"
    label: str
    code: int
    meant: bool
    detail: str = ""
    ran: int = 0


class Fault(_Line):
    """The run did harm. ``groups`` is what it may disturb; empty means all.

    ``harm`` to the process ``label``: kill, stop. To the server: kill, stop, sleep, drop (its clients), pause (its
    clients), forget (its scripts), full, clock, password; flush and wipe (a restart without its data) lose what it
    knew, and so may failover; outage (an agent starts meanwhile). To the link of some processes: cut, stall, delay,
    half-open, lose (a reply), repeat (a request). To an agent: disk (full), files (no descriptor left), blind (it comes
    again in a pid namespace of its own), trim (of the orders that came while it was down), join (it leaves, and comes
    again while jobs wait), late-agents (all begin after the jobs); to its backend: slow, fail, fail-on, hang, die, lie,
    late. To a job: files; and it comes again as another one: title, host-name, pid-namespace, time-namespace, threads
    (it can't start any for a while). To a lease: revoke.

    ``planned``: the kind by which the schedule knows it. ``kills``: processes that the run ended in doing it.
    """

    kind: Literal["fault"] = "fault"
    id: int
    harm: str
    label: str = ""  # the process it was done to, if it was one
    groups: tuple[str, ...] = ()
    detail: str = ""
    planned: str = ""
    kills: tuple[str, ...] = ()

    @property
    def killed(self) -> tuple[str, ...]:
        """Labels of processes that the run ended in doing it."""
        return (*self.kills, *([self.label] if self.harm == "kill" and self.label else []))


class Took(_Line):
    """That fault came about: its effect was read back. One without this line was tried, and excuses, but counts not."""

    kind: Literal["took"] = "took"
    id: int


class Healed(_Line):
    """The harm of that fault is over (the process runs again or was replaced, the link is whole)."""

    kind: Literal["healed"] = "healed"
    id: int


class Told(_Line):
    """An entry of a group's event stream, in the stream's order."""

    kind: Literal["told"] = "told"
    group: str
    entry: str
    type: str
    fields: dict[str, str]


class Calm(_Line):
    """No more faults come, all are healed; every living waiter must get in within ``seconds``."""

    kind: Literal["calm"] = "calm"
    seconds: float


class Ended(_Line):
    """The run is over; who has not been granted by now never will be."""

    kind: Literal["ended"] = "ended"


Line = Annotated[
    Asked
    | Entered
    | Checked
    | Cramped
    | Surveyed
    | Silent
    | Lost
    | Left
    | GaveUp
    | Moved
    | OnDevice
    | Born
    | Died
    | Fault
    | Took
    | Healed
    | Told
    | Calm
    | Ended,
    Field(discriminator="kind"),
]
_LINES: TypeAdapter[Line] = TypeAdapter(Line)


class TornLineError(ValueError):
    """A file ends in the middle of a line."""


class Writer:
    """Appends lines to a file of its own. Each is one write(2), so a kill leaves a whole line, or the last one torn."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, line: Line) -> None:
        os.write(self._file, line.model_dump_json().encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


def read(path: Path) -> Iterator[Line]:
    """The lines of one file, or of all ``*.jsonl`` files of a folder, each file in its order. ValueError names a bad
    line; it is a TornLineError where a file ends in the middle of one."""
    for file in files_of(path):
        content = file.read_bytes()
        raws = content.splitlines()
        for number, raw in enumerate(raws, 1):
            try:
                yield _LINES.validate_json(raw)
            except ValidationError as error:
                torn = number == len(raws) and not content.endswith(b"\n")
                kind = TornLineError if torn else ValueError
                raise kind(f"{file}, line {number} is no line of a history: {_first_of(error)}") from error


def read_so_far(path: Path) -> Iterator[Line]:
    """As ``read``, while they are written: a line that is only partly there is left out, of whichever file."""
    for file in files_of(path):
        with suppress(TornLineError):
            yield from read(file)


def files_of(path: Path) -> list[Path]:
    """The file itself, or those of a folder."""
    return sorted(path.glob("*.jsonl")) if path.is_dir() else [path]


def _first_of(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    message = first["msg"].replace(" at line 1 column ", " at column ")  # each line is a document of its own
    return f"{where + ': ' * bool(where)}{message:.150}"
