"""The whole demo: a stack of its own, each job alone, then all by turns."""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from timeslice.arena import Device
from timeslice.demo.grpo import TOKENS, Work
from timeslice.demo.job import GROUPS, TRAINERS, Spec, state_bytes
from timeslice.demo.measure import Run, read_log, summary
from timeslice.demo.processes import Child
from timeslice.demo.progress import Progress, Watch
from timeslice.embedded import server_version
from timeslice.errors import TimeSliceError
from timeslice.events import Event, decode
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import Keys
from timeslice.locks.scripts import text
from timeslice.settings import runtime_dir
from timeslice.up import LocalStack, private_environment

JOBS = ("a", "b")
TARGET_BUSY = 0.5  # share of its time that a job alone shall spend on its devices
# The same of the trainers where samplers run ahead. Recorded: 42.0 % (asynchronous veRL, R1-1.5B, on three H100; public
# telemetry of llm-d-incubation/llm-d-rl-time-slicing).
TARGET_DUTY = 0.42
_WARM_UP_STEPS = 3
_FEWEST_STEPS = 4
_RUNS = 3.4  # all runs together take about so many times as long as a job alone
_LOOK_S = 0.2
_SETTLE_S = 30.0
_WAIT_S = 120.0

StatePath = Literal["channel", "checkpoint", "both"]
Mode = Literal["sync", "async"]


@dataclass(frozen=True)
class Options:
    """What to run."""

    work: Work
    seed: int
    path: StatePath = "both"
    latency_s: float | None = None  # None: measured, so that TARGET_BUSY is met
    steps: int | None = None  # None: as many as fit into the budget
    budget_s: float = 27.0  # for all runs together, as estimated from the warm-up
    most_steps: int = 8
    mode: Mode = "sync"
    staleness: int = 2  # in the asynchronous mode: updates by which samplers may be behind

    @property
    def groups(self) -> tuple[str, ...]:
        """What the jobs share."""
        return GROUPS if self.mode == "sync" else (TRAINERS,)

    def channel(self, job: str) -> bool:
        """Whether the job moves its state itself when asked; else the agent does it from outside."""
        return self.path == "channel" or (self.path == "both" and job == JOBS[0])


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    report: dict[str, Any]
    alone: tuple[Run, ...]
    sliced: Run

    @property
    def events(self) -> list[Event]:
        return [event for run in (*self.alone, self.sliced) for event in run.events]


def run_demo(options: Options) -> Outcome:
    """Run it all; raises TimeSliceError when a part fails. Leaves nothing behind, however it ends."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="timeslice-demo-")))
        stack.enter_context(private_environment(folder))
        return _Demo(options, folder, stack).run()


class _Demo:
    def __init__(self, options: Options, folder: Path, stack: ExitStack) -> None:
        self.options = options
        self.folder = folder
        self.sizes = {group: size for group, size in state_bytes(options.work).items() if group in options.groups}
        self.capacities = {group: size * 3 // 2 for group, size in self.sizes.items()}
        self.local = LocalStack(self.capacities)
        stack.callback(self.local.stop)
        self.local.start()
        self.driver = SyncDriver(self.local.url)
        stack.callback(self.driver.close)
        self.keys = Keys()
        self.devices = {group: runtime_dir() / "devices" / group for group in options.groups}
        self.progress = stack.enter_context(Progress(self._why))
        self._last_event = dict.fromkeys(options.groups, "")
        self._runs = 0
        self.load_before = round(os.getloadavg()[0], 2)  # other work on the machine distorts every number

    def run(self) -> Outcome:
        options, say = self.options, self.progress.say
        advisory = any(Device.open(path).advisory for path in self.devices.values())
        say(
            f"two GRPO jobs share {' and '.join(options.groups)}, emulated devices; state of a job: "
            + ", ".join(
                f"{size >> 20} MiB on the {group} ({self.capacities[group] >> 20} MiB)"
                for group, size in self.sizes.items()
            )
        )
        if advisory:
            say("no right to mount: the devices' capacity is advisory, kept by accounting instead of by the kernel")
        for job in JOBS:
            how = "by itself, when asked (channel)" if options.channel(job) else "from outside (checkpoint)"
            say(f"job {job}: state is moved {how}")
        if options.mode == "async":
            say(f"each job generates on samplers of its own, at most {options.staleness} updates behind")
        latency, steps = self._settle()
        say(f"{steps} steps; the verifier takes {latency:.3f} s for a batch of {options.work.batch} answers")
        alone = tuple(self._run(job, [job], steps, latency) for job in JOBS)
        sliced = self._run("sliced", JOBS, steps, latency)
        report = {
            "device": "emulated",
            "capacity_kept_by": "accounting" if advisory else "kernel",
            "mode": options.mode,
            "staleness": options.staleness if options.mode == "async" else 0,
            **summary(alone, sliced),
            "device_bytes": self.capacities,
            "state_moved_by": {job: "channel" if options.channel(job) else "checkpoint" for job in JOBS},
            "weights_travel": "through host memory, inside the train and generate phases"
            if options.mode == "sync"
            else "through host memory, to samplers that each job has for itself",
            "verifier_latency_s": round(latency, 4),
            "verifier_latency_chosen": "measured" if options.latency_s is None else "given",
            "steps": steps,
            "steps_chosen": "measured" if options.steps is None else "given",
            "seeds": {job: self._work(job).seed for job in JOBS},
            "work": _sizes_of(options.work),
            "versions": _versions(self.local.server.binary),
            "machine": {"cpus": os.cpu_count(), "architecture": platform.machine(), "load_before": self.load_before},
        }
        return Outcome(report, alone, sliced)

    def _settle(self) -> tuple[float, int]:
        """The verifier's latency, so that a job alone is on its devices as much as wanted, and the steps."""
        latency, steps = self.options.latency_s, self.options.steps
        if latency is not None and steps is not None:
            return latency, steps
        run = self._run("warm-up", [JOBS[0]], _WARM_UP_STEPS, 0.0)
        busy = sum(
            statistics.median(body.seconds for body in run.bodies if body.group == group and body.step)
            for group in self.options.groups
        )
        if self.options.mode == "sync":
            making, period = busy, busy / TARGET_BUSY
        else:
            making, period = statistics.median(run.jobs[JOBS[0]].sampled_s[1:]), busy / TARGET_DUTY
        if latency is None:
            latency = max(period - making, 0.0)
        if steps is None:
            fit = int(self.options.budget_s / (max(making + latency, busy) * _RUNS))
            steps = min(max(fit, _FEWEST_STEPS), self.options.most_steps)
        return latency, steps

    def _work(self, job: str) -> Work:
        return replace(self.options.work, seed=self.options.seed + JOBS.index(job))

    def _run(self, name: str, jobs: Sequence[str], steps: int, latency: float) -> Run:
        self._runs += 1
        folder = self.folder / f"{self._runs}-{name}"
        folder.mkdir()
        self._await_empty_devices()
        title = f"{' and '.join(jobs)}: by turns" if len(jobs) > 1 else f"{name}: alone"
        with ExitStack() as stack:
            socket = self.folder / f"{self._runs}.sock"  # a short path: sockets have a limit
            verifier = stack.enter_context(
                Child("verifier", "timeslice.demo.verifier", [str(socket), str(latency)], folder, {})
            )
            verifier.await_line()
            children, watches = [], []
            for job in jobs:
                spec = self._spec(job, steps, socket, folder, _WAIT_S + latency)
                environment = {"TIMESLICE_JOB": job, "TIMESLICE_URL": self.local.url}
                child = Child(f"job-{job}", "timeslice.demo.job", [spec.model_dump_json()], folder, environment)
                children.append(stack.enter_context(child))
                watches.append(Watch(job, spec.log, steps))
            for child in children:
                child.await_line()
            self._new_events()  # what happened before is not this run's
            for child in children:
                child.go()
            events: list[Event] = []
            running = children
            while running:
                time.sleep(_LOOK_S)
                running = [child for child in children if child.running()]
                verifier.running()
                self.local.check()
                self.progress.show(title, watches)
                events += self._new_events()
            logs = {job: read_log(job, folder / f"{job}.jsonl") for job in jobs}
        run = Run(name, logs, tuple(events), self._clock_offset())
        last = ", ".join(f"{job} {log.rewards[0]:.2f} to {log.rewards[-1]:.2f}" for job, log in logs.items())
        self.progress.say(f"{title}: {run.wall_s:.1f} s, {len(run.swaps)} swaps, reward {last}")
        return run

    def _spec(self, job: str, steps: int, verifier: Path, folder: Path, wait_s: float) -> Spec:
        return Spec(
            job=job,
            work=self._work(job),
            steps=steps,
            devices=self.devices,
            verifier=verifier,
            log=folder / f"{job}.jsonl",
            staleness=self.options.staleness if self.options.mode == "async" else None,
            channel=self.options.channel(job),
            wait_s=wait_s,
        )

    def _new_events(self) -> list[Event]:
        """The events of both groups since the last call. Read often, for the streams keep only the newest."""
        client: Any = self.driver.client
        found = []
        for group in self.options.groups:
            after = self._last_event[group]
            read = partial(client.xrange, self.keys.group(group).events, f"({after}" if after else "-")
            for entry, fields in self.driver.retry(read):
                self._last_event[group] = text(entry)
                found.append(decode(group, text(entry), {text(k): text(v) for k, v in fields.items()}))
        return sorted(found, key=lambda event: event.at_ms)

    def _await_empty_devices(self) -> None:
        """Wait until the agent has seen the jobs of the run before end: that is not this run's cost."""
        until = time.monotonic() + _SETTLE_S
        for group in self.options.groups:
            while left := self.driver.view(self.keys.group(group)).resident:
                if time.monotonic() > until:
                    raise TimeSliceError(
                        f"group {group}: job {left[0]} ended; {_SETTLE_S:g} s later its state still counts",
                        group=group,
                        job=left[0],
                    )
                time.sleep(0.05)

    def _clock_offset(self) -> float:
        """Monotonic clock minus the server's."""
        seconds, micros = self.driver.retry(self.driver.client.time)
        return time.monotonic() - (seconds + micros / 1e6)

    def _why(self, group: str) -> str:
        view = self.driver.view(self.keys.group(group))
        if view.reason:
            return f"{view.phase}, {view.reason}"
        return f"job {view.holder} holds it" if view.holder else view.phase


def _sizes_of(work: Work) -> dict[str, Any]:
    return {
        "task": f"a+b, a-b and a*b modulo {work.modulus}, one token each",
        "modulus": work.modulus,
        "width": work.width,
        "prompts": work.prompts,
        "samples_of_each": work.samples,
        "tokens_of_each": TOKENS,
        "trained_parameters": work.trained,
        "frozen_parameters": work.width**2,
    }


def _versions(binary: str) -> dict[str, str]:
    major, minor = server_version(binary)
    return {
        "timeslice": version("timeslice-rl"),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "server": f"{Path(binary).name} {major}.{minor}",
    }
