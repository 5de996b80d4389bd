"""An operator's orders: ``yield``, ``cancel``, ``pause``, ``resume``."""

from __future__ import annotations

import click

from timeslice.cli.output import json_option, note, print_json
from timeslice.cli.revoke import reason_option
from timeslice.cli.session import Session, operator
from timeslice.errors import NotHolderError, RefusedError, UnknownJobError
from timeslice.locks import scripts


@click.command(
    name="yield",
    epilog="""\b
Examples:
  timeslice yield trainers --job run-a""",
)
@click.argument("group")
@click.option("--job", required=True, metavar="JOB", help="The job that holds GROUP now.")
@json_option
@click.pass_obj
def yield_(session: Session, group: str, job: str, as_json: bool) -> None:
    """Give GROUP up for JOB, which holds it.

    The job finds its lease lost at its next renewal. Exit code 6 if it does not hold GROUP.
    """
    view = session.view(group)
    if view.holder != job:
        raise NotHolderError(_not_holder(group, job, view.holder), group=group, job=job)
    call = scripts.yield_(session.keys.group(group), view.state["lease_id"], None, by=operator(), floor=view.counter)
    reply = session.run(call)
    if isinstance(reply, scripts.NotHolder):
        raise NotHolderError(_not_holder(group, job, reply.holder), group=group, job=job)
    if as_json:
        print_json({"group": group, "job": job, "waiting": reply.pending})
    else:
        note(f"yielded {group} for {job}; {reply.pending} waiting")


def _not_holder(group: str, job: str, holder: str) -> str:
    who = f"{holder} does" if holder else "nobody does"
    return f"job {job} does not hold {group}; {who}. See: timeslice status {group}"


@click.command(
    epilog="""\b
Examples:
  timeslice cancel trainers --job run-b            # all of its requests
  timeslice cancel trainers --waiter 5f0c6d2e"""
)
@click.argument("group")
@click.option("--job", metavar="JOB", help="Cancel every request of JOB.")
@click.option("--waiter", metavar="ID", help="Cancel one request; `timeslice queue` shows the ids.")
@json_option
@click.pass_obj
def cancel(session: Session, group: str, job: str | None, waiter: str | None, as_json: bool) -> None:
    """Take a waiting request out of the queue of GROUP.

    The waiting program gets an error that names you. Who holds already is not touched; see `timeslice yield`.
    """
    if (job is None) == (waiter is None):
        raise click.UsageError("say what to cancel: either --job JOB or --waiter ID")
    view = session.view(group)
    asking = (*view.queue, *view.forming)
    chosen = [each.waiter for each in asking if waiter in {each.waiter, None} and job in {each.job, None}]
    if not chosen:
        if view.holder and (view.holder == job or view.state.get("lease_id") == waiter):
            raise RefusedError(
                f"job {view.holder} does not wait for {group}, it holds it; "
                f"end that with: timeslice yield {group} --job {view.holder}",
                group=group,
                job=view.holder,
            )
        what = f"job {job} does not wait" if job else f"no waiter {waiter} waits"
        raise UnknownJobError(f"{what} for {group}; see: timeslice queue {group}", group=group, job=job)
    by, keys = operator(), session.keys.group(group)
    done = {each: session.run(scripts.cancel(keys, each, by=by, floor=view.counter)) for each in chosen}
    if holding := [each for each, was in done.items() if was == "holds"]:
        raise RefusedError(
            f"{holding[0]} was granted {group} in the meantime; see: timeslice status {group}", group=group, job=job
        )
    if as_json:
        print_json({"group": group, "cancelled": [{"waiter": each, "was": was} for each, was in done.items()]})
    else:
        note(f"cancelled {len(done)} of {group}: {', '.join(done)}")


def _set_paused(session: Session, group: str, reason: str, *, pause: bool, as_json: bool) -> None:
    view = session.view(group)
    phase = session.run(scripts.pause(session.keys.group(group), pause, operator(), reason, floor=view.counter))
    changed = bool(view.state.get("paused")) != pause
    if as_json:
        print_json({"group": group, "paused": pause, "changed": changed, "phase": phase})
    elif changed:
        note(f"{'paused' if pause else 'resumed'} {group}; it is {phase} now")
    else:
        note(f"{group} {'was paused already' if pause else 'was not paused'}; it is {phase}")


@click.command(
    epilog="""\b
Examples:
  timeslice pause trainers       # before maintenance: who holds may finish, nobody else starts"""
)
@click.argument("group")
@reason_option
@json_option
@click.pass_obj
def pause(session: Session, group: str, reason: str, as_json: bool) -> None:
    """Stop granting GROUP. The holder keeps it, requests queue up."""
    _set_paused(session, group, reason, pause=True, as_json=as_json)


@click.command(
    epilog="""\b
Examples:
  timeslice resume trainers"""
)
@click.argument("group")
@reason_option
@json_option
@click.pass_obj
def resume(session: Session, group: str, reason: str, as_json: bool) -> None:
    """Go on granting GROUP."""
    _set_paused(session, group, reason, pause=False, as_json=as_json)
