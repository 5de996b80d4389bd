"""Rules of a state machine that pass when they can't act.

Hypothesis' own `precondition` must not ask what real time or a server decides: the same choices would then lead to
other rules when a run is repeated. (A machine that is too busy lets real time pass that the model does not know of.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def when(may_act: Callable[[Any], object]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Below ``@rule``: run it only if ``may_act(machine)``."""

    def guard(rule: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(rule)
        def guarded(machine: Any, **choices: Any) -> None:
            if may_act(machine):
                rule(machine, **choices)

        return guarded

    return guard
