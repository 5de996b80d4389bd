"""Command ``ready``: whether a job may be sent requests, for routers, probes and scripts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from timeslice.cli.output import Seconds, json_option, note, print_json, print_table
from timeslice.cli.session import Session
from timeslice.errors import ServerUnsuitableError, UsageError
from timeslice.names import check_name

if TYPE_CHECKING:
    from timeslice.locks.view import GroupView
    from timeslice.readiness import Readiness

POLL_S = 0.2


@click.command(
    epilog="""\b
Examples:
  timeslice ready run-a --group samplers            # for a probe: exit code 0 or not
  timeslice ready run-a --group samplers --wait 60 && curl http://sampler-a:8000/generate
  timeslice ready run-a --json | jq -r .state
\b
Exit codes: 0 ready, 1 not ready, 3 nobody knows the job or there is no such group, 4 not ready within --wait,
5 Redis unreachable."""
)
@click.argument("job", required=False)
@click.option("--group", metavar="GROUP", help="Look at this group only. Default: ready in every group that knows JOB.")
@click.option(
    "--wait",
    type=Seconds(0, 86_400),
    metavar="SECONDS",
    help="Wait until it is ready, at most for so long. A job that nobody knows yet is waited for, too.",
)
@json_option
@click.pass_obj
@click.pass_context
def ready(
    ctx: click.Context, session: Session, job: str | None, group: str | None, wait: float | None, as_json: bool
) -> None:
    """Say whether JOB may be sent requests: it holds, and its state is on the device.

    JOB is TIMESLICE_JOB if it is not given. When it is not ready, the state tells whether it comes back by itself:
    suspended, restoring and waiting do, idle does when it asks again, absent is gone or was never there. Of unknown
    nothing can be said: a node is silent, or this user may not read a group.
    """
    from timeslice.cli import exits
    from timeslice.settings import Settings

    job = job or Settings().job
    if job is None:
        raise UsageError("name the job: timeslice ready JOB, or set TIMESLICE_JOB")
    check_name("job", job)
    until = time.monotonic() + (wait or 0.0)
    found = _look(session, job, group)
    while not found.ready and time.monotonic() < until:
        time.sleep(POLL_S)
        found = _look(session, job, group)
    _show(found, as_json=as_json)
    if not found.ready:
        failed = exits.UNKNOWN if found.state == "absent" else exits.FAILED
        ctx.exit(failed if wait is None else exits.TIMED_OUT)


def _look(session: Session, job: str, group: str | None) -> Readiness:
    from timeslice.readiness import in_all, in_one

    if group is not None:
        return in_one(job, group, session.view(group))
    asking = in_all(job, session.group_names())
    view: GroupView | None = None
    try:
        while True:
            name = asking.send(view)
            try:
                view = session.driver.view(session.keys.group(name))
            except (ServerUnsuitableError, UsageError):
                view = None  # another tenant's, or spoilt; no reason to be silent about the others
    except StopIteration as end:
        found: Readiness = end.value
        return found


def _show(found: Readiness, *, as_json: bool) -> None:
    if as_json:
        print_json(found.document())
        return
    if found.unread and found.groups:
        note(f"may not or can't read {', '.join(found.unread)}; see: timeslice doctor")
    rows = [(each.group, each.state, each.phase, each.residency, each.reason) for each in found.groups]
    print_table(("group", "state", "phase", "residency", "reason"), rows, empty=found.reason)
