"""The interface of snapshot backends, and its contract.

Only a node agent calls a backend, from the one executor of a group, never two calls at once for one (group, job).
Every method may be repeated with the same arguments and then finds what it did before: **observed state beats
remembered state**, so each looks before it acts and again afterwards. A failed ``suspend`` leaves the job running
where it was. A failed ``restore`` leaves the saved copy intact. Faults are ``BackendError`` with a kind; anything
else that escapes is taken as ``poisoned``.

The order in one swap is prepare, suspend, (other job: restore, release); or prepare, abort; and after a failure
behind ``suspend``, restore and release of the job that had left.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from timeslice.models import ChannelAnswer, ChannelCommand, Leave, Residency, Target


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a backend can do."""

    modes: frozenset[Literal["offload", "discard"]] = frozenset({"offload"})
    forced: bool = False  # can suspend a process that does not cooperate (stopped, hung)
    freed_share: float = 0.0  # share of the device bytes that must be measured free after a suspend; 0: not measured
    overlaps: bool = False  # may bring one job back while it moves another one out, where there is room for both


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job's presence on this node, as the agent hands it to a backend."""

    group: str
    job: str
    node: str
    targets: tuple[Target, ...]  # alive when the agent looked; the backend checks again


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What of a job's state is meant. Empty tags mean all of it, and for ``restore`` all that is out."""

    mode: Literal["offload", "discard"] = "offload"
    tags: tuple[str, ...] = ()
    slot: str = ""  # one named instance of what the tags name, such as one adapter of many

    def as_leave(self) -> Leave:
        """The same, as it is written on the wire."""
        return Leave(mode=self.mode, tags=self.tags, slot=self.slot)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What was observed. ``state`` is absent, resident, suspended or faulted (between two steps and not known)."""

    state: Residency
    device_bytes: int = 0  # on this group's devices
    host_bytes: int = 0  # held for it in host memory
    locked: bool = False  # prepared: it can't touch the device until released
    parts: dict[str, int] = field(default_factory=dict)  # bytes on the device by tag, where known


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a step did. Seconds are wall time of the step; ``steps`` splits them by name."""

    moved_bytes: int = 0
    freed_bytes: int = 0
    saved_bytes: int = 0  # not copied, since host memory had a valid copy already
    seconds: float = 0.0
    steps: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """One accelerator's memory as this backend's devices report it, in bytes."""

    device: str
    total_bytes: int
    free_bytes: int
    holders: tuple[tuple[int, int], ...] = ()  # (pid, bytes), where the backend can tell


class Channel(Protocol):
    """How a backend reaches an in-process workload. The agent brings the implementation."""

    async def ask(self, job: str, process: str, command: ChannelCommand, *, deadline_s: float) -> ChannelAnswer:
        """Send a command and wait for its answer. The same id gets the same answer. TimeoutError after the deadline."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a backend is made with."""

    group: str
    node: str
    devices: tuple[Path, ...] = ()  # folders of emulated devices of this group on this node
    accelerators: tuple[str, ...] = ()  # UUIDs (GPU-..., MIG-...) of real devices of this group on this node
    channel: Channel | None = None
    options: dict[str, str] = field(default_factory=dict)  # of the agent's ``--backend name:key=value,...``


class Backend(ABC):
    """One way of moving a job's device state to host memory and back. One instance serves one group of one agent.

    Constructed as ``BackendClass(context)``; found by its entry point in the group ``timeslice.backends``.
    """

    name: str
    # What it takes from ``Context.options``; another one is refused before it is made. None: it checks them itself.
    options: ClassVar[frozenset[str] | None] = frozenset()

    @abstractmethod
    def __init__(self, context: Context) -> None:
        """Raises BackendError(unsupported) with a remedy when this node can't run the backend at all."""

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Constant for the life of the instance."""

    def outside(self) -> Backend:
        """As much of it as works without an answer of the job, for jobs that are stopped and for orders by force.
        Another name than its own means that it goes another way, and brings back only what it took."""
        return self

    @abstractmethod
    async def probe(self, job: Job) -> Probe:
        """Look at the job's real state. Changes nothing. ``gone`` targets are left out; none left means absent."""

    @abstractmethod
    async def estimate(self, job: Job, selection: Selection) -> int:
        """Host bytes that a suspend would need on top of what is held already."""

    @abstractmethod
    async def prepare(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        """Drain and lock: afterwards nothing computes on the device. All targets or none."""

    @abstractmethod
    async def suspend(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        """Move the state of a prepared job to host memory and free the device."""

    @abstractmethod
    async def restore(self, job: Job, selection: Selection, *, deadline_s: float) -> Outcome:
        """Bring a suspended job's state back, still locked. Needs the device memory to be free already."""

    @abstractmethod
    async def release(self, job: Job, *, deadline_s: float) -> Outcome:
        """Let a restored job run on."""

    @abstractmethod
    async def abort(self, job: Job, *, deadline_s: float) -> Outcome:
        """Undo ``prepare``: the job runs on as if nothing had been asked."""

    @abstractmethod
    async def health(self) -> Sequence[str]:
        """What would keep this backend from working here, one sentence each with the remedy. Empty: all is well."""

    @abstractmethod
    async def memory(self) -> Sequence[DeviceMemory]:
        """The group's devices on this node. Empty when the backend can't measure them."""
