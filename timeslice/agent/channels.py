"""Reaches in-process workloads over the job's channel stream: commands and answers on one stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from timeslice.backends.base import Channel
from timeslice.errors import RedisUnreachableError
from timeslice.locks.drivers import AsyncDriver
from timeslice.locks.flows import Entries, Wait
from timeslice.locks.keys import Keys
from timeslice.locks.scripts import text
from timeslice.models import ChannelAnswer, ChannelCommand, read_wire

log = logging.getLogger("timeslice.agent")

KEPT = 64  # entries of the stream
KEEP_S = 3600
ASK_AGAIN_S = 1.0  # a workload that was not listening yet, or whose answer was trimmed, hears it again
_PAUSE_S = 0.2

ExitEvent = Callable[[str, int, int], asyncio.Event | None]


class StreamChannel(Channel):
    """``exit_event`` tells (job, pid, start) -> event that is set when the process ends, if it is watched."""

    def __init__(self, driver: AsyncDriver, keys: Keys, exit_event: ExitEvent) -> None:
        self._driver, self._keys, self._exit_event = driver, keys, exit_event

    async def ask(self, job: str, process: str, command: ChannelCommand, *, deadline_s: float) -> ChannelAnswer:
        """Raises TimeoutError after the deadline, or at once when the process has ended."""
        answering = asyncio.ensure_future(self._ask(job, process, command, deadline_s))
        event = self._event_of(job, process)
        leaving = asyncio.ensure_future(event.wait()) if event else None
        try:
            await asyncio.wait({answering, *([leaving] if leaving else [])}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                return answering.result()
            raise TimeoutError(f"job {job}: process {process} ended before it answered {command.action}")
        finally:
            for task in filter(None, (answering, leaving)):
                task.cancel()
            await asyncio.gather(*filter(None, (answering, leaving)), return_exceptions=True)

    def _event_of(self, job: str, process: str) -> asyncio.Event | None:
        _, pid, start = process.rsplit(".", 2) if process.count(".") >= 2 else ("", "", "")
        return self._exit_event(job, int(pid), int(start)) if pid.isdigit() and start.isdigit() else None

    async def _ask(self, job: str, process: str, command: ChannelCommand, deadline_s: float) -> ChannelAnswer:
        key = self._keys.channel(job, process)
        until = time.monotonic() + deadline_s
        after = ""
        while (left := until - time.monotonic()) > 0:
            try:
                sent = await self._send(key, command)
                after = after or sent
                again = time.monotonic() + min(left, ASK_AGAIN_S)
                while (slice_s := again - time.monotonic()) > 0:
                    entries = await self._driver.wait(Wait(key, after, int(slice_s * 1000)))
                    if (answer := _answer(entries, command.id, key)) is not None:
                        return answer
                    after = entries[-1][0] if entries else after
            except RedisUnreachableError as error:
                log.debug("job %s: its channel can't be reached, trying on: %s", job, error)  # the driver says so
                await asyncio.sleep(_PAUSE_S)
        raise TimeoutError(f"job {job}: process {process} did not answer {command.action} within {deadline_s:g} s")

    async def _send(self, key: str, command: ChannelCommand) -> str:
        entry = ("XADD", key, "MAXLEN", "~", KEPT, "*", "kind", "command", "body", command.model_dump_json())
        sent, _ = await self._driver.pipe([entry, ("EXPIRE", key, KEEP_S)])
        return text(sent)


def _answer(entries: Entries, command_id: str, key: str) -> ChannelAnswer | None:
    for entry_id, fields in entries:
        if fields.get("kind") != "answer":
            continue
        try:
            answer = read_wire(ChannelAnswer, fields.get("body", ""))
        except ValueError as error:
            log.warning("the answer %s on %s is invalid and ignored: %s", entry_id, key, error)
            continue
        if answer.id == command_id:
            return answer
    return None
