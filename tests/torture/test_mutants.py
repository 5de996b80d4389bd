"""The checker is checked: a torture run of the product with one mistake in it finds that mistake."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.torture.hunting import Hunt, at_holder, at_waiter, hunt, until_inside
from timeslice.torture.mutants import MUTANTS, NAMES

CALM = ("kill-job",)  # one early kill, and traffic
HUNTS = {
    "no-fencing": Hunt(40, ("stop-agent",), aim=until_inside, lasts_s=5.0),
    "early-grant": Hunt(4, CALM),
    "lost-wake-up": Hunt(3, CALM),
    "last-in-first-out": Hunt(4, CALM),
    "dropped-restore": Hunt(4, CALM),
    "no-confirmation": Hunt(40, ("stop-job",), aim=at_waiter, lasts_s=6.0),
    "no-reclaim": Hunt(40, ("stop-job",), aim=at_holder, lasts_s=6.0),
    "early-expiry": Hunt(20, ("clock",)),
    "reused-tokens": Hunt(20, ("flush",)),
    "no-exclusion": Hunt(10, CALM),
}


@pytest.mark.parametrize("name", NAMES)
def test_the_product_still_has_what_the_mutant_changes(name: str) -> None:
    """A change of the product can't silently make a mutant into none."""
    code = f"from timeslice.torture import mutants; mutants.apply({name!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", NAMES)
def test_a_mutant_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a rule that is about its mistake."""
    rules = MUTANTS[name].rules
    report = hunt(tmp_path, monkeypatch, HUNTS[name], name, rules)
    assert {violation.rule for violation in report.violations} & rules


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_product_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same run, with all that is aimed, finds nothing in the product as it is."""
    faults = ("stop-job", "stop-agent", "kill-job", "flush", "clock")
    report = hunt(tmp_path, monkeypatch, Hunt(15, faults, aim=at_holder), "", ())
    assert report.violations == []
    assert report.grants > 0
    assert report.swaps > 0
