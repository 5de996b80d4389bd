"""Command ``torture``."""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
from click.core import ParameterSource

from timeslice.cli import exits
from timeslice.cli.output import SCHEMA, Seconds, note, print_json
from timeslice.errors import TimeSliceError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from timeslice.torture.run import Options
    from timeslice.torture.stage import Topology

_STDOUT = Path("-")
_LEAST_SWAPS = 80  # one in each of two groups between two measurements


@click.command(
    epilog="""\b
Examples:
  timeslice torture                                         # a minute, standalone, a new seed
  timeslice torture --seconds 600 --seed 1 --json torture.json
  timeslice torture --topology sentinel --keep history      # and what happened, for another look
  timeslice torture --check history                         # judge it again
  timeslice torture --faults kill-job,stop-agent --seed 7   # only these
  timeslice torture --swaps 10000 --json growth.json        # no faults: nothing grows
  timeslice torture --json - | jq .violations

\b
Kinds of faults:
  to jobs, agents and coordinators: kill-job stop-job kill-agent stop-agent
    kill-coordinator stop-coordinator
  to jobs: files-job threads; and a process comes again as one that is hard to
    know: title host-name pid-namespace time-namespace
  to agents: files-agent blind-agent; they come late or lack orders: trim join
    late-agents
  to leases: revoke
  to servers: kill-server stop-server drop pause forget full; standalone only:
    sleep flush wipe clock outage password
  to connections, standalone only: cut stall delay half-open lose repeat
  to agents' disks: disk
  to backends: slow fail fail-on hang die lie late

\b
Needs: a Redis-compatible server (redis-server or valkey-server on PATH, or
pip install 'timeslice-rl[embedded]'); for sentinel one that can be a sentinel;
about 1 GiB of memory. `clock` needs libfaketime; `disk`, `host-name` and the
namespaces need root, and the latter unshare (util-linux); without them those
faults are left out, and a line says so. A run of 300 s has every kind.

\b
Takes some 5 s to start and, when the faults are over, as long as jobs wait:
5 to 40 s, at most 65. --swaps does 5 to 20 swaps a second.

\b
Exit codes: 0 all promises held, 1 one was broken or something grew,
2 usage, 130 interrupted (Ctrl-C or SIGTERM) with nothing broken so far."""
)
@click.option("--seconds", type=Seconds(5, 86_400), default=60.0, show_default=True, help="How long faults come.")
@click.option("--seed", type=click.IntRange(0, 2**31), help="Fixes the schedule of faults. Default: random, and shown.")
@click.option(
    "--topology",
    type=click.Choice(["standalone", "cluster", "sentinel"]),
    default="standalone",
    show_default=True,
    help="Of the Redis servers, which are the run's own.",
)
@click.option(
    "--json",
    "report",
    type=click.Path(dir_okay=False, writable=True, allow_dash=True, path_type=Path),
    metavar="FILE",
    help="Write the report there; - is stdout, and the table goes to stderr then.",
)
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep the history there. Default: a temporary folder, kept and named if there are violations or --json.",
)
@click.option("--check", type=click.Path(exists=True, path_type=Path), metavar="PATH", help="Judge a saved history.")
@click.option("--faults", metavar="KIND,...", help="Only these kinds of faults, see below.")
@click.option("--jobs", type=click.IntRange(1, 64), default=8, show_default=True, help="Processes of jobs at a time.")
@click.option(
    "--swaps",
    type=click.IntRange(_LEAST_SWAPS),
    metavar="N",
    help=f"Do N swaps instead, {_LEAST_SWAPS} or more, each by new jobs, and see what grows.",
)
@click.option("--mutant", hidden=True, help="For tests of the checker: break the product on purpose.")
@click.pass_context
def torture(
    ctx: click.Context,
    seconds: float,
    seed: int | None,
    topology: str,
    report: Path | None,
    keep: Path | None,
    check: Path | None,
    faults: str | None,
    jobs: int,
    swaps: int | None,
    mutant: str | None,
) -> None:
    """Attack a whole system with faults, and prove that its promises held.

    Everything that happens is written down and then judged. Server, coordinators, agents and jobs are the run's own, on
    emulated devices, and nothing is left behind.
    """
    if report is not None and not report.absolute().parent.is_dir():
        raise UsageError(f"the folder of {report} does not exist; nothing was run")
    for name, alone in (("check", check), ("swaps", swaps)):
        if alone is not None:
            _only(ctx, name)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a service manager's Ctrl-C
    try:
        if check is not None:
            _finish(check, report, named=check)
        elif swaps is not None:
            _grow(swaps, report)
        else:
            from timeslice.torture.run import Options

            options = Options(
                seed=secrets.randbelow(2**31) if seed is None else seed,
                seconds=seconds,
                topology=cast("Topology", topology),
                kinds=() if faults is None else tuple(each.strip() for each in faults.split(",")),
                jobs=jobs,
                mutant=mutant or "",
            )
            if _run(options, keep, report):
                ctx.exit(exits.INTERRUPTED)
    except KeyboardInterrupt:
        note("interrupted; nothing was judged")
        ctx.exit(exits.INTERRUPTED)


def _only(ctx: click.Context, name: str) -> None:
    """Refuse options that would do nothing beside this one."""
    given = [each for each in ctx.params if ctx.get_parameter_source(each) is ParameterSource.COMMANDLINE]
    if others := [each for each in given if each not in {name, "report"}]:
        raise UsageError(f"--{name} takes none of: {', '.join(f'--{each}' for each in others)}; leave them out")


def _run(options: Options, keep: Path | None, report: Path | None) -> bool:
    """Whether it was interrupted."""
    from timeslice.torture.progress import Screen
    from timeslice.torture.report import FACTS, merge
    from timeslice.torture.run import run_torture
    from timeslice.torture.samples import quarters
    from timeslice.torture.schedule import schedule

    # A wrong name of a fault is told before anything runs.
    planned = schedule(options.seed, options.seconds, options.topology, options.kinds)
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise UsageError(f"{keep} is not empty; name a new folder for the history")
    folder = keep or Path(tempfile.mkdtemp(prefix="timeslice-torture-"))
    with Screen() as screen:
        if options.mutant:
            screen.say(f"THE PRODUCT IS MUTATED ({options.mutant}): this run says nothing about timeslice itself")
        screen.say(f"seed {options.seed}, {options.topology}, {options.seconds:g} s")
        try:
            outcome = run_torture(options, folder, say=screen.say, show=screen.show)
        except KeyboardInterrupt:  # a second one: there is no time to judge
            if keep is None:
                shutil.rmtree(folder)
            raise
    merge(folder)
    facts: dict[str, Any] = {
        "seed": options.seed,
        "seconds": outcome.seconds,
        "interrupted": outcome.interrupted,
        "topology": options.topology,
        "planned": sorted({each.kind for each in planned}),
        "kinds_left_out": dict(outcome.left_out),
        "grown": quarters(outcome.series),
    }
    if options.mutant:
        facts["mutant"] = options.mutant
    (folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n")
    _finish(folder, report, named=keep, temporary=keep is None)
    return outcome.interrupted


def _grow(swaps: int, report: Path | None) -> None:
    from timeslice.torture import growth
    from timeslice.torture.progress import Screen

    with tempfile.TemporaryDirectory(prefix="timeslice-torture-") as folder, Screen() as screen:
        found = growth.run(swaps, folder=Path(folder), say=screen.say)
    _write(report, {"device": "emulated", "growth": found.model_dump()})
    click.echo(growth.summary(found), err=report == _STDOUT)
    if found.growing:
        _console(report).print(growth.table(found))
        raise TimeSliceError(f"these did not level off over {found.swaps} swaps: {', '.join(found.growing)}")


def _finish(place: Path, report: Path | None, *, named: Path | None, temporary: bool = False) -> None:
    """Judge, tell, and fail if there is something to complain of."""
    from timeslice.torture.report import HISTORY, complaints, document, facts_of, judge, table

    judged = judge(place)
    kept = named is not None or report is not None or bool(judged.report.violations)
    history = place / HISTORY if place.is_dir() else place
    told = document(judged, facts_of(place), history.absolute() if kept else None)
    _write(report, told)
    if temporary and not kept:
        shutil.rmtree(place)
    _console(report).print(table(told))
    click.echo(f"history: {told['history'] or 'not kept'}", err=report == _STDOUT)  # whole, however long
    if not judged.complete:
        note("warning: INCOMPLETE: the end of this history is missing; violations after it, and waiters who were never "
             "let in, can't be seen")  # fmt: skip
    said = complaints(told)
    for each in said:
        click.echo(each, err=True)
    if said:
        raise TimeSliceError(
            f"{len(told['violations'])} violations; the history is {history}, judge it again with: "
            f"timeslice torture --check {place}"
        )


def _write(report: Path | None, document: Mapping[str, Any]) -> None:
    if report == _STDOUT:
        print_json(document)
    elif report is not None:
        report.write_text(json.dumps({"schema": SCHEMA, **document}, indent=2) + "\n")


def _console(report: Path | None) -> Console:
    """Where the table goes: stdout is for one thing."""
    from rich.console import Console

    return Console(stderr=report == _STDOUT)
