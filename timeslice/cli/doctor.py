"""Command ``doctor``: looks at server, daemons, groups and this installation, and says what to do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from timeslice.cli import bundle, checks, checks_groups
from timeslice.cli.access import access
from timeslice.cli.exits import FAILED, UNREACHABLE
from timeslice.cli.facts import Facts, gather, is_whole
from timeslice.cli.finding import Finding
from timeslice.cli.output import clean, json_option, note, print_json
from timeslice.cli.session import Session
from timeslice.errors import ServerUnsuitableError, TimeSliceError
from timeslice.locks.permissions import ROLES

_COLOURS = {"ok": "green", "info": "cyan", "warning": "yellow", "error": "red"}


@click.command(
    epilog="""\b
Examples:
  timeslice doctor
  timeslice doctor --json | jq '.findings[] | select(.level == "error")'
  timeslice --url redis://agent-user@redis doctor --role agent --group trainers
  timeslice doctor --bundle report.tar.gz      # for a bug; secrets are taken out"""
)
@click.option(
    "--role",
    type=click.Choice(list(ROLES)),
    help="See whether the current Redis user may act as this. Default: any role.",
)
@click.option(
    "--group", "groups", multiple=True, metavar="GROUP", help="... in this group; repeatable. Default: any group."
)
@click.option(
    "--bundle",
    "file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write a report for a bug to FILE (.tar.gz or .zip), which must not exist. Without secrets: its README "
    "says what is in it and what was hidden.",
)
@json_option
@click.pass_context
def doctor(ctx: click.Context, role: str | None, groups: tuple[str, ...], file: Path | None, as_json: bool) -> None:
    """Look for what is wrong, and say what to do about it.

    Exit code 1 if there is an error, 5 if Redis can't be reached or none is known; warnings alone are 0.
    With --bundle 0 once the report is written, whatever was found.
    """
    session: Session = ctx.obj
    session.keys  # noqa: B018 - a bad prefix is a mistake of the command line, no finding
    if file:
        bundle.check_name(file)
    findings = [checks.installation(), *checks.command_line(session.given_url)]
    facts, code = None, FAILED
    try:
        facts = gather(session)
        findings += _findings(session, facts, role, groups)
    except TimeSliceError as error:
        findings.append(Finding("error", "server", str(error), "nothing else could be looked at"))
        # What names a group was read from a server; no server known is none reached.
        code = FAILED if isinstance(error, ServerUnsuitableError) or error.group else UNREACHABLE
    if file:
        bundle.write(file, session, facts, findings)
    _print(findings, file, as_json=as_json)
    if not file and any(each.level == "error" for each in findings):
        ctx.exit(code)


def _findings(session: Session, facts: Facts, role: str | None, groups: Sequence[str]) -> list[Finding]:
    findings = checks.server(facts)
    if facts.cluster and not is_whole(facts.cluster):
        return findings
    findings += [
        *access(session, [view.name for view in facts.views], role, groups),
        *checks_groups.coordinators(facts),
        *checks_groups.agents(facts),
    ]
    for view in facts.views:
        findings += checks_groups.group(view)
    return findings


def _print(findings: Sequence[Finding], file: Path | None, *, as_json: bool) -> None:
    if file:
        note(f"wrote {file}: a report for a bug, without secrets; look at its README.txt before you send it")
    if as_json:
        print_json({"findings": [vars(each) for each in findings], **({"bundle": str(file)} if file else {})})
        return
    for each in findings:
        level = click.style(f"{each.level:7}", fg=_COLOURS[each.level])
        click.echo(f"{level}  {each.check}: {clean(each.what)}")
        if each.do:
            click.echo(f"         -> {clean(each.do)}")
