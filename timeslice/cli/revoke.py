"""Command ``revoke``: take a group away from a holder that does not give it up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from timeslice.cli.output import Seconds, json_option, note, print_json
from timeslice.cli.session import Session, operator
from timeslice.errors import QUOTED_MAX, NotHolderError
from timeslice.locks import scripts

if TYPE_CHECKING:
    from timeslice.locks.view import GroupView


def _short(_: click.Context, param: click.Parameter, text: str) -> str:
    if len(text) > QUOTED_MAX:
        raise click.BadParameter(f"it has {len(text)} characters; {QUOTED_MAX} at most", param=param)
    return text


reason_option = click.option("--reason", default="", callback=_short, metavar="TEXT", help="Why; kept in the events.")
wait_option = click.option(
    "--wait",
    type=Seconds(0, 86_400),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait until it is done; 0 only gives the order.",
)


@dataclass(frozen=True)
class Taken:
    """A lease that is over by an operator's word. ``quiet_ms``: a lock-only group is not granted for so long."""

    job: str
    token: int
    by: str
    served: bool
    quiet_ms: int
    already: bool  # by an earlier order


def take(session: Session, view: GroupView, job: str | None, reason: str, *, at_once: bool = False) -> Taken:
    """End the lease that ``view`` shows, or find that it was revoked before. NotHolderError."""
    state, token = view.state, view.number("token")
    holder, lease, by = view.holder, state.get("lease_id", ""), operator()
    already = not holder and view.number("revoked") == token != 0
    if already:
        holder, lease, by = state.get("revoked_job", ""), state.get("revoked_lease", ""), state.get("revoked_by", "")
    if not holder or job not in {None, holder}:
        what = f"job {job} does not hold {view.name}; " if job else ""
        who = f"job {view.holder} does" if view.holder else f"nobody holds {view.name}"
        raise NotHolderError(f"{what}{who}. See: timeslice status {view.name}", group=view.name, job=job)
    keys = session.keys.group(view.name)
    done = session.run(scripts.revoke(keys, holder, lease, token, by, reason, at_once=at_once, floor=view.counter))
    return Taken(holder, token, by, done.served, done.quiet_ms, already)


@click.command(
    epilog="""\b
Examples:
  timeslice revoke trainers                              # whoever holds it
  timeslice revoke trainers --job run-a --reason "hangs since noon"
  timeslice revoke licences --now                        # lock-only: do not wait for the old lease"""
)
@click.argument("group")
@click.option("--job", metavar="JOB", help="Only if JOB holds GROUP.")
@reason_option
@wait_option
@click.option("--now", "at_once", is_flag=True, help="Lock-only groups: grant at once, though the body may still run.")
@json_option
@click.pass_obj
@click.pass_context
def revoke(
    ctx: click.Context,
    session: Session,
    group: str,
    job: str | None,
    reason: str,
    wait: float,
    at_once: bool,
    as_json: bool,
) -> None:
    """Take GROUP away from its holder, by force if need be.

    The holder's lease ends at once; it finds that out, with your name and reason, at its next renewal. Its device
    state is moved to host memory, from outside if a backend can, and nobody is granted before that is proved. A
    lock-only group is granted again when the old lease's time is over.
    """
    from timeslice.cli import outcome

    view = session.view(group)
    taken = take(session, view, job, reason, at_once=at_once)
    before = f"was revoked already, by {taken.by}" if taken.already else "is revoked"
    note(f"the lease of job {taken.job} on {group} (token {taken.token}) {before}")
    document = {"group": group, "job": taken.job, "token": taken.token, "by": taken.by, "already": taken.already}
    if not taken.served:
        if at_once:
            note(f"warning: the body of job {taken.job} may still run; it is told at its next renewal")
        elif taken.quiet_ms:
            note(f"the next grant comes in {taken.quiet_ms / 1000:.0f} s at the latest, when its time is over")
        if as_json:
            print_json({**document, "quiet_s": taken.quiet_ms / 1000, "moved": None})
        return
    found = outcome.wait_for(session, group, taken.job, wait)
    if as_json:
        print_json({**document, "quiet_s": 0.0, "moved": found.document()})
    note(str(found))
    if advice := outcome.what_next(session.view(group), found):
        note(advice)
    if wait or found.state != "pending":
        ctx.exit(found.exit_code)
