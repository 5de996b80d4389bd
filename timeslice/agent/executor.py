"""Carries out the orders of one group, one at a time and in order. A hang here stops no other group.

The life of an order: fence, answer from the journal if it had one, ``accepted`` by the group's script, intent on
disk, the step, result on disk, ack. Nothing is touched without ``accepted``, nor without the intent on disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from timeslice import metrics
from timeslice.agent import fencing, state, stuck
from timeslice.agent.calling import Deadline
from timeslice.agent.group import Scope
from timeslice.agent.state import Answer, Ledger, Seen, Undo
from timeslice.errors import BackendError, FaultKind, RedisUnreachableError, StaleCommandError
from timeslice.locks import scripts
from timeslice.locks.scripts import Call
from timeslice.models import Command, Residency

log = logging.getLogger("timeslice.agent")

T = TypeVar("T")

AGAIN_S = 1.0  # after a fault that nobody foresaw
MID_ACK_S = 1.0  # an ack in the middle of a step is a courtesy: it may not hold the step up
_PAUSE_S = 0.5

Done = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class _Order:
    command: Command
    done: Done  # takes it off the stream


class Executor:
    """``turn`` is held while something of the group is touched: nobody else may call its backends then."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._orders: asyncio.Queue[_Order] = asyncio.Queue()
        self.turn = asyncio.Lock()
        self.leaving = False  # what the server does not answer now is left to the next agent, which has the journal

    def submit(self, command: Command, done: Done) -> None:
        """Take an order. ``done`` is called when it was answered or refused."""
        self._orders.put_nowait(_Order(command, done))

    async def run(self) -> None:
        """Work for ever. Whatever one order brings, the next one gets its turn; one that broke comes again after it,
        for the group waits for its answer."""
        while True:
            order = await self._orders.get()
            try:
                async with self.turn:
                    await self._handle(order.command)
                await order.done()
            except RedisUnreachableError as error:
                log.warning("group %s: order %s is taken up again: %s", self._scope.name, order.command.id, error)
                asyncio.get_running_loop().call_later(AGAIN_S, self._orders.put_nowait, order)
            except Exception:
                log.exception("group %s: order %s was left unfinished; it is taken up again in %g s",
                              self._scope.name, order.command.id, AGAIN_S)  # fmt: skip
                asyncio.get_running_loop().call_later(AGAIN_S, self._orders.put_nowait, order)

    def look_again(self) -> None:
        """Have the jobs themselves asked for their state, and what is found reported, as soon as nothing is moved."""
        self._scope.ask = True
        self._scope.wake.set()

    async def tidy(self, swap: int) -> None:
        """Clean up after a swap that is over although it left something behind; the group is at ``swap`` now."""
        async with self.turn:
            await self._tidy(swap)

    async def _handle(self, command: Command) -> None:
        scope = self._scope
        try:
            fencing.check(scope.ledger, command)
            if (answer := scope.ledger.answer_to(command)) is not None:
                await self._ack(command, answer)
                return
            left_ms = await self._insist(
                scripts.accepted(
                    scope.keys, scope.node, command.swap, command.epoch, command.step, command.id, floor=scope.floor
                )
            )
        except StaleCommandError as error:
            metrics.STALE_COMMANDS.labels(scope.name).inc()
            log.warning("order refused: %s", error)
            scope.raise_floor(error.token or 0)
            scope.wake.set()  # the next heartbeat carries our floor to the group
            return
        deadline = Deadline(left_ms / 1000)  # counts from accepted, on our own clock
        scope.raise_floor(command.swap)
        await self._tidy(command.swap)
        if command.step == "prepare":
            await scope.refresh()  # who has held until now registered before it held
        answer = await self._carry_out(command, deadline)
        metrics.COMMANDS.labels(scope.name, command.step, answer.outcome).inc()
        await scope.journal.update_anyway(lambda ledger: self._written(state.finished(ledger, command, answer)))
        scope.note(answer.seen, moved=True)
        await self._ack(command, answer)

    async def _carry_out(self, command: Command, deadline: Deadline) -> Answer:
        scope, steps = self._scope, self._scope.steps
        undo_s = command.restore_timeout_ms / 1000
        if command.step == "rollback":
            # An undo goes ahead even with a full disk: it only leads back to what was before.
            await scope.journal.update_anyway(lambda ledger: state.begun(ledger, command, Undo()))
            return await steps.rollback(scope.undo_of(command), undo_s)
        try:
            if command.step == "prepare":
                return await steps.prepare(command, deadline, self._intend(command))
            return await steps.commit(
                command, deadline, self._intend(command), self._tell(command), scope.undo_of(command)
            )
        except BackendError as error:
            told = await stuck.judge(scope, error)
            log.warning("order %s failed: %s", command.id, told)
            return await steps.fail(told, scope.undo_of(command), undo_s)

    def _intend(self, command: Command) -> Callable[[Undo], Awaitable[None]]:
        async def intend(undo: Undo) -> None:
            try:
                await self._scope.journal.update(lambda ledger: state.begun(ledger, command, undo))
            except OSError as error:
                raise BackendError(
                    f"node {command.node}: the state folder can't be written ({error.strerror}), and nothing is moved "
                    "without a note of it; free space there",
                    kind=FaultKind.TRANSIENT,
                    group=command.group,
                    node=command.node,
                ) from error

        return intend

    def _tell(self, command: Command) -> Callable[[Seen], Awaitable[None]]:
        async def tell(seen: Seen) -> None:
            scope = self._scope
            call = scripts.ack(scope.keys, scope.node, command.swap, command.id, [seen.observed], floor=scope.floor)
            try:
                await scope.driver.run(call, deadline_s=MID_ACK_S)
            except RedisUnreachableError as error:
                log.warning("group %s: job %s was not told of in passing: %s", scope.name, seen.job, error)

        return tell

    def _written(self, ledger: Ledger) -> Ledger:
        """The ledger with how jobs left or came back."""
        for job, note in self._scope.steps.notes.items():
            ledger = state.noted(ledger, job, note)
        self._scope.steps.notes.clear()
        return ledger

    async def _tidy(self, swap: int) -> None:
        scope = self._scope
        if not scope.ledger.is_open(swap):
            return
        log.warning("group %s: swap %d ended without a word to this node; letting its jobs run on",
                    scope.name, scope.ledger.swap)  # fmt: skip
        await scope.refresh()
        seen = await scope.steps.tidy(scope.ledger.undo, scope.config.restore_timeout_ms / 1000)
        await scope.journal.update_anyway(lambda ledger: self._written(state.abandoned(ledger)))
        scope.note(seen)

    async def _ack(self, command: Command, answer: Answer) -> None:
        scope = self._scope
        observed = [seen.observed for seen in answer.seen]
        current = await self._insist(
            scripts.ack(
                scope.keys,
                scope.node,
                command.swap,
                command.id,
                observed,
                outcome=answer.outcome,
                kind=answer.kind,
                error=answer.error,
                floor=scope.floor,
            )
        )
        if not current:
            log.warning("group %s: the answer to order %s came too late", scope.name, command.id)
            scope.wake.set()  # nothing was noted: the next look reports what is there
            return
        for job in answer.seen:
            if job.state == Residency.GONE:
                scope.registry.forget(job.job)  # the group has heard of it

    async def _insist(self, call: Call[Any]) -> Any:
        """Send a call until it is answered, however long the server is away: the answer is all that is left to do."""
        while True:
            try:
                return await self._scope.driver.run(call)
            except RedisUnreachableError:  # the driver says so
                if self.leaving:
                    raise
                await asyncio.sleep(_PAUSE_S)
