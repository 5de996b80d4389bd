"""Try the cuda backend case by case: on a real GPU where there is one, else on the stand-ins of tests/gpu.

The same cases run on both. Nothing of the backend is replaced; on stand-ins the driver's libraries and the tool are.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from gpu_cases import CASES, DEADLINE_S, CantTellError, Case, Ground

from tests.gpu.build import build, compiler
from tests.gpu.inprocess import nvml_of
from tests.gpu.node import Node
from timeslice.backends.nvml import Nvml
from timeslice.errors import BackendError

MIB, GIB = 1 << 20, 1 << 30
STUB = "stub (no NVIDIA GPU here)"
STUB_BYTES = 64 * MIB  # of the stand-in for a device


@dataclass
class Result:
    """A line of the table. ``size`` are bytes moved, where speeds mean something: not on a stand-in."""

    name: str
    outcome: str  # passed, failed, skipped
    seconds: float
    size: int = 0
    out_s: float = 0.0
    back_s: float = 0.0
    why: str = ""


def run_case(ground: Ground, case: Case) -> Result:
    began, outcome, why = time.monotonic(), "passed", ""

    async def limited() -> None:
        async with asyncio.timeout(DEADLINE_S * 2):
            await case(ground)

    try:
        asyncio.run(limited())
    except CantTellError as error:
        outcome, why = "skipped", str(error)
    except Exception as error:
        outcome, why = "failed", f"{type(error).__name__}: {error}"
    except BaseException:
        ground.clear()  # a process that is stopped would keep its memory for ever
        raise
    result = Result(case.__name__.replace("_", " "), outcome, round(time.monotonic() - began, 3), why=why)
    if ground.node is None:
        result.size, (result.out_s, result.back_s) = ground.size, ground.seconds
    ground.clear()
    return result


def real_ground(options: dict[str, str], gib: float, folder: Path) -> Ground | None:
    """The first GPU of this machine; None without one."""
    try:
        found = Nvml().devices()
    except BackendError:
        return None
    if not found:
        return None
    first = found[0]
    nbytes = min(int(gib * GIB), int(first.free_bytes * 0.55))
    return Ground(first.uuid, f"{first.name} {first.uuid}, driver {Nvml().driver_version()}", nbytes, options, folder)


@contextmanager
def stub_ground(options: dict[str, str], folder: Path) -> Iterator[Ground]:
    if not (cc := compiler()):
        raise click.ClickException("there is no NVIDIA GPU here, and no C compiler for the stand-ins; install gcc")
    node = Node.make(folder / "node", build(folder / "lib", cc), (STUB_BYTES, STUB_BYTES))
    os.environ.update(node.environment)
    with nvml_of(node):
        device = Nvml().devices()[0].uuid
        yield Ground(device, STUB, int(STUB_BYTES * 0.55), options, folder, node)


def writable(_context: click.Context, _option: click.Parameter, path: Path | None) -> Path | None:
    """Minutes of work are not lost to a typing error."""
    if path and not path.absolute().parent.is_dir():
        raise click.BadParameter(f"the folder of {path} does not exist; nothing was run")
    return path


def show(results: list[Result]) -> None:
    for each in results:
        speed = ""
        if each.size and each.out_s and each.back_s:
            gib = each.size / GIB
            speed = f"  {gib:6.2f} GiB, out {gib / each.out_s:5.2f} GiB/s, back {gib / each.back_s:5.2f} GiB/s"
        print(f"{each.name:<26}{each.outcome:<9}{each.seconds:8.2f} s{speed}{'  ' + each.why if each.why else ''}")


@click.command(help=__doc__)
@click.option(
    "--json",
    "path",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=writable,
    help="Write the results to this file.",
)
@click.option("--driver", type=click.Choice(["cli", "api"]), default="cli", help="cuda-checkpoint, or the driver API.")
@click.option("--tool", help="Path of cuda-checkpoint.")
@click.option("--gib", type=float, default=4.0, show_default=True, help="Size of a job on a real GPU.")
def main(path: Path | None, driver: str, tool: str | None, gib: float) -> None:
    options = {"driver": driver, **({"tool": tool} if tool else {})}
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda got, _: sys.exit(128 + got))
    folder = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    try:
        if ground := real_ground(options, gib, folder):
            results = run_all(ground)
        else:
            print("No NVIDIA GPU here: these are stand-ins for the driver and its tool, and nothing ran on hardware.")
            with stub_ground(options, folder) as ground:
                results = run_all(ground)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    failed = sum(each.outcome == "failed" for each in results)
    print(f"{len(results)} cases, {failed} failed, on: {ground.name}")
    if path:
        told = {"device": ground.name, "cases": [asdict(each) for each in results], "failed": failed}
        path.write_text(json.dumps(told, indent=2) + "\n")
    sys.exit(1 if failed else 0)


def run_all(ground: Ground) -> list[Result]:
    for line in asyncio.run(ground.backend().health()):
        print(f"! {line}")
    results = []
    for case in CASES:
        results.append(run_case(ground, case))
        show(results[-1:])
    return results


if __name__ == "__main__":
    main()
