"""The result for people."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from timeslice.demo.measure import disturbance


def tables(report: dict[str, Any]) -> Iterator[str]:
    """What the report says, as text."""
    yield _text(_runs(report))
    yield _text(_moves(report))
    yield _verdict(report)
    if said := disturbance(report):
        yield said


def _runs(report: dict[str, Any]) -> Table:
    table = Table(
        "run", "wall", *(f"{group} busy" for group in report["groups"]), "reward", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for name, run in report["alone"]["jobs"].items():
        rewards = report["rewards"][name]["alone"]
        table.add_row(f"job {name} alone", *_times(run), f"{rewards[0]:.2f} to {rewards[-1]:.2f}")
    table.add_row("one after the other", *_times(report["alone"]), "")
    same = "equal to the bit" if report["rewards_equal"] and report["parameters_equal"] else "DIFFERENT"
    table.add_row("by turns", *_times(report["sliced"]), same)
    return table


def _times(run: dict[str, Any]) -> list[str]:
    return [f"{run['wall_s']:.1f} s", *(f"{duty:.0%}" for duty in run["duty"].values())]


def _moves(report: dict[str, Any]) -> Table:
    table = Table(
        "by turns",
        "phases",
        "longer in sum than alone",
        "swaps",
        "a swap",
        "a wait",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for group in report["groups"]:
        body, swap, wait = report["body_s"][group]["sliced"], report["swap_s"][group], report["wait_s"][group]
        table.add_row(
            group,
            f"{body['count']} of {body['median_s'] * 1000:.0f} ms",
            f"{report['body_inflation_by_group'][group] - 1:+.0%}",
            str(swap["count"]),
            f"{swap['median_s'] * 1000:.0f} ms, p95 {swap['p95_s'] * 1000:.0f}",
            f"{wait['median_s'] * 1000:.0f} ms, p95 {wait['p95_s'] * 1000:.0f}",
        )
    return table


def _verdict(report: dict[str, Any]) -> str:
    limits = report["gain_limits"]
    return (
        f"{_use(report)} (verifier: {report['verifier_latency_s']:.3f} s a batch)\n"
        f"{report['swaps']} swaps moved {report['bytes_moved'] / 2**20:,.0f} MiB on emulated devices; "
        f"{report['overlaps']} overlaps; tokens {'rise' if report['tokens_monotonic'] else 'DO NOT RISE'}\n"
        f"gain {report['gain']:.2f} over one after the other; the bound is {report['gain_bound']:.2f} "
        f"(longest job {limits['longest_job_s']:.1f} s, {limits['busiest_group']} busy {limits['busiest_s']:.1f} s)"
    )


def _use(report: dict[str, Any]) -> str:
    if report["mode"] == "sync":
        return f"alone a job is on its devices {report['alone']['busy']:.0%} of its time"
    alone, sliced = report["alone"]["duty"]["trainers"], report["sliced"]["duty"]["trainers"]
    return f"the trainers are in use {alone:.0%} of the time by one job after the other, {sliced:.0%} shared"


def _text(table: Table) -> str:
    console = Console(file=io.StringIO(), width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().strip("\n").splitlines()) + "\n"
