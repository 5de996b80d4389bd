"""What the logs of the jobs and the events of the groups say about the runs. All times in seconds, monotonic clock."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from timeslice.demo.job import GROUPS
from timeslice.events import Event, JobRestored, JobSuspended, SwapFinished

_INFLATED = 1.25  # body_inflation above this means that the jobs were short of something else than devices


@dataclass(frozen=True)
class Body:
    """One phase of a job inside a hold, as the job itself logged it."""

    job: str
    group: str
    phase: str
    step: int
    token: int
    asked: float
    entered: float
    left: float
    waited_s: float
    swap_s: float
    how: str

    @property
    def seconds(self) -> float:
        return self.left - self.entered


@dataclass(frozen=True)
class JobLog:
    """One process of a job, from its log."""

    job: str
    begins: float
    ends: float
    bodies: tuple[Body, ...]
    rewards: tuple[float, ...]
    sha256: str
    bytes: dict[str, int]  # on each group's device
    sampled_s: tuple[float, ...] = ()  # of each batch that samplers of its own generated

    @property
    def wall_s(self) -> float:
        return self.ends - self.begins


@dataclass(frozen=True)
class Swap:
    """One swap that went well, as its group's events tell it."""

    group: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Run:
    """One or more jobs at work at the same time."""

    name: str
    jobs: dict[str, JobLog]
    events: tuple[Event, ...] = ()
    clock_offset_s: float = 0.0  # monotonic clock minus the server's
    swaps: tuple[Swap, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "swaps", tuple(self._find_swaps()))

    def _find_swaps(self) -> Iterable[Swap]:
        for event in self.events:
            if isinstance(event, SwapFinished):
                end = event.at_ms / 1000 + self.clock_offset_s
                yield Swap(event.group, end - event.swap_ms / 1000, end)

    @property
    def begins(self) -> float:
        return min(job.begins for job in self.jobs.values())

    @property
    def wall_s(self) -> float:
        return max(job.ends for job in self.jobs.values()) - self.begins

    @property
    def bodies(self) -> list[Body]:
        return sorted((body for job in self.jobs.values() for body in job.bodies), key=lambda body: body.entered)

    def busy_s(self, group: str) -> float:
        """Time that jobs spent inside holds of the group."""
        return sum(body.seconds for body in self.bodies if body.group == group)

    @property
    def groups(self) -> tuple[str, ...]:
        """Those that were held."""
        held = {body.group for body in self.bodies}
        return tuple(group for group in GROUPS if group in held)

    def duty(self) -> dict[str, float]:
        return {group: self.busy_s(group) / self.wall_s for group in self.groups}


def read_log(job: str, path: Path) -> JobLog:
    """A finished job's log."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    at = {line["kind"]: line["at"] for line in lines}
    result = next(line for line in lines if line["kind"] == "result")
    names = Body.__dataclass_fields__.keys() - {"job"}
    bodies = [Body(job=job, **{name: line[name] for name in names}) for line in lines if line["kind"] == "body"]
    return JobLog(
        job,
        at["begins"],
        at["ends"],
        tuple(bodies),
        tuple(result["rewards"]),
        result["sha256"],
        result["bytes"],
        tuple(line["seconds"] for line in lines if line["kind"] == "sampled"),
    )


def overlaps(bodies: Sequence[Body]) -> int:
    """Pairs of phases of one group that ran at the same time, in whatever jobs."""
    pairs = itertools.combinations(sorted(bodies, key=lambda body: body.entered), 2)
    return sum(one.group == other.group and other.entered < one.left for one, other in pairs)


def tokens_rise(bodies: Sequence[Body]) -> bool:
    """Whether in each group every phase had a higher token than all that were entered before it."""
    ordered = sorted(bodies, key=lambda body: body.entered)
    for group in GROUPS:
        tokens = [body.token for body in ordered if body.group == group]
        if any(later <= earlier for earlier, later in itertools.pairwise(tokens)):
            return False
    return True


def bytes_moved(events: Iterable[Event]) -> int:
    """Bytes of every suspend and every restore; a restore moves what the suspend before it had moved."""
    saved: dict[tuple[str, str, str], int] = {}
    moved = 0
    for event in events:
        if isinstance(event, JobSuspended):
            saved[event.group, event.node, event.job] = event.bytes
            moved += event.bytes
        elif isinstance(event, JobRestored):
            moved += saved.get((event.group, event.node, event.job), 0)
    return moved


def spread(values: Iterable[float]) -> dict[str, float | int]:
    """Count, median, 95th percentile and maximum of some seconds."""
    ordered = sorted(values)
    if not ordered:
        return {"count": 0, "median_s": 0.0, "p95_s": 0.0, "max_s": 0.0}
    p95 = statistics.quantiles(ordered, n=20, method="inclusive")[-1] if len(ordered) > 1 else ordered[0]
    return {
        "count": len(ordered),
        "median_s": round(statistics.median(ordered), 4),
        "p95_s": round(p95, 4),
        "max_s": round(ordered[-1], 4),
    }


def inflation(alone: Sequence[Body], sliced: Sequence[Body]) -> float:
    """How much longer the same phases took when the devices were shared."""
    return sum(body.seconds for body in sliced) / sum(body.seconds for body in alone)


def summary(alone: Sequence[Run], sliced: Run) -> dict[str, Any]:
    """The comparison, as it goes into the JSON."""
    one_after_the_other = sum(run.wall_s for run in alone)
    groups = sliced.groups
    bodies_alone = [body for run in alone for body in run.bodies]
    jobs_alone = {name: job for run in alone for name, job in run.jobs.items()}
    busy = {group: sum(run.busy_s(group) for run in alone) for group in groups}
    busiest = max(busy, key=busy.__getitem__)
    longest = max(run.wall_s for run in alone)
    every = [*bodies_alone, *sliced.bodies]
    return {
        "groups": list(groups),
        "alone": {
            "wall_s": round(one_after_the_other, 3),
            "duty": _rounded({group: busy[group] / one_after_the_other for group in groups}),
            "busy": round(sum(busy.values()) / one_after_the_other, 4),
            "jobs": {run.name: _alone(run) for run in alone},
        },
        "sliced": {
            "wall_s": round(sliced.wall_s, 3),
            "duty": _rounded(sliced.duty()),
            "jobs": {name: {"wall_s": round(job.wall_s, 3)} for name, job in sliced.jobs.items()},
        },
        "gain": round(one_after_the_other / sliced.wall_s, 4),
        # No order of the phases is shorter than the longest job or than all the work of the busiest group.
        "gain_bound": round(one_after_the_other / max(longest, busy[busiest]), 4),
        "gain_limits": {
            "longest_job_s": round(longest, 3),
            "busiest_group": busiest,
            "busiest_s": round(busy[busiest], 3),
        },
        "body_inflation": round(inflation(bodies_alone, sliced.bodies), 4),
        "body_inflation_by_group": {
            group: round(
                inflation(
                    [body for body in bodies_alone if body.group == group],
                    [body for body in sliced.bodies if body.group == group],
                ),
                4,
            )
            for group in groups
        },
        "body_s": {
            group: {
                "alone": spread(body.seconds for body in bodies_alone if body.group == group),
                "sliced": spread(body.seconds for body in sliced.bodies if body.group == group),
            }
            for group in groups
        },
        "swaps": len(sliced.swaps),
        "swaps_alone": sum(len(run.swaps) for run in alone),
        "swap_s": {group: spread(swap.seconds for swap in sliced.swaps if swap.group == group) for group in groups},
        "bytes_moved": bytes_moved(sliced.events),
        # From asking to inside: the queue and the swap together.
        "wait_s": {
            group: spread(body.entered - body.asked for body in sliced.bodies if body.group == group)
            for group in groups
        },
        "wait_alone_s": spread(body.entered - body.asked for body in bodies_alone),
        "rewards_equal": all(sliced.jobs[name].rewards == job.rewards for name, job in jobs_alone.items()),
        "parameters_equal": all(sliced.jobs[name].sha256 == job.sha256 for name, job in jobs_alone.items()),
        "rewards": {
            name: {"alone": list(job.rewards), "sliced": list(sliced.jobs[name].rewards)}
            for name, job in jobs_alone.items()
        },
        "overlaps": overlaps(sliced.bodies) + sum(overlaps(run.bodies) for run in alone),
        "tokens_monotonic": tokens_rise(every),
        "state_bytes": {name: job.bytes for name, job in sliced.jobs.items()},
    }


def _alone(run: Run) -> dict[str, Any]:
    duty = run.duty()
    return {"wall_s": round(run.wall_s, 3), "duty": _rounded(duty), "busy": round(sum(duty.values()), 4)}


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items()}


def disturbance(found: dict[str, Any]) -> str:
    """Why the numbers say more about the machine than about the method, or ''."""
    machine, why = found["machine"], []
    if machine["load_before"] > machine["cpus"]:
        why.append(f"before it began {machine['load_before']:.1f} processes wanted {machine['cpus']} CPUs")
    if found["body_inflation"] > _INFLATED:
        why.append(f"the same phases took {found['body_inflation'] - 1:.0%} longer than alone")
    if not why:
        return ""
    return f"disturbed: {' and '.join(why)}, so the numbers say more about this machine than about the method"


def faults(found: dict[str, Any]) -> list[str]:
    """What must not be: a demo that shows one of these has failed."""
    said = []
    if not found["rewards_equal"] or not found["parameters_equal"]:
        said.append("the sliced jobs computed other rewards or parameters than alone")
    if found["overlaps"]:
        said.append(f"two phases were inside the same group at once, {found['overlaps']} times")
    if not found["tokens_monotonic"]:
        said.append("fencing tokens did not rise")
    if not found["swaps"]:
        said.append("nothing was swapped, so nothing was shown")
    return said
