"""The stand-ins of workloads that registered over a WorkloadChannel: one process each, one stream at a time.

A stream that breaks is no proof that the workload ended. Its stand-in stays for ``reconnect_s``, and an order that
comes meanwhile waits. Who comes back in time is told an order that is unanswered once more, under the same id. Then
the stand-in ends without a good-bye, and so the group believes nothing of the workload until it registers again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial

from pydantic import TypeAdapter, ValidationError

from timeslice.client.aio import AsyncClient
from timeslice.errors import GroupModeError, RefusedError, UnknownGroupError, quoted
from timeslice.gateway.operations import FullError
from timeslice.gateway.standin import END_S, Done, End, Failed, FromStandIn, Order, Ready, Registration, Setup
from timeslice.locks.view import GroupView
from timeslice.models import TEXT_MAX, Residency, brief

log = logging.getLogger("timeslice.gateway")

RECONNECT_S = 30.0  # as long as a lease
STAND_INS_MAX = 64
_READY_S = 30.0
CLOSE_S = 1.0  # those that stay are none of a gateway any more
_HEARD: TypeAdapter[Ready | Failed | Order] = TypeAdapter(FromStandIn)


class ConnectedError(RefusedError):
    """The workload has a stream already."""


class StandIn:
    """One workload and the process that stands in for it. ``order`` is the one without an answer."""

    def __init__(self, asked: Registration, process: subprocess.Popen[bytes]) -> None:
        self.asked, self.pid = asked, process.pid
        self.order: Order | None = None
        self.attached, self.ended = True, False
        self.leaving: asyncio.TimerHandle | None = None
        self._process = process
        self._news = asyncio.Event()
        self._heard = asyncio.StreamReader()
        self._pipes: list[asyncio.BaseTransport] = []
        self._listening: asyncio.Task[None] | None = None

    async def begin(self, setup: Setup) -> None:
        """Returns when it has registered. RefusedError if it can't."""
        loop = asyncio.get_running_loop()
        self._said, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, self._process.stdin)
        hearing, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self._heard), self._process.stdout
        )
        self._pipes = [self._said, hearing]
        self._say(setup)
        try:
            async with asyncio.timeout(_READY_S):
                answer = await self._hear()
        except TimeoutError:
            answer = None
        if not isinstance(answer, Ready):
            await self.end(said_good_bye=False)
            why = answer.error if isinstance(answer, Failed) else "its process did not come up; see the gateway's log"
            asked = self.asked
            raise RefusedError(
                f"group {asked.group}: nothing stands in for job {asked.job}: {why}", group=asked.group, job=asked.job
            )
        self._listening = asyncio.create_task(self._listen(), name=f"stand-in {self.pid}")

    async def orders(self) -> AsyncIterator[Order]:
        """What a stream has to pass on, also what an earlier one left unanswered. Ends with the process."""
        told = ""
        while not self.ended:
            self._news.clear()
            if self.order and self.order.id != told:
                told = self.order.id
                yield self.order
            else:
                await self._news.wait()

    def answer(self, order_id: str, *, ok: bool, error: str) -> None:
        """The workload's word about an order. One about any other was given before, or is nobody's."""
        if self.order is None or self.order.id != order_id:
            log.info("group %s: job %s answers %.80r, which is not asked; ignored",
                     self.asked.group, self.asked.job, order_id)  # fmt: skip
            return
        self.order = None
        self._say(Done(id=order_id, ok=ok, error=quoted(error)[:TEXT_MAX]))

    async def end(self, *, said_good_bye: bool) -> None:
        """End the process. Only if it ``said_good_bye`` its node's agent sees that as the end of the workload."""
        if said_good_bye:
            self._say(End())
        if not await self.leave(END_S if said_good_bye else 0.0):
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    async def leave(self, patience_s: float) -> bool:
        """Let go of the process. False: it is still there after so many seconds."""
        for pipe in self._pipes:
            pipe.close()
        if self._listening:
            self._listening.cancel()
        try:
            await asyncio.to_thread(self._process.wait, patience_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _say(self, message: Setup | Done | End) -> None:
        self._said.write(message.model_dump_json().encode() + b"\n")

    async def _hear(self) -> Ready | Failed | Order | None:
        """The next message; None when the process has ended, or says what it can't mean."""
        line = await self._heard.readline()
        try:
            return _HEARD.validate_json(line) if line else None
        except ValidationError as error:
            log.error("stand-in %d: its message is invalid: %s", self.pid, brief(error))
            return None

    async def _listen(self) -> None:
        while isinstance(message := await self._hear(), Order):
            self.order = message
            self._news.set()
        self.ended = True
        self._news.set()


class Workloads:
    """All stand-ins of this gateway, by group and job."""

    def __init__(self, client: AsyncClient, node: str, reconnect_s: float = RECONNECT_S) -> None:
        self._client, self._node, self._reconnect_s = client, node, reconnect_s
        self._known: dict[tuple[str, str], StandIn | None] = {}  # None: it is being started
        self._ending: set[asyncio.Task[None]] = set()

    async def attach(self, asked: Registration) -> StandIn:
        """The workload's stand-in, for a new stream. ConnectedError, FullError; UnknownGroupError, GroupModeError,
        RefusedError where it could not be moved."""
        key = (asked.group, asked.job)
        known = self._known.get(key)
        if key in self._known and (known is None or known.attached):
            raise ConnectedError(
                f"group {asked.group}: job {asked.job} has a WorkloadChannel already; end that one first, or wait "
                "until the gateway notices that it broke",
                group=asked.group,
                job=asked.job,
            )
        if known and known.asked == asked and not known.ended:
            self._stay(known)
            known.attached = True
            return known
        if known is None and len(self._known) >= STAND_INS_MAX:
            raise FullError(f"this gateway stands in for {STAND_INS_MAX} workloads already; use another node's")
        self._known[key] = None
        if known:
            self._stay(known)
        try:
            made = await self._start(asked)
        except BaseException:
            del self._known[key]
            if known:
                self._end(known, said_good_bye=False)
            raise
        self._known[key] = made
        if known:  # it came back with other capabilities; never is there nobody who stands in for it
            self._end(known, said_good_bye=True)
        return made

    def detach(self, stand_in: StandIn, *, ended: bool) -> None:
        """The stream is over. ``ended``: its workload said so itself."""
        stand_in.attached = False
        if ended or stand_in.ended:
            self._end(stand_in, said_good_bye=ended)
        else:
            loop = asyncio.get_running_loop()
            stand_in.leaving = loop.call_later(self._reconnect_s, partial(self._end, stand_in, said_good_bye=False))

    async def close(self) -> None:
        """Leave the stand-ins alone: they stay for a while, so that no workload's state counts as unknown while the
        gateway is started anew."""
        found, self._known = [each for each in self._known.values() if each], {}
        for each in found:
            self._stay(each)
        await asyncio.gather(*(each.leave(CLOSE_S) for each in found), *self._ending)

    async def _start(self, asked: Registration) -> StandIn:
        view = await self._client.status(asked.group)
        self._check(view, asked)
        setup = Setup(
            url=self._client.url,
            workload=asked,
            suspended=self._is_suspended(view, asked.job),
            linger_s=self._reconnect_s,
        )
        stand_in = StandIn(asked, _spawn(self._node, self._client.keys.prefix))
        try:
            await stand_in.begin(setup)
        except asyncio.CancelledError:
            await stand_in.end(said_good_bye=False)
            raise
        return stand_in

    def _is_suspended(self, view: GroupView, job: str) -> bool | None:
        """An earlier gateway may have stood in for it, and the workload does not say itself how it is. None: an order
        was under way when that one ended, or may have been."""
        mine = (each for each in view.members if (each.node, each.job) == (self._node, job))
        state = next((member.state for member in mine), Residency.ABSENT)
        if view.holder == job or state == Residency.ABSENT:
            return False
        settled = {Residency.RESIDENT: False, Residency.SUSPENDED: True}
        return None if view.swap else settled.get(Residency(state))

    def _check(self, view: GroupView, asked: Registration) -> None:
        if not view.exists:
            raise UnknownGroupError(f"no group {asked.group}; see: timeslice groups", group=asked.group)
        if view.mode == "lock":
            raise GroupModeError(f"group {asked.group} is lock-only: nothing is moved there", group=asked.group)
        if self._node not in view.nodes:
            raise RefusedError(
                f"group {asked.group}: no agent of node {self._node} serves it, so nobody would move job {asked.job}; "
                f"connect to a gateway on a node that does: {', '.join(sorted(view.nodes)) or 'there is none yet'}",
                group=asked.group,
                job=asked.job,
                node=self._node,
            )

    @staticmethod
    def _stay(stand_in: StandIn) -> None:
        if stand_in.leaving:
            stand_in.leaving.cancel()

    def _end(self, stand_in: StandIn, *, said_good_bye: bool) -> None:
        key = (stand_in.asked.group, stand_in.asked.job)
        if self._known.get(key) is stand_in:
            del self._known[key]
        task = asyncio.create_task(stand_in.end(said_good_bye=said_good_bye), name=f"end of stand-in {stand_in.pid}")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


def _spawn(node: str, prefix: str) -> subprocess.Popen[bytes]:
    """Its environment names no job: what it takes part in, it shows itself. The URL, with its password, goes over the
    pipe. In a session of its own, so that Ctrl-C at a terminal ends the gateway only."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("TIMESLICE_")}
    return subprocess.Popen(
        [sys.executable, "-I", "-m", "timeslice.gateway.standin"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**plain, "TIMESLICE_NODE": node, "TIMESLICE_PREFIX": prefix},
    )
