"""Random histories: what is legal raises no alarm, and any one corruption of it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.torture.cases import TERMS
from tests.torture.simulator import Simulator
from timeslice.torture.checker import check
from timeslice.torture.history import Checked, Entered, Fault, Left, Line, Moved, Told

PATIENT = replace(TERMS, recovery_s=1e6)  # nobody here is in a hurry
STEADY = settings(  # a red test must mean a change, not luck
    max_examples=300, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
CHOICES = st.lists(st.integers(0, 26), min_size=6, max_size=40)

Corrupt = Callable[[list[Line], int], "list[Line] | None"]


@STEADY
@given(CHOICES, st.booleans())
def test_a_legal_history_raises_no_alarm(choices: list[int], lock_only: bool) -> None:
    """Whatever is killed, stopped or lost."""
    assert check(Simulator(choices, lock_only=lock_only).tale.lines, PATIENT).violations == []


def _places(lines: list[Line], fits: Callable[[Any], bool]) -> list[int]:
    return [index for index, line in enumerate(lines) if fits(line)]


def _other_content(lines: list[Line], pick: int) -> list[Line] | None:
    found = _places(lines, lambda line: isinstance(line, Checked))
    if not found:
        return None
    at = found[pick % len(found)]
    return [*lines[:at], lines[at].model_copy(update={"found": "other"}), *lines[at + 1 :]]


def _older_token(lines: list[Line], pick: int) -> list[Line] | None:
    """A grant repeats a token of the one before."""
    found = _places(lines, lambda line: isinstance(line, Told) and line.type == "LeaseGranted")[1:]
    if not found:
        return None
    at = found[pick % len(found)]
    line = lines[at]
    assert isinstance(line, Told)
    fields = {**line.fields, "token": str(int(line.fields["token"]) - 1)}
    return [*lines[:at], line.model_copy(update={"fields": fields}), *lines[at + 1 :]]


def _dropped_restore(lines: list[Line], pick: int) -> list[Line] | None:
    """No step of it is left, and the job enters all the same."""
    found = _places(lines, lambda line: isinstance(line, Moved) and (line.step, line.stage) == ("restore", "begin"))
    if not found:
        return None
    at = found[pick % len(found)]
    return lines[:at] + lines[at + 4 :]


def _dropped_suspend(lines: list[Line], pick: int) -> list[Line] | None:
    """A swap's suspend is left out; the next one enters all the same."""
    found = _places(
        lines,
        lambda line: isinstance(line, Moved) and (line.step, line.stage) == ("prepare", "begin"),
    )
    found = [at for at in found if isinstance(lines[at - 1], Told)]  # not of a holder that was stopped
    found = [at for at in found if lines[at - 1].type == "SwapStarted"]  # type: ignore[union-attr]
    if not found:
        return None
    at = found[pick % len(found)]
    return lines[:at] + lines[at + 4 :]


def _never_left(lines: list[Line], pick: int) -> list[Line] | None:
    """The body goes on when the next one is in already."""
    found = _places(lines, lambda line: isinstance(line, Left))
    found = [at for at in found if _next_entry(lines, at)]
    if not found:
        return None
    at = found[pick % len(found)]
    entry = _next_entry(lines, at)
    assert entry is not None
    late = lines[at].model_copy(update={"at": lines[entry].at + 50_000_000})
    return [*lines[:at], *lines[at + 1 : entry + 1], late, *lines[entry + 1 :]]


def _next_entry(lines: list[Line], at: int) -> int | None:
    """The next one, if nobody was frozen or killed before it."""
    for index in range(at + 1, len(lines)):
        if isinstance(lines[index], Moved | Fault):
            return None
        if isinstance(lines[index], Entered):
            return index
    return None


def _never_entered(lines: list[Line], pick: int) -> list[Line] | None:
    """Somebody who was due in the calm is not let in."""
    calm = next(index for index, line in enumerate(lines) if line.kind == "calm")
    found = [at for at in _places(lines, lambda line: isinstance(line, Entered)) if at > calm]
    if not found:
        return None
    at = found[pick % len(found)]
    ended = lines[-1].model_copy(update={"at": lines[-1].at + 1001 * 1_000_000_000})
    return [*lines[:at], *lines[at + 1 : -1], ended]


def _overtaken(lines: list[Line], pick: int) -> list[Line] | None:
    """Of two that are queued one after the other the second is told of first."""
    found = [
        at
        for at in _places(lines, lambda line: isinstance(line, Told) and line.type == "LeaseGranted")
        if len(_waiting(lines, at)) > 1
    ]
    if not found:
        return None
    at = found[pick % len(found)]
    line = lines[at]
    assert isinstance(line, Told)
    last = _waiting(lines, at)[-1]
    swapped = line.model_copy(update={"fields": {**line.fields, "waiter": last, "job": last[0]}})
    return [*lines[:at], swapped, *lines[at + 1 :]]


def _waiting(lines: list[Line], at: int) -> list[str]:
    queue: list[str] = []
    for line in lines[:at]:
        if isinstance(line, Told):
            waiter = line.fields.get("waiter", "")
            if line.type == "WaiterQueued" and waiter not in queue:
                queue.append(waiter)
            elif line.type in {"LeaseGranted", "WaiterReaped"} and waiter in queue:
                queue.remove(waiter)
    return queue


CORRUPTIONS: dict[str, tuple[Corrupt, str, bool]] = {  # name -> what it does, the rule, in a lock-only group
    "other content": (_other_content, "content", False),
    "older token": (_older_token, "tokens", True),
    "dropped restore": (_dropped_restore, "restored", False),
    "dropped suspend": (_dropped_suspend, "resident", False),
    "never left": (_never_left, "overlap", True),
    "never entered": (_never_entered, "waiting", True),
    "overtaken": (_overtaken, "order", True),
}


@STEADY
@given(CHOICES, st.sampled_from(sorted(CORRUPTIONS)), st.integers(0, 1000))
def test_any_corruption_is_caught(choices: list[int], name: str, pick: int) -> None:
    """By its rule; what follows from it may break others, too."""
    corrupt, rule, lock_only = CORRUPTIONS[name]
    lines = corrupt(Simulator(choices, lock_only=lock_only).tale.lines, pick)
    assume(lines is not None)
    assert lines is not None
    assert rule in {violation.rule for violation in check(lines, PATIENT).violations}
