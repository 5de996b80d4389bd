"""Workloads that move their own device state: callbacks of a job, called when its node's agent says so.

Commands and answers go over one stream of the process. A daemon thread reads it on connections of its own, so the job
need not do anything for it; it must only not touch the device state outside of its holds.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from pydantic import ValidationError

from timeslice.client.callbacks import Busy, Callbacks, Mode, Moved, OnRestore, OnSuspend, ProbeNow, State
from timeslice.client.engines import callbacks_of
from timeslice.client.identity import declared, process_id, this_target
from timeslice.client.registration import CLOSE_S, REFRESH_S, Registration
from timeslice.errors import FaultKind, TimeSliceError, UsageError, printable
from timeslice.locks import scripts
from timeslice.locks.flows import Wait
from timeslice.locks.keys import Keys
from timeslice.models import TEXT_MAX, ChannelAnswer, ChannelCommand, Leave, Residency, Target, brief, read_wire
from timeslice.names import check_name
from timeslice.settings import Settings, default_job, default_node

__all__ = ["Busy", "Moved", "Workload", "register_arena", "register_workload"]

log = logging.getLogger("timeslice")

KEPT_ANSWERS = 64
_KEPT_ENTRIES = 64
_KEEP_S = 3600
_ANSWER_S = 10.0  # then the answer is kept for the next time it is asked for
_ALL = Leave()


def register_workload(
    group: str,
    workload: Any = None,
    *,
    on_suspend: OnSuspend | None = None,
    on_restore: OnRestore | None = None,
    probe: ProbeNow | None = None,
    job: str | None = None,
    modes: Sequence[Mode] | None = None,
    tags: Sequence[str] | None = None,
    slots: Sequence[str] | None = None,
    leave: Leave = _ALL,
    url: str | None = None,
    loop: asyncio.AbstractEventLoop | None = None,
) -> Workload:
    """Let the agent of this node move this process's device state in ``group`` through these callbacks.

    ``on_suspend(mode, tags)`` moves the state to host memory (or drops it, for ``discard``) and returns when the
    device memory is free; ``on_restore(tags)`` brings it back. Both may return the bytes that they moved, or a Moved,
    and raise Busy to be asked again. If one fails, the state must be where it was. Empty tags mean everything, and for
    ``on_restore`` everything that is out. Whoever registers ``slots`` gets the slot as one more argument of both:
    ``on_suspend(mode, tags, slot)`` and ``on_restore(tags, slot)``, with ``""`` for all of them.

    ``probe()`` returns (Residency, bytes on the device, bytes in host memory) and, if known, a dictionary of the bytes
    on the device by tag; the state is suspended as soon as some of it is out. Without ``probe`` the workload counts as
    resident from now on, and as what it was last told afterwards.

    Instead of callbacks give an object as ``workload``: one with methods ``suspend`` and ``restore`` (and ``probe``,
    ``modes``, ``tags`` and ``slots``, if it has them), or an engine of vLLM, ``LLM`` or ``AsyncLLM``.

    ``leave`` says what of it leaves when another job gets the group, unless a hold says otherwise:
    ``timeslice.Leave(mode="discard", tags=("kv_cache",))``.

    By default ``modes`` is ``("offload",)``, and there are no tags or slots; nothing is asked for that was not
    registered. Callbacks run on a thread of their own, one at a time; coroutine functions run on ``loop``, by default
    the one that runs now. ``job`` and ``url`` as for ``timeslice.hold``.

    Raises InvalidNameError, UnknownGroupError, and UsageError when no server is known, this process registered for the
    group already, methods are missing, or ``leave`` names what is not registered.
    """
    for name, given in (("modes", modes), ("tags", tags), ("slots", slots)):
        if isinstance(given, str):
            raise UsageError(f"group {group}: {name}={given!r}: give a list of names", group=group)
    if workload is None:
        if on_suspend is None or on_restore is None:
            raise UsageError(
                f"group {group}: give on_suspend= and on_restore=, or an object that has both", group=group
            )
        callbacks = Callbacks(on_suspend=on_suspend, on_restore=on_restore, probe=probe)
    elif on_suspend or on_restore or probe:
        raise UsageError(f"group {group}: give an object or callbacks, not both", group=group)
    else:
        callbacks = callbacks_of(workload)
    callbacks = replace(
        callbacks,
        modes=callbacks.modes if modes is None else tuple(modes),
        tags=callbacks.tags if tags is None else tuple(tags),
        slots=callbacks.slots if slots is None else tuple(slots),
    )
    return Workload(group, callbacks, job=job, url=url, loop=loop, leave=leave)


class ArenaLike(Protocol):
    """What is needed of a ``timeslice.arena.Arena``."""

    @property
    def state(self) -> str: ...
    @property
    def bytes_on_device(self) -> int: ...
    @property
    def bytes_on_host(self) -> int: ...
    @property
    def bytes_saved(self) -> int: ...
    def suspend(self) -> int: ...
    def resume(self) -> int: ...


def register_arena(group: str, arena: ArenaLike, *, job: str | None = None, url: str | None = None) -> Workload:
    """``register_workload`` for memory on the emulated device: all of ``arena`` moves."""

    def probe() -> tuple[Residency, int, int]:
        try:
            suspended = arena.state == "checkpointed"
        except UsageError:  # closed
            return Residency.ABSENT, 0, 0
        on_device = arena.bytes_on_device
        state = Residency.SUSPENDED if suspended else Residency.RESIDENT if on_device else Residency.ABSENT
        return state, on_device, arena.bytes_on_host

    return register_workload(
        group,
        on_suspend=lambda _mode, _tags: Moved(bytes=arena.suspend(), saved=arena.bytes_saved),
        on_restore=lambda _tags: arena.resume(),
        probe=probe,
        job=job,
        url=url,
    )


class Workload(Registration):
    """A workload that an agent may ask to move. A forked child has none."""

    def __init__(
        self,
        group: str,
        callbacks: Callbacks,
        *,
        job: str | None,
        url: str | None,
        loop: asyncio.AbstractEventLoop | None = None,
        leave: Leave = _ALL,
    ) -> None:
        check_name("group", group)
        node, name = default_node(), job or default_job()
        known = this_target(group, name, node)
        if known.channel:
            raise UsageError(
                f"group {group}: process {known.pid} has a workload of job {name} already; close that one first",
                group=group,
                job=name,
            )
        # The group is part of it: the roles of one job in one process must not hear each other's commands. Behind it a
        # character that no name has, so that an ACL can give a user the channels of one group.
        channel = f"{group}/{process_id(node)}"
        able = {"modes": callbacks.modes, "tags": callbacks.tags, "slots": callbacks.slots, "leave": leave}
        try:
            target = Target.model_validate(known.model_dump() | {"channel": channel} | able)
        except ValidationError as error:
            raise UsageError(f"group {group}: the workload can't be registered so: {brief(error)}") from None
        if why := target.unable(leave):
            raise UsageError(f"group {group}: the workload can't leave as leave= says: it {why}", group=group, job=name)
        super().__init__(group, target, "the workload")
        self._stream = Keys(Settings().prefix).channel(name, channel)
        self._state = State(callbacks, loop=loop)
        self._answers: OrderedDict[str, ChannelAnswer] = OrderedDict()
        self._after = ""
        self._refresh_at = 0.0
        self._start(url, f"timeslice-workload-{group}")

    def close(self) -> None:
        """End the registration; a command under way is finished first, if that takes seconds and not minutes. What is
        out then stays out, and no agent brings it back: do so in your next hold. Does nothing in a forked child."""
        if not self._is_open():
            return
        self._closed.set()
        self._state.close()
        try:
            with self._telling:
                self._forget()
                self._register(this_target(self.group, self.job, self.target.host), CLOSE_S)
            self._add("close", "", CLOSE_S)  # wakes the thread
        except TimeSliceError as error:
            log.warning("%s closed unseen: %s", self._what, error)
        if self._thread and threading.current_thread() is not self._thread:
            self._thread.join(REFRESH_S + CLOSE_S)
            if self._thread.is_alive():
                log.warning(
                    "%s closed while a callback is still at work: wait for it before you use the state", self._what
                )
        if self._state.is_out:
            log.warning("%s closed while its state is out: no agent will bring it back, so do it yourself", self._what)
        self._driver.close()

    def _declare(self) -> None:
        declared[self.group, self.job] = self.target

    def _forget(self) -> None:
        declared.pop((self.group, self.job), None)

    def _turn(self) -> None:
        try:
            self._listen()
        except Exception:
            self._refresh_at = 0.0  # the server may have forgotten everything meanwhile
            raise

    def _listen(self) -> None:
        if (left := self._refresh_at - time.monotonic()) <= 0:
            self._refresh(deadline_s=REFRESH_S)
            left = REFRESH_S
        for entry_id, fields in self._driver.wait(Wait(self._stream, self._after, int(left * 1000))):
            self._after = entry_id
            if fields.get("kind") == "command" and not self._closed.is_set():
                self._obey(fields.get("body", ""))

    def _refresh(self, *, deadline_s: float) -> None:
        def newest() -> Any:
            return self._driver.client.xrevrange(self._stream, count=1)

        found = self._driver.retry(newest, deadline_s=deadline_s)
        last = scripts.text(found[0][0]) if found else "0-0"
        # What an earlier workload of this process left unanswered is none of ours. A stream that ends before the place
        # where we were is another one, made after the server lost its data: all of it is new.
        if not self._after:
            self._after = last
        elif _position(last) < _position(self._after):
            self._after = "0-0"
        super()._refresh(deadline_s=deadline_s)
        self._refresh_at = time.monotonic() + REFRESH_S

    def _obey(self, body: str) -> None:
        try:
            command = read_wire(ChannelCommand, body)
        except ValueError as error:
            log.warning("group %s: a command to job %s is invalid and ignored: %s", self.group, self.job, error)
            return
        answer = self._answers.get(command.id)
        if answer is None:
            answer = self._answers[command.id] = self._execute(command)
            while len(self._answers) > KEPT_ANSWERS:
                self._answers.popitem(last=False)
        self._add("answer", answer.model_dump_json(), _ANSWER_S)

    def _execute(self, command: ChannelCommand) -> ChannelAnswer:
        began, moved = time.monotonic(), Moved()
        try:
            if command.action == "suspend":
                moved = self._state.suspend(command.mode, command.tags, command.slot)
            elif command.action == "restore":
                moved = self._state.restore(command.tags, command.slot)
            seen = self._state.look()
            return ChannelAnswer(
                id=command.id,
                ok=True,
                state=seen.state,
                device_bytes=seen.device_bytes,
                host_bytes=seen.host_bytes,
                moved_bytes=moved.bytes,
                saved_bytes=moved.saved,
                parts=seen.parts,
                seconds=time.monotonic() - began,
            )
        except BaseException as error:  # whatever it is, it is the callback's: this thread has to go on
            busy = isinstance(error, Busy) or getattr(error, "kind", None) is FaultKind.BUSY
            if not busy:
                log.exception("group %s: %s of job %s failed", self.group, command.action, self.job)
            return ChannelAnswer(
                id=command.id,
                ok=False,
                busy=busy,
                state=Residency.FAULTED,
                error=_words(error),
                seconds=time.monotonic() - began,
            )

    def _add(self, kind: str, body: str, deadline_s: float) -> None:
        entry = ("XADD", self._stream, "MAXLEN", "~", _KEPT_ENTRIES, "*", "kind", kind, "body", body)
        self._driver.pipe([entry, ("EXPIRE", self._stream, _KEEP_S)], deadline_s=deadline_s)


def _words(error: BaseException) -> str:
    """What a callback raised, as an answer can carry it: an answer that can't be written would be asked for again, and
    the callback called again."""
    try:
        said = str(error)
    except Exception:
        said = "it can't say what"
    return printable(f"{type(error).__name__}: {said}")[:TEXT_MAX]


def _position(entry_id: str) -> tuple[int, int]:
    milliseconds, _, number = entry_id.partition("-")
    return int(milliseconds), int(number)
