"""Wire models (validated by pydantic wherever they come from Redis) and value types shared by several parts."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from timeslice.names import MAX_LENGTH, check_name


class Residency(StrEnum):
    """Where a job's device state is."""

    ABSENT = "absent"  # it has none: never loaded, or only a bare context
    RESIDENT = "resident"  # on the device
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"  # in host memory
    RESTORING = "restoring"
    FAULTED = "faulted"  # an operation left it in doubt
    GONE = "gone"  # its processes ended and the memory was measured free
    UNKNOWN = "unknown"  # it was granted, and nobody can see whether it is still there


def _name(kind: str) -> AfterValidator:
    return AfterValidator(lambda value: check_name(kind, value))


GroupName = Annotated[str, Field(max_length=MAX_LENGTH), _name("group")]
JobName = Annotated[str, Field(max_length=MAX_LENGTH), _name("job")]
TagName = Annotated[str, Field(max_length=MAX_LENGTH), _name("tag")]
NodeName = Annotated[str, Field(max_length=MAX_LENGTH), _name("node")]


W = TypeVar("W", bound="Wire")

# Bounds of what strangers may send: tests/security/test_limits.py finds a field that has none.
NUMBER_MAX = 2**53 - 1  # what Lua and JSON readers hold exactly: counters, times, bytes
RECORD_MAX = 8192  # characters of a stored registration
BODY_MAX = 256 << 10  # characters of a stream entry's body; the largest order has 1024 names

Number = Annotated[int, Field(ge=0, le=NUMBER_MAX)]
Positive = Annotated[int, Field(gt=0, le=NUMBER_MAX)]
Milliseconds = Annotated[int, Field(gt=0, le=24 * 3_600_000)]
Id = Annotated[str, Field(max_length=300)]
Word = Annotated[str, Field(max_length=MAX_LENGTH)]
TEXT_MAX = 2000  # characters of a reason or an error
Text = Annotated[str, Field(max_length=TEXT_MAX)]
Mode = Literal["offload", "discard"]
Url = Annotated[str, Field(max_length=200, pattern=r"\Ahttps?://[A-Za-z0-9._:\[\]/-]+\z")]


class Wire(BaseModel):
    """Frozen, closed: an unknown field is an error, not a surprise."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Leave(Wire):
    """What of a process's state leaves the device when another job gets the group. Empty fields leave it to the
    group's settings; no tags there either means all of it."""

    mode: Mode | Literal[""] = ""
    tags: tuple[Word, ...] = Field(default=(), max_length=64)
    slot: Word = ""  # one named instance of what the tags name, such as one adapter of many


class Target(Wire):
    """A process of a job, as it registered itself. A pid alone is never trusted: the start time goes with it."""

    job: JobName
    host: NodeName
    pid: int = Field(gt=0, le=2**22)
    start: Number  # clock ticks since boot, field 22 of /proc/PID/stat
    uid: int = Field(ge=0, lt=2**32)
    pid_namespace: Word  # readlink /proc/PID/ns/pid
    backend: Word = ""  # "" lets the agent choose
    # Process part of the channel key, if a workload listens.
    channel: str = Field(default="", max_length=200, pattern=r"\A[A-Za-z0-9._/-]*\z")
    modes: tuple[Mode, ...] = Field(default=(), max_length=8)  # what the workload can do
    tags: tuple[Word, ...] = Field(default=(), max_length=64)
    slots: tuple[Word, ...] = Field(default=(), max_length=64)
    leave: Leave = Leave()
    endpoints: tuple[Url, ...] = Field(default=(), max_length=16)  # of servers that the `http` backend asks
    dialect: Word = ""  # of these servers: vllm, sglang

    def unable(self, leave: Leave) -> str:
        """Why what registered so can't leave so, such as ``knows no tag lora; it registered: weights``; '' if it can.

        Said by the client to who asks, and by the agent before anything is sent.
        """
        if leave.mode and leave.mode not in (self.modes or ("offload",)):
            return f"can't {leave.mode}; it registered: {', '.join(self.modes) or 'offload'}"
        for what, asked, able in (("tag", {*leave.tags}, self.tags), ("slot", {leave.slot} - {""}, self.slots)):
            if unknown := sorted(asked - {*able}):
                return f"knows no {what} {', '.join(unknown)}; it registered: {', '.join(able) or 'none'}"
        return ""


Step = Literal["prepare", "commit", "rollback"]


class Command(Wire):
    """An order of a coordinator to the agent of one node.

    ``id`` is swap/node/step/attempt: the same id always gets the same answer.
    """

    id: Id
    group: GroupName
    node: NodeName
    swap: Positive
    epoch: Positive
    step: Step
    out: tuple[JobName, ...] = Field(default=(), max_length=1024)  # jobs whose state must leave the device
    into: JobName | None = None  # job whose saved state, if any, must come back
    suspend_timeout_ms: Milliseconds
    restore_timeout_ms: Milliseconds
    force: bool = False  # who goes out is not asked: a backend that works from outside is preferred


class Plan(Wire):
    """What a swap will do, stored before the first order goes out. The same on every node: an agent knows best
    what of it exists on its own."""

    out: tuple[JobName, ...] = Field(default=(), max_length=1024)
    into: JobName | None = None
    nodes: tuple[NodeName, ...] = Field(default=(), max_length=4096)
    force: bool = False


class ChannelCommand(Wire):
    """An agent's command to an in-process workload, over the job's channel stream."""

    id: Id
    action: Literal["suspend", "restore", "probe"]
    mode: Mode = "offload"
    tags: tuple[Word, ...] = Field(default=(), max_length=64)
    slot: Word = ""


class ChannelAnswer(Wire):
    """A workload's answer. ``busy`` asks to be asked again."""

    id: Id
    ok: bool
    busy: bool = False
    state: Residency = Residency.RESIDENT
    device_bytes: Number = 0
    host_bytes: Number = 0
    moved_bytes: Number = 0
    saved_bytes: Number = 0  # not copied, since host memory had a valid copy already
    parts: dict[Word, Number] = Field(default_factory=dict, max_length=64)  # bytes on the device by tag, where known
    seconds: float = Field(default=0.0, ge=0, le=1e9)
    error: Text = ""


def _listed(value: object) -> object:
    """A hash of Redis has them as one string."""
    return tuple(filter(None, value.split(","))) if isinstance(value, str) else value


class GroupConfig(Wire):
    """Settings of a group, in its ``config`` hash. Everything has a default."""

    order: int = Field(default=0, ge=-1000, le=1000)  # groups taken together are taken in this order
    prepare_timeout_ms: int = Field(default=10_000, gt=0, le=3_600_000)
    suspend_timeout_ms: int = Field(default=180_000, gt=0, le=3_600_000)
    restore_timeout_ms: int = Field(default=180_000, gt=0, le=3_600_000)
    host_reserve_bytes: Number = 256 << 20  # host memory that suspends may not use
    on_stuck: Literal["block", "kill"] = "block"  # a job that must leave, and that nothing can move
    # What leaves of a job whose hold and whose workload say nothing: as in ``Leave``.
    mode: Mode | Literal[""] = ""
    tags: Annotated[tuple[TagName, ...], BeforeValidator(_listed)] = Field(default=(), max_length=64)

    def stored(self) -> dict[str, str]:
        """As the fields of its hash."""
        return {
            name: ",".join(value) if isinstance(value, tuple) else str(value)
            for name, value in self.model_dump().items()
        }


def brief(error: ValidationError) -> str:
    """What is wrong with it, in one short line. The error's own text would quote whatever somebody sent."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])[:100]
    return ascii(f"{where}: {first['msg'][:200]}" if where else first["msg"][:200])[1:-1]


def read_wire(model: type[W], body: str, *, limit: int = BODY_MAX) -> W:
    """What somebody wrote as JSON. ValueError says what is wrong with it, fit for a log."""
    if len(body) > limit:
        raise ValueError(f"it has more than {limit} characters")
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise ValueError(brief(error)) from None
