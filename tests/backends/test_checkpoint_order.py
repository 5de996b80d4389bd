"""In which order the checkpoint tool is driven, seen by a tool that writes down its calls."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.jobs import JobProcess
from timeslice.backends.base import Capabilities, Context, DeviceMemory, Job, Selection
from timeslice.backends.checkpoint_tool import CheckpointBackend, Seen
from timeslice.backends.toolrun import State, Tool
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Residency, Target

ALL = Selection()
DEADLINE_S = 20.0


class StubBackend(CheckpointBackend):
    """Believes the state files of the stub tool; every process has a thousand bytes."""

    name = "stub"

    def __init__(self, context: Context) -> None:
        self.folder = Path(context.options["folder"])
        tool = Path(__file__).parent / "stub_tool.py"
        super().__init__(context, Tool((sys.executable, "-I", "-S", str(tool), str(self.folder)), {}))

    def capabilities(self) -> Capabilities:
        return Capabilities()

    async def see(self, job: Job, target: Target) -> Seen | None:
        state = State((self.folder / str(target.pid)).read_text())
        inside = state is not State.CHECKPOINTED
        return Seen(state=state, device_bytes=1000 * inside, host_bytes=1000 * (not inside), total_bytes=1000)

    async def health(self) -> Sequence[str]:
        return ()

    async def memory(self) -> Sequence[DeviceMemory]:
        return ()


class Stubbed:
    """A job of two ranks on the stub tool."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.backend = StubBackend(Context(group="g", node="n1", options={"folder": str(folder)}))
        self.processes = [JobProcess("tests.backends.worker") for _ in range(2)]
        self.job = Job(group="g", job="a", node="n1", targets=tuple(p.target("a") for p in self.processes))
        self.pids = [process.pid for process in self.processes]
        for pid in self.pids:
            self.write(str(pid), "running")

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def states(self) -> list[str]:
        return [(self.folder / str(pid)).read_text() for pid in self.pids]

    def calls(self, *, ends: bool = False) -> list[str]:
        """What was called, in order; and forgotten then."""
        lines = (self.folder / "log").read_text().splitlines()
        (self.folder / "log").unlink()
        return lines if ends else [line.removeprefix("begin ") for line in lines if line.startswith("begin ")]


@pytest.fixture
def stubbed(tmp_path: Path) -> Iterator[Stubbed]:
    made = Stubbed(tmp_path)
    yield made
    for process in made.processes:
        process.end()


def actions(calls: list[str]) -> list[str]:
    return [call.split()[0] for call in calls if not call.startswith("get-state")]


async def test_all_are_locked_before_any_is_copied(stubbed: Stubbed) -> None:
    """C14: lock all, checkpoint all; restore all, unlock all; each process in a call of its own."""
    await stubbed.backend.prepare(stubbed.job, ALL, deadline_s=DEADLINE_S)
    await stubbed.backend.suspend(stubbed.job, ALL, deadline_s=DEADLINE_S)
    await stubbed.backend.restore(stubbed.job, ALL, deadline_s=DEADLINE_S)
    await stubbed.backend.release(stubbed.job, deadline_s=DEADLINE_S)
    lines = stubbed.calls(ends=True)
    for before, after in (("lock", "checkpoint"), ("checkpoint", "restore"), ("restore", "unlock")):
        last_end = max(i for i, line in enumerate(lines) if line.startswith(f"end {before} "))
        first_begin = min(i for i, line in enumerate(lines) if line.startswith(f"begin {after} "))
        assert last_end < first_begin
    assert sorted(actions([line.removeprefix("begin ") for line in lines if line.startswith("begin")])) == sorted(
        ["lock", "checkpoint", "restore", "unlock"] * 2
    )


async def test_a_repeat_asks_for_the_state_and_does_nothing(stubbed: Stubbed) -> None:
    """get-state comes before each action, so what is done already is not done again."""
    await stubbed.backend.prepare(stubbed.job, ALL, deadline_s=DEADLINE_S)
    await stubbed.backend.suspend(stubbed.job, ALL, deadline_s=DEADLINE_S)
    stubbed.calls()
    await stubbed.backend.prepare(stubbed.job, ALL, deadline_s=DEADLINE_S)
    await stubbed.backend.suspend(stubbed.job, ALL, deadline_s=DEADLINE_S)
    calls = stubbed.calls()
    assert actions(calls) == []
    assert calls


async def test_a_process_without_a_context_is_skipped(stubbed: Stubbed) -> None:
    """G14: "initialization error" means that there is nothing to move; the other rank moves."""
    pid = stubbed.pids[0]
    text = f'Error getting process state for process ID {pid}: "initialization error"'
    stubbed.write(f"get-state-{pid}", text)
    await stubbed.backend.prepare(stubbed.job, ALL, deadline_s=DEADLINE_S)
    await stubbed.backend.suspend(stubbed.job, ALL, deadline_s=DEADLINE_S)
    assert stubbed.states() == ["running", "checkpointed"]


async def test_a_failed_lock_unlocks_those_that_were_locked(stubbed: Stubbed) -> None:
    """One rank can't be locked: the deadline passes with retries, then all run, and the tool's text is in the fault."""
    text = f'Could not lock on process ID {stubbed.pids[1]}: "device not ready"'
    stubbed.write(f"lock-{stubbed.pids[1]}", text)
    with pytest.raises(BackendError) as caught:
        await stubbed.backend.prepare(stubbed.job, ALL, deadline_s=4.0)
    assert caught.value.kind is FaultKind.TRANSIENT
    assert text in str(caught.value)
    assert stubbed.states() == ["running", "running"]
    calls = stubbed.calls()
    assert calls.count(f"lock {stubbed.pids[1]}") > 1
    assert calls.count(f"unlock {stubbed.pids[0]}") == 1


async def test_a_failed_checkpoint_brings_all_back_and_lets_them_run(stubbed: Stubbed) -> None:
    """G04: after any copy began, the undo is restore and unlock; it is not tried twice."""
    text = f'Could not checkpoint on process ID {stubbed.pids[1]}: "OS call failed"'
    stubbed.write(f"checkpoint-{stubbed.pids[1]}", text)
    await stubbed.backend.prepare(stubbed.job, ALL, deadline_s=DEADLINE_S)
    with pytest.raises(BackendError) as caught:
        await stubbed.backend.suspend(stubbed.job, ALL, deadline_s=DEADLINE_S)
    assert text in str(caught.value)
    assert stubbed.states() == ["running", "running"]
    calls = stubbed.calls()
    assert calls.count(f"checkpoint {stubbed.pids[1]}") == 1
    assert calls.count(f"restore {stubbed.pids[0]}") == 1


async def test_an_undo_that_fails_too_is_a_poisoned_fault(stubbed: Stubbed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may believe that such a job runs: both texts are told."""
    monkeypatch.setattr("timeslice.backends.steps.UNDO_S", 1.0)
    stubbed.write("checkpoint", "first trouble")
    stubbed.write("unlock", "second trouble")
    with pytest.raises(BackendError, match=r"first trouble.*second trouble") as caught:
        await stubbed.backend.suspend(stubbed.job, ALL, deadline_s=1.0)
    assert caught.value.kind is FaultKind.POISONED


async def test_a_lock_that_waits_for_its_peer_is_resolved_by_the_undo(
    stubbed: Stubbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C14: rank 2's lock does not return before rank 1 runs again; the tool is not killed, and at last both run."""
    monkeypatch.setattr("timeslice.backends.checkpoint_tool.SETTLE_S", DEADLINE_S)  # the stub takes a Python a call
    stubbed.write(f"wait-{stubbed.pids[1]}", str(stubbed.pids[0]))
    with pytest.raises(BackendError, match="must not be killed") as caught:
        await stubbed.backend.prepare(stubbed.job, ALL, deadline_s=1.0)
    assert caught.value.kind is FaultKind.TRANSIENT
    assert stubbed.states() == ["running", "running"]
    assert (await stubbed.backend.probe(stubbed.job)).state is Residency.RESIDENT
    assert f"end lock {stubbed.pids[1]}" in stubbed.calls(ends=True)


async def test_half_a_suspended_job_is_faulted_and_can_be_finished_or_undone(stubbed: Stubbed) -> None:
    """An agent died between two ranks: no state is claimed, and both ways lead out."""
    for way, expected in (("suspend", "checkpointed"), ("abort", "running")):
        for pid, state in zip(stubbed.pids, ("locked", "checkpointed"), strict=True):
            stubbed.write(str(pid), state)
        assert (await stubbed.backend.probe(stubbed.job)).state is Residency.FAULTED
        if way == "suspend":
            await stubbed.backend.suspend(stubbed.job, ALL, deadline_s=DEADLINE_S)
        else:
            await stubbed.backend.abort(stubbed.job, deadline_s=DEADLINE_S)
        assert stubbed.states() == [expected, expected]


async def test_a_tool_that_is_not_there_is_named(stubbed: Stubbed) -> None:
    """The fault says what could not be started, and the job runs on."""
    stubbed.backend._tool = Tool(("/nowhere/cuda-checkpoint",), {})
    with pytest.raises(BackendError, match="/nowhere/cuda-checkpoint can't be started") as caught:
        await stubbed.backend.prepare(stubbed.job, ALL, deadline_s=DEADLINE_S)
    assert caught.value.kind is FaultKind.UNSUPPORTED
    assert stubbed.states() == ["running", "running"]
