"""Command ``torture``."""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from timeslice.cli.output import Seconds
from timeslice.errors import TimeSliceError, UsageError

if TYPE_CHECKING:
    from timeslice.torture.run import Options
    from timeslice.torture.stage import Topology


@click.command(
    epilog="""\b
Examples:
  timeslice torture                                         # a minute, standalone, a new seed
  timeslice torture --seconds 600 --seed 1 --json torture.json
  timeslice torture --topology sentinel --keep history      # and what happened, for another look
  timeslice torture --check history                         # judge it again
  timeslice torture --swaps 10000 --json growth.json        # no faults: nothing grows"""
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
    "--json", "report", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write the report there."
)
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep the history there. Default: a temporary folder, kept and named if there are violations or --json.",
)
@click.option("--check", type=click.Path(exists=True, path_type=Path), metavar="PATH", help="Judge a saved history.")
@click.option("--faults", metavar="KIND,...", help="Only these kinds of faults.")
@click.option("--jobs", type=click.IntRange(1, 64), default=6, show_default=True, help="Processes of jobs at a time.")
@click.option(
    "--swaps", type=click.IntRange(1), metavar="N", help="Do N swaps instead, each by new jobs, and see what grows."
)
@click.option("--mutant", hidden=True, help="For tests of the checker: break the product on purpose.")
def torture(
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
    emulated devices, and nothing is left behind. Exit code 1 if a promise was broken, or something grew.
    """
    if report is not None and not report.absolute().parent.is_dir():
        raise UsageError(f"the folder of {report} does not exist; nothing was run")
    if check is not None:
        _finish(check, report, named=check)
        return
    if swaps is not None:
        _grow(swaps, report)
        return
    from timeslice.torture.run import Options

    options = Options(
        seed=secrets.randbelow(2**31) if seed is None else seed,
        seconds=seconds,
        topology=cast("Topology", topology),
        kinds=tuple(faults.split(",")) if faults else (),
        jobs=jobs,
        mutant=mutant or "",
    )
    _run(options, keep, report)


def _run(options: Options, keep: Path | None, report: Path | None) -> None:
    from timeslice.torture.progress import Screen
    from timeslice.torture.report import FACTS, merge
    from timeslice.torture.run import run_torture
    from timeslice.torture.samples import quarters
    from timeslice.torture.schedule import schedule

    # A wrong name of a fault is told before anything runs.
    schedule(options.seed, options.seconds, options.topology, options.kinds)
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise UsageError(f"{keep} is not empty; name a new folder for the history")
    folder = keep or Path(tempfile.mkdtemp(prefix="timeslice-torture-"))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a service manager's Ctrl-C
    with Screen() as screen:
        if options.mutant:
            screen.say(f"THE PRODUCT IS MUTATED ({options.mutant}): this run says nothing about timeslice itself")
        screen.say(f"seed {options.seed}, {options.topology}, {options.seconds:g} s")
        try:
            series = run_torture(options, folder, say=screen.say, show=screen.show)
        except KeyboardInterrupt:  # before there was anything to judge
            if keep is None:
                shutil.rmtree(folder)
            raise
    merge(folder)
    facts: dict[str, Any] = {
        "seed": options.seed,
        "seconds": options.seconds,
        "topology": options.topology,
        "grown": quarters(series),
    }
    if options.mutant:
        facts["mutant"] = options.mutant
    (folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n")
    _finish(folder, report, named=keep, temporary=keep is None)


def _grow(swaps: int, report: Path | None) -> None:
    from rich.console import Console

    from timeslice.torture import growth
    from timeslice.torture.progress import Screen

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="timeslice-torture-") as folder, Screen() as screen:
        found = growth.run(swaps, folder=Path(folder), say=screen.say)
    if report is not None:
        report.write_text(json.dumps({"device": "emulated", "growth": found.model_dump()}, indent=2) + "\n")
    Console().print(growth.table(found))
    if found.growing:
        raise TimeSliceError(f"these did not level off over {found.swaps} swaps: {', '.join(found.growing)}")


def _finish(place: Path, report: Path | None, *, named: Path | None, temporary: bool = False) -> None:
    """Judge, tell, and fail if there is something to complain of."""
    from timeslice.torture.report import HISTORY, complaints, document, facts_of, judge, table

    lines, verdict = judge(place)
    kept = named is not None or report is not None or bool(verdict.violations)
    history = place / HISTORY if place.is_dir() else place
    told = document(lines, verdict, facts_of(place), history.absolute() if kept else None)
    if report is not None:
        report.write_text(json.dumps(told, indent=2) + "\n")
    if temporary and not kept:
        shutil.rmtree(place)
    from rich.console import Console

    Console().print(table(told))
    said = complaints(told)
    for each in said:
        click.echo(each, err=True)
    if said:
        raise TimeSliceError(
            f"{len(told['violations'])} violations; the history is {history}, judge it again with: "
            f"timeslice torture --check {place}"
        )
