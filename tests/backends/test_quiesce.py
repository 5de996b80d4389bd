"""Quiescing a job before it is frozen and after it runs again: signals and commands, on real processes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.backends.conftest import ALL, DEADLINE_S, MIB
from tests.backends.quiet import heard
from tests.backends.test_checkpoint_order import StubBackend
from tests.support.jobs import JobProcess, process_state, wait_until
from timeslice.arena import Device
from timeslice.arena.process import start_time_of
from timeslice.backends import composite, hooks
from timeslice.backends.base import Backend, Capabilities, Context, Job
from timeslice.backends.composite import CompositeBackend
from timeslice.backends.quiesce import QuiesceBackend
from timeslice.backends.registry import get_backend
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Residency

SETTLE = 1.5


class Freezer(StubBackend):
    """The stub tool as a last stage: it needs no answer of the job."""

    def capabilities(self) -> Capabilities:
        return Capabilities(forced=True)


class Ranks:
    """A job of two processes that write down which signals they got."""

    def __init__(self, folder: Path, device: Device) -> None:
        self.folder, self.device = folder, device
        self.journal = folder / "journal"
        self.processes = [JobProcess("tests.backends.quiet") for _ in range(2)]
        self.pids = [process.pid for process in self.processes]
        self.job = Job(group="g", job="a", node="n1", targets=tuple(p.target("a") for p in self.processes))
        self.hearing = 0
        self.settled: list[float] = []  # how long was waited for those who were told

    def listen(self, *which: int) -> None:
        for process in self.processes if not which else [self.processes[n] for n in which]:
            process.call("listen", str(self.journal))
            self.hearing += 1

    async def settle(self, seconds: float) -> None:
        """What the time to settle is for, however busy the machine is: until who was told has acted on it."""
        wait_until(lambda: self.count("before") >= self.hearing, "all heard that they have to make ready")
        self.settled.append(seconds)

    def load(self) -> None:
        for seed, process in enumerate(self.processes):
            process.call("arena", self.device.path)
            process.call("allocate", MIB, seed)

    def backend(self, **options: str) -> Backend:
        """quiesce+arena; a new one is a new agent's."""
        given = {"stages": "quiesce+arena", "quiesce.state": str(self.folder / "marks"), "quiesce.settle": str(SETTLE)}
        given = {key: value for key, value in {**given, **options}.items() if value}
        return CompositeBackend(Context(group="g", node="n1", devices=(Path(self.device.path),), options=given))

    def stubbed(self, monkeypatch: pytest.MonkeyPatch) -> Backend:
        """quiesce and a checkpoint tool that fails as it is told."""
        for pid in self.pids:
            (self.folder / str(pid)).write_text("running")

        def make(name: str, context: Context) -> Backend:
            return Freezer(context) if name == "stub" else get_backend(name, context)

        monkeypatch.setattr(composite, "get_backend", make)
        return self.backend(stages="quiesce+stub", **{"stub.folder": str(self.folder)})

    def count(self, what: str) -> int:
        return sum(line.startswith(what) for line in heard(self.journal))


@pytest.fixture
def ranks(tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    made = Ranks(tmp_path, device)
    monkeypatch.setattr(hooks, "sleep", made.settle)
    yield made
    for process in made.processes:
        process.end()


async def test_every_rank_hears_before_any_is_frozen_and_after_all_run(ranks: Ranks) -> None:
    """C14, G37: nobody loses a peer that still talks to it; and what was destroyed is rebuilt only where all run."""
    ranks.listen()
    ranks.load()
    backend = ranks.backend()
    await backend.prepare(ranks.job, ALL, deadline_s=DEADLINE_S)
    assert [process_state(pid) for pid in ranks.pids] == ["T", "T"]
    assert sorted(heard(ranks.journal)) == sorted(f"before {pid}" for pid in ranks.pids)
    assert ranks.settled == [SETTLE]
    out = await backend.suspend(ranks.job, ALL, deadline_s=DEADLINE_S)
    assert (await backend.probe(ranks.job)).state is Residency.SUSPENDED
    await backend.restore(ranks.job, ALL, deadline_s=DEADLINE_S)
    assert ranks.count("after") == 0
    await backend.release(ranks.job, deadline_s=DEADLINE_S)
    wait_until(lambda: ranks.count("after") == 2, "all heard that they run again")
    assert ranks.count("before") == 2
    assert out.moved_bytes == 2 * MIB
    assert {"arena.suspend", "arena.prepare"} <= out.steps.keys()
    probe = await backend.probe(ranks.job)
    assert (probe.state, probe.locked) == (Residency.RESIDENT, False)


async def test_a_process_without_a_handler_is_never_signalled_nor_is_its_peer(ranks: Ranks) -> None:
    """An unhandled signal would kill it: the order is refused, naming it, and nobody was told anything."""
    ranks.listen(0)
    ranks.load()
    with pytest.raises(BackendError, match=f"process {ranks.pids[1]} has no handler for signal RTMIN") as caught:
        await ranks.backend().prepare(ranks.job, ALL, deadline_s=DEADLINE_S)
    assert caught.value.kind is FaultKind.UNSUPPORTED
    assert all(process.call("ping") == process.pid for process in ranks.processes)
    assert heard(ranks.journal) == []


async def test_a_number_that_was_reused_is_not_signalled(ranks: Ranks) -> None:
    """The process of that number now has a handler, and is another one."""
    ranks.listen()
    ranks.load()
    other = [target.model_copy(update={"start": target.start - 1}) for target in ranks.job.targets]
    job = Job(group="g", job="a", node="n1", targets=tuple(other))
    stage = QuiesceBackend(
        Context(group="g", node="n1", options={"state": str(ranks.folder / "m"), "settle": str(SETTLE)})
    )
    await stage.prepare(job, ALL, deadline_s=DEADLINE_S)
    assert heard(ranks.journal) == []


@pytest.mark.parametrize("step", ["lock", "checkpoint"])
async def test_a_freeze_that_fails_is_followed_by_the_other_hook(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """G04: the job runs on with its communicators rebuilt."""
    ranks.listen()
    backend = ranks.stubbed(monkeypatch)
    (ranks.folder / step).write_text("no")
    if step == "checkpoint":
        await backend.prepare(ranks.job, ALL, deadline_s=4.0)
    failing = backend.prepare if step == "lock" else backend.suspend
    with pytest.raises(BackendError, match="no"):
        await failing(ranks.job, ALL, deadline_s=4.0)
    wait_until(lambda: ranks.count("after") == 2, "all were told to go on")
    probe = await backend.probe(ranks.job)
    assert (probe.state, probe.locked) == (Residency.RESIDENT, False)


async def test_a_lock_that_waits_for_its_peer_ends_in_a_rollback(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """C14: rank 2's lock hangs until rank 1 is let go. The step fails in its time, and both run, quiesced no more."""
    monkeypatch.setattr("timeslice.backends.checkpoint_tool.SETTLE_S", DEADLINE_S)  # the stub takes a Python a call
    ranks.listen()
    backend = ranks.stubbed(monkeypatch)
    (ranks.folder / f"wait-{ranks.pids[1]}").write_text(str(ranks.pids[0]))
    with pytest.raises(BackendError) as caught:
        await backend.prepare(ranks.job, ALL, deadline_s=4.0)
    assert caught.value.kind is FaultKind.TRANSIENT
    assert [(ranks.folder / str(pid)).read_text() for pid in ranks.pids] == ["running", "running"]
    wait_until(lambda: ranks.count("after") == 2, "all were told to go on")


async def test_a_new_agent_knows_who_was_told(ranks: Ranks) -> None:
    """It died right behind the signal: the job counts as locked, and letting it run ends that. Nobody hears twice."""
    ranks.listen()
    ranks.load()
    stage = QuiesceBackend(
        Context(group="g", node="n1", options={"state": str(ranks.folder / "marks"), "settle": str(SETTLE)})
    )
    await stage.prepare(ranks.job, ALL, deadline_s=DEADLINE_S)
    backend = ranks.backend()
    probe = await backend.probe(ranks.job)
    assert (probe.state, probe.locked) == (Residency.RESIDENT, True)
    await backend.prepare(ranks.job, ALL, deadline_s=DEADLINE_S)
    assert ranks.count("before") == 2
    await ranks.backend().abort(ranks.job, deadline_s=DEADLINE_S)
    wait_until(lambda: ranks.count("after") == 2, "all were told to go on")
    assert not (await backend.probe(ranks.job)).locked


async def test_a_process_that_lost_its_handler_meanwhile_is_not_signalled(ranks: Ranks) -> None:
    """It would end by it. Its peer is told, and the job counts as told."""
    ranks.listen()
    stage = QuiesceBackend(Context(group="g", node="n1", options={"state": str(ranks.folder / "m")}))
    await stage.prepare(ranks.job, ALL, deadline_s=DEADLINE_S)
    ranks.processes[0].call("deaf")
    await stage.release(ranks.job, deadline_s=DEADLINE_S)
    wait_until(lambda: ranks.count("after") == 1, "the other one was told")
    assert ranks.processes[0].call("ping") == ranks.pids[0]
    assert not (await stage.probe(ranks.job)).locked


async def test_by_force_the_stopped_are_passed_over(ranks: Ranks) -> None:
    """It can't hear; asked nicely it is refused, by force it leaves all the same, and its peer is told."""
    ranks.listen()
    ranks.load()
    os.kill(ranks.pids[1], signal.SIGSTOP)
    wait_until(lambda: process_state(ranks.pids[1]) == "T", "stopped")
    ranks.hearing = 1
    backend = ranks.backend()
    with pytest.raises(BackendError, match=f"kill -CONT {ranks.pids[1]}"):
        await backend.prepare(ranks.job, ALL, deadline_s=DEADLINE_S)
    forced = backend.outside()
    await forced.prepare(ranks.job, ALL, deadline_s=DEADLINE_S)
    await forced.suspend(ranks.job, ALL, deadline_s=DEADLINE_S)
    assert ranks.device.used_bytes() == 0
    await forced.restore(ranks.job, ALL, deadline_s=DEADLINE_S)
    await forced.release(ranks.job, deadline_s=DEADLINE_S)
    wait_until(lambda: heard(ranks.journal) == [f"before {ranks.pids[0]}", f"after {ranks.pids[0]}"], "one was told")


def script(folder: Path, code: str) -> str:
    """A command without commas or quotes in it."""
    path = folder / "hook.py"
    path.write_text(f"import os, sys, time\n{code}\n")
    return f"{sys.executable} -I -S {path}"


SAY = """
with open(sys.argv[1], "a") as out:
    print(*(os.environ["TIMESLICE_" + name] for name in ("STAGE", "JOB", "GROUP", "PIDS")), sys.argv[2:], file=out)
"""


async def test_by_force_a_command_that_fails_stops_nobody(ranks: Ranks) -> None:
    """It is frozen all the same, and told afterwards that it runs again."""
    ranks.load()
    said = ranks.folder / "said"
    line = f"{script(ranks.folder, FAILS)} {said}"
    forced = ranks.backend(**{"quiesce.before": line, "quiesce.after": line, "quiesce.settle": ""}).outside()
    await forced.prepare(ranks.job, ALL, deadline_s=DEADLINE_S)
    await forced.suspend(ranks.job, ALL, deadline_s=DEADLINE_S)
    assert ranks.device.used_bytes() == 0
    await forced.restore(ranks.job, ALL, deadline_s=DEADLINE_S)
    await forced.release(ranks.job, deadline_s=DEADLINE_S)
    assert [line.split()[0] for line in said.read_text().splitlines()] == ["before", "after"]


async def test_a_command_is_run_before_and_after(ranks: Ranks) -> None:
    """Once a stage, told which job and which processes; by no shell."""
    ranks.load()
    said = ranks.folder / "said"
    line = f"{script(ranks.folder, SAY)} {said} $HOME 'a b'"
    backend = ranks.backend(**{"quiesce.before": line, "quiesce.after": line, "quiesce.settle": ""})
    await backend.prepare(ranks.job, ALL, deadline_s=DEADLINE_S)
    await backend.suspend(ranks.job, ALL, deadline_s=DEADLINE_S)
    await backend.restore(ranks.job, ALL, deadline_s=DEADLINE_S)
    assert len(said.read_text().splitlines()) == 1
    await backend.release(ranks.job, deadline_s=DEADLINE_S)
    pids = " ".join(map(str, ranks.pids))
    rest = f"a g {pids} ['$HOME', 'a b']"
    assert said.read_text().splitlines() == [f"before {rest}", f"after {rest}"]


FAILS = (
    SAY
    + """
if os.environ["TIMESLICE_STAGE"] == "before":
    print("no luck")
    sys.exit(3)
"""
)


async def test_a_command_that_fails_is_a_fault_and_undone(ranks: Ranks) -> None:
    """Its exit code and words are told, the other command runs, and nothing was frozen."""
    ranks.load()
    said = ranks.folder / "said"
    line = f"{script(ranks.folder, FAILS)} {said}"
    backend = ranks.backend(**{"quiesce.before": line, "quiesce.after": line, "quiesce.settle": ""})
    with pytest.raises(BackendError, match=r"ended with 3: no luck"):
        await backend.prepare(ranks.job, ALL, deadline_s=DEADLINE_S)
    assert [line.split()[0] for line in said.read_text().splitlines()] == ["before", "after"]
    assert all(process.call("ping") == process.pid for process in ranks.processes)
    assert not (await backend.probe(ranks.job)).locked


async def test_a_command_that_hangs_is_ended_with_its_deadline_and_all_that_it_started(ranks: Ranks) -> None:
    """It is ours, so it may be killed; the job runs on."""
    ranks.load()
    line = f"/bin/sh -c 'echo $$ > {ranks.folder}/pid; sleep 600 & echo $! > {ranks.folder}/child; wait'"
    backend = ranks.backend(**{"quiesce.before": line, "quiesce.settle": ""})
    with pytest.raises(BackendError, match="did not end within its deadline"):
        await backend.prepare(ranks.job, ALL, deadline_s=3.0)
    for name in ("pid", "child"):
        wait_until(partial(has_ended, ranks.folder / name), "the command has ended")
    assert all(process.call("ping") == process.pid for process in ranks.processes)


def has_ended(number: Path) -> bool:
    return start_time_of(int(number.read_text())) is None


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"signal_before": "KILL"}, "no signal to quiesce"),
        ({"signal_after": "9"}, "no signal to quiesce"),
        ({"settle": "soon"}, "write seconds"),
        ({"before": "/nowhere/at/all x"}, "/nowhere/at/all is not there"),
        ({"before": "true 'open"}, "no command"),
        ({"before": "true", "signal_after": "RTMIN+3"}, "exclude each other"),
    ],
)
def test_options_that_make_no_sense_are_refused_at_the_start(options: dict[str, str], why: str, tmp_path: Path) -> None:
    """Long before a job depends on them."""
    with pytest.raises(BackendError, match=why) as caught:
        QuiesceBackend(Context(group="g", node="n1", options={**options, "state": str(tmp_path)}))
    assert caught.value.kind is FaultKind.UNSUPPORTED


async def test_other_signals_may_be_chosen(ranks: Ranks) -> None:
    """By name or by number."""
    for process in ranks.processes:
        process.call("listen", str(ranks.journal), signal.SIGUSR1, signal.SIGRTMIN + 5)
    ranks.hearing = 2
    ranks.load()
    chosen = {"quiesce.signal_before": "USR1", "quiesce.signal_after": str(signal.SIGRTMIN + 5)}
    backend = ranks.backend(**chosen)
    await backend.prepare(ranks.job, ALL, deadline_s=DEADLINE_S)
    await backend.abort(ranks.job, deadline_s=DEADLINE_S)
    wait_until(lambda: (ranks.count("before"), ranks.count("after")) == (2, 2), "all were told")
