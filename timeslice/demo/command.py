"""Command ``demo``."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from timeslice.cli.events import document
from timeslice.cli.output import SCHEMA, Seconds
from timeslice.errors import TimeSliceError, UsageError

if TYPE_CHECKING:
    from timeslice.demo.run import Mode, Options, Outcome


@click.command(
    epilog="""\b
Examples:
  timeslice demo --fast                      # half a minute
  timeslice demo --json demo.json            # and a picture: demo.svg, demo.png
  timeslice demo --mode async --fast         # samplers of their own that run ahead; shared trainers
  timeslice demo --path checkpoint           # state moved from outside the processes only"""
)
@click.option("--fast", is_flag=True, help="Smaller batches and fewer steps: half a minute instead of two.")
@click.option("--steps", type=click.IntRange(2, 10_000), help="Of each job. Default: as many as fit into the time.")
@click.option(
    "--seed", type=click.IntRange(0, 2**31), default=0, show_default=True, help="Of job a; job b has the next."
)
@click.option(
    "--path",
    type=click.Choice(["channel", "checkpoint", "both"]),
    default="both",
    show_default=True,
    help="How state moves: by callbacks in the job, from outside it, or job a the one way and job b the other.",
)
@click.option(
    "--mode",
    type=click.Choice(["sync", "async"]),
    default="sync",
    show_default=True,
    help="sync: samplers and trainers are shared. async: each job has samplers of its own that run ahead of training, "
    "and only the trainers are shared; they are asked for when a batch is ready.",
)
@click.option(
    "--staleness",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Of --mode async: updates by which the samplers' weights may be behind. Default: 2.",
)
@click.option(
    "--verifier-latency",
    type=Seconds(0, 3600),
    metavar="SECONDS",
    help="Of a batch. Default: measured first, so that a job alone is on its devices half of its time.",
)
@click.option(
    "--json",
    "report",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the numbers there (docs/reference/demo.md), and the picture beside it as .svg and .png.",
)
@click.option(
    "--events",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the groups' events there, as `timeslice events --json` prints them.",
)
def demo(
    fast: bool,
    steps: int | None,
    seed: int,
    path: str,
    mode: str,
    staleness: int | None,
    verifier_latency: float | None,
    report: Path | None,
    events: Path | None,
) -> None:
    """Run two RL jobs alone and then by turns on the same devices, and compare.

    Two independent GRPO jobs learn some arithmetic. Each needs the group samplers to generate and the group trainers
    to train, on emulated devices that hold the state of only one job. Server, coordinator and agent are the demo's
    own, and nothing is left behind.
    """
    if staleness is not None and mode != "async":
        raise click.UsageError("--staleness goes with --mode async: in the synchronous mode nothing runs ahead")
    _check_writable([*(_files(report) if report else ()), *([events] if events else ())])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        from timeslice.demo.run import run_demo
    except ModuleNotFoundError as error:
        install = "pip install 'timeslice-rl[demo]', or in a checkout: pip install '.[demo]'"
        raise UsageError(f"the demo needs {error.name}; run: {install}") from error
    from timeslice.demo.measure import faults

    options = replace(
        _options(fast, steps, seed, path, verifier_latency), mode=cast("Mode", mode), staleness=staleness or 2
    )
    outcome = run_demo(options)
    _write(outcome, report, events)
    _print(outcome)
    if said := faults(outcome.report):
        raise TimeSliceError("; ".join(said))


def _files(report: Path) -> tuple[Path, Path, Path]:
    return report, report.with_suffix(".svg"), report.with_suffix(".png")


def _check_writable(files: list[Path]) -> None:
    """Minutes of work shall not be lost to a wrong name. What the files hold stays for now."""
    if len({file.absolute() for file in files}) < len(files):
        raise UsageError(f"one file can't take two results: {', '.join(map(str, files))}; nothing was run")
    for file in files:
        if not file.absolute().parent.is_dir():
            raise UsageError(f"the folder of {file} does not exist; nothing was run")
        new = not file.exists()
        try:
            file.open("a").close()
            if new:
                file.unlink()
        except OSError as error:
            raise UsageError(f"can't write {file} ({error.strerror}); nothing was run") from error


def _options(fast: bool, steps: int | None, seed: int, path: str, latency: float | None) -> Options:
    from timeslice.demo.grpo import Work
    from timeslice.demo.run import Options, StatePath

    chosen = cast("StatePath", path)
    if fast:
        work = Work(modulus=4, prompts=48, samples=16, minibatches=6, replayed=8)
        return Options(work, seed, chosen, latency, steps)
    return Options(Work(), seed, chosen, latency, steps, budget_s=100, most_steps=24)


def _write(outcome: Outcome, report: Path | None, events: Path | None) -> None:
    if report:
        from timeslice.demo.timeline import draw

        _, *pictures = _files(report)
        report.write_text(json.dumps(outcome.report, indent=2) + "\n")
        draw(outcome.alone, outcome.sliced, outcome.report["gain"], pictures)
        click.echo(f"wrote {report}, {pictures[0]} and {pictures[1]}", err=True)
    if events:
        lines = [json.dumps({"schema": SCHEMA, **document(event)}) for event in outcome.events]
        events.write_text("\n".join(lines) + "\n")


def _print(outcome: Outcome) -> None:
    from timeslice.demo.table import tables

    for table in tables(outcome.report):
        click.echo(table)
