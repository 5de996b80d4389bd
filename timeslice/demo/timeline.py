"""The picture: who was inside which group when, each job alone above and both sliced below."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from timeslice.demo.measure import Run

_COLOURS = ("#2a6f97", "#e07a1f", "#5a8f3d", "#8e5aa0")
_SWAP = "#b0b0b0"


def draw(alone: Sequence[Run], sliced: Run, gain: float, paths: Sequence[Path]) -> None:
    """Write the picture to each path; the suffix chooses the format."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "timeslice"
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    groups = sliced.groups
    colours = dict(zip(sliced.jobs, _COLOURS, strict=False))
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(11, 2.2 + len(groups)), layout="constrained")
    at = 0.0
    for run in alone:  # one after the other
        _bars(above, run, at - run.begins, colours)
        at += run.wall_s
    above.set_title(f"alone, one job after the other: {at:.1f} s", loc="left", fontsize=10)
    _bars(below, sliced, -sliced.begins, colours)
    below.set_title(f"sliced, by turns: {sliced.wall_s:.1f} s, gain {gain:.2f}", loc="left", fontsize=10)
    for axes in (above, below):
        axes.set_yticks(range(len(groups)), groups)
        axes.set_ylim(len(groups) - 0.5, -0.5)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    below.set_xlabel("seconds (emulated devices)")
    below.set_xlim(0, at)
    patches = [Patch(color=colour, label=f"job {name} inside") for name, colour in colours.items()]
    figure.legend(
        handles=[*patches, Patch(color=_SWAP, label="swap")], loc="outside upper right", ncols=3, frameon=False
    )
    for path in paths:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _bars(axes: Any, run: Run, shift: float, colours: dict[str, str]) -> None:
    for row, group in enumerate(run.groups):
        for job, colour in colours.items():
            spans = [(b.entered + shift, b.seconds) for b in run.bodies if b.group == group and b.job == job]
            axes.broken_barh(spans, (row - 0.35, 0.7), facecolors=colour)
        swaps = [(swap.start + shift, swap.seconds) for swap in run.swaps if swap.group == group]
        axes.broken_barh(swaps, (row - 0.35, 0.7), facecolors=_SWAP)
