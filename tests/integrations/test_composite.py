"""Several callbacks in the one place that a framework has."""

from __future__ import annotations

import pytest

from tests.integrations.conftest import Pools
from timeslice.integrations.phases import CompositeCallback, Context, PhaseCallback

CALLS = ("begin", "end", "close")


class Noting:
    """Notes what it is told, and fails where it is asked to."""

    def __init__(self, name: str, notes: list[str], fails: str = "") -> None:
        self._name, self._notes, self._fails = name, notes, fails

    def _note(self, call: str, *told: object) -> None:
        self._notes.append(" ".join(map(str, (self._name, call, *told))))
        if call == self._fails:
            raise RuntimeError(f"{self._name} can't {call}")

    def on_phase_begin(self, phase: str, role: str, context: Context | None = None) -> None:
        self._note("begin", phase, role, context)

    def on_phase_end(self, phase: str, role: str, context: Context | None = None) -> None:
        self._note("end", phase, role, context)

    def close(self) -> None:
        self._note("close")


def test_begin_in_order_and_end_in_reverse() -> None:
    """All are told all that the framework tells."""
    notes: list[str] = []
    composite = CompositeCallback([Noting("a", notes), Noting("b", notes)])
    composite.on_phase_begin("train", "trainer", {"rollout_id": 1})
    composite.on_phase_end("train", "trainer")
    composite.close()
    assert notes == [
        "a begin train trainer {'rollout_id': 1}",
        "b begin train trainer {'rollout_id': 1}",
        "b end train trainer None",
        "a end train trainer None",
        "b close",
        "a close",
    ]


def test_one_that_fails_to_begin_ends_those_before_it() -> None:
    """Nothing stays begun, and those behind it are not asked."""
    notes: list[str] = []
    composite = CompositeCallback([Noting("a", notes), Noting("b", notes, "begin"), Noting("c", notes)])
    with pytest.raises(RuntimeError, match="b can't begin"):
        composite.on_phase_begin("train", "trainer")
    assert notes == ["a begin train trainer None", "b begin train trainer None", "a end train trainer None"]


def test_one_that_fails_to_end_keeps_no_other_from_it(pools: Pools) -> None:
    """A profiler that fails does not keep the devices: the groups are free, and its error comes through."""
    notes: list[str] = []
    for fails in ("end", "close"):
        composite = CompositeCallback([PhaseCallback(), Noting("profiler", notes, fails)])
        composite.on_phase_begin("train", "both")
        assert pools.holders() == ("mine", "mine")
        with pytest.raises(RuntimeError, match=f"profiler can't {fails}"):
            composite.on_phase_end("train", "both") if fails == "end" else composite.close()
        assert pools.holders() == ("", "")
