"""The jobs of a torture run: seats of processes on nodes, taken by one job after another."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from timeslice.torture.faults import groups_of
from timeslice.torture.processes import Child
from timeslice.torture.scene import Scene
from timeslice.torture.stage import GANG_GROUP, GANG_RANKS, JOB_BYTES, LOCK_GROUP, Seat, seats

LIVES_S = (12.0, 40.0)  # of a job


class Traffic:
    """Keeps every seat taken until it is told to drain. A job that was killed comes again under its id."""

    def __init__(self, scene: Scene, work: Path, seed: int, count: int) -> None:
        self._scene, self._seed = scene, seed
        self._drain = work / "drain"
        self._random = random.Random(f"{seed}/jobs")  # noqa: S311 - load needs no secrecy
        self._jobs: dict[int, tuple[str, float]] = {}  # pair of seats -> its job, and until when that lives
        self._made = 0
        self._seats: dict[str, Seat] = {}  # name of a process -> its seat
        for seat in seats(count):
            self._take(seat)

    def again(self, done: list[Child]) -> None:
        """Give the seats of processes that ended for good to new jobs."""
        for child in done:
            if child.name in self._seats and not self._drain.exists():
                self._take(self._seats.pop(child.name))

    def drain(self) -> None:
        """Jobs finish what they wait for, and end."""
        self._drain.touch()

    @property
    def flows(self) -> bool:
        """Every seat's process has begun to ask."""
        labels = [child.label for child in self._scene.processes.children if child.role == "job"]
        return all((self._scene.parts / f"{label}.jsonl").exists() for label in labels)

    @property
    def over(self) -> bool:
        """No job's process is left."""
        return not any(child.role == "job" for child in self._scene.processes.children)

    def _take(self, seat: Seat) -> None:
        now = time.monotonic()
        job, until = self._jobs.get(seat.pair, ("", 0.0))
        if until <= now:
            self._made += 1
            job, until = f"job{self._made}", now + self._random.uniform(*LIVES_S)
            self._jobs[seat.pair] = (job, until)
        scene = self._scene
        name = f"{job}-{seat.node}"

        def spec(label: str) -> dict[str, Any]:
            return {
                "label": label,
                "job": job,
                "node": seat.node,
                "url": scene.proxied if seat.proxied else scene.url,
                "history": str(scene.parts),
                "drain": str(self._drain),
                "seed": f"{self._seed}/{label}",
                "asynchronous": seat.asynchronous,
                "devices": {group: str(path) for group, path in scene.devices(seat.node).items()},
                "bytes": JOB_BYTES,
                "lock_group": LOCK_GROUP,
                "until": until,
                "knobs": str(scene.world.knobs),
                "everywhere": {
                    group: {node: str(path) for node, path in nodes.items()}
                    for group, nodes in scene.everywhere.items()
                    if seat.node in nodes
                },
                "pids": str(scene.pids),
                **({} if seat.rank is None else {"rank": seat.rank, "ranks": GANG_RANKS, "gang_group": GANG_GROUP}),
            }

        self._seats[name] = seat
        groups = groups_of("job", seat.node)
        environment = scene.environment(seat.node)
        scene.processes.add(Child(name, "job", spec, environment, job=job, node=seat.node, groups=groups))
