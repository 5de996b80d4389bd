"""Counts what our objects of this process keep, so that a test can see that nothing is kept for ever."""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

_DEEPEST = 5
# What a look at all processes of the machine holds: as much as there are, those of other tests too.
_THE_MACHINE = {"Scanner", "Snapshot", "Line", "Sighting", "Shown", "Elsewhere"}


def census() -> Counter[str]:
    """``Type`` -> how many there are, and ``Type.attribute`` -> elements of the containers kept there."""
    gc.collect()
    found: Counter[str] = Counter()
    for each in gc.get_objects():
        kind = type(each)
        ours = str(kind.__module__).startswith("timeslice.")  # some types have no text there
        if ours and kind.__name__ not in _THE_MACHINE:
            found[kind.__name__] += 1
            for name, value in getattr(each, "__dict__", {}).items():
                found[f"{kind.__name__}.{name}"] += _elements(value)
    return found


def _elements(value: Any, depth: int = 0) -> int:
    if depth == _DEEPEST or not isinstance(value, (dict, list, tuple, set, frozenset, deque)):
        return 0
    inside = value.values() if isinstance(value, Mapping) else value
    return len(value) + sum(_elements(each, depth + 1) for each in inside)


def grown(before: Counter[str], after: Counter[str], *, rounds: int) -> dict[str, tuple[int, int]]:
    """What became more by over half a piece a round, with both counts. A call that is under way in some thread at the
    moment of a count, with all its keys, is not kept."""
    slack = rounds // 2
    return {name: (before[name], count) for name, count in after.items() if count > before[name] + slack}
