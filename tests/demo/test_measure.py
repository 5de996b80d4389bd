"""What the demo makes of logs and events."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from timeslice.demo.job import GROUPS, SAMPLERS, TRAINERS, Log
from timeslice.demo.measure import (
    Body,
    JobLog,
    Run,
    bytes_moved,
    faults,
    overlaps,
    read_log,
    spread,
    summary,
    tokens_rise,
)
from timeslice.demo.table import tables
from timeslice.demo.timeline import draw
from timeslice.events import Event, JobRestored, JobSuspended, SwapFinished


def body(job: str, group: str, entered: float, left: float, token: int, *, asked: float | None = None) -> Body:
    return Body(job, group, "x", 0, token, entered if asked is None else asked, entered, left, 0, 0, "no-op")


def job_log(name: str, begins: float, ends: float, *bodies: Body, rewards: tuple[float, ...] = (0.5,)) -> JobLog:
    return JobLog(name, begins, ends, bodies, rewards, "00", dict.fromkeys(GROUPS, 100))


def run(name: str, *jobs: JobLog, events: tuple[Event, ...] = ()) -> Run:
    return Run(name, {job.job: job for job in jobs}, events)


def suspended(job: str, size: int) -> JobSuspended:
    return JobSuspended(id="1-1", group=TRAINERS, at_ms=1, node="n", job=job, bytes=size)


def restored(job: str) -> JobRestored:
    return JobRestored(id="1-1", group=TRAINERS, at_ms=1, node="n", job=job, bytes=0)


ALONE = (
    run("a", job_log("a", 10, 14, body("a", SAMPLERS, 10, 11, 1), body("a", TRAINERS, 13, 14, 2))),
    run("b", job_log("b", 20, 24, body("b", SAMPLERS, 20, 21, 3), body("b", TRAINERS, 23, 24, 4))),
)
SLICED = run(
    "sliced",
    job_log("a", 30, 34, body("a", SAMPLERS, 30, 31, 5), body("a", TRAINERS, 33, 34, 6)),
    job_log("b", 30, 35, body("b", SAMPLERS, 31.5, 32.5, 7, asked=30), body("b", TRAINERS, 34, 35, 8)),
    events=(SwapFinished(id="1-1", group=SAMPLERS, at_ms=31_500, swap=1, swap_ms=400), suspended("a", 1000)),
)


RUN_AS = {"mode": "sync", "verifier_latency_s": 0.5}


def test_gain_and_bound_compare_with_one_after_the_other() -> None:
    """Two jobs of 4 s each in 5 s: gain 1.6; with a longest job of 4 s it could have been 2."""
    found = summary(ALONE, SLICED)
    assert found["gain"] == pytest.approx(1.6)
    assert found["gain_bound"] == pytest.approx(2.0)
    assert found["alone"]["wall_s"] == pytest.approx(8)
    assert found["alone"]["jobs"]["a"]["duty"] == {SAMPLERS: 0.25, TRAINERS: 0.25}
    assert found["alone"]["busy"] == pytest.approx(0.5)
    assert found["sliced"]["duty"] == {SAMPLERS: 0.4, TRAINERS: 0.4}
    assert found["body_inflation"] == pytest.approx(1.0)
    assert (found["swaps"], found["bytes_moved"]) == (1, 1000)
    assert found["wait_s"][SAMPLERS]["max_s"] == pytest.approx(1.5)
    assert faults(found) == []


def test_the_busiest_group_bounds_the_gain_too() -> None:
    """Where one group works nearly all the time, sharing can't gain more than what is idle in it."""
    alone = tuple(
        run(
            name,
            job_log(
                name,
                start,
                start + 4,
                body(name, SAMPLERS, start, start + 0.5, token),
                body(name, TRAINERS, start + 1, start + 4, token),
            ),
        )
        for name, start, token in (("a", 0, 1), ("b", 10, 2))
    )
    found = summary(alone, SLICED)
    assert found["gain_bound"] == pytest.approx(8 / 6, abs=1e-3)
    assert found["gain_limits"]["busiest_group"] == TRAINERS


def test_phases_that_overlap_in_a_group_are_counted() -> None:
    """Also within one job, and where one lies inside the other; other groups and touching ends don't count."""
    clean = [body("a", TRAINERS, 0, 2, 1), body("b", TRAINERS, 2, 3, 2), body("b", SAMPLERS, 0, 9, 1)]
    assert overlaps(clean) == 0
    assert overlaps([*clean, body("a", TRAINERS, 1, 1.5, 3)]) == 1
    assert overlaps([*clean, body("b", TRAINERS, 1, 2.5, 3)]) == 2


def test_tokens_have_to_rise_in_the_order_of_entering() -> None:
    """Equal tokens are as wrong as falling ones; groups count for themselves."""
    rising = [body("a", TRAINERS, 2, 3, 9), body("b", TRAINERS, 0, 1, 5), body("a", SAMPLERS, 5, 6, 1)]
    assert tokens_rise(rising)
    assert not tokens_rise([*rising, body("a", TRAINERS, 4, 5, 9)])
    assert not tokens_rise([*rising, body("a", TRAINERS, 4, 5, 8)])


def test_a_restore_moves_what_the_suspend_moved() -> None:
    """A first load moves nothing; each suspend and restore moves the job's bytes."""
    assert bytes_moved([restored("a"), suspended("a", 10), suspended("b", 7), restored("a"), restored("b")]) == 34


def test_spread_of_few_and_many() -> None:
    """Median and 95th percentile, also of nothing and of one."""
    assert spread([])["count"] == 0
    assert spread([2.0]) == {"count": 1, "median_s": 2.0, "p95_s": 2.0, "max_s": 2.0}
    found = spread(float(each) for each in range(101))
    assert (found["median_s"], found["p95_s"], found["max_s"]) == (50, 95, 100)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rewards": (0.5000000001,)}, "other rewards"),
        ({"sha256": "01"}, "other rewards or parameters"),
        ({"bodies": (body("a", SAMPLERS, 30, 32, 5), body("a", TRAINERS, 33, 34, 6))}, "inside the same group"),
        ({"bodies": (body("a", SAMPLERS, 30, 31, 9), body("a", TRAINERS, 33, 34, 6))}, "tokens did not rise"),
    ],
)
def test_a_fault_is_said(wrong: dict[str, object], said: str) -> None:
    """The demo fails when slicing changed the mathematics or let two in."""
    jobs = dict(SLICED.jobs)
    jobs["a"] = replace(jobs["a"], **wrong)  # type: ignore[arg-type]
    found = faults(summary(ALONE, run("sliced", *jobs.values(), events=SLICED.events)))
    assert len(found) == 1
    assert said in found[0]


def test_no_swap_is_a_fault_too() -> None:
    """A run in which nothing had to move shows nothing."""
    assert "nothing was swapped" in faults(summary(ALONE, run("sliced", *SLICED.jobs.values())))[0]


def test_a_log_is_read_as_written(tmp_path: Path) -> None:
    """What a job writes comes back with every bit of its rewards."""
    path = tmp_path / "a.jsonl"
    with path.open("w") as file:
        log = Log(file)
        log.write("begins")
        log.write("asks", group=SAMPLERS, phase="generate", step=0)
        values = {name: getattr(ALONE[0].bodies[0], name) for name in Body.__dataclass_fields__ if name != "job"}
        log.write("body", **values)
        log.write("ends")
        log.write("result", rewards=[1 / 3], sha256="ff", bytes={SAMPLERS: 3})
    found = read_log("a", path)
    assert found.bodies == (ALONE[0].bodies[0],)
    assert found.rewards == (1 / 3,)
    assert found.ends > found.begins


def test_the_picture_is_there_in_both_formats(tmp_path: Path) -> None:
    """An SVG that parses, a PNG that is one, and the same bytes again for the same runs."""
    paths = [tmp_path / "x.svg", tmp_path / "x.png"]
    draw(ALONE, SLICED, 1.6, paths)
    first = paths[0].read_bytes()
    assert ET.fromstring(first).tag.endswith("svg")
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    draw(ALONE, SLICED, 1.6, paths)
    assert paths[0].read_bytes() == first


def test_the_table_says_what_matters() -> None:
    """Gain, bound, equality and that the devices are emulated are readable without the JSON."""
    report = summary(ALONE, SLICED) | RUN_AS | {"machine": {"cpus": 2, "load_before": 0.5}}
    text = "\n".join(tables(report))
    for expected in (
        "gain 1.60",
        "longer in sum than alone",
        "the bound is 2.00",
        "equal to the bit",
        "emulated",
        "0 overlaps",
        "tokens rise",
    ):
        assert expected in text
    assert "disturbed" not in text
    json.dump(report, io.StringIO())


def test_trainers_alone_are_told_apart_where_only_they_are_shared() -> None:
    """Asynchronous: the table has no samplers, and says how much the trainers are in use alone and shared."""
    alone = tuple(
        run(name, job_log(name, start, start + 4, body(name, TRAINERS, start + 1, start + 2, token)))
        for name, start, token in (("a", 0, 1), ("b", 10, 2))
    )
    bodies = (("a", 30, body("a", TRAINERS, 31, 32, 3)), ("b", 30, body("b", TRAINERS, 32, 33, 4)))
    sliced = run("sliced", *(job_log(name, at, at + 4, one) for name, at, one in bodies), events=SLICED.events)
    report = summary(alone, sliced) | RUN_AS | {"mode": "async", "machine": {"cpus": 2, "load_before": 0.5}}
    text = "\n".join(tables(report))
    assert report["groups"] == [TRAINERS]
    assert "the trainers are in use 25% of the time by one job after the other, 50% shared" in text
    assert SAMPLERS not in text


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"machine": {"cpus": 2, "load_before": 2.5}}, "before it began 2.5 processes wanted 2 CPUs"),
        ({"body_inflation": 1.3}, "the same phases took 30% longer than alone"),
    ],
)
def test_a_disturbed_run_says_so(found: dict[str, object], said: str) -> None:
    """On a busy machine the reader learns not to trust the numbers, in one line below them."""
    report = summary(ALONE, SLICED) | RUN_AS | {"machine": {"cpus": 2, "load_before": 2.0}} | found
    assert list(tables(report))[-1].startswith(f"disturbed: {said}")
