"""Two torchrun jobs of two ranks each share one emulated device by turns.

Every rank holds the group, and each pair of ranks is one gang: both get in together, on one lease. Inside they do an
all-reduce over gloo, which would hang if only one of them had got in. Each rank has its state on the device; the agent
moves the state of both ranks out and in between the turns.

    python examples/torchrun_gang.py
    python examples/torchrun_gang.py --rounds 20 --json gang.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import turns

GROUP = "trainers"
JOBS = ("a", "b")
RANKS = 2
STATE_BYTES = 8 << 20  # of each rank; the device has room for the ranks of one job
WAIT_S = 120.0


def worker(folder: Path, device: Path, rounds: int) -> None:
    """One rank: what a researcher's script looks like."""
    import numpy as np
    import torch
    import torch.distributed as dist

    import timeslice
    from timeslice.arena import Arena

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, job = dist.get_rank(), os.environ["TIMESLICE_JOB"]
    arena = Arena(device, label=f"{job}-{rank}")
    with timeslice.hold(GROUP, phase="init", timeout=WAIT_S):  # the first load is held too
        weights: Any = np.frombuffer(arena.allocate(STATE_BYTES), np.float32)
    await_all(folder, f"{job}-{rank}")
    with (folder / f"{job}-{rank}.jsonl").open("w") as log:
        for number in range(rounds):
            with timeslice.hold(GROUP, phase="train", timeout=WAIT_S) as lease:  # torchrun is noticed: one gang
                entered = time.monotonic()
                gradient = torch.full((4,), float(rank + 1))
                dist.all_reduce(gradient)  # hangs unless all ranks are inside
                weights += float(gradient[0])
                left = time.monotonic()
            line = {"job": job, "rank": rank, "round": number, "token": lease.fencing_token, "how": lease.grant.how}
            log.write(json.dumps({**line, "entered": entered, "left": left}) + "\n")
            log.flush()
            time.sleep(0.05)  # off the device: a verifier at work
        with timeslice.hold(GROUP, phase="save", timeout=WAIT_S):  # saving reads the device
            total = float(weights.sum(dtype=np.float64))
        log.write(json.dumps({"job": job, "rank": rank, "sum": total}) + "\n")
    dist.destroy_process_group()


def await_all(folder: Path, name: str) -> None:
    """Begin when all ranks of all jobs are there, however long loading took: else there were no turns to see."""
    (folder / f"{name}.ready").touch()
    until = time.monotonic() + WAIT_S
    while len(list(folder.glob("*.ready"))) < len(JOBS) * RANKS:
        if time.monotonic() > until:
            raise SystemExit(f"not all ranks were ready within {WAIT_S:g} s")
        time.sleep(0.02)


def start(job: str, folder: Path, device: Path, rounds: int, url: str) -> subprocess.Popen[bytes]:
    """torchrun for one job."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)),
        *("--log-dir", str(folder / "torchrun"), __file__),  # else a folder of its own stays when it is ended
        *("--worker", str(folder), str(device), str(rounds)),
    ]
    environment = {**os.environ, "TIMESLICE_JOB": job, "TIMESLICE_URL": url, "OMP_NUM_THREADS": "1"}
    with (folder / f"{job}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def end(torchrun: subprocess.Popen[bytes]) -> None:
    """Kill it with its ranks. By a plain kill it forgets those that it starts at that moment."""
    if torchrun.poll() is not None:
        return
    process = psutil.Process(torchrun.pid)
    process.suspend()
    while process.status() not in {psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE}:  # then it starts no more
        time.sleep(0.01)
    for each in (*process.children(recursive=True), process):
        with suppress(psutil.NoSuchProcess):
            each.kill()
    torchrun.wait()


@contextmanager
def stack() -> Iterator[tuple[Any, Path]]:
    """A server, coordinator and agent of this example's own, with one emulated device."""
    from timeslice.up import LocalStack, private_environment

    with (
        tempfile.TemporaryDirectory(prefix="ts-gang-") as name,
        private_environment(Path(name)),
        LocalStack({GROUP: STATE_BYTES * RANKS * 3 // 2}) as local,
    ):
        yield local, Path(name)


def run(rounds: int) -> dict[str, Any]:
    """Both jobs, until they end."""
    with stack() as (local, folder), ExitStack() as running:
        device = folder / "run" / "devices" / GROUP
        print(f"starting {len(JOBS)} torchrun jobs of {RANKS} ranks; loading PyTorch takes seconds", file=sys.stderr)
        jobs: dict[str, subprocess.Popen[bytes]] = {}
        for job in JOBS:
            jobs[job] = process = start(job, folder, device, rounds, local.url)
            running.callback(end, process)
        for job, process in jobs.items():
            if process.wait(WAIT_S * (rounds + 2)):
                raise SystemExit(f"torchrun of job {job} failed:\n{(folder / f'{job}.log').read_text()[-3000:]}")
        lines = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return judge(lines, rounds)


def judge(lines: list[dict[str, Any]], rounds: int) -> dict[str, Any]:
    """What the ranks wrote down, as numbers."""
    bodies = sorted((line for line in lines if "token" in line), key=lambda line: line["entered"])
    turns: dict[int, list[dict[str, Any]]] = {}
    for body in bodies:
        turns.setdefault(body["token"], []).append(body)
    gangs = list(turns.values())
    expected = sum(range(1, RANKS + 1)) * rounds * (STATE_BYTES // 4)
    return {
        "device": "emulated",
        "jobs": len(JOBS),
        "ranks": RANKS,
        "rounds": rounds,
        "turns": [
            {
                "token": gang[0]["token"],
                "job": gang[0]["job"],
                "ranks": sorted(body["rank"] for body in gang),
                "how": gang[0]["how"],
                "seconds": round(max(b["left"] for b in gang) - min(b["entered"] for b in gang), 4),
            }
            for gang in gangs
        ],
        "gangs_whole": all(sorted(b["rank"] for b in gang) == list(range(RANKS)) for gang in gangs),
        "overlaps": sum(
            one["job"] != other["job"] and one["entered"] < other["left"] and other["entered"] < one["left"]
            for index, one in enumerate(bodies)
            for other in bodies[index + 1 :]
        ),
        "tokens_rise": all(one[0]["token"] < other[0]["token"] for one, other in pairwise(gangs)),
        "switches": sum(one[0]["job"] != other[0]["job"] for one, other in pairwise(gangs)),
        "restored": sum(gang[0]["how"] == "restored" for gang in gangs),
        "sums_right": all(line["sum"] == expected for line in lines if "sum" in line),
    }


def show(report: dict[str, Any]) -> None:
    """For people."""
    for turn in report["turns"]:
        ranks = " and ".join(map(str, turn["ranks"]))
        print(
            f"token {turn['token']}: job {turn['job']}, ranks {ranks}, {turn['how']}, {turn['seconds'] * 1000:.0f} ms"
        )
    print(
        f"{len(report['turns'])} turns of gangs of {report['ranks']} on an emulated device, "
        f"{report['switches']} switches of job, {report['restored']} times restored, overlaps {report['overlaps']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="holds of each job (default 8)")
    parser.add_argument("--json", type=turns.new_file, metavar="FILE", help="write the numbers there")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not find_spec("torch"):
        raise SystemExit(
            "this example needs PyTorch: in a checkout: pip install torch '.[demo]', or run it by scripts/frameworks"
        )
    if arguments.worker:
        folder, device, rounds = arguments.worker
        worker(Path(folder), Path(device), int(rounds))
        return
    if arguments.rounds < 1:
        parser.error("--rounds: at least 1")
    turns.end_on_signals()
    report = run(arguments.rounds)
    show(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    wrong = report["overlaps"] or not (report["gangs_whole"] and report["tokens_rise"] and report["sums_right"])
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
