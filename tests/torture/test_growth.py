"""Nothing grows: how a series is judged, and a soak run of a whole system."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from timeslice.cli.main import main
from timeslice.torture import growth
from timeslice.torture.growth_series import judge, judge_all


def _rising(by: float, start: float = 0.0) -> list[float]:
    return [start + by * n for n in range(40)]


@pytest.mark.parametrize(
    ("name", "values", "level"),
    [
        ("server: {g1}:jobs", [3.0, 6.0, 9.0, 3.0] * 10, True),
        ("server: {g1}:jobs", _rising(1.0), False),
        ("server: {g1}:events", _rising(50.0), True),  # it fills up to its cap
        ("server: {g1}:events", _rising(100.0), False),
        ("agent n1: memory (B)", [5e7 + 1e5 * (n % 3) for n in range(40)], True),
        ("agent n1: memory (B)", _rising(3e5, 5e7), False),
        ("state of n1: size (B on disk)", _rising(200.0, 14e3), False),
        ("agent n1: open files", [9.0] * 10 + [12.0] * 30, True),
    ],
)
def test_a_series_levels_off_or_grows(name: str, values: list[float], level: bool) -> None:
    """What swings, fills up to its cap or settles is level; what rises with use is not, and is called by its name."""
    assert judge(name, values).level is level


def test_a_key_that_comes_late_is_a_series_too() -> None:
    """What was not there at the start counts as nothing then."""
    samples = [{"keys": 1.0} for _ in range(20)] + [{"keys": 1.0, "others:new": float(n)} for n in range(20)]
    assert {series.name: series.level for series in judge_all(samples)} == {"keys": True, "others:new": False}


def _verdict(level: bool) -> growth.GrowthReport:
    series = (judge("agent n1: memory (B)", [1.0, 1.0, 1.0, 1.0] if level else _rising(3e7, 2.8e7)),)
    growing = tuple(each.name for each in series if not each.level)
    return growth.GrowthReport(
        swaps=97, jobs=6, holds=7, timeouts=7, seconds=1.0, samples=4, expiring=2, series=series, growing=growing,
        level=level,
    )  # fmt: skip


@pytest.mark.parametrize("level", [True, False])
def test_the_command_tells_and_fails_when_something_grew(
    level: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torture --swaps` shows what grew, with units, writes all series as JSON, and exits 1 naming what grew."""
    monkeypatch.setattr(growth, "run", lambda swaps, **_: _verdict(level) if swaps == 97 else None)
    result = CliRunner().invoke(main, ["torture", "--swaps", "97", "--json", str(tmp_path / "growth.json")])
    written = growth.GrowthReport.model_validate_json(
        (tmp_path / "growth.json").read_text().partition('"growth":')[2][:-3]
    )
    assert written == _verdict(level)
    assert ("agent n1: memory (B)" in result.stdout) is not level
    assert ("1.116 GiB" in result.stdout) is not level
    assert f"{0 if level else 1} grew" in " ".join(result.stdout.split())
    assert result.exit_code == (0 if level else 1)
    complaint = "did not level off over 97 swaps: agent n1: memory (B)"
    assert (complaint in str(result.exception) + result.output) is not level


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_hundreds_of_swaps_by_new_jobs_leave_nothing_behind(tmp_path: Path) -> None:
    """Two groups, two agents, two coordinators, a process for each job: keys, streams, hashes, memory, files and
    descriptors level off."""
    report = growth.run(400, folder=tmp_path, samples=16)
    assert report.growing == ()
    assert report.swaps >= 400
    assert report.jobs > 300
    assert report.holds == report.timeouts >= 400
    measured = {series.name for series in report.series}
    assert {"server: {g1}:jobs", "agent n2: memory (B)", "holder lock: open files", "state of n1: files"} <= measured
