"""Commands ``status`` and ``queue``: who holds, what is being moved, who waits and why."""

from __future__ import annotations

import click

from timeslice.cli import report
from timeslice.cli.output import clean, json_option, note, print_fields, print_json, print_table, seconds, size
from timeslice.cli.session import Session
from timeslice.locks.view import GroupView


@click.command(
    epilog="""\b
Examples:
  timeslice status                      # all groups, a line each
  timeslice status trainers             # one group in full
  timeslice status --json | jq '.groups[] | select(.phase == "blocked")'"""
)
@click.argument("group", required=False)
@json_option
@click.pass_obj
def status(session: Session, group: str | None, as_json: bool) -> None:
    """Show who holds what, since when, and what is being moved."""
    views = session.views() if group is None else [session.view(group)]
    emulated = session.emulated()
    told = session.complaints() if as_json or group is not None else None
    if as_json:
        documents = [report.group_document(view, emulated=_is_in(emulated, view.name), told=told) for view in views]
        print_json({"groups": documents})
    elif group is not None:
        _print_group(views[0], emulated=bool(_is_in(emulated, group)))
        for node, line in report.complaints(views[0], told):
            click.echo(f"\ncomplaint of {node}: {clean(line)}")
    else:
        print_table(
            ("group", "phase", "since", "holder", "waiting", "resident", "nodes", "why"),
            [
                (
                    view.name,
                    view.phase,
                    "" if (since := report.since_s(view)) is None else seconds(since),
                    _with_phase(view.holder, view.state.get("label", "")) if view.holder else "",
                    view.waiting,
                    ", ".join(view.resident),
                    f"{_nodes(view)}{', emulated' if _is_in(emulated, view.name) else ''}",
                    _why(view),
                )
                for view in views
            ],
            empty="no groups yet: a group comes into being when an agent serves it or a job holds it",
        )


def _is_in(emulated: set[str] | None, group: str) -> bool | None:
    return None if emulated is None else group in emulated


def _why(view: GroupView) -> str:
    told = [report.moving(view) if view.phase == "swapping" else report.why(view)]
    told += [f"job {gang.job}: {gang.forms}" for gang in view.forming]
    return "; ".join(filter(None, told))


def _with_phase(job: str, phase: str) -> str:
    return f"{job} ({phase})" if phase else job


def _nodes(view: GroupView) -> str:
    if view.mode == "lock":
        return "lock-only"
    alive = sum(node.alive for node in view.nodes.values())
    return f"{alive} alive" if alive == len(view.nodes) else f"{alive} of {len(view.nodes)} alive"


def _print_group(view: GroupView, *, emulated: bool) -> None:
    held = report.holder(view)
    moving = report.moving(view)
    fields: dict[str, object] = {
        "group": f"{view.name} ({view.mode or 'neither served nor lock-only yet'})",
        "phase": view.phase + report.for_long(view),
    }
    if emulated:
        fields["devices"] = "emulated"
    if why := report.why(view):
        fields["why"] = why
    if held:
        phase = f", phase {held['job_phase']}" if held["job_phase"] else ""
        confirmed = "" if held["confirmed"] else ", not confirmed yet"
        gang = f", {found}" if (found := report.inside(view)) else ""
        fields["holder"] = (
            f"job {held['job']} for {seconds(held['held_s'])}{phase}{confirmed}{gang} "
            f"(process {held['pid']} on {held['host']}, token {held['token']}, {held['how']})"
        )
    if moving:
        fields["moving"] = moving
    if view.mode == "served":
        fields["resident"] = ", ".join(view.resident) or "nobody"
        fields["driven by"] = report.coordinator(view) or "no coordinator"
    if stopped := report.frozen(view):
        fields["frozen"] = "; ".join(map(str, stopped))
    print_fields(fields)
    _print_queue(view, heading=True)
    if view.jobs:
        click.echo("\njobs:")
        _print_jobs(view)
    if view.nodes:
        click.echo("\nnodes:")
        rows = []
        for node in view.nodes.values():
            health = "alive" if node.alive else f"unreachable for {seconds(node.heartbeat_age_s)}"
            fault = f"{node.kind}: {node.error}" if node.step == "failed" else ""
            rows.append((node.node, health, node.step, fault))
        print_table(("node", "agent", "last step", "fault"), rows, empty="")


def _print_jobs(view: GroupView) -> None:
    observed = {(member.job, member.node): member for member in view.members}
    rows: list[tuple[object, ...]] = []
    for job in sorted(view.jobs.values(), key=lambda each: each.job):
        places = [member for (name, _), member in observed.items() if name == job.job]
        where = ", ".join(f"{member.node} {member.state}{' UNHELD' if member.unheld else ''}" for member in places)
        on_device = sum(member.device_bytes for member in places)
        rows.append(
            (
                job.job,
                job.residency + (", needs weights" if job.needs_weights else ""),
                size(on_device),
                size(job.host_bytes),
                seconds(report.used_s(view, job.job)),
                where,
            )
        )
    print_table(("job", "state", "on device", "in host memory", "used", "where"), rows, empty="")


@click.command(
    epilog="""\b
Examples:
  timeslice queue trainers
  timeslice queue trainers --json | jq -r .holder.job"""
)
@click.argument("group")
@json_option
@click.pass_obj
def queue(session: Session, group: str, as_json: bool) -> None:
    """Show who waits for GROUP, in service order, and why each waits."""
    view = session.view(group)
    if as_json:
        emulated, told = session.emulated(), session.complaints()
        print_json(report.group_document(view, emulated=_is_in(emulated, group), told=told))
        return
    if held := report.holder(view):
        phase = f" ({held['job_phase']})" if held["job_phase"] else ""
        note(f"job {held['job']} holds {group} for {seconds(held['held_s'])}{phase}")
    else:
        why = f": {why}" if (why := report.why(view)) else ""
        note(f"{group} is {view.phase}{report.for_long(view)}{why}")
    if moving := report.moving(view):
        note(moving)
    _print_queue(view)


def _print_queue(view: GroupView, *, heading: bool = False) -> None:
    if heading and (view.queue or view.forming):
        click.echo("\nqueue:")
    print_table(
        ("next", "job", "priority", "waited", "waiter", "why it waits"),
        [
            (
                each["position"] + 1 if "position" in each else "",
                _with_phase(each["job"], each["job_phase"]),
                each["priority"],
                seconds(each["waited_s"]),
                each["waiter"],
                each["why"],
            )
            for each in (*report.waiters(view), *report.forming(view))
        ],
        empty="nobody waits",
    )
