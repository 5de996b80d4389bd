"""Faults on request, so that what stands above can be tested against a checkpoint tool that misbehaves.

Rules are comma-separated ``ACTION:FAULT`` and come from ``TIMESLICE_ARENA_FAULTS`` in the operator's environment
and from the file ``.timeslice-faults`` in the device's folder (both count). ACTION is ``lock``, ``checkpoint``,
``restore``, ``unlock`` or ``get-state``. FAULT is one of:

=============  ==================================================================================================
``1/N``        every Nth call fails before it touches anything, as a real lock does now and then
``fail``       every call fails before it touches anything
``fail-once``  the first call fails
``poison``     the first call fails with "out of memory", all later ones with "OS call failed ...", as a CUDA
               driver does after a restore that did not fit
``hang``       the call never returns; it keeps the arena's lock meanwhile
``hang=S``     it takes S seconds longer
``die``        the operator dies of SIGKILL in mid-call: half way through a copy, else after its first step
``die=STEP``   it dies at that step: ``stopping stopped`` (lock), ``begun half copied recorded freed``
               (checkpoint), ``stopped reserved half copied`` (restore), ``recorded continued`` (unlock)
``lie``        the call claims success; nothing was locked, restored or unlocked, and a checkpoint freed nothing
``late=S``     a checkpoint claims success and frees the device memory S seconds later
=============  ==================================================================================================

Calls are counted per rule and target process. The counters live in the target's control block, so they outlive the
operator's process and end with the target.
"""

# pathlib knows no dir_fd and no descriptors, and would cost the command start-up time.
# ruff: noqa: PTH123
from __future__ import annotations

import os
import signal
import time
from binascii import crc32

from timeslice.arena.errors import InjectedFaultError
from timeslice.errors import FaultKind, UsageError

TYPE_CHECKING = False  # typing costs the command a fifth of its start-up time
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from timeslice.arena.control import Record

ENVIRONMENT = "TIMESLICE_ARENA_FAULTS"
ACTIONS = ("lock", "checkpoint", "restore", "unlock", "get-state")
_STEPS = {
    "lock": ("stopping", "stopped"),
    "checkpoint": ("half", "begun", "copied", "recorded", "freed"),
    "restore": ("half", "stopped", "reserved", "copied"),
    "unlock": ("recorded", "continued"),
}
_PLAIN = ("fail", "fail-once", "poison", "hang", "die", "lie")
OS_CALL_FAILED = "OS call failed or operation not supported on this OS"


class Rule:
    """One ``ACTION:FAULT``; ``value`` is what follows ``=`` or ``1/``."""

    __slots__ = ("action", "fault", "text", "value")

    def __init__(self, text: str) -> None:
        self.text = text
        self.action, _, rest = text.partition(":")
        self.fault, _, self.value = rest.partition("=")
        if rest.startswith("1/"):
            self.fault, self.value = "1/N", rest[2:]
        if self.fault == "die" and self.value == "":
            self.value = _STEPS.get(self.action, ("",))[0]
        if self.action not in ACTIONS or not self._sound():
            raise UsageError(f"{ENVIRONMENT}: {text!r} is no fault; see timeslice/arena/README.md for the list")

    def _sound(self) -> bool:
        if self.fault == "1/N":
            return self.value.isdecimal() and int(self.value) > 0
        if self.fault == "die":
            return self.value in _STEPS.get(self.action, ())
        if self.fault == "late":
            return self.action == "checkpoint" and _is_number(self.value)
        if self.fault == "hang" and self.value:
            return _is_number(self.value)
        return self.fault in _PLAIN and not self.value

    @property
    def key(self) -> int:
        return crc32(self.text.encode())


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal()


def parse(text: str) -> list[Rule]:
    """The rules in ``text``; `UsageError` names the one that is wrong."""
    return [Rule(word.strip()) for word in text.replace("\n", ",").split(",") if word.strip()]


def rules_for(files: Iterable[str]) -> list[Rule]:
    """Rules of the environment and of these fault files, each once."""
    texts = [os.environ.get(ENVIRONMENT, "")]
    for path in files:
        try:
            with open(path, encoding="utf-8") as file:
                texts.append(file.read())
        except (FileNotFoundError, PermissionError):
            continue
    return list({rule.text: rule for text in texts for rule in parse(text)}.values())


class Plan:
    """The faults of one call of one action."""

    def __init__(self, action: str, rules: list[Rule]) -> None:
        self._rules = [rule for rule in rules if rule.action == action]
        self._dies_at = {rule.value for rule in self._rules if rule.fault == "die"}
        self.lies = any(rule.fault == "lie" for rule in self._rules)
        self.late = max((rule.value for rule in self._rules if rule.fault == "late"), default="")

    def begin(self, record: Record, save: Callable[[], None]) -> None:
        """Count this call, then hang or fail if that is asked for. Called before anything is touched."""
        counted = [rule for rule in self._rules if rule.fault in ("1/N", "fail-once", "poison")]
        for rule in counted:
            record.counters[rule.key] = record.counters.get(rule.key, 0) + 1
        if counted:
            save()
        for rule in self._rules:
            count = record.counters.get(rule.key, 0)
            if rule.fault == "hang":
                _hang(float(rule.value) if rule.value else None)
            elif rule.fault == "poison":
                reason = "out of memory" if count == 1 else OS_CALL_FAILED
                raise InjectedFaultError(f"injected fault {rule.text}", reason=reason, kind=FaultKind.POISONED)
            elif (
                rule.fault == "fail"
                or (rule.fault == "fail-once" and count == 1)
                or (rule.fault == "1/N" and count % int(rule.value) == 0)
            ):
                raise InjectedFaultError(f"injected fault {rule.text}", reason=OS_CALL_FAILED, kind=FaultKind.TRANSIENT)

    def at(self, step: str) -> None:
        """Die here, if that is asked for."""
        if step in self._dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def progress(self, total: int) -> Callable[[int], None] | None:
        """For the copy loop: dies half way, if that is asked for."""
        if "half" not in self._dies_at:
            return None
        return lambda done: self.at("half") if done * 2 >= total else None


def _hang(seconds: float | None) -> None:
    if seconds is not None:
        time.sleep(seconds)
        return
    while True:
        signal.pause()
