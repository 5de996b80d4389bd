"""Whole runs start dozens of processes: two at a time are what a small machine can carry, and they come first, so that
they do not all meet at the end."""

from __future__ import annotations

import pytest

_RUNS = ("test_run", "test_mutants", "test_growth", "test_hard_to_know")
_AT_A_TIME = 2


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    runs = [item for item in items if item.path.stem in _RUNS and item.get_closest_marker("slow")]
    first = set(runs)
    for number, item in enumerate(runs):
        item.add_marker(pytest.mark.xdist_group(f"torture {number % _AT_A_TIME}"))
    items[:] = [*runs, *(item for item in items if item not in first)]
