"""Wire models (validated by pydantic wherever they come from Redis) and value types shared by several parts."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from timeslice.names import check_name


class Residency(StrEnum):
    """Where a job's device state is."""

    ABSENT = "absent"  # it has none: never loaded, or only a bare context
    RESIDENT = "resident"  # on the device
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"  # in host memory
    RESTORING = "restoring"
    FAULTED = "faulted"  # truly unknown
    GONE = "gone"  # its processes ended and the memory was measured free


def _name(kind: str) -> AfterValidator:
    return AfterValidator(lambda value: check_name(kind, value))


GroupName = Annotated[str, _name("group")]
JobName = Annotated[str, _name("job")]
NodeName = Annotated[str, _name("node")]


class Wire(BaseModel):
    """Frozen, closed: an unknown field is an error, not a surprise."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Target(Wire):
    """A process of a job, as it registered itself. A pid alone is never trusted: the start time goes with it."""

    job: JobName
    host: NodeName
    pid: int = Field(gt=0, le=2**22)
    start: int = Field(ge=0)  # clock ticks since boot, field 22 of /proc/PID/stat
    uid: int = Field(ge=0)
    pid_namespace: str = Field(max_length=64)  # readlink /proc/PID/ns/pid
    backend: str = Field(default="", max_length=63)  # "" lets the agent choose
    channel: str = Field(default="", max_length=200)  # process id part of the channel key, if a workload listens
    modes: tuple[str, ...] = Field(default=(), max_length=8)  # what the workload can do: offload, discard
    tags: tuple[str, ...] = Field(default=(), max_length=64)


Step = Literal["prepare", "commit", "rollback"]


class Command(Wire):
    """An order of a coordinator to the agent of one node.

    ``id`` is swap/node/step/attempt: the same id always gets the same answer.
    """

    id: str = Field(max_length=300)
    group: GroupName
    node: NodeName
    swap: int = Field(gt=0)
    epoch: int = Field(gt=0)
    step: Step
    out: tuple[JobName, ...] = Field(default=(), max_length=1024)  # jobs whose state must leave the device
    into: JobName | None = None  # job whose saved state, if any, must come back
    suspend_timeout_ms: int = Field(gt=0)
    restore_timeout_ms: int = Field(gt=0)


class Plan(Wire):
    """What a swap will do, stored before the first order goes out. The same on every node: an agent knows best
    what of it exists on its own."""

    out: tuple[JobName, ...] = ()
    into: JobName | None = None
    nodes: tuple[NodeName, ...] = ()


class ChannelCommand(Wire):
    """An agent's command to an in-process workload, over the job's channel stream."""

    id: str = Field(max_length=300)
    action: Literal["suspend", "restore", "probe"]
    mode: Literal["offload", "discard"] = "offload"
    tags: tuple[str, ...] = Field(default=(), max_length=64)


class ChannelAnswer(Wire):
    """A workload's answer. ``busy`` asks to be asked again."""

    id: str = Field(max_length=300)
    ok: bool
    busy: bool = False
    state: Residency = Residency.RESIDENT
    device_bytes: int = Field(default=0, ge=0)
    host_bytes: int = Field(default=0, ge=0)
    moved_bytes: int = Field(default=0, ge=0)
    seconds: float = Field(default=0.0, ge=0)
    error: str = Field(default="", max_length=2000)


class GroupConfig(Wire):
    """Settings of a group, in its ``config`` hash. Everything has a default."""

    order: int = Field(default=0, ge=-1000, le=1000)  # groups taken together are taken in this order
    prepare_timeout_ms: int = Field(default=10_000, gt=0, le=3_600_000)
    suspend_timeout_ms: int = Field(default=180_000, gt=0, le=3_600_000)
    restore_timeout_ms: int = Field(default=180_000, gt=0, le=3_600_000)
    host_reserve_bytes: int = Field(default=256 << 20, ge=0)  # host memory that suspends may not use
