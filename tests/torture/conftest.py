"""Whole runs start dozens of processes, and one at a time is what a small machine can carry: they are spread over the
other tests, so that they do not all meet at the end."""

from __future__ import annotations

import pytest

_RUNS = ("test_run", "test_mutants", "test_growth", "test_hard_to_know")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    runs = [item for item in items if item.path.stem in _RUNS and item.get_closest_marker("slow")]
    first = set(runs)
    others = [item for item in items if item not in first]
    apart = len(others) // (len(runs) + 1)
    items.clear()
    for number, run in enumerate(runs):
        items += [*others[number * apart : (number + 1) * apart], run]
    items += others[len(runs) * apart :]
