"""Two jobs that take turns on one emulated device, with agent and coordinator, as real processes under a keeper."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal

from timeslice.arena import Device
from timeslice.embedded import EmbeddedServer
from timeslice.locks import scripts
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import Keys
from timeslice.torture.backend import Knob, knob_file
from timeslice.torture.checker import Report, Terms, check
from timeslice.torture.events import EventReader
from timeslice.torture.history import Checked, Entered, Fault, Healed, Line, Moved, Writer, read_so_far
from timeslice.torture.processes import Child, Processes, Role
from timeslice.torture.stage import CONFIG, LEASES_S, LOCK_GROUP
from timeslice.torture.survey import Surveyor

GROUP, NODE, JOBS = "trainers", "n1", ("a", "b")
JOB_BYTES, DEVICE_BYTES = 1 << 20, 3 << 19  # two jobs don't fit
# A node that is silent for longer may be passed by grants that move nothing, and the history tells of no reason where
# its agent was only slow.
AGENT_TTL_S = 4.5
OWNER_LEASE_MS, WAITER_TTL_S = 700, 3.0
DEADLINE_S = 40.0
_WRITTEN_NS = 300_000_000  # a line that is older is on disk
_TICK_S = 0.01
_SLOW_S = 0.8  # of a step: the agent gives signs of life within


class Duel:
    """The system, for a whole module of tests. Whoever ends is started again, as by a service manager."""

    def __init__(self, folder: Path, stack: ExitStack, *, device_bytes: int = DEVICE_BYTES) -> None:
        self._device_bytes = device_bytes
        self._folder, self._parts, self._work = folder, folder / "parts", folder / "work"
        (folder / "logs").mkdir(parents=True)
        (self._work / "knobs").mkdir(parents=True)
        self._writer = Writer(self._parts / "run.jsonl")
        self._server = stack.enter_context(EmbeddedServer(folder / "server"))
        self._driver = SyncDriver(self._server.url)
        stack.callback(self._driver.close)
        self._read: dict[Path, tuple[int, list[Line]]] = {}
        self._faults = 0
        self._lock_group, self._hasty = "", False
        settings = CONFIG.stored()
        for name, mode in ((GROUP, "served"), (LOCK_GROUP, "lock")):
            self._driver.run(scripts.configure(Keys().group(name), settings, mode=mode))
        self._driver.client.sadd(Keys().groups, GROUP, LOCK_GROUP)
        self._processes = Processes(self._work, folder / "logs", self._writer)
        stack.callback(self._end)
        self._children = {
            "agent": self._child("agent-n1", "agent", self._agent),
            "coordinator": self._child("coordinator-c1", "coordinator", self._coordinator),
        }
        group = Keys().group(GROUP)
        self.until(lambda: NODE in self._driver.view(group).nodes, "the agent has joined")
        self._children |= {job: self._child(f"job-{job}", "job", self._job(job), job=job) for job in JOBS}
        events = EventReader(self._server.url, (GROUP, LOCK_GROUP), Writer(self._parts / "events.jsonl"))
        stack.callback(events.close)
        devices = {GROUP: {NODE: self._device}}
        survey = Surveyor(devices, self._pids, self._work / "job.pids", Writer(self._parts / "survey.jsonl"))
        stack.callback(survey.close)

    def kill_at(
        self,
        who: str,
        point: str,
        when: str,
        *,
        harm: Literal["lie", "slow", ""] = "",
        newcomer: bool = False,
        forgotten: bool = False,
        lock_group: str = "",
        hasty: bool = False,
        later: Literal["swap", "stop", ""] = "",
    ) -> None:
        """Have a new process of that name kill itself there, and wait until it has, and the keeper replaced it.

        ``harm``: of the backend meanwhile. ``newcomer``: a process of a job comes new after it. ``forgotten``: until
        then the server forgets who registered. ``lock_group``: a job uses it, too. ``hasty``: a job gives up at once,
        at every second try. ``later``: not the first time that it comes there, but in the middle of a swap after both
        jobs had their turns, or when it is told to stop.
        """
        self._lock_group, self._hasty = lock_group, hasty
        gate = self._work / "gate"
        gate.unlink(missing_ok=True)
        self._replace(who, f"{who}:{point}:{when}:1" + (f":{gate}" if later else ""))
        if later:
            self.both_take_turns()
        child = self._children[who]
        doomed = child.process
        assert doomed is not None
        with self._harm(harm) if harm else nullcontext():
            if later == "swap":
                self.until(lambda: self._moves, "jobs are swapped")
            if later:
                gate.touch()
            if newcomer:
                self._replace(JOBS[1], "")
            if later == "stop":
                doomed.terminate()

            def ended() -> bool:
                if forgotten:  # again and again: they register again
                    self._driver.client.delete(Keys().group(GROUP).targets)
                return doomed.poll() is not None

            self.until(ended, f"{who} comes to {point}")
        assert doomed.returncode == -9, f"{who} ended with {doomed.returncode} before it came to {point}"
        self._lock_group, self._hasty = "", False
        self.until(lambda: child.process is not None and child.process is not doomed, f"{who} is there again")

    @contextmanager
    def _harm(self, harm: Literal["lie", "slow"]) -> Iterator[None]:
        """The backend misbehaves, and not a moment longer. It tells no lies of a restore: a job that has left already
        could not be brought back meanwhile, so nobody would be there whose suspend could fail."""
        knob, number = knob_file(self._work / "knobs", NODE, GROUP), self._begin(harm)
        knob.write_text(Knob(id=number, harm=harm, seconds=_SLOW_S, lies=("suspend",)).model_dump_json())
        try:
            yield
        finally:
            knob.unlink()
            self._writer.write(Healed(who="run", id=number))

    @property
    def url(self) -> str:
        """Of its server."""
        return self._server.url

    def disguise(self, job: str, form: str) -> str:
        """Have a new process of that job come in another form, see ``forms``. Its label."""
        child = self._children[job]
        before = child.label
        child.next_form = form
        self._replace(job, "")
        self.until(lambda: child.label != before, "it comes again")
        return child.label

    def trace(self, who: str, file: Path) -> None:
        """Have a new process of that name write its points into ``file``."""
        self._replace(who, f"trace:{file}")

    def both_take_turns(self) -> None:
        """Each job gets in again, and finds on the device what it had left there."""
        since = time.monotonic_ns()

        def done() -> bool:
            lines = [line for line in self.lines("job-*") if line.at > since]
            checked = {line.job for line in lines if isinstance(line, Checked)}
            back = {line.job for line in lines if isinstance(line, Entered) and line.how == "restored"}
            return checked >= set(JOBS) and back >= set(JOBS)

        self.until(done, f"both jobs are in again, with their state; see {self._folder}")

    def report(self) -> Report:
        """What the checker says of everything so far."""
        self.rest(2 * _WRITTEN_NS / 1e9)  # events are read every 0.2 s
        known = time.monotonic_ns() - _WRITTEN_NS
        lines = [line for line in self.lines() if line.at <= known]
        return check(lines, Terms(lease_s=max(LEASES_S), recovery_s=DEADLINE_S))

    def lines(self, which: str = "*") -> list[Line]:
        """What was written so far; files that did not grow are not read again."""
        for path in self._parts.glob(f"{which}.jsonl"):
            size = path.stat().st_size
            if self._read.get(path, (0, []))[0] != size:
                self._read[path] = (size, list(read_so_far(path)))
        return [line for path, (_, lines) in self._read.items() if path.match(f"{which}.jsonl") for line in lines]

    def until(self, condition: Callable[[], Any], what: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end, f"not within {DEADLINE_S} s: {what}"
            self._keep()

    def rest(self, seconds: float) -> None:
        """Let everybody go on for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._keep()

    def _keep(self) -> None:
        for child in self._children.values():
            if child.process is None:
                child.again_at = 0.0  # at once
        self._processes.keep(time.monotonic())
        time.sleep(_TICK_S)

    def _replace(self, who: str, spec: str) -> None:
        child = self._children[who]
        self.until(lambda: child.running, f"{who} runs")
        fault, before = self._begin("kill", child.label), child.process
        child.kill_at = spec
        self._processes.kill(child, again_at=0.0, fault=fault)
        self.until(lambda: child.process is not None and child.process is not before, f"a new {who} is there")

    def _begin(self, harm: str, label: str = "") -> int:
        self._faults += 1
        self._writer.write(Fault(who="run", id=self._faults, harm=harm, label=label))
        return self._faults

    def _child(self, name: str, role: Role, spec: Callable[[str], dict[str, Any]], *, job: str = "") -> Child:
        mine = {key: value for key, value in os.environ.items() if not key.startswith("TIMESLICE_")}
        environment = {**mine, "TIMESLICE_NODE": NODE, "TIMESLICE_RUNTIME_DIR": str(self._work / NODE)}
        child = Child(name, role, spec, environment, job=job, node=NODE)
        self._processes.add(child)
        return child

    @property
    def _moves(self) -> bool:
        """Whether the agent is in the middle of a step."""
        last = [line for line in self.lines("agent-*") if isinstance(line, Moved)][-1:]
        return bool(last) and last[0].stage == "begin"

    def _pids(self) -> list[int]:
        found = []
        for job in JOBS:
            with suppress(ProcessLookupError):
                found.append(self._children[job].pid)
        return found

    @property
    def _device(self) -> Path:
        return self._work / NODE / "devices" / GROUP

    def _agent(self, label: str) -> dict[str, Any]:
        return {
            "label": label,
            "node": NODE,
            "url": self._server.url,
            "groups": [GROUP],
            "device_bytes": self._device_bytes,
            "ttl_s": AGENT_TTL_S,
            "leave": True,
            "state_dir": str(self._work / NODE / "state"),
            "knobs": str(self._work / "knobs"),
            "history": str(self._parts),
        }

    def _coordinator(self, label: str) -> dict[str, Any]:
        return {"label": label, "name": "c1", "url": self._server.url, "lease_ms": OWNER_LEASE_MS}

    def _job(self, job: str) -> Callable[[str], dict[str, Any]]:
        def spec(label: str) -> dict[str, Any]:
            return {
                "label": label,
                "job": job,
                "node": NODE,
                "url": self._server.url,
                "history": str(self._parts),
                "drain": str(self._work / "drain"),
                "seed": label,
                "asynchronous": job == "b",
                "devices": {GROUP: str(self._device)},
                "bytes": JOB_BYTES,
                "lock_group": self._lock_group,
                "until": time.monotonic() + 3600,
                "pace": 0.1,
                "waiter_ttl_s": WAITER_TTL_S,
                "knobs": str(self._work / "knobs"),
                "everywhere": {GROUP: {NODE: str(self._device)}},
                "pids": str(self._work / "job.pids"),
                **({"timeouts": (0.0, None)} if self._hasty else {}),
            }

        return spec

    def _end(self) -> None:
        self._processes.end()
        self._processes.clear()
        if self._device.exists():
            Device.open(self._device).destroy(force=True)
