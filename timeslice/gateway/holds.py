"""What a gateway holds for a job, and what Redis says of it. Decisions without waiting."""

from __future__ import annotations

import sys
import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from timeslice.client.aio import AsyncClient
from timeslice.client.lease import AsyncLease
from timeslice.client.terms import Terms
from timeslice.gateway.faults import UnavailableError
from timeslice.locks.flows import Grant
from timeslice.locks.scripts import Request
from timeslice.locks.view import GroupView
from timeslice.models import Residency

HOST = "gateway@"  # how the hosts of all gateways begin; no node has such a name, so no client has such a host
GONE_S = 3.0  # a job that starts its process anew, or whose workload registers again, has that long

asks_for: ContextVar[str | None] = ContextVar("timeslice_gateway_job", default=None)


class GatewayClient(AsyncClient):
    """Takes leases for jobs whose processes are elsewhere."""

    registers = False

    def __init__(self, url: str, prefix: str, node: str) -> None:
        super().__init__(url, "gateway", prefix)
        self.host = HOST + node

    def _taker(self) -> object:
        """The job, so that a wait knows what else its job holds here, and finds circles."""
        return asks_for.get()

    def adopt(self, view: GroupView, job: str) -> AsyncLease | None:
        """Go on with a lease of the job that this gateway in a former life, or another one, has taken."""
        state = view.state
        ours = state.get("host", "").startswith(HOST) and state.get("confirmed") == "1"
        if not ours or not job or view.holder != job:
            return None
        lease_ms = view.number("lease_ms")
        request = Request(
            waiter=state["lease_id"],
            job=job,
            host=state["host"],
            pid=view.number("pid"),
            start=view.number("start"),
            lease_ms=lease_ms,
        )
        sent_at = time.monotonic() - (lease_ms - (view.number("deadline_ms") - view.now_ms)) / 1000
        grant = Grant(view.number("token"), "no-op", 0.0, 0.0, view.mode, True, view.counter, sent_at)
        lease = AsyncLease(self, self.group_keys(view.name), request, grant, Terms(job))
        lease.taken_by = sys.intern(job)
        self.raise_floor(view.name, view.counter)
        self.renewer.add(lease)
        return lease


@dataclass(eq=False)
class Hold:
    """A lease that is kept for a job."""

    lease: AsyncLease
    until: float  # monotonic: the end of the maximum hold
    taken_over: bool  # a caller of another gateway, or of this one in a former life, has it
    vouched: bool = False  # agents have shown processes of the job since it is held
    nodes: set[str] = field(default_factory=set)  # where they run, as far as is known
    gone_at: float | None = None  # since when none is left

    def has_ended(self, view: GroupView) -> bool:
        """Whether all processes of the job that agents knew have ended, and no new one has come."""
        of_job = f"{self.lease.job}/"
        running = {name.split("/")[1] for name in view.targets if name.startswith(of_job)}
        self.nodes = running | {node for node in self.nodes if not _has_told(view, node)}
        self.vouched |= bool(running)
        if self.nodes or not self.vouched:
            self.gone_at = None
            return False
        now = time.monotonic()
        self.gone_at = self.gone_at or now
        return now >= self.gone_at + GONE_S


def _has_told(view: GroupView, node: str) -> bool:
    """Whether a node's agent lives and has told of its processes: after data loss they are missing until then."""
    known = view.nodes.get(node)
    return known is not None and known.alive and node not in view.state.get("unheard", "").split()


def refuse_unknown(view: GroupView) -> None:
    """Nobody is granted before somebody has looked at it, so nobody should wait. UnavailableError."""
    faulted = sorted(name for name, job in view.jobs.items() if job.residency == Residency.FAULTED)
    if faulted and not view.holder and not view.swap:
        raise UnavailableError(
            f"group {view.name}: the device state of job {', '.join(faulted)} is unknown, so nobody is granted. "
            f"See: timeslice repair {view.name}",
            group=view.name,
        )


def why_not_holder(view: GroupView, job: str) -> str:
    """Why the job can't yield here."""
    if view.holder == job:
        return (
            f"group {view.name}: job {job} holds it, but not through a gateway; it is for its process to yield. "
            f"An operator may: timeslice yield {view.name} --job {job}"
        )
    who = f"job {view.holder} does" if view.holder else "nobody does"
    return f"group {view.name}: job {job} does not hold it; {who}"
