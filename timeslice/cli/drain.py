"""Commands ``node drain`` and ``node undrain``: a node is taken out of use for maintenance, and put back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from timeslice.cli.output import Seconds, json_option, note, print_json, size
from timeslice.cli.revoke import reason_option, take
from timeslice.cli.session import Session, operator
from timeslice.errors import NotHolderError, RefusedError, UnknownNodeError
from timeslice.locks import scripts

if TYPE_CHECKING:
    from timeslice.locks.view import GroupView

_POLL_S = 0.2


@click.command(
    epilog="""\b
Examples:
  timeslice node drain node-7 --reason "new driver"
  timeslice node drain node-7 --revoke --wait 120    # do not wait for holders to yield"""
)
@click.argument("name", metavar="NODE")
@click.option(
    "--wait",
    type=Seconds(0, 86_400),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for holders and moves.",
)
@click.option("--revoke", "by_force", is_flag=True, help="Take the groups away from their holders.")
@reason_option
@json_option
@click.pass_obj
@click.pass_context
def drain(
    ctx: click.Context, session: Session, name: str, wait: float, by_force: bool, reason: str, as_json: bool
) -> None:
    """Get NODE ready for maintenance: nobody is let into its groups, and its devices are emptied.

    Who holds may finish, unless --revoke. The groups stay so until `timeslice node undrain`. Copies in host memory
    stay in the jobs' processes; they are listed, for they end with the machine.
    """
    from timeslice.cli import exits

    views = _serving(session, name)
    for view in views:
        call = scripts.drain(session.keys.group(view.name), name, True, operator(), reason, floor=view.counter)
        fresh = session.run(call)
        note(f"{view.name}: nobody is let in while node {name} is drained" + ("" if fresh else " (it was so already)"))
    stays = f"node {name} stays drained; repeat this to go on, or end it with: timeslice node undrain {name}"
    try:
        busy = _empty(session, name, [view.name for view in views], wait, by_force=by_force, reason=reason)
    except KeyboardInterrupt:
        note(f"interrupted: {stays}")
        ctx.exit(exits.INTERRUPTED)
    copies = _copies(session, name, [view.name for view in views])
    if as_json:
        busy_documents = [{"group": group, "why": why} for group, why in busy.items()]
        print_json({"node": name, "safe": not busy, "busy": busy_documents, "host_copies": copies})
    for each in copies:
        note(f"job {each['job']} of {each['group']} keeps {size(each['host_bytes'])} in host memory of {name}: "
             "lost if the machine restarts")  # fmt: skip
    for group, why in busy.items():
        note(f"{group}: {why}")
    if busy:
        held = not by_force and any(view.holder for view in session.views(busy))
        more = ". Add --revoke to take groups away from their holders" if held else ""
        note(f"not empty yet, for what stands above: {stays}{more}")
        ctx.exit(exits.TIMED_OUT)
    note(f"node {name} is drained: nothing is on its devices, it is safe to stop its agent")


@click.command(
    epilog="""\b
Examples:
  timeslice node undrain node-7"""
)
@click.argument("name", metavar="NODE")
@reason_option
@json_option
@click.pass_obj
def undrain(session: Session, name: str, reason: str, as_json: bool) -> None:
    """End the maintenance of NODE. A pause by `timeslice pause`, or the drain of another node, stays."""
    found = [
        view for view in session.views() if name in view.nodes or f"node {name} by " in view.state.get("drains", "")
    ]
    if not found:
        raise UnknownNodeError(f"node {name} does not serve any group; see: timeslice nodes", node=name)
    ended = []
    for view in found:
        call = scripts.drain(session.keys.group(view.name), name, False, operator(), reason, floor=view.counter)
        if session.run(call):
            ended.append(view.name)
    if as_json:
        print_json({"node": name, "resumed": ended})
    else:
        note(f"node {name} is in use again in {', '.join(ended)}" if ended else f"node {name} was not drained")


def _serving(session: Session, node: str) -> list[GroupView]:
    found = [view for view in session.views() if node in view.nodes]
    if not found:
        raise UnknownNodeError(f"node {node} does not serve any group; see: timeslice nodes", node=node)
    return found


def _empty(
    session: Session, node: str, groups: list[str], seconds: float, *, by_force: bool, reason: str
) -> dict[str, str]:
    """Get the groups' devices on the node empty. The groups where that was not done in time, with the reason."""
    until, told = time.monotonic() + seconds, dict[str, str]()
    while True:
        busy = {group: why for group in groups if (why := _step(session, group, node, by_force, reason))}
        for group, why in busy.items():
            if told.get(group) != why:
                note(f"{group}: {why}")
        told = busy
        if not busy or time.monotonic() >= until:
            return busy
        time.sleep(_POLL_S)


def _step(session: Session, group: str, node: str, by_force: bool, reason: str) -> str:
    """Do what can be done now to get the group's devices on the node empty. Why they are not, or ''."""
    view = session.view(group)
    if view.holder:
        if not by_force:
            return f"job {view.holder} holds it"
        try:
            take(session, view, view.holder, reason or f"node {node} is drained")
        except NotHolderError:
            pass  # it yielded meanwhile
        return f"job {view.holder} is taken out"
    if view.swap or view.state.get("evict_how"):
        return view.reason or "state is being moved"
    for job in view.resident:
        if not any(member.node == node and member.job == job for member in view.members):
            continue
        if tried := view.evict_reason:
            told = f"job {job} could not be moved off the device: {tried}"
        else:
            told = f"job {job} is moved to host memory"
        call = scripts.evict(
            session.keys.group(group), job, operator(), reason or f"node {node} is drained",
            force=by_force, floor=view.counter,
        )  # fmt: skip
        try:
            session.run(call)
        except RefusedError as error:
            return str(error)
        return told
    return ""


def _copies(session: Session, node: str, groups: list[str]) -> list[dict[str, Any]]:
    """What is kept in the memory of processes on the node."""
    return [
        {"group": view.name, "job": member.job, "host_bytes": member.host_bytes}
        for view in session.views(groups)
        for member in view.members
        if member.node == node and member.state in {"suspended", "suspending"}
    ]
