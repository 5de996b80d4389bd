"""A job that holds the group `g` and moves its own state, for the tests of stuck jobs.

Run as ``python -m tests.agent.stuck_job JOB [hang [FILE]]``; prints ``inside`` in its hold, and stays there for ever.
With ``hang`` it never comes back from the order to suspend, or not before FILE exists.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import timeslice
from timeslice.models import Residency

LEASE_S = 2.0


def main() -> None:
    job, *more = sys.argv[1:]
    out = [False]
    until = Path(more[1]) if len(more) > 1 else None

    def suspend(*_: object) -> int:
        while "hang" in more and not (until and until.exists()):
            time.sleep(0.1)
        out[0] = True
        return 5

    def restore(*_: object) -> int:
        out[0] = False
        return 5

    def probe() -> tuple[Residency, int, int]:
        return Residency.SUSPENDED if out[0] else Residency.RESIDENT, 5 * (not out[0]), 5 * out[0]

    with timeslice.hold("g", job=job, lease=LEASE_S):
        workload = timeslice.register_workload("g", on_suspend=suspend, on_restore=restore, probe=probe, job=job)
        print("inside", flush=True)
        while workload:
            time.sleep(0.05)


if __name__ == "__main__":
    main()
