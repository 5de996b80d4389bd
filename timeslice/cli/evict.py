"""Command ``evict``: move a job's device state to host memory now."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from timeslice.cli.output import json_option, note, print_json
from timeslice.cli.revoke import reason_option, wait_option
from timeslice.cli.session import Session, operator
from timeslice.errors import RefusedError, UnknownJobError
from timeslice.locks import scripts

if TYPE_CHECKING:
    from timeslice.locks.view import GroupView


@click.command(
    epilog="""\b
Examples:
  timeslice evict run-a                          # in every group
  timeslice evict run-a --group trainers --force # whether its workload answers or not"""
)
@click.argument("job")
@click.option("--group", "groups", multiple=True, metavar="GROUP", help="Only in this group; may be repeated.")
@click.option("--force", is_flag=True, help="Do not ask the job's workload; use a backend that works from outside.")
@reason_option
@wait_option
@json_option
@click.pass_obj
@click.pass_context
def evict(
    ctx: click.Context,
    session: Session,
    job: str,
    groups: tuple[str, ...],
    force: bool,
    reason: str,
    wait: float,
    as_json: bool,
) -> None:
    """Move the device state of JOB to host memory, where it does not hold.

    Refused (exit code 6) while it holds, and while something else is being moved. If it can't be moved it stays as it
    is, and the order is dropped.
    """
    from timeslice.cli import exits, outcome

    every = session.views()
    views = [session.view(group) for group in groups] or every
    concerned = [view for view in views if _knows(view, job)]
    if not concerned and not any(_knows(view, job) for view in every):
        raise UnknownJobError(
            f"no group knows a job {job}: it has ended and left nothing, or is misspelt; see: timeslice jobs", job=job
        )
    ordered, code, results = [], exits.DONE, []
    for view in concerned:
        call = scripts.evict(session.keys.group(view.name), job, operator(), reason, force=force, floor=view.counter)
        try:
            if session.run(call):
                ordered.append(view.name)
            else:
                note(f"job {job} has nothing on the device of {view.name}")
                results.append({"group": view.name, "job": job, "state": "nothing to do", "reason": "", "nodes": []})
        except RefusedError as error:
            code = exits.REFUSED
            note(f"error: {error}")
            results.append({"group": view.name, "job": job, "state": "refused", "reason": str(error), "nodes": []})
    if not concerned:
        note(f"job {job} has nothing on the device of {', '.join(groups)}")
    for group in ordered:
        found = outcome.wait_for(session, group, job, wait)
        note(str(found))
        if advice := outcome.what_next(session.view(group), found):
            note(advice)
        if wait or found.state != "pending":
            code = code or found.exit_code
        results.append(found.document())
    if as_json:
        print_json({"job": job, "groups": results})
    ctx.exit(code)


def _knows(view: GroupView, job: str) -> bool:
    named = {member.job for member in view.members} | {waiter.job for waiter in view.queue} | set(view.jobs)
    named |= {field.partition("/")[0] for field in view.targets}
    return job in named or job in {view.holder, view.state.get("evict")}
