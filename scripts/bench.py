"""scripts/bench [--json FILE] [--only NAME]: speed as ratios, each measured beside its reference in one run.

Aims are printed beside the figures and never asserted: a busy machine is no defect.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

SUBJECTS = ("locks", "scale", "swaps", "device", "swap-bytes")


def _machine() -> dict[str, object]:
    import redis

    return {"cpus": os.cpu_count(), "python": platform.python_version(), "redis_py": redis.__version__}


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--only", choices=SUBJECTS, action="append", help="run only this subject (repeatable)")
    options = parser.parse_args()
    from benchmarks import device, locks, scale, swap_bytes, swaps

    subjects = {
        "locks": locks.measure,
        "scale": scale.measure,
        "swaps": swaps.measure,
        "device": device.measure,
        "swap-bytes": swap_bytes.measure,
    }
    ratios: dict[str, float] = {}
    values: dict[str, float] = {}
    aims: dict[str, str] = {}
    for name in options.only or SUBJECTS:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        figures = subjects[name]()
        ratios |= figures.ratios
        values |= figures.values
        aims |= figures.aims
    table = Table("figure", "measured", "aim")
    for key, value in (ratios | values).items():
        table.add_row(key, f"{value:.3f}", aims.get(key, ""))
    Console().print(table)
    print("The device is emulated. Medians of interleaved rounds; see scripts/benchmarks/.")
    if options.json:
        report = {"machine": _machine(), "device": "emulated", "ratios": ratios, "values": values, "aims": aims}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
