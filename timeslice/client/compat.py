"""The Python client of llm-d's time-slicing, over Redis: the same names, arguments and results.

``target`` is a Redis URL or ``host:port``; ``TIMESLICE_URL`` overrides it, so that code with an orchestrator's address
in it runs unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from types import TracebackType
from typing import Any, Self

from timeslice.client.core import BaseClient
from timeslice.client.hold import Hold
from timeslice.client.lease import BaseLease, Lease
from timeslice.client.steps import Steps
from timeslice.client.sync import Client
from timeslice.client.terms import Terms
from timeslice.errors import (
    AcquireTimeoutError,
    RedisUnreachableError,
    ServerUnsuitableError,
    TimeSliceError,
    UsageError,
)
from timeslice.locks.scripts import text
from timeslice.locks.view import GroupView
from timeslice.models import Residency
from timeslice.settings import Settings, find_url


class OrchestratorError(TimeSliceError):
    """Root of what TimeSliceOrchestratorClient raises; the cause is one of timeslice's own errors."""


class OrchestratorConnectionError(OrchestratorError):
    """The server does not answer, or is no Redis."""


class OrchestratorTimeoutError(OrchestratorError, TimeoutError):
    """Not granted within ``timeout_sec``; the request is withdrawn."""


class OrchestratorInvalidArgumentError(OrchestratorError, ValueError):
    """An unknown group, a bad name, or a release of what is not held."""


class OrchestratorInternalError(OrchestratorError):
    """Anything else, such as a lease that was lost."""


@dataclass(frozen=True)
class AcquireResult:
    """``success``, ``waited_ms`` and ``context_restored``, as of llm-d's client."""

    success: bool
    waited_ms: int
    context_restored: bool  # the job's saved state was put back on the devices


@dataclass(frozen=True)
class YieldResult:
    """``success``, ``pending_waiters`` and ``snapshot_deferred``, as of llm-d's client."""

    success: bool  # False: the server has not answered yet; the release is tried on in the background
    pending_waiters: int
    snapshot_deferred: bool  # nobody waits, so the job's state stays on the devices for now


class GroupState(StrEnum):
    UNKNOWN = "STATE_UNKNOWN"
    IDLE = "STATE_IDLE"
    IDLE_YIELDED = "STATE_IDLE_YIELDED"  # idle, with a job's state still on the devices
    LOCKED = "STATE_LOCKED"
    SWITCHING = "STATE_SWITCHING"


class JobState(StrEnum):
    IDLE = "STATE_IDLE"
    RUNNING = "STATE_RUNNING"
    TRANSITIONING = "STATE_TRANSITIONING"
    SAVED = "STATE_SAVED"
    FAULTED = "STATE_FAULTED"


@dataclass(frozen=True)
class AgentJobState:
    agent: str
    job_state: JobState
    job_id: str


@dataclass(frozen=True)
class GroupStatus:
    """A group in the words of llm-d's client."""

    group_id: str
    group_state: GroupState
    state_timestamp: datetime
    locking_job: str
    active_job: str
    waiter_queue_depth: int
    loaded_job: str
    agent_job_states: tuple[AgentJobState, ...]


_TARGET_HINT = (
    ". The address is the `target` written in the code; to use another server without changing it, set TIMESLICE_URL, "
    "which overrides it"
)

_JOB_STATES: dict[str, JobState] = {
    Residency.RESIDENT: JobState.RUNNING,
    Residency.SUSPENDING: JobState.TRANSITIONING,
    Residency.RESTORING: JobState.TRANSITIONING,
    Residency.SUSPENDED: JobState.SAVED,
    Residency.FAULTED: JobState.FAULTED,
    Residency.UNKNOWN: JobState.FAULTED,
}


class OnAccelerators(Hold[AcquireResult, AcquireResult]):
    """A hold that gives the AcquireResult: for ``with``, ``async with`` and as decorator."""

    _hint = ""

    def _enter(self, client: BaseClient[Any, Any]) -> Steps[AcquireResult]:
        try:
            lease: BaseLease = yield from super()._enter(client)
        except TimeSliceError as error:
            raise _translated(error, self._hint) from error
        return _result(lease)


class TimeSliceOrchestratorClient:
    """Acquire and release groups as llm-d's client does. Ids given here are the defaults of each call.

    A missing ``job_id`` is taken from ``TIMESLICE_JOB`` or ``TIMESLICE_JOB_ID``, else made of node and process id.
    """

    def __init__(self, target: str | None = None, job_id: str | None = None, group_id: str | None = None) -> None:
        settings = Settings()
        self._url = None if settings.disable else find_url(target=target)
        self._hint = _TARGET_HINT if target and not settings.url else ""
        self._client = Client(self._url, job_id)
        self._group_id = group_id
        self._leases: dict[tuple[str, str], Lease] = {}

    def acquire(
        self, job_id: str | None = None, group_id: str | None = None, timeout_sec: float | None = None
    ) -> AcquireResult:
        """Wait for the group; at once if this client holds it already."""
        job, group = job_id or self._client.job, self._group(group_id)
        held = self._leases.get((job, group))
        if held and held.state == "held":
            return AcquireResult(success=True, waited_ms=0, context_restored=False)
        try:
            lease = self._client.acquire(group, job=job, timeout=timeout_sec, gang=False)
        except TimeSliceError as error:
            raise _translated(error, self._hint) from error
        self._leases[job, group] = lease
        return _result(lease)

    def release(self, job_id: str | None = None, group_id: str | None = None) -> YieldResult:
        """Give the group up."""
        job, group = job_id or self._client.job, self._group(group_id)
        lease = self._leases.pop((job, group), None)
        if lease is None:
            raise OrchestratorInvalidArgumentError(
                f"group {group}: job {job} does not hold it through this client; call acquire first",
                group=group,
                job=job,
            )
        reply = lease.yield_()
        if lease.lost.is_set():
            try:
                lease.ensure_held()
            except TimeSliceError as error:
                raise _translated(error, self._hint) from error
        if reply is None:
            return YieldResult(success=self._client.disabled, pending_waiters=0, snapshot_deferred=False)
        return YieldResult(success=True, pending_waiters=reply.pending, snapshot_deferred=reply.kept)

    yield_ = release

    def on_accelerators(
        self, job_id: str | None = None, group_id: str | None = None, timeout_sec: float | None = None
    ) -> OnAccelerators:
        """Hold the group around a block or a function; gives the AcquireResult."""
        terms = Terms(job=job_id or self._client.job)
        held = OnAccelerators((self._group(group_id),), terms, timeout_sec, url=self._url)
        held._hint = self._hint  # noqa: SLF001
        return held

    def get_status(self, group_id: str | None = None) -> GroupStatus:
        """How the group stands."""
        try:
            view = self._client.status(self._group(group_id))
        except TimeSliceError as error:
            raise _translated(error, self._hint) from error
        if not view.exists:
            raise OrchestratorInvalidArgumentError(f"no group {view.name}; see list_groups()", group=view.name)
        return group_status(view)

    def list_groups(self) -> list[str]:
        """Names of all groups."""
        client = self._client
        try:
            names = client.driver.retry(lambda: client.driver.client.smembers(client.keys.groups))
        except TimeSliceError as error:
            raise _translated(error, self._hint) from error
        return sorted(text(name) for name in names)

    def close(self) -> None:
        """Release what was acquired and close the connections."""
        self._leases.clear()
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _group(self, group_id: str | None) -> str:
        group = group_id or self._group_id
        if not group:
            raise UsageError("group_id is missing: give it to the call or to TimeSliceOrchestratorClient")
        return group


def on_accelerators(*, group_id: str, job_id: str | None = None, timeout_sec: float | None = None) -> OnAccelerators:
    """``TimeSliceOrchestratorClient.on_accelerators`` with the server and job of the environment."""
    return OnAccelerators((group_id,), Terms(job=job_id), timeout_sec)


def _result(lease: BaseLease) -> AcquireResult:
    grant = lease.grant
    return AcquireResult(success=True, waited_ms=round(grant.waited_s * 1000), context_restored=grant.how == "restored")


def job_state(residency: str) -> JobState:
    """Where a job's state is, in the words of llm-d."""
    return _JOB_STATES.get(residency, JobState.IDLE)


def group_status(view: GroupView) -> GroupStatus:
    """A group in the words of llm-d."""
    loaded = view.resident[0] if view.resident else ""
    if view.swap:
        state = GroupState.SWITCHING
    elif view.holder:
        state = GroupState.LOCKED
    elif view.phase == "blocked":
        state = GroupState.UNKNOWN
    else:
        state = GroupState.IDLE_YIELDED if loaded else GroupState.IDLE
    return GroupStatus(
        group_id=view.name,
        group_state=state,
        state_timestamp=datetime.fromtimestamp(view.number("since_ms") / 1000, UTC),
        locking_job=view.holder,
        active_job=view.holder,
        waiter_queue_depth=len(view.queue),
        loaded_job=loaded,
        agent_job_states=tuple(
            AgentJobState(member.node, job_state(member.state), member.job) for member in view.members
        ),
    )


def _translated(error: TimeSliceError, hint: str = "") -> OrchestratorError:
    if isinstance(error, AcquireTimeoutError):
        kind: type[OrchestratorError] = OrchestratorTimeoutError
    elif isinstance(error, RedisUnreachableError | ServerUnsuitableError):
        kind = OrchestratorConnectionError
    elif isinstance(error, UsageError):
        kind = OrchestratorInvalidArgumentError
    else:
        kind = OrchestratorInternalError
    told = f"{str(error).rstrip('.')}{hint}" if hint and kind is OrchestratorConnectionError else str(error)
    return kind(told, group=error.group, job=error.job, node=error.node, token=error.token)
