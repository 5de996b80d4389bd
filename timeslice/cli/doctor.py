"""Command ``doctor``: looks at server, daemons, groups and this installation, and says what to do."""

from __future__ import annotations

import click

from timeslice.cli import checks
from timeslice.cli.exits import FAILED, UNREACHABLE
from timeslice.cli.output import clean, json_option, print_json
from timeslice.cli.session import Session
from timeslice.errors import ServerUnsuitableError, TimeSliceError


@click.command(
    epilog="""\b
Examples:
  timeslice doctor
  timeslice doctor --json | jq '.findings[] | select(.level == "error")'"""
)
@json_option
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Look for what is wrong, and say what to do about it.

    Exit code 1 if there is an error, 5 if Redis can't be reached or none is known; warnings alone are 0.
    """
    session: Session = ctx.obj
    session.keys  # noqa: B018 - a bad prefix is a mistake of the command line, no finding
    findings = [checks.installation()]
    code = FAILED
    try:
        facts = checks.gather(session)
    except TimeSliceError as error:
        findings.append(checks.Finding("error", "server", str(error), "nothing else could be looked at"))
        # What names a group was read from a server; no server known is none reached.
        code = FAILED if isinstance(error, ServerUnsuitableError) or error.group else UNREACHABLE
    else:
        findings += checks.server(facts)
        findings += checks.coordinators(facts)
        for view in facts.views:
            findings += checks.group(view)
    _print(findings, as_json=as_json)
    if any(each.level == "error" for each in findings):
        ctx.exit(code)


def _print(findings: list[checks.Finding], *, as_json: bool) -> None:
    if as_json:
        print_json({"findings": [vars(each) for each in findings]})
        return
    colours = {"ok": "green", "warning": "yellow", "error": "red"}
    for each in findings:
        level = click.style(f"{each.level:7}", fg=colours[each.level])
        click.echo(f"{level}  {each.check}: {clean(each.what)}")
        if each.do:
            click.echo(f"         -> {clean(each.do)}")
