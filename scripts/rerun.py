"""scripts/rerun.py FILE: run the tests once more, alone, that failed in the tiers of `.ci/run`.

FILE is what tests/support/failures.py wrote; if it is empty nothing is done or printed.
A test that passes now is listed as flaky. It fails if a test fails again, or if three are flaky.
The last line printed is pytest's closing line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MAX_FLAKY = 2
# More have failed than may be flaky: the run fails whatever comes. Some are run all the same, for who mends them.
MAX_TESTS = 10


def noted(file: Path) -> list[tuple[str, str]]:
    """Interpreter and test of each line."""
    return [(python, test) for python, test in map(json.loads, file.read_text().splitlines())]


def run_again(python: str, tests: list[str]) -> tuple[set[str], bool, str]:
    """Which tests fail again, whether pytest ran them all, and its closing line. The rest is printed."""
    with tempfile.NamedTemporaryFile() as file:
        command = [python, "-m", "pytest", "-n", "0", "-q", *tests]
        environment = {**os.environ, "FAILED_TESTS": file.name}
        run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        said, _, closing = run.stdout.strip().rpartition("\n")
        print(said, flush=True)
        return {test for _, test in noted(Path(file.name))}, run.returncode == 0, closing


def main(file: Path) -> int:
    failed = noted(file)
    if not failed:
        return 0
    chosen = failed[:MAX_TESTS]
    print(f"Once more, alone: {len(chosen)} of the {len(failed)} tests that failed.", flush=True)
    closings: list[tuple[bool, str]] = []
    flaky: list[str] = []
    for python in dict.fromkeys(python for python, _ in chosen):
        tests = [test for each, test in chosen if each == python]
        again, complete, closing = run_again(python, tests)
        if complete:
            flaky += [f"{test}  ({python})" for test in tests if test not in again]
        closings.append((complete and not again, closing))
    for test in flaky:
        print(f"flaky: {test}")
    if len(flaky) > MAX_FLAKY:
        print(f"{len(flaky)} tests are flaky: mend them; up to {MAX_FLAKY} are let through.")
    print(min(closings)[1])  # that of a run that failed, if there is one
    return int(len(flaky) > MAX_FLAKY or len(failed) > MAX_TESTS or not all(passed for passed, _ in closings))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
