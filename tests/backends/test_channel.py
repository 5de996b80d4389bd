"""The channel backend against workloads that are busy, silent, half-hearted, or lose their answers."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from pathlib import Path

import pytest

from tests.backends.conftest import ALL, MIB
from tests.support.jobs import JobProcess
from timeslice.arena import Arena, Device
from timeslice.arena.process import start_time_of
from timeslice.backends.base import Channel, Context, Job, Selection
from timeslice.backends.channel import ChannelBackend
from timeslice.errors import BackendError, FaultKind
from timeslice.models import ChannelAnswer, ChannelCommand, Residency, Target


class Workloads(Channel):
    """Workloads in memory. ``plan`` maps (process, action) to what goes wrong with its next attempts:
    ``lost`` (never heard), ``dropped`` (done, and the answer lost), ``busy``, ``fail``, ``lie`` (says done)."""

    def __init__(self) -> None:
        self.states: dict[str, Residency] = defaultdict(lambda: Residency.RESIDENT)
        self.plan: dict[tuple[str, str], list[str]] = defaultdict(list)
        self.always: dict[tuple[str, str], str] = {}
        self.asked: list[tuple[str, ChannelCommand]] = []
        self.done: list[tuple[str, str]] = []
        self._answers: dict[str, ChannelAnswer] = {}

    async def ask(self, job: str, process: str, command: ChannelCommand, *, deadline_s: float) -> ChannelAnswer:
        self.asked.append((process, command))
        place = process, command.action
        trouble = self.plan[place].pop(0) if self.plan[place] else self.always.get(place, "")
        if trouble == "gone":
            raise BackendError("it ended", kind=FaultKind.GONE)
        if trouble != "lost" and command.id not in self._answers:
            self._answers[command.id] = self._obey(process, command, trouble)
        if trouble in {"lost", "dropped"}:
            await asyncio.sleep(min(deadline_s, 0.02))
            raise TimeoutError
        return self._answers[command.id]

    def _obey(self, process: str, command: ChannelCommand, trouble: str) -> ChannelAnswer:
        if trouble in {"busy", "fail"}:
            return ChannelAnswer(id=command.id, ok=False, busy=trouble == "busy", error=f"cause: {trouble}")
        if command.action != "probe":
            self.done.append((process, command.action))
            if trouble != "lie":
                out = command.action == "suspend"
                self.states[process] = Residency.SUSPENDED if out else Residency.RESIDENT
        inside = self.states[process] is Residency.RESIDENT
        return ChannelAnswer(
            id=command.id,
            ok=True,
            state=self.states[process],
            device_bytes=1000 * inside,
            host_bytes=1000 * (not inside),
            moved_bytes=1000 * (command.action != "probe"),
        )

    def ids(self, action: str) -> list[str]:
        return [command.id for _, command in self.asked if command.action == action]


@pytest.fixture
def workloads() -> Workloads:
    return Workloads()


@pytest.fixture
def backend(workloads: Workloads) -> ChannelBackend:
    return ChannelBackend(Context(group="g", node="n1", channel=workloads))


def target(process: str, pid: int = 0, **fields: object) -> Target:
    pid = pid or os.getpid()
    values = {"job": "a", "host": "n1", "pid": pid, "start": start_time_of(pid), "uid": 0, "pid_namespace": ""}
    return Target.model_validate(values | {"channel": process, "modes": ("offload",)} | fields)


def job(*targets: Target) -> Job:
    return Job(group="g", job="a", node="n1", targets=targets or (target("p1"),))


@pytest.mark.parametrize("trouble", ["lost", "dropped"])
async def test_an_answer_that_is_not_there_is_asked_for_again(
    backend: ChannelBackend, workloads: Workloads, trouble: str
) -> None:
    """Under the same id, so it is done once, whether the command or the answer was lost."""
    workloads.plan["p1", "suspend"] = [trouble, trouble]
    outcome = await backend.suspend(job(), ALL, deadline_s=10)
    assert workloads.done == [("p1", "suspend")]
    assert len(workloads.ids("suspend")) == 3
    assert len(set(workloads.ids("suspend"))) == 1
    assert (outcome.moved_bytes, outcome.freed_bytes) == (1000, 1000)


async def test_a_later_swap_uses_new_ids(backend: ChannelBackend, workloads: Workloads) -> None:
    """Otherwise the workload would repeat its old answer and do nothing."""
    for _ in range(3):
        await backend.suspend(job(), ALL, deadline_s=10)
        await backend.restore(job(), ALL, deadline_s=10)
    ids = workloads.ids("suspend") + workloads.ids("restore")
    assert len(set(ids)) == len(ids) == 6


async def test_a_busy_workload_is_asked_again_until_it_is_not(backend: ChannelBackend, workloads: Workloads) -> None:
    """Each attempt has a new id, for "busy" was an answer."""
    workloads.plan["p1", "suspend"] = ["busy", "busy"]
    workloads.plan["p1", "probe"] = ["busy"]
    await backend.prepare(job(), ALL, deadline_s=10)
    await backend.suspend(job(), ALL, deadline_s=10)
    assert workloads.done == [("p1", "suspend")]
    assert len(set(workloads.ids("suspend"))) == 3


async def test_a_workload_that_stays_busy_keeps_its_state(backend: ChannelBackend, workloads: Workloads) -> None:
    """After the deadline a fault that says so, with the job on the device."""
    workloads.always["p1", "suspend"] = "busy"
    with pytest.raises(BackendError, match="cause: busy") as caught:
        await backend.suspend(job(), ALL, deadline_s=1.0)
    assert caught.value.kind is FaultKind.BUSY
    assert (await backend.probe(job())).state is Residency.RESIDENT


@pytest.mark.parametrize(
    ("selection", "word"),
    [(Selection(mode="discard"), "discard"), (Selection(tags=("kv", "lora")), "lora")],
)
async def test_what_a_workload_did_not_register_is_never_sent(
    backend: ChannelBackend, workloads: Workloads, selection: Selection, word: str
) -> None:
    """Not even a question goes out."""
    for step in (backend.prepare, backend.suspend, backend.restore):
        with pytest.raises(BackendError, match=word) as caught:
            await step(job(target("p1", tags=("kv",))), selection, deadline_s=10)
        assert caught.value.kind is FaultKind.UNSUPPORTED
    assert workloads.asked == []


async def test_mode_and_tags_reach_the_workload(backend: ChannelBackend, workloads: Workloads) -> None:
    """What was registered may be asked for."""
    able = target("p1", modes=("offload", "discard"), tags=("kv",))
    await backend.suspend(job(able), Selection(mode="discard", tags=("kv",)), deadline_s=10)
    assert ("p1", "discard", ("kv",)) in {(process, c.mode, c.tags) for process, c in workloads.asked}


@pytest.mark.parametrize("action", ["suspend", "restore"])
async def test_all_processes_or_none(backend: ChannelBackend, workloads: Workloads, action: str) -> None:
    """One fails: what the other did is taken back, and the fault carries the workload's own words."""
    both = job(target("p1"), target("p2"))
    before = Residency.RESIDENT
    if action == "restore":
        await backend.suspend(both, ALL, deadline_s=10)
        before = Residency.SUSPENDED
    workloads.plan["p2", action] = ["fail"]
    with pytest.raises(BackendError, match="cause: fail") as caught:
        await getattr(backend, action)(both, ALL, deadline_s=10)
    assert caught.value.kind is FaultKind.TRANSIENT
    assert ("p1", action) in workloads.done
    assert (workloads.states["p1"], workloads.states["p2"]) == (before, before)


async def test_a_workload_that_contradicts_itself_has_failed(backend: ChannelBackend, workloads: Workloads) -> None:
    """It says "done" and "still resident" in one answer."""
    workloads.plan["p1", "suspend"] = ["lie"]
    with pytest.raises(BackendError, match="claimed success") as caught:
        await backend.suspend(job(), ALL, deadline_s=10)
    assert caught.value.kind is FaultKind.TRANSIENT


async def test_half_a_job_out_is_faulted(backend: ChannelBackend, workloads: Workloads) -> None:
    """A part here and a part there is no state to rely on; a repeat finishes it."""
    both = job(target("p1"), target("p2"))
    workloads.states["p1"] = Residency.SUSPENDED
    assert (await backend.probe(both)).state is Residency.FAULTED
    await backend.suspend(both, ALL, deadline_s=10)
    assert workloads.done == [("p2", "suspend")]
    assert (await backend.probe(both)).state is Residency.SUSPENDED


async def test_silence_after_an_order_is_poisoned(
    backend: ChannelBackend, workloads: Workloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it was done is open. Its peer is brought back, and the silent one finds the order to come back next."""
    monkeypatch.setattr("timeslice.backends.channel.UNDO_S", 1.0)
    workloads.always["p2", "suspend"] = workloads.always["p2", "restore"] = "lost"
    with pytest.raises(BackendError, match="has not answered suspend") as caught:
        await backend.suspend(job(target("p1"), target("p2")), ALL, deadline_s=1.0)
    assert caught.value.kind is FaultKind.POISONED
    assert workloads.states["p1"] is Residency.RESIDENT
    silent = [command.action for process, command in workloads.asked if process == "p2"]
    assert silent.index("restore") > silent.index("suspend")


async def test_silence_after_a_question_is_transient(
    backend: ChannelBackend, workloads: Workloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was asked of it, so nothing is unknown that was known; it is no fault of the job's state."""
    monkeypatch.setattr("timeslice.backends.channel.PROBE_S", 0.1)
    workloads.always["p1", "probe"] = "lost"
    for look in (backend.probe(job()), backend.prepare(job(), ALL, deadline_s=0.1)):
        with pytest.raises(BackendError, match="has not answered probe") as caught:
            await look
        assert caught.value.kind is FaultKind.TRANSIENT


async def test_a_process_that_ends_while_it_is_asked_is_out(backend: ChannelBackend, workloads: Workloads) -> None:
    """F02: noticed without waiting for the deadline, by the agent's watch or by looking."""
    doomed = JobProcess("tests.backends.worker")
    watched = target("p1", doomed.pid)
    workloads.plan["p1", "suspend"] = ["gone"]
    await backend.suspend(job(watched, target("p2")), ALL, deadline_s=60)
    workloads.always["p1", "suspend"] = "lost"
    ending = asyncio.create_task(backend.suspend(job(watched), ALL, deadline_s=60))
    await asyncio.sleep(0.05)
    doomed.end()
    await ending
    assert (await backend.probe(job(watched))).state is Residency.ABSENT


async def test_a_workload_in_another_pid_namespace_is_reached(backend: ChannelBackend) -> None:
    """Its number means nothing here, and is not needed: the stream finds it."""
    far = target("p1", pid_namespace="pid:[1]", start=1)
    await backend.suspend(job(far), ALL, deadline_s=10)
    assert (await backend.probe(job(far))).state is Residency.SUSPENDED


async def test_a_process_without_a_channel_is_no_part_of_it(backend: ChannelBackend, workloads: Workloads) -> None:
    """Only who listens is asked."""
    await backend.suspend(job(target("")), ALL, deadline_s=10)
    assert (await backend.probe(job(target("")))).state is Residency.ABSENT
    assert workloads.asked == []


async def test_on_a_device_the_freed_bytes_are_measured(tmp_path: Path, workloads: Workloads) -> None:
    """G06: a workload that says it left, and the device shows that nothing was freed."""
    device = Device.create(tmp_path / "device", 4 * MIB)
    backend = ChannelBackend(Context(group="g", node="n1", channel=workloads, devices=(Path(device.path),)))
    with Arena(device) as arena:
        arena.allocate(MIB)
        assert (await backend.suspend(job(), ALL, deadline_s=10)).freed_bytes == 0
    device.destroy()


def test_without_a_channel_there_is_no_channel_backend() -> None:
    """It is the agent that brings one."""
    with pytest.raises(BackendError) as caught:
        ChannelBackend(Context(group="g", node="n1"))
    assert caught.value.kind is FaultKind.UNSUPPORTED
