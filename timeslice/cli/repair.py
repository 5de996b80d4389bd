"""Command ``repair``: put right what needs no guess, and name the rest."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from timeslice.cli.output import json_option, note, print_json
from timeslice.cli.revoke import reason_option
from timeslice.cli.session import Session, operator
from timeslice.locks import scripts
from timeslice.names import check_name

if TYPE_CHECKING:
    from timeslice.locks.view import GroupView

LOOK_S = 5.0  # for agents to look again, and coordinators to act on what they tell
_POLL_S = 0.2
_KEPT = 1000  # entries of a node's order stream


@click.command(
    epilog="""\b
Examples:
  timeslice repair trainers --dry-run    # what is in its way, and what would be done
  timeslice repair trainers
  timeslice repair trainers --out run-a  # you looked: nothing of run-a is on any device"""
)
@click.argument("group")
@click.option("--dry-run", is_flag=True, help="Change nothing; say what would be done.")
@click.option(
    "--out",
    "out",
    multiple=True,
    metavar="JOB",
    help="Your word that nothing of JOB, which nobody can see, is on any device of GROUP. If something is, two jobs "
    "will share it. May be given several times.",
)
@reason_option
@json_option
@click.pass_obj
@click.pass_context
def repair(
    ctx: click.Context, session: Session, group: str, dry_run: bool, out: tuple[str, ...], reason: str, as_json: bool
) -> None:
    """Put right what keeps GROUP from going on, and say what else is in its way.

    Has every agent look again, drops half records, and tries at once what was put off. It never guesses: a holder
    that lives, a node that is away with state on it, a job whose state is unknown and a swap in the middle are named
    with the next step, and the exit code is 6. What only you can know you are asked at a terminal, or say it: --out.
    """
    for job in out:
        check_name("job", job)
    from timeslice.cli import exits
    from timeslice.cli.diagnosis import findings

    view = session.view(group)
    done = _index(session, view, dry=dry_run)
    call = scripts.repair(session.keys.group(group), operator(), reason, out=out, dry=dry_run, floor=view.counter)
    done = [*done, *session.run(call)]
    if not dry_run:
        view = _look_again(session, view)
    if not (dry_run or as_json) and sys.stdin.isatty() and (out := _unchanged(_asked(view), view, session.view(group))):
        done = [*done, *session.run(scripts.repair(session.keys.group(group), operator(), reason, out=out))]
        view = _look_again(session, view)
    left = findings(view)
    if as_json:
        print_json(
            {
                "group": group,
                "dry_run": dry_run,
                "repaired": done,
                "left": [{"what": each.what, "next_step": each.next_step} for each in left],
            }
        )
    for line in done:
        note(f"{'would be' if dry_run else 'done'}: {line}")
    for each in left:
        note(f"left: {each.what}. Next: {each.next_step}")
    if not done and not left:
        note(f"{group} is {view.phase}; there is nothing to repair")
    ctx.exit(exits.REFUSED if left else exits.DONE)


def _asked(view: GroupView) -> tuple[str, ...]:
    """The jobs that nobody can see, and of which whoever sits at the terminal says that they are on no device."""
    return tuple(
        job.job
        for job in view.jobs.values()
        if job.residency == "unknown"
        and click.confirm(
            f"No agent can see whether {job.job} is still on the devices of {view.name}. Did you look, and is nothing "
            "of it on any of them?",
            err=True,
        )
    )


def _unchanged(out: tuple[str, ...], then: GroupView, now: GroupView) -> tuple[str, ...]:
    """Those of them that have had no turn since: an answer may take long, and is about what was there before."""
    kept = tuple(job for job in out if job in now.jobs and now.jobs[job].token == then.jobs[job].token)
    for job in set(out) - set(kept):
        note(f"job {job} has had a turn in {now.name} while you looked; look again, and run this again")
    return kept


def _index(session: Session, view: GroupView, *, dry: bool) -> list[str]:
    """Write back the names by which lists and coordinators find the group and its nodes."""
    missing = [(session.keys.groups, view.name)] if view.name not in session.group_names() else []
    missing += [(session.keys.nodes, node) for node in sorted(set(view.nodes) - set(session.node_names()))]
    client = session.driver.client
    for key, name in missing:
        if not dry:
            session.ask(lambda: client.sadd(key, name))  # noqa: B023 - called at once
    return [f"{name} is in the index {key} again" for key, name in missing]


def _look_again(session: Session, view: GroupView) -> GroupView:
    """Ask every agent that lives to look at what is really there; the group as it is when nothing is left, or later."""
    from timeslice.cli.diagnosis import findings

    client = session.driver.client
    for node in view.nodes.values():
        if node.alive:
            key = session.keys.commands(node.node)
            entry: Any = {"look": view.name}
            session.ask(lambda: client.xadd(key, entry, maxlen=_KEPT))  # noqa: B023 - called at once
    until = time.monotonic() + LOOK_S
    while True:
        view = session.view(view.name)
        if not findings(view) or time.monotonic() >= until:
            return view
        time.sleep(_POLL_S)
