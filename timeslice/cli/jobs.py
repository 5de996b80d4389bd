"""Command ``jobs``: every job that holds, waits or has device state, over all groups."""

from __future__ import annotations

from typing import Any

import click

from timeslice.cli.output import json_option, print_json, print_table, seconds, size
from timeslice.cli.report import elapsed, frozen, used_s
from timeslice.cli.session import Session
from timeslice.locks.view import GroupView


@click.command(
    epilog="""\b
Examples:
  timeslice jobs
  timeslice jobs --json | jq '.jobs[] | select(.unheld)'"""
)
@json_option
@click.pass_obj
def jobs(session: Session, as_json: bool) -> None:
    """List the jobs, what they hold and wait for, and where their device state is."""
    rows = [row for view in session.views() for row in _jobs(view)]
    rows.sort(key=lambda each: (each["job"], each["group"]))
    if as_json:
        print_json({"jobs": rows})
        return
    print_table(
        ("job", "group", "does", "state", "on device", "in host memory", "used", "processes"),
        [
            (
                each["job"],
                each["group"],
                _does(each),
                each["residency"] + (" FROZEN" if each["frozen"] else _weights(each)),
                size(each["device_bytes"]),
                size(each["host_bytes"]),
                seconds(each["usage_s"]),
                each["processes"],
            )
            for each in rows
        ],
        empty="no jobs yet; a job appears when it holds or waits: timeslice hold GROUP --job NAME -- COMMAND",
    )


def _does(row: dict[str, Any]) -> str:
    if row["unheld"]:
        return "uses the device UNHELD"
    if row["holds"]:
        return f"holds ({row['job_phase']})" if row["job_phase"] else "holds"
    if row["waiting"]:
        return f"waits {seconds(row['waited_s'])}"
    return f"{row['job_phase']} for {seconds(row['phase_s'])}" if row["job_phase"] else ""


def _weights(row: dict[str, Any]) -> str:
    return ", needs weights" if row["needs_weights"] else ""


def _jobs(view: GroupView) -> list[dict[str, Any]]:
    waiting = [each for each in (*view.queue, *view.forming) if each.alive]
    registered = [target.partition("/")[0] for target in view.targets]
    names = {*view.jobs, *(each.job for each in waiting), *registered, *([view.holder] if view.holder else [])}
    stopped = {each.job for each in frozen(view)}
    rows = []
    for name in names - {""}:
        stored = view.jobs.get(name)
        places = [member for member in view.members if member.job == name]
        waits = [each.waited_s for each in waiting if each.job == name]
        holds = view.holder == name
        rows.append(
            {
                "job": name,
                "group": view.name,
                "holds": holds,
                "job_phase": view.state.get("label", "") if holds else stored.phase if stored else "",
                "phase_s": elapsed(view, "granted_at_ms") if holds else stored.phase_s if stored else 0.0,
                "waiting": len(waits),
                "waited_s": max(waits, default=0.0),
                "residency": stored.residency if stored else "absent",
                "needs_weights": bool(stored and stored.needs_weights),
                "device_bytes": sum(member.device_bytes for member in places),
                "host_bytes": sum(member.host_bytes for member in places),
                "saved_bytes": sum(member.saved_bytes for member in places),
                "usage_s": used_s(view, name),
                "unheld": any(member.unheld for member in places),
                "frozen": name in stopped,
                "nodes": sorted(member.node for member in places),
                "processes": registered.count(name),
            }
        )
    return rows
