"""The checker is checked: a torture run of the product with one mistake in it finds that mistake."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.torture.hunting import Aim, Hunt, as_flush, at_holder, at_waiter, hunt, stray_order, unaimed
from timeslice.torture.faults import Deed, World
from timeslice.torture.mutants import MUTANTS, NAMES
from timeslice.torture.schedule import Planned

TRAFFIC = ("kill-job",)  # a kill now and then
HUNTS = {
    "no-fencing": Hunt(60, ("drop",), stray_order),
    "early-grant": Hunt(60, TRAFFIC),
    "lost-wake-up": Hunt(6, TRAFFIC),
    "last-in-first-out": Hunt(60, TRAFFIC),
    "dropped-restore": Hunt(60, TRAFFIC),
    "no-confirmation": Hunt(110, ("stop-job",), at_waiter, lasts_s=1.0),
    "no-reclaim": Hunt(6, ("kill-job",), at_holder),
    "early-expiry": Hunt(60, ("clock",)),
    "reused-tokens": Hunt(60, ("drop",), as_flush),
    "first-lease-unchecked": Hunt(60, ("revoke",)),
    "unseen-is-out": Hunt(110, ("blind-agent",)),
    "wiped-is-nobodys": Hunt(110, ("title",)),
    "refused-is-ended": Hunt(110, ("blind-agent",)),
    "order-given-once": Hunt(40, ("trim",)),
    "no-exclusion": Hunt(60, TRAFFIC),
}


@pytest.mark.parametrize("name", NAMES)
def test_the_product_still_has_what_the_mutant_changes(name: str) -> None:
    """A change of the product can't silently make a mutant into none, or into one that can't run."""
    code = f"from timeslice.torture import mutants; mutants.apply({name!r}); mutants.loader.load_all()"
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
    """What is aimed at the mutants finds nothing in the product as it is."""

    def any_of_them(aim: Aim, world: World, planned: Planned, now: float) -> Deed | None:
        mine = {"drop": stray_order, "stop-job": at_holder if planned.pick < 0.5 else at_waiter}
        return mine.get(planned.kind, unaimed)(aim, world, planned, now)

    what = Hunt(12, ("drop", "stop-job", "kill-job", "flush", "clock"), any_of_them)
    report = hunt(tmp_path, monkeypatch, what, "", ())
    assert report.violations == []
    assert report.grants > 0
    assert report.swaps > 0
