"""One torture run: a whole system of its own, traffic, faults, then calm; all of it written down."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import redis

from timeslice.errors import TimeSliceError
from timeslice.torture.events import EventReader
from timeslice.torture.faults import Deed, choose
from timeslice.torture.heartbeats import Heartbeats
from timeslice.torture.history import Calm, Ended, Fault, Healed, Took, Writer
from timeslice.torture.samples import Sampler
from timeslice.torture.scene import READY_S, Scene
from timeslice.torture.schedule import KINDS, Planned, schedule
from timeslice.torture.stage import GROUPS, NODE_TTL_S, SERVED, Topology
from timeslice.torture.survey import Surveyor
from timeslice.torture.traffic import Traffic

CALM_S = 60.0  # who waits when the faults are over is in within this time
AFTERWARDS_S = 4.0  # of the calm: jobs still come and go; then they ask for nothing new
_TICK_S = 0.02
_TAKES_S = 1.0  # a fault that shows at once shows by then
_LOOK_S = 0.3  # between two looks whether one that shows late does
_ASKED_S = 2.0  # jobs ask for so long before late agents begin


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run."""

    seed: int
    seconds: float = 60.0
    topology: Topology = "standalone"
    kinds: tuple[str, ...] = ()  # of faults; none: all
    jobs: int = 8
    mutant: str = ""


@dataclass
class Progress:
    """How far a run is."""

    seconds: float
    elapsed_s: float = 0.0
    phase: str = "starting"
    faults: int = 0
    last: str = ""  # fault
    events: Mapping[str, int] = field(default_factory=dict)


Say = Callable[[str], None]
Show = Callable[[Progress], None]


@dataclass
class Outcome:
    """What a run has to tell beside its history. ``seconds``: how long faults came. ``left_out``: kinds of faults that
    were planned and that this machine can't do, each with the reason."""

    seconds: float = 0.0
    left_out: Mapping[str, str] = field(default_factory=dict)
    interrupted: bool = False
    series: Mapping[str, Sequence[float]] = field(default_factory=dict)


def run_torture(options: Options, history: Path, *, say: Say, show: Show) -> Outcome:
    """Run, and leave one file a process in ``history / "parts"`` and their output in ``history / "logs"``.

    KeyboardInterrupt ends the start, the faults or the calm; it does not get out. Nothing that was started outlives
    this call, nor this process.
    """
    outcome = Outcome()
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tst-", ignore_cleanup_errors=True)))
        try:
            _Run(options, history, work, stack, say, show).run(outcome)
        except KeyboardInterrupt:
            say("interrupted; what there is so far is judged")
            outcome.interrupted = True
    return outcome


class _Run:
    def __init__(self, options: Options, history: Path, work: Path, stack: ExitStack, say: Say, show: Show) -> None:
        self._options, self._say, self._show = options, say, show
        (history / "logs").mkdir(parents=True, exist_ok=True)
        self._writer = Writer(history / "parts" / "run.jsonl")
        stack.callback(self._writer.close)
        say("starting servers, agents and coordinators")
        self._planned = list(schedule(options.seed, options.seconds, options.topology, options.kinds))
        self._late = [self._planned.pop(0)] if self._planned and KINDS[self._planned[0].kind].victim == "start" else []
        self._scene = Scene(
            options.topology, work, history, self._writer, stack, mutant=options.mutant, late=bool(self._late)
        )
        lacks = {kind: self._scene.world.lacks(kind) for kind in sorted({each.kind for each in self._planned})}
        self._left_out = {kind: why for kind, why in lacks.items() if why}
        for why in sorted(set(self._left_out.values())):
            say(f"left out: {', '.join(kind for kind, each in self._left_out.items() if each == why)}: {why}")
        self._work = work
        self._pending: list[tuple[float, Planned, Deed]] = []  # when to heal which fault
        self._took: set[int] = set()
        self._looked = 0.0
        self._progress = Progress(options.seconds)

    def run(self, outcome: Outcome) -> None:
        scene, options = self._scene, self._options
        events = EventReader(scene.url, GROUPS, Writer(scene.parts / "events.jsonl"))
        sampler = Sampler(scene.url, self._pids)
        outcome.series, outcome.left_out = sampler.series, self._left_out
        surveyor = Surveyor(scene.everywhere, self._job_pids, scene.pids, Writer(scene.parts / "survey.jsonl"))
        beats = Heartbeats(scene.url, tuple(SERVED), NODE_TTL_S, Writer(scene.parts / "heartbeats.jsonl"))
        self._progress.events = events.counts
        self._began = time.monotonic()
        try:
            self._traffic = Traffic(scene, self._work, options.seed, options.jobs)
            self._until(lambda: self._traffic.flows)
            if self._late:
                self._start_late(self._late[0])
            self._began = time.monotonic()
            self._harm(self._planned, outcome)
            self._calm()
        except KeyboardInterrupt:
            self._heal_all()
            raise
        finally:
            sampler.close()
            surveyor.close()
            beats.close()
            events.close()

    def _harm(self, planned: list[Planned], outcome: Outcome) -> None:
        self._progress.elapsed_s = 0.0
        while self._progress.elapsed_s < self._options.seconds:
            outcome.seconds = round(self._progress.elapsed_s, 1)
            if planned and planned[0].at_s <= self._progress.elapsed_s:
                self._strike(planned.pop(0))
            self._tick("faults")
        outcome.seconds = self._options.seconds

    def _until(self, condition: Callable[[], bool], within_s: float = READY_S) -> bool:
        until = time.monotonic() + within_s
        while not condition():
            if time.monotonic() >= until:
                return False
            self._tick("starting")
        return True

    def _start_late(self, planned: Planned) -> None:
        """Start the agents for the first time, while jobs already wait."""
        said = {"harm": planned.kind, "planned": planned.kind, "groups": tuple(SERVED)}
        self._writer.write(Fault.model_validate({"who": "run", "id": planned.id, **said}))
        self._until(lambda: False, _ASKED_S)
        waited = self._scene.waits()
        self._scene.start_agents()
        if not self._until(self._scene.served):
            raise TimeSliceError(f"the agents did not join within {READY_S:g} s; see {self._scene.logs}")
        if waited:
            self._note(planned)
        self._writer.write(Healed(who="run", id=planned.id))

    def _strike(self, planned: Planned) -> None:
        now = time.monotonic()
        deed = choose(self._scene.world, planned, now)
        if deed is None:
            return
        self._progress.last = f"{planned.kind} {deed.label}".strip()
        said = {"harm": deed.harm, "label": deed.label, "groups": deed.groups, "detail": deed.detail}
        said |= {"planned": planned.kind, "kills": deed.kills}
        self._writer.write(Fault.model_validate({"who": "run", "id": planned.id, **said}))
        self._attempt(planned.kind, deed.do)
        if not deed.late:
            self._read_back(planned, deed, _TAKES_S)
        if deed.heal or deed.late:
            self._pending.append((now + planned.lasts_s, planned, deed))

    def _tick(self, phase: str) -> None:
        now = time.monotonic()
        self._progress.elapsed_s, self._progress.phase = now - self._began, phase
        if now > self._looked + _LOOK_S:
            self._looked = now
            self._look_at_late()
        for due in [each for each in self._pending if each[0] <= now]:
            self._heal(due)
        self._traffic.again(self._scene.processes.keep(now))
        self._show(self._progress)
        time.sleep(_TICK_S)

    def _heal(self, due: tuple[float, Planned, Deed]) -> None:
        self._pending.remove(due)
        _, planned, deed = due
        if deed.late and planned.id not in self._took:
            self._read_back(planned, deed, 0.0)
        if deed.heal:
            self._attempt(f"the end of {deed.harm}", deed.heal)
            self._writer.write(Healed(who="run", id=planned.id))

    def _look_at_late(self) -> None:
        """What shows late may not show at its end any more: a process that came in another form may have ended."""
        for _, planned, deed in self._pending:
            if deed.late and planned.id not in self._took and _shows(deed):
                self._note(planned)

    def _read_back(self, planned: Planned, deed: Deed, patience_s: float) -> None:
        """A fault counts when its effect is seen. What can't be asked for it has not shown it."""
        until = time.monotonic() + patience_s
        while not _shows(deed):
            if time.monotonic() >= until:
                self._say(f"{planned.kind} {deed.detail or deed.label}: did not take, and does not count")
                return
            time.sleep(_TICK_S)
        self._note(planned)

    def _note(self, planned: Planned) -> None:
        self._took.add(planned.id)
        self._progress.faults += 1
        self._writer.write(Took(who="run", id=planned.id))

    def _heal_all(self) -> None:
        for due in list(self._pending):
            self._heal(due)

    def _attempt(self, what: str, act: Callable[[], object]) -> None:
        """A fault that can't be done, because of another one, is none; that is no reason to end the run."""
        try:
            act()
        except (TimeSliceError, redis.exceptions.RedisError, OSError) as error:
            self._say(f"{what}: {error}")

    def _calm(self) -> None:
        """Heal everything, let the jobs go on for a while, then let them end: who waits by then gets in."""
        self._heal_all()
        self._scene.processes.hurry()
        self._writer.write(Calm(who="run", seconds=CALM_S))
        since = time.monotonic()
        while (calm := time.monotonic() - since) < CALM_S + 1 and not self._traffic.over:
            if calm > AFTERWARDS_S:
                self._traffic.drain()
            self._tick("calm")
        self._writer.write(Ended(who="run"))

    def _job_pids(self) -> list[int]:
        found = []
        for child in list(self._scene.processes.children):
            with suppress(ProcessLookupError):  # it ends, or has not begun yet
                if child.role == "job":
                    found.append(child.pid)
        return found

    def _pids(self) -> dict[str, list[int]]:
        children = list(self._scene.processes.children)
        found: dict[str, list[int]] = {"agent": [], "coordinator": []}
        for child in children:
            process = child.process  # once: this is the sampler's thread, and the keeper buries who has ended
            if child.role in found and process is not None:
                found[child.role].append(process.pid)
        return found


def _shows(deed: Deed) -> bool:
    try:
        return deed.took()
    except (TimeSliceError, redis.exceptions.RedisError, OSError):
        return False
