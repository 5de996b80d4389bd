"""Commands ``nodes`` and ``node forget``."""

from __future__ import annotations

from typing import Any

import click

from timeslice.cli.output import json_option, note, print_json, print_table, seconds
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
        ("node", "agent", "groups", "devices", "version", "last fault"),
        [
            (
                each["node"],
                _health(each),
                ", ".join(group["group"] for group in each["groups"]),
                "emulated" if each["emulated"] else "",
                each["version"],
                next((f"{g['fault']}: {g['error']}" for g in each["groups"] if g["fault"] or g["error"]), ""),
            )
            for each in found
        ],
        empty="no nodes yet; start an agent: timeslice agent --group GROUP",
    )


def _health(node: dict[str, Any]) -> str:
    if not node["groups"]:
        return "serves nothing"
    return "alive" if node["alive"] else f"unreachable for {seconds(node['silent_s'])}"


def _nodes(session: Session) -> dict[str, dict[str, Any]]:
    """Every node that is known by name or serves a group."""
    found: dict[str, dict[str, Any]] = {}
    for name in session.node_names():
        client, key = session.driver.client, session.keys.node_state(name)
        stored = {text(k): text(v) for k, v in session.ask(lambda: client.hgetall(key)).items()}  # noqa: B023
        found[name] = _document(name, stored)
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
                }
            )
            if not node.alive:
                document["silent_s"] = max(document["silent_s"] or 0.0, node.heartbeat_age_s)
    for document in found.values():
        document["alive"] = bool(document["groups"]) and all(group["alive"] for group in document["groups"])
    return found


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
            for field in ("capabilities", "memory", "emulated", "complaints", "overdue")
        },
        "groups": [],
    }


@click.group(
    epilog="""\b
Examples:
  timeslice node forget node-7"""
)
def node() -> None:
    """Forget a node that will not come back."""


@node.command(
    epilog="""\b
Examples:
  timeslice node forget node-7                    # in every group
  timeslice node forget node-7 --group trainers"""
)
@click.argument("name", metavar="NODE")
@click.option("--group", metavar="GROUP", help="Only in this group.")
@click.pass_obj
def forget(session: Session, name: str, group: str | None) -> None:
    """Take NODE out of its groups, when its machine is gone for good.

    What its jobs had on its devices counts as gone, so be sure. Refused while its agent is alive.
    """
    views = [session.view(group)] if group is not None else session.views()
    serving = [view for view in views if name in view.nodes]
    if not serving:
        where = f"group {group}" if group else "any group"
        raise UnknownNodeError(f"node {name} does not serve {where}; see: timeslice nodes", node=name, group=group)
    if alive := [view.name for view in serving if view.nodes[name].alive]:
        raise RefusedError(
            f"the agent of node {name} is alive and serves {', '.join(alive)}. Stopping it does not take the node out: "
            "stop it and repeat this when `timeslice nodes` calls it unreachable, or start it with --leave and stop it",
            node=name,
        )
    for view in serving:
        session.run(scripts.forget(session.keys.group(view.name), name, operator(), "", floor=view.counter))
    if group is None:
        client = session.driver.client
        session.ask(lambda: client.srem(session.keys.nodes, name))
        session.ask(lambda: client.delete(session.keys.node_state(name), session.keys.commands(name)))
    note(f"forgot node {name} in {', '.join(view.name for view in serving)}")
