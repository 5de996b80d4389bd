"""Jobs with a vLLM server each take turns on one emulated device: first each alone, then all together.

The servers are stand-ins (tests/servers/vllm.py): the routes and habits of vLLM, and no model. The backend `http` of
the agent puts one to sleep and wakes the other.

    python examples/vllm_sampler/run.py
    python examples/vllm_sampler/run.py --jobs 3 --json out.json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, Self

from timeslice.up import LocalStack, private_environment

GROUP = "samplers"
CAPACITY = 8 << 20  # one server fits, two do not
STEPS, VERIFIER_S = 4, 0.3
WAIT_S = 120.0
FOLDER = Path(__file__).parent


class Driver:
    """The process of one job: it is told what to do line by line, and says ``done``."""

    def __init__(self, folder: Path, job: str, seed: int) -> None:
        self.job, self._result, self._log = job, folder / f"{job}.json", folder / f"{job}.log"
        spec = {
            "device": str(folder / "run" / "devices" / GROUP),
            "seed": seed,
            "steps": STEPS,
            "verifier_s": VERIFIER_S,
            "result": str(self._result),
        }
        command = [sys.executable, str(FOLDER / "sampler.py"), json.dumps(spec)]
        environment = {**os.environ, "TIMESLICE_JOB": job}
        pipe = subprocess.PIPE
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdin=pipe, stdout=pipe, stderr=log, text=True, bufsize=1
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._into, self._from = self._process.stdin, self._process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._into.close()
        self._from.close()

    def tell(self, what: str) -> None:
        self._into.write(f"{what}\n")

    def done(self) -> None:
        if self._from.readline() != "done\n":
            raise self._failed()

    def result(self) -> dict[str, Any]:
        """Let it end."""
        self._into.close()
        if self._process.wait(WAIT_S):
            raise self._failed()
        found: dict[str, Any] = json.loads(self._result.read_text())
        return found

    def _failed(self) -> SystemExit:
        return SystemExit(f"job {self.job} failed:\n{self._log.read_text()[-3000:]}")


def together(folder: Path, jobs: dict[str, int]) -> dict[str, dict[str, Any]]:
    """These jobs at the same time, each with the seed of its weights, until they end."""
    with ExitStack() as stack:
        drivers = [stack.enter_context(Driver(folder, job, seed)) for job, seed in jobs.items()]
        for driver in drivers:
            driver.done()
        for driver in drivers:
            driver.tell("sample")
        for driver in drivers:
            driver.done()
        if len(drivers) > 1:  # the last one takes the device, and the first one's server sleeps
            for driver, what in ((drivers[-1], "take a turn"), (drivers[0], "ask a sleeper")):
                driver.tell(what)
                driver.done()
        return {driver.job: driver.result() for driver in drivers}


def run(count: int) -> dict[str, Any]:
    """Each job alone, then all, and what came of it."""
    jobs = {f"job-{number}": number for number in range(1, count + 1)}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ts-vllm-")))
        stack.enter_context(private_environment(folder))
        # The agent asks only servers that are on its list.
        backend = f"http:allow=http://127.0.0.1:*,state={folder / 'marks'}"
        local = stack.enter_context(LocalStack({GROUP: CAPACITY}, backends={GROUP: [backend]}))
        os.environ["TIMESLICE_URL"] = local.url
        stack.callback(os.environ.pop, "TIMESLICE_URL")
        alone: dict[str, Any] = {}
        for job, seed in jobs.items():
            say(f"{job} alone")
            alone |= together(folder, {job: seed})
        say(f"{' and '.join(jobs)} by turns")
        sliced = together(folder, jobs)
    return judge(alone, sliced)


def judge(alone: dict[str, Any], sliced: dict[str, Any]) -> dict[str, Any]:
    """The numbers."""
    spans = [{"job": job, **span} for job, result in sliced.items() for span in result["spans"]]
    spans.sort(key=lambda span: float(span["began"]))
    at_once = [
        (a, b)
        for a, b in combinations(spans, 2)
        if a["job"] != b["job"] and a["began"] < b["ended"] and b["began"] < a["ended"]
    ]
    turns = [
        {**{name: span[name] for name in ("job", "how", "token")}, "seconds": round(span["ended"] - span["began"], 3)}
        for span in spans
    ]
    first = next(iter(sliced.values()))
    return {
        "device": "emulated",
        "servers": "stand-ins for vLLM",
        "jobs": len(sliced),
        "turns": turns,
        "switches": sum(a["job"] != b["job"] for a, b in pairwise(turns)),
        "overlaps": len(at_once),
        "results_equal": all(sliced[job]["texts"] == alone[job]["texts"] for job in sliced),
        "texts": {job: result["texts"][0] for job, result in sliced.items()},
        "sleeper_refused": first["refused"],
        "sleeper_refused_s": round(first["refused_s"], 3),
        "probes_of_sleepers": sum(result["asleep"] for result in sliced.values()),
        "probes_that_saw_death": sum(result["dead"] for result in sliced.values()),
    }


def say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=2, choices=range(2, 6), help="how many (default 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    options = parser.parse_args()
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"the folder of {options.json} does not exist; nothing was run")
    for number in (signal.SIGINT, signal.SIGTERM):  # end as any other way: nothing is left behind
        signal.signal(number, lambda got, _: sys.exit(128 + got))
    found = run(options.jobs)
    for turn in found["turns"]:
        say(f"  {turn['job']}: {turn['how']}, {turn['seconds']:.2f} s")
    say("the servers are stand-ins for vLLM, the device is emulated")
    say(f"results_equal {found['results_equal']}, overlaps {found['overlaps']}, switches {found['switches']}")
    refused = f"a request to a sleeper was refused within {found['sleeper_refused_s']:.3f} s"
    say(f"{refused}; of {found['probes_of_sleepers']} probes of sleepers {found['probes_that_saw_death']} saw death")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))
    good = found["results_equal"] and found["sleeper_refused"] and not found["probes_that_saw_death"]
    if not good or found["overlaps"] or not found["switches"]:
        raise SystemExit("something is wrong; see above")


if __name__ == "__main__":
    main()
