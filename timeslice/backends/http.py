"""The ``http`` backend: vLLM and SGLang servers go to sleep and wake when they are asked over HTTP.

A registration names addresses; only those on this agent's allow list are ever asked. Nothing is locked: a server is
drained and put to sleep, and while a part of it sleeps the job counts as suspended.
"""

# ruff: noqa: ARG002 - the interface has these arguments
from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import psutil

from timeslice.backends.base import Backend, Capabilities, Context, DeviceMemory, Job, Outcome, Probe, Selection
from timeslice.backends.checks import fault, is_alive, is_foreign
from timeslice.backends.devices import has_devices, measure_devices, missing_devices, used_bytes
from timeslice.backends.http_access import AccessError, AllowList, Token, plain
from timeslice.backends.http_client import HttpClient
from timeslice.backends.http_dialect import Dialect, Server
from timeslice.backends.http_marks import Marks, default_folder
from timeslice.backends.http_servers import Seen, Sleepers, kept
from timeslice.backends.http_sglang import SglangDialect
from timeslice.backends.http_vllm import VllmDialect
from timeslice.backends.steps import Step, combine, together
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Target

log = logging.getLogger("timeslice.backends")

PROBE_S = 5.0
FREE_S = 10.0  # an answer may come before the memory is free
FREED_SHARE = 0.8
_PAUSE_S = 0.05

T = TypeVar("T")


class HttpBackend(Backend):
    """Options: ``allow`` (required), ``token_env`` or ``token_file``, ``timeout`` (seconds for an answer to a
    question), ``drain`` (wait or abort: what becomes of a vLLM server's requests), ``reload=1`` (vLLM loads dropped
    weights from its checkpoint again), ``state`` (folder of the marks)."""

    name = "http"
    options: ClassVar[frozenset[str] | None] = frozenset(
        {"allow", "token_env", "token_file", "timeout", "drain", "reload", "state"}
    )

    def __init__(self, context: Context) -> None:
        self._context = context
        given = context.options
        try:
            allow, self._token = AllowList(given.get("allow", "")), Token.of(given)
            self._client = HttpClient(allow, self._token, timeout_s=_seconds(given.get("timeout", "5")))
            drain = _one_of("drain", given.get("drain", "wait"), ("wait", "abort"))
            reload = _one_of("reload", given.get("reload", "0"), ("0", "1")) == "1"
            self._sleepers = Sleepers(Marks(Path(given.get("state") or default_folder())), self._sizes)
        except ValueError as error:
            raise BackendError(
                f"group {context.group}, node {context.node}: http backend: {error}",
                kind=FaultKind.UNSUPPORTED,
                group=context.group,
                node=context.node,
            ) from error
        self._dialects: dict[str, Dialect] = {
            "vllm": VllmDialect(drain=drain, reload=reload),
            "sglang": SglangDialect(),
        }

    def capabilities(self) -> Capabilities:
        share = FREED_SHARE if has_devices(self._context) else 0.0
        return Capabilities(modes=frozenset({"offload", "discard"}), freed_share=share)

    async def probe(self, job: Job) -> Probe:
        """BackendError(transient) when a server does not answer though its process lives."""
        # Once: an agent looks often, and asks again itself where it matters.
        found = await self._look(job, time.monotonic() + PROBE_S, patient=False)
        for seen in found:
            if seen.dialect.tells and seen.asleep == () and seen.mark and not seen.mark.unsure:
                log.warning(
                    "%s: it slept and is awake, and nobody here woke it; if it was started again, push its weights",
                    seen.server.who,
                )
                self._sleepers.forget(seen.server)
        return Probe(
            state=combine(seen.state for seen in found),
            device_bytes=await self._on_device(job) if found else 0,
            host_bytes=sum(seen.mark.host_bytes for seen in found if seen.asleep and seen.mark),
        )

    async def estimate(self, job: Job, selection: Selection) -> int:
        """At most: a server does not tell how much of it are weights, some tell how much is dropped in any case."""
        if selection.mode == "discard" or selection.tags == ("kv_cache",):
            return 0
        until = time.monotonic() + PROBE_S
        awake = [seen for seen in await self._look(job, until) if not seen.asleep]
        dropped = await self._each(job, awake, lambda seen: seen.dialect.dropped(seen.server, until))
        held = await self._sizes(*{seen.server.target: None for seen in awake})
        return kept(held, min(dropped, default=0))

    async def prepare(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        """Nothing can be locked from here: it waits until the servers are idle."""
        step = Step(deadline_s)
        found = await self._able(job, selection, step.until)
        await self._each(job, found, lambda seen: self._sleepers.drain(seen, step.until))
        step.note("drain")
        return step.outcome()

    async def suspend(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        step = Step(deadline_s)
        found = await self._able(job, selection, step.until)
        todo = [seen for seen in found if set(seen.asked(selection)) - set(seen.asleep or ())]
        had, taken = await self._on_device(job), await used_bytes(self._context)

        async def put_to_sleep(seen: Seen) -> None:
            await self._sleepers.drain(seen, step.until)
            await self._sleepers.put_to_sleep(seen, selection, step.until)

        try:
            await self._each(job, todo, put_to_sleep)
            step.note("sleep")
            if todo:
                whole = all(set(seen.asked(selection)) == set(seen.tags) for seen in todo)
                await self._freed(job, had, step.until, whole=whole)
        except BackendError as error:
            await self._undo(job, todo, step, error)
            raise
        step.note("free")
        freed = max(0, taken - await used_bytes(self._context))
        return step.outcome(freed if selection.mode == "offload" else 0, freed)

    async def restore(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        step = Step(deadline_s)
        found = await self._look(job, step.until)
        self._refuse(job, found, selection)
        todo = [seen for seen in found if set(seen.asked(selection)) & set(seen.asleep or ())]
        dropped = any(seen.mark and seen.mark.mode == "discard" for seen in todo)
        taken = await used_bytes(self._context)
        if not selection.tags:
            await self._refuse_crowded(job, todo)
        try:
            await self._each(job, todo, lambda seen: self._sleepers.wake(seen, seen.asked(selection), step.until))
        except BackendError as error:
            await self._undo(job, todo, step, error)
            raise
        step.note("wake")
        return step.outcome(0 if dropped else max(0, await used_bytes(self._context) - taken))

    async def release(self, job: Job, *, deadline_s: float) -> Outcome:
        return Outcome()  # nothing was locked

    async def abort(self, job: Job, *, deadline_s: float) -> Outcome:
        return Outcome()  # nothing was asked of it

    async def health(self) -> Sequence[str]:
        lines = await missing_devices(self._context)
        try:
            self._token.headers()
        except AccessError as error:
            lines.append(str(error))
        return lines

    async def memory(self) -> Sequence[DeviceMemory]:
        return await measure_devices(self._context)

    async def _able(self, job: Job, selection: Selection, until: float) -> list[Seen]:
        """How its servers are. BackendError(unsupported), and nothing is asked to sleep, when one can't do it."""
        self._refuse(job, self._servers(job), selection)
        found = await self._look(job, until)

        async def check(seen: Seen) -> None:
            if reason := await seen.dialect.objection(seen.server, selection, until):
                raise BackendError(f"server {seen.server.url}: {reason}", kind=FaultKind.UNSUPPORTED)

        await self._each(job, [seen for seen in found if not seen.asleep], check)
        return found

    def _refuse(self, job: Job, found: Sequence[Seen], selection: Selection) -> None:
        for seen in found:
            # Of what was registered, what its kind of server has.
            if why := seen.server.target.model_copy(update={"tags": seen.tags}).unable(selection.as_leave()):
                raise fault(FaultKind.UNSUPPORTED, job, f"server {seen.server.url} {why}")

    async def _refuse_crowded(self, job: Job, every: Sequence[Seen]) -> None:
        """BackendError(transient) when what they had on the devices has no room there: a server that runs out of memory
        while it wakes may end."""
        had: dict[Target, int] = {}  # one that stands in for several has the bytes of all
        for seen in every:
            target = seen.server.target
            had[target] = max(had.get(target, 0), seen.mark.device_bytes if seen.mark else 0)
        need = sum(had.values()) - sum(await self._sizes(*had))
        devices = await self.memory()
        free = sum(device.free_bytes for device in devices)
        if devices and need > free:
            message = f"its servers are not woken: they need {need} bytes of the device, and {free} are free"
            raise fault(FaultKind.TRANSIENT, job, f"{message}; see who has them: timeslice nodes")

    def _servers(self, job: Job, *, patient: bool = True) -> list[Seen]:
        """Those of processes that live, before anything was asked. Each once, also where every rank of a program has
        registered it: two orders at once could end it. Its own process tells more than one that stands in for it."""
        found: dict[str, Seen] = {}
        for target in sorted(job.targets, key=lambda target: bool(target.channel)):
            if not (is_foreign(target) or is_alive(target)):
                continue
            dialect = self._dialects.get(target.dialect)
            if target.endpoints and dialect is None:
                message = f"no dialect {target.dialect!r}; there are: {', '.join(self._dialects)}"
                raise fault(FaultKind.UNSUPPORTED, job, message)
            for url in target.endpoints:
                assert dialect is not None
                address = plain(url)
                found.setdefault(address, Seen(Server(address, target, self._client, patient), dialect, None, ()))
        return list(found.values())

    async def _look(self, job: Job, until: float, *, patient: bool = True) -> list[Seen]:
        async def look(seen: Seen) -> Seen:
            return await self._sleepers.find(seen.server, seen.dialect, until)

        return await self._each(job, self._servers(job, patient=patient), look)

    async def _each(self, job: Job, every: Sequence[Seen], act: Callable[[Seen], Coroutine[Any, Any, T]]) -> list[T]:
        """All at once. Who ended meanwhile is left out; faults name the job."""

        async def one(seen: Seen) -> list[T]:
            try:
                return [await act(seen)]
            except BackendError as error:
                if error.kind is not FaultKind.GONE:
                    raise fault(error.kind, job, str(error)) from error
                self._sleepers.forget(seen.server)
                return []

        return [result for results in await together(one(seen) for seen in every) for result in results]

    async def _undo(self, job: Job, every: Sequence[Seen], step: Step, cause: BackendError) -> None:
        """All or none: what was done to a part of the servers is taken back."""
        until = step.undo_until()
        try:
            await self._each(job, every, lambda seen: self._sleepers.undo(seen, until))
        except BackendError as error:
            raise fault(FaultKind.POISONED, job, f"{cause}; and taking it back failed: {error}") from cause

    async def _freed(self, job: Job, had: int, until: float, *, whole: bool) -> None:
        """BackendError(transient) when its servers keep more of the devices than they may. How large a part was nobody
        can tell, but that it freed nothing at all."""
        soon, may_keep = min(until, time.monotonic() + FREE_S), (1 - FREED_SHARE) * had if whole else max(0, had - 1)
        while (still := await self._on_device(job)) > may_keep:
            if time.monotonic() + _PAUSE_S > soon:
                message = f"its servers said that they sleep, and still have {still} of {had} bytes on the device"
                raise fault(
                    FaultKind.TRANSIENT,
                    job,
                    f"{message}; see that they were started with --enable-sleep-mode (vLLM) or --enable-memory-saver "
                    "(SGLang)",
                )
            await asyncio.sleep(_PAUSE_S)

    async def _on_device(self, job: Job) -> int:
        """Bytes that its servers have on the devices."""
        return sum(await self._sizes(*(target for target in job.targets if target.endpoints)))

    async def _sizes(self, *targets: Target) -> list[int]:
        """Bytes that these processes and their children have on each device. Nothing where nobody can tell: of servers
        elsewhere, for whom another process stands in."""
        if not has_devices(self._context):
            return []
        local = [target.pid for target in targets if not is_foreign(target) and is_alive(target)]
        pids = await asyncio.to_thread(_families, local)
        return [sum(size for pid, size in device.holders if pid in pids) for device in await self.memory()]


def _families(pids: Sequence[int]) -> set[int]:
    """These processes and all below them: a server computes in children of its own."""
    found = set(pids)
    for pid in pids:
        try:
            found |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
        except psutil.Error:
            continue  # it ended meanwhile
    return found


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 600:
        raise ValueError(f"option timeout={text!r} must be seconds, above 0 and at most 600")
    return seconds


def _one_of(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ValueError(f"option {name}={value!r} must be one of: {', '.join(known)}")
    return value
