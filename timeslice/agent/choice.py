"""Which backend moves a job: the first of the group's ordered list that applies to its processes as they are now."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from timeslice.agent import procfs
from timeslice.backends.base import Backend, Context, DeviceMemory
from timeslice.backends.spec import parse_specs
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Target

log = logging.getLogger("timeslice.agent")

MakeBackend = Callable[[str, Context], Backend]
CHANNEL, HTTP = "channel", "http"
# Without a device to look at, only a workload that moves its own state can be believed.
DEFAULT, DEFAULT_EMULATED = (CHANNEL,), (CHANNEL, "arena")


def stands_in(target: Target) -> bool:
    """Whether it is only the end of a wire to processes elsewhere: a workload behind a gateway, or servers. Its own end
    tells nothing of those, unless it has let its channel go before: then they said good-bye."""
    return target.backend in (CHANNEL, HTTP) and bool(target.channel)


def _listens(targets: Sequence[Target]) -> bool:
    """Whether a workload in these processes can answer: a stopped one can't, and would cost the whole deadline."""
    listening = [target for target in targets if target.channel]
    return bool(listening) and all(procfs.runs(target) for target in listening)


class BackendSet:
    """The backends of one group, in order of preference."""

    def __init__(self, group: str, node: str, backends: Mapping[str, Backend]) -> None:
        self._group, self._node = group, node
        self._backends = dict(backends)

    @classmethod
    def make(cls, context: Context, specs: Sequence[str], make: MakeBackend) -> BackendSet:
        """From ``name`` or ``name:key=value,...`` each. UsageError for what is not written so,
        BackendError(unsupported) when one can't run here."""
        wanted = parse_specs(context.group, specs or (DEFAULT_EMULATED if context.devices else DEFAULT))
        found = {name: make(name, replace(context, options=options)) for name, options in wanted.items()}
        if idle := [name for name, each in found.items() if not each.capabilities().modes]:
            raise BackendError(
                f"group {context.group}, node {context.node}: backend {idle[0]} moves nothing by itself; make it a "
                f"stage before one that does: --backend composite:stages={idle[0]}+cuda",
                kind=FaultKind.UNSUPPORTED,
                group=context.group,
                node=context.node,
            )
        return cls(context.group, context.node, found)

    def __getitem__(self, name: str) -> Backend:
        return self._backends[name]

    def names(self) -> tuple[str, ...]:
        return tuple(self._backends)

    def choose(self, job: str, targets: Sequence[Target], prefer: str = "", *, force: bool = False) -> Backend:
        """The backend for a job. ``prefer`` is the one that suspended it: nobody else could bring it back. With
        ``force`` one that works from outside, if there is one. BackendError(unsupported) if none can."""
        if moved := self._named(prefer):
            return moved
        if prefer:
            raise self._unsupported(job, f"it left by the backend {prefer}, which alone can bring it back")
        asked = {target.backend for target in targets} - {""}
        if force and (outside := self.by_force(targets)):
            return outside
        if len(asked) > 1 or asked - self._backends.keys():
            raise self._unsupported(job, f"its processes ask for {', '.join(sorted(asked))}")
        for name in asked or self._backends:
            if name == CHANNEL and not _listens(targets):
                continue
            backend = self._backends[name]
            # What has to ask would wait for a stopped process until its deadline.
            return backend if all(map(procfs.runs, targets)) else backend.outside()
        raise self._unsupported(job, "its workload does not answer on its channel (no channel, or stopped)")

    def by_force(self, targets: Sequence[Target]) -> Backend | None:
        """One that moves these processes whether they answer or not, if there is one."""
        # Where one stands in for a process elsewhere, nothing reaches that one from outside.
        if any(target.backend == CHANNEL or stands_in(target) for target in targets):
            return None
        return next((each.outside() for each in self._backends.values() if each.capabilities().forced), None)

    def observer(self, targets: Sequence[Target]) -> Backend | None:
        """One that can look at the job from outside, without asking the job."""
        asked = {target.backend for target in targets} - {""}
        names = asked & self._backends.keys() or self._backends
        return next((self._backends[name].outside() for name in names if name != CHANNEL), None)

    def _named(self, name: str) -> Backend | None:
        """The backend of this name, or the part of one that is called so."""
        views = [each.outside() for each in self._backends.values()]
        return self._backends.get(name) or next((each for each in views if each.name == name), None)

    async def measure(self) -> Sequence[DeviceMemory]:
        """The group's devices on this node, by the first backend that can tell; empty if none can."""
        for backend in self._backends.values():
            if devices := await backend.memory():
                return devices
        return ()

    async def health(self) -> list[str]:
        return [f"{name}: {line}" for name, backend in self._backends.items() for line in await backend.health()]

    def _unsupported(self, job: str, why: str) -> BackendError:
        return BackendError(
            f"group {self._group}: no backend of node {self._node} can move job {job}: {why}; "
            f"this agent has: {', '.join(self._backends) or 'none'} (timeslice agent --backend)",
            kind=FaultKind.UNSUPPORTED,
            group=self._group,
            job=job,
            node=self._node,
        )
