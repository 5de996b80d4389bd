"""Command ``observe``: when a program that is not instrumented yet uses the device, and where its holds would go."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from timeslice.cli.output import Seconds, json_option, note, print_fields, print_json, seconds, size
from timeslice.errors import TimeSliceError

if TYPE_CHECKING:
    from timeslice.observe.sampling import Reading
    from timeslice.observe.series import Loop

_EVERY_S = 0.25
_TOLD_EVERY_S = 10.0
_LEAST = 4  # readings that say anything


@click.command(
    epilog="""\b
Examples:
  timeslice observe --pid 4711                      # before you change your code: where would holds go?
  timeslice observe --pid 4711 --seconds 600        # for loops of minutes; best are five turns or more
  timeslice observe --pid $(pgrep -of train.py) --json | jq .period_s
\b
Ctrl-C ends it early, and what was seen counts."""
)
@click.option("--pid", type=click.IntRange(1, 2**22), required=True, help="The process; its children count as well.")
@click.option(
    "--seconds",
    "for_s",
    type=Seconds(1, 86_400),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to look.",
)
@click.option(
    "--gap",
    type=Seconds(0.1, 3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="A pause that is shorter is no pause, for nobody could use it; an active stretch that is shorter is noise.",
)
@json_option
def observe(pid: int, for_s: float, gap: float, as_json: bool) -> None:
    """Watch a running program, and say when it uses the device.

    The program need not know of timeslice, and nothing is changed in it. On a real device its activity is the device's
    utilization, as NVIDIA's driver tells it; on an emulated device, which has none, it is the program's CPU use.
    """
    from timeslice.observe.sampling import Observed, samples_of, watch
    from timeslice.observe.series import analyse

    observed = Observed(pid)
    note(f"observing process {pid} for {seconds(for_s)}: {observed.command}")
    readings = _collect(watch(observed, for_s, min(_EVERY_S, gap / 3)), for_s)
    if len(readings) < _LEAST:
        raise TimeSliceError(f"process {pid} was seen for too short a time to say anything; observe it for longer")
    if not any(each.real or each.emulated for each in readings):
        raise TimeSliceError(
            f"in {seconds(readings[-1].at_s)} process {pid} and its children had nothing on any device of this "
            "machine; is it running on the CPU, or is this the launcher of processes elsewhere?"
        )
    samples, kind = samples_of(readings)
    loop = analyse(samples, gap_s=gap)
    if as_json:
        _print_document(pid, loop, kind, readings)
    else:
        _print(loop, kind, readings)


def _collect(found: Iterable[Reading], for_s: float) -> list[Reading]:
    """All readings, with progress on stderr. Ctrl-C ends it early."""
    readings: list[Reading] = []
    hidden = not sys.stderr.isatty()
    told = _TOLD_EVERY_S
    with click.progressbar(length=round(for_s * 10), file=sys.stderr, hidden=hidden, label="observing") as bar:
        try:
            for each in found:
                readings.append(each)
                bar.update(min(round(each.at_s * 10), bar.length or 0) - bar.pos)
                if hidden and each.at_s >= told:
                    note(f"observed {seconds(each.at_s)} of {seconds(for_s)}")
                    told += _TOLD_EVERY_S
        except KeyboardInterrupt:
            note(f"ended early, after {seconds(readings[-1].at_s) if readings else '0 s'}")
    return readings


def _active(loop: Loop) -> str:
    count = len(loop.stretches)
    if not count:
        return "never" if not loop.ignored else f"only in moments of about {seconds(loop.ignored_s)}"
    return f"{count} {'stretch' if count == 1 else 'stretches'}, typically {seconds(loop.active_s)}"


def _kind_of(readings: list[Reading]) -> str:
    return "real" if any(each.real for each in readings) else "emulated"


def _print_document(pid: int, loop: Loop, kind: str, readings: list[Reading]) -> None:
    from timeslice.observe.words import document

    shared = any(each.shared for each in readings)
    print_json({"pid": pid, "device": _kind_of(readings), "activity": kind, "shared": shared, **document(loop)})


def _print(loop: Loop, kind: str, readings: list[Reading]) -> None:
    from timeslice.observe.words import advice

    measured = {
        "device": "utilization of the device, as the driver tells it",
        "cpu": "CPU use of the processes, as a stand-in: this device tells no activity",
    }[kind]
    if any(each.shared for each in readings):
        measured += "; others are on the device too, and count in it"
    every = "not to be told" if loop.period_s is None else seconds(loop.period_s)
    print_fields(
        {
            "observed": seconds(loop.seconds),
            "device": _kind_of(readings),
            "activity": measured,
            "period": every if loop.period_s is None or loop.regular else f"{every}, with large differences",
            "active": _active(loop),
            "idle": f"{loop.idle_share:.0%}",
            "on the device": f"{size(loop.most_bytes)} at most, {size(loop.least_bytes)} while idle",
        }
    )
    click.echo()
    for line in advice(loop):
        click.echo(line)
