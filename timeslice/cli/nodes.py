"""Commands ``nodes`` and ``node``."""

from __future__ import annotations

from typing import Any

import click

from timeslice.cli.drain import drain, undrain
from timeslice.cli.node_memory import devices_told, host_told, suspended
from timeslice.cli.output import json_option, note, print_json, print_table, seconds
from timeslice.cli.revoke import reason_option
from timeslice.cli.session import Session, operator, parse_json
from timeslice.errors import RefusedError, UnknownNodeError
from timeslice.locks import scripts
from timeslice.locks.scripts import text


@click.command(
    epilog="""\b
Examples:
  timeslice nodes
  timeslice nodes --json | jq '.nodes[] | select(.alive | not) | .node'"""
)
@json_option
@click.pass_obj
def nodes(session: Session, as_json: bool) -> None:
    """List the nodes, the groups they serve and how their agents are."""
    found = list(_nodes(session).values())
    if as_json:
        print_json({"nodes": found})
        return
    print_table(
        ("node", "agent", "groups", "devices", "host memory", "version", "last fault"),
        [
            (
                each["node"],
                _health(each),
                ", ".join(group["group"] for group in each["groups"]),
                devices_told(each),
                host_told(each),
                each["version"],
                next((f"{g['fault']}: {g['error']}" for g in each["groups"] if g["fault"] or g["error"]), "")
                or _intrusion(each["groups"])
                or _complaint(each["complaints"]),
            )
            for each in found
        ],
        empty="no nodes yet; start an agent: timeslice agent --group GROUP",
    )


def _intrusion(groups: list[dict[str, Any]]) -> str:
    """Who is on a device without holding."""
    return "; ".join(f"job {job} uses {each['group']} UNHELD" for each in groups for job in each["unheld"])


def _complaint(told: Any) -> str:
    """The first thing that the agent complains of, and how many there are; by group, as it was stored."""
    groups = told.values() if isinstance(told, dict) else ()
    lines = [str(line) for each in groups if isinstance(each, list) for line in each]
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    return f"{lines[0]:.200}{more}" if lines else ""


def _health(node: dict[str, Any]) -> str:
    if not node["groups"]:
        return "serves nothing"
    return "alive" if node["alive"] else f"unreachable for {seconds(node['silent_s'])}"


def _nodes(session: Session) -> dict[str, dict[str, Any]]:
    """Every node that is known by name or serves a group."""
    found: dict[str, dict[str, Any]] = {}
    names = session.if_allowed(session.node_names, "nodes that serve no group, and what agents say of themselves, were")
    for name in names or ():
        stored = session.if_allowed(lambda: _stored(session, name), f"what the agent of {name} says of itself was")  # noqa: B023
        found[name] = _document(name, stored or {})
    for view in session.views():
        for node in view.nodes.values():
            document = found.setdefault(node.node, _document(node.node, {}))
            failed = node.step == "failed"
            document["groups"].append(
                {
                    "group": view.name,
                    "alive": node.alive,
                    "fault": node.kind if failed else "",
                    "error": node.error if failed else "",
                    "unheld": sorted(each.job for each in view.members if each.node == node.node and each.unheld),
                }
            )
            document["suspended"] += suspended(view, node.node)
            if not node.alive:
                document["silent_s"] = max(document["silent_s"] or 0.0, node.heartbeat_age_s)
    for document in found.values():
        document["alive"] = bool(document["groups"]) and all(group["alive"] for group in document["groups"])
    return found


def _stored(session: Session, name: str) -> dict[str, str]:
    client, key = session.driver.client, session.keys.node_state(name)
    return {text(field): text(value) for field, value in session.ask(lambda: client.hgetall(key)).items()}


def _document(name: str, stored: dict[str, str]) -> dict[str, Any]:
    return {
        "node": name,
        "alive": False,
        "silent_s": None,
        "instance": stored.get("instance", ""),
        "version": stored.get("version", ""),
        "heartbeat_at_ms": int(stored["heartbeat_at_ms"]) if stored.get("heartbeat_at_ms", "").isdigit() else None,
        **{
            field: parse_json(stored.get(field, ""))
            for field in ("capabilities", "memory", "emulated", "accelerators", "complaints", "overdue")
        },
        "groups": [],
        "suspended": [],
    }


@click.group(
    epilog="""\b
Examples:
  timeslice node drain node-7
  timeslice node undrain node-7
  timeslice node forget node-7"""
)
def node() -> None:
    """Drain a node for maintenance, or forget one that will not come back."""


node.add_command(drain)
node.add_command(undrain)


@node.command(
    epilog="""\b
Examples:
  timeslice node forget node-7                    # in every group
  timeslice node forget node-7 --group trainers
  timeslice node forget node-7 --lose run-a       # its state there is gone with the machine"""
)
@click.argument("name", metavar="NODE")
@click.option("--group", metavar="GROUP", help="Only in this group.")
@click.option("--lose", multiple=True, metavar="JOB", help="Give up the state of JOB on NODE; may be repeated.")
@reason_option
@click.pass_obj
def forget(session: Session, name: str, group: str | None, lose: tuple[str, ...], reason: str) -> None:
    """Take NODE out of its groups, when its machine is gone for good.

    Refused while its agent is alive, and while state of jobs is on it that --lose does not name.
    """
    views = [session.view(group)] if group is not None else session.views()
    serving = [view for view in views if name in view.nodes]
    if not serving and group is None and _strike_off(session, name):
        note(f"forgot node {name}, which served no group")
        return
    if not serving:
        where = f"group {group}" if group else "any group"
        raise UnknownNodeError(f"node {name} does not serve {where}; see: timeslice nodes", node=name, group=group)
    forgotten, refusals = [], []
    for view in serving:
        keys = session.keys.group(view.name)
        try:
            session.run(scripts.forget(keys, name, operator(), reason, lose=lose, floor=view.counter))
            forgotten.append(view.name)
        except RefusedError as error:
            refusals.append(error)
    if forgotten:
        note(f"forgot node {name} in {', '.join(forgotten)}")
    if refusals:
        raise refusals[0]
    if group is None:
        client = session.driver.client
        session.ask(lambda: client.srem(session.keys.nodes, name))


def _strike_off(session: Session, name: str) -> bool:
    """Take a node off the list that is in no group any more: they were deleted, or this order was once cut short. False
    if the list does not name it; RefusedError while its agent lives."""
    if name not in session.node_names():
        return False
    client = session.driver.client
    until_ms = scripts.number(_stored(session, name).get("instance_until_ms", ""))
    if until_ms >= int(session.ask(client.time)[0]) * 1000:
        raise RefusedError(f"the agent of node {name} is alive: stop it, and repeat this", node=name)
    session.ask(lambda: client.srem(session.keys.nodes, name))
    return True
