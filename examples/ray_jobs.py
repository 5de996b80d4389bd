"""Two Ray jobs on one cluster share two emulated devices by turns, first each alone and then together.

Each job is a driver with a sampler actor and a trainer actor, which learn a little arithmetic with GRPO. The loop is
the same for both. Job a holds in its driver, and its actors move their own state when they are asked. Job b does
neither: its actors are shared, so each call waits for its group, and the agent moves their state from outside.

    python examples/ray_jobs.py
    python examples/ray_jobs.py --steps 10 --json ray.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import platform
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any

try:
    import ray
except ModuleNotFoundError:
    raise SystemExit(
        "this example needs Ray: in a checkout: pip install '.[ray,demo]', or run it by scripts/frameworks"
    ) from None
import numpy as np
import turns

import timeslice
from timeslice.arena import Arena
from timeslice.demo.grpo import Rollouts, Sampler, Trainer, Work
from timeslice.demo.job import allocator, state_bytes
from timeslice.demo.measure import bytes_moved
from timeslice.demo.processes import ONE_THREAD
from timeslice.demo.verifier import score
from timeslice.events import Event, SwapFinished, decode
from timeslice.integrations.ray import TimesliceActor, runtime_env, share
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import Keys
from timeslice.locks.scripts import text
from timeslice.up import LocalStack, private_environment

SAMPLERS, TRAINERS = GROUPS = ("samplers", "trainers")
JOBS = ("a", "b")
VERIFIER_S = 0.8  # what a reward model or a sandbox takes for a batch; the devices are free for others meanwhile
WAIT_S = 120.0

Hold = Callable[[str], AbstractContextManager[Any]]


class OnDevice(TimesliceActor):
    """An actor with its state on the emulated device of its group, and nowhere else."""

    def __init__(self, device: str, work: Work) -> None:
        self.work = work
        self.arena = Arena(Path(device), label=type(self).__name__)
        self.half: Any = None
        super().__init__()  # from now on the agent knows this process

    def ready(self) -> bool:
        return True

    def load(self, kind: Any) -> Any:
        """The first call loads; the group is held then, as it must be."""
        if self.half is None:
            self.half = kind(self.work, allocator(self.arena))
            self.half.load()
        return self.half


class SamplerActor(OnDevice):
    def generate(self, step: int, trained: Any) -> tuple[Rollouts, tuple[float, float]]:
        entered = time.monotonic()
        half = self.load(Sampler)
        if trained is not None:
            half.trained[:] = trained
        rollouts = half.generate(step)
        return rollouts, (entered, time.monotonic())


class TrainerActor(OnDevice):
    def train(self, rollouts: Rollouts, rewards: Any) -> tuple[Any, tuple[float, float]]:
        entered = time.monotonic()
        trained = self.load(Trainer).train(rollouts, rewards)
        return trained, (entered, time.monotonic())


class MovesItself:
    """The callbacks of an actor that moves its own state, here that of an arena."""

    arena: Arena

    def on_suspend(self, _mode: str, _tags: tuple[str, ...]) -> int:
        return self.arena.suspend()

    def on_restore(self, _tags: tuple[str, ...]) -> int:
        return self.arena.resume()

    def on_probe(self) -> tuple[str, int, int]:
        on_device = self.arena.bytes_on_device
        state = "suspended" if self.arena.state == "checkpointed" else "resident" if on_device else "absent"
        return state, on_device, self.arena.bytes_on_host


class MovingSampler(MovesItself, SamplerActor):
    pass


class MovingTrainer(MovesItself, TrainerActor):
    pass


def loop(work: Work, steps: int, sampler: Any, trainer: Any, hold: Hold) -> dict[str, Any]:
    """What a researcher's driver looks like."""
    rewards: list[float] = []
    spans: dict[str, list[tuple[float, float]]] = {group: [] for group in GROUPS}
    trained: Any = None
    begins = time.monotonic()
    for step in range(steps):
        with hold(SAMPLERS):
            rollouts, span = ray.get(sampler.generate.remote(step, trained))
        spans[SAMPLERS].append(span)
        scores = np.array(score(work.modulus, rollouts.prompts.tolist(), rollouts.tokens.tolist()), np.float64)
        time.sleep(VERIFIER_S)
        rewards.append(float(scores.mean()))
        with hold(TRAINERS):
            trained, span = ray.get(trainer.train.remote(rollouts, scores))
        spans[TRAINERS].append(span)
    wall = time.monotonic() - begins
    digest = hashlib.sha256(np.ascontiguousarray(trained).tobytes()).hexdigest()
    return {"rewards": rewards, "sha256": digest, "spans": spans, "begins": begins, "wall_s": wall}


def untouched(_group: str) -> AbstractContextManager[None]:
    """The hold of a driver that knows nothing of turns."""
    return nullcontext()


def driver(spec: dict[str, Any]) -> None:
    """The process of one job: connect, make the actors, run the loop when told to."""
    job, work = os.environ["TIMESLICE_JOB"], Work(**spec["work"])
    told = threading.Event()
    threading.Thread(target=_follow_starter, args=[told], daemon=True).start()
    ray.init(address=spec["address"], runtime_env=runtime_env(), log_to_driver=False, configure_logging=False)
    own = job == JOBS[0]
    kinds = (MovingSampler, MovingTrainer) if own else (SamplerActor, TrainerActor)
    sampler, trainer = (
        ray.remote(kind)
        .options(num_cpus=0, runtime_env=runtime_env(groups=[group]))
        .remote(spec["devices"][group], work)
        for kind, group in zip(kinds, GROUPS, strict=True)
    )
    if own:
        hold: Hold = partial(timeslice.hold, timeout=WAIT_S)
    else:
        hold = untouched
        sampler, trainer = share(sampler, SAMPLERS), share(trainer, TRAINERS)
    ray.get([sampler.ready.remote(), trainer.ready.remote()])
    print("ready", flush=True)
    if not told.wait(WAIT_S):
        raise SystemExit("nobody said that the others are ready, too")
    Path(spec["result"]).write_text(json.dumps(loop(work, spec["steps"], sampler, trainer, hold)))
    ray.shutdown()


def _follow_starter(told: threading.Event) -> None:
    """Begin when told to, and end with it: Ray would wait for long for a cluster that is gone."""
    while os.read(0, 64):
        told.set()
    os._exit(1)


class Cluster:
    """A server, coordinator and agent, and a small Ray cluster: all of this example's own, gone afterwards."""

    def __init__(self, folder: Path, stack: ExitStack, work: Work, steps: int) -> None:
        self.folder, self.stack, self.work, self.steps = folder, stack, work, steps
        stack.enter_context(private_environment(folder))
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            del os.environ[name]
        os.environ.update(ONE_THREAD)
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # Ray would write one into the home directory
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        logging.getLogger("ray").setLevel(logging.ERROR)
        # Room for the state of one job and a half.
        capacities = {group: size * 3 // 2 for group, size in state_bytes(work).items()}
        self.local = stack.enter_context(LocalStack(capacities))
        self.redis = SyncDriver(self.local.url)
        stack.callback(self.redis.close)
        stack.callback(ray.shutdown)
        info = ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=80 << 20,
            configure_logging=False,
            log_to_driver=False,
            _temp_dir=str(folder / "ray"),
        )
        turns.end_on_signals()  # again: Ray has just taken SIGTERM for itself, and would leave all the rest behind
        self.address = info.address_info["gcs_address"]

    def run(self, name: str, jobs: tuple[str, ...]) -> dict[str, Any]:
        """The jobs at the same time, until they end. Job -> what it found."""
        say(f"{name}: starting {'drivers' if len(jobs) > 1 else 'driver'} {' and '.join(jobs)}")
        results = {job: self.folder / f"{name}-{job}.json" for job in jobs}
        with ExitStack() as running:
            drivers = {job: running.enter_context(self._driver(job, results[job])) for job in jobs}
            for job, process in drivers.items():
                assert process.stdout is not None
                if process.stdout.readline() != b"ready\n":
                    raise self._failed(job)
            for process in drivers.values():
                assert process.stdin is not None
                process.stdin.write(b"go\n")
                process.stdin.flush()
            for job, process in drivers.items():
                if process.wait(WAIT_S * self.steps):
                    raise self._failed(job)
        found = {job: json.loads(path.read_text()) for job, path in results.items()}
        for job, result in found.items():
            say(f"{name}: job {job} took {result['wall_s']:.1f} s, reward {result['rewards'][-1]:.2f}")
        return found

    def events(self) -> list[Event]:
        """All that happened in both groups so far."""
        found = []
        for group in GROUPS:
            client: Any = self.redis.client
            for entry, fields in client.xrange(Keys().group(group).events):
                found.append(decode(group, text(entry), {text(k): text(v) for k, v in fields.items()}))
        return found

    def _driver(self, job: str, result: Path) -> AbstractContextManager[subprocess.Popen[bytes]]:
        spec = {
            "address": self.address,
            "devices": {group: str(self.folder / "run" / "devices" / group) for group in GROUPS},
            "work": {**vars(self.work), "seed": JOBS.index(job)},
            "steps": self.steps,
            "result": str(result),
        }
        command = [sys.executable, __file__, "--driver", json.dumps(spec)]
        environment = {**os.environ, "TIMESLICE_JOB": job, "TIMESLICE_URL": self.local.url}
        with (self.folder / f"{job}.log").open("wb") as log:
            pipe = subprocess.PIPE
            return subprocess.Popen(
                command,
                env=environment,
                stdin=pipe,
                stdout=pipe,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal is the example's to handle
            )

    def _failed(self, job: str) -> SystemExit:
        return SystemExit(f"the driver of job {job} failed:\n{(self.folder / f'{job}.log').read_text()[-3000:]}")


def run(steps: int) -> dict[str, Any]:
    """Each job alone, then both, and what came of it."""
    work = Work(modulus=4, width=1024, prompts=32, samples=16)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ts-ray-")))
        say("starting server, agent and Ray")
        cluster = Cluster(folder, stack, work, steps)
        alone = {job: cluster.run("alone", (job,))[job] for job in JOBS}
        before = len(cluster.events())
        together = cluster.run("by turns", JOBS)
        return judge(alone, together, cluster.events()[before:], cluster.local)


def judge(alone: dict[str, Any], together: dict[str, Any], events: list[Event], local: LocalStack) -> dict[str, Any]:
    """The numbers."""
    ends = max(result["begins"] + result["wall_s"] for result in together.values())
    sliced = ends - min(result["begins"] for result in together.values())
    one_after_the_other = sum(result["wall_s"] for result in alone.values())
    return {
        "device": "emulated",
        "jobs": {
            job: {
                "rewards": together[job]["rewards"],
                "sha256": together[job]["sha256"],
                "alone_s": round(alone[job]["wall_s"], 3),
                "sliced_s": round(together[job]["wall_s"], 3),
                "held_by": "driver" if job == JOBS[0] else "shared calls",
                "state_moved_by": "actor" if job == JOBS[0] else "agent",
            }
            for job in JOBS
        },
        "overlaps": overlaps(together),
        "results_equal": all(
            (alone[job]["rewards"], alone[job]["sha256"]) == (together[job]["rewards"], together[job]["sha256"])
            for job in JOBS
        ),
        "swaps": sum(isinstance(event, SwapFinished) for event in events),
        "bytes_moved": bytes_moved(events),
        "alone_s": round(one_after_the_other, 3),
        "sliced_s": round(sliced, 3),
        "gain": round(one_after_the_other / sliced, 4),
        "versions": {
            "timeslice": version("timeslice-rl"),
            "ray": ray.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "server": Path(local.server.binary).name,
        },
    }


def overlaps(together: dict[str, Any]) -> int:
    """How often two jobs computed on the same device at once, by the actors' own clocks."""
    return sum(
        one[0] < other[1] and other[0] < one[1]
        for group in GROUPS
        for first, second in combinations(together.values(), 2)
        for one in first["spans"][group]
        for other in second["spans"][group]
    )


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="of each job (default 4)")
    parser.add_argument("--json", type=turns.new_file, metavar="FILE", help="write the numbers there")
    parser.add_argument("--driver", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.driver:
        driver(json.loads(arguments.driver))
        return
    if arguments.steps < 1:
        parser.error("--steps: at least 1")
    turns.end_on_signals()
    report = run(arguments.steps)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    print(
        f"one after the other {report['alone_s']:.1f} s, by turns {report['sliced_s']:.1f} s, gain "
        f"{report['gain']:.2f} on emulated devices; {report['swaps']} swaps, {report['bytes_moved'] >> 20} MiB moved, "
        f"overlaps {report['overlaps']}, results equal: {report['results_equal']}"
    )
    sys.exit(0 if report["results_equal"] and not report["overlaps"] and report["swaps"] else 1)


if __name__ == "__main__":
    main()
