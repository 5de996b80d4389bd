"""A job that takes turns on a stand-in for a GPU: its workload moves "its tensors" by writing them into the stand-in's
state, and leaves its context where it is, as a CUDA process does. Run by tests.

Arguments: job, group, device, bytes of its state, bytes of its context, and what it is: "honest", one that "keeps"
its state when told to suspend, or one with its state "elsewhere", such as tensors of a CPU.
A line of input asks for a hold; it prints how it was granted once it is in, and yields at the next line.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import timeslice
from tests.gpu.node import Node


class State:
    """What the job has, where."""

    def __init__(self, device: str, nbytes: int, context: int, kind: str) -> None:
        self._node = Node(Path(os.environ["STUB_GPU_DIR"]), Path())
        self._device, self._nbytes, self._context, self._kind = device, nbytes, context, kind
        self.is_out = False

    def show(self) -> None:
        """Write down what is on the device."""
        here = self._kind == "keeps" or (self._kind == "honest" and not self.is_out)
        tensors = [f"alloc {self._device} {self._nbytes}"] if here else []
        self._node.write(os.getpid(), "state running", f"context {self._device} {self._context}", *tensors)

    def suspend(self, mode: str, tags: object) -> int:
        self.is_out = True
        self.show()
        return self._nbytes

    def restore(self, tags: object) -> int:
        self.is_out = False
        self.show()
        return self._nbytes

    def probe(self) -> tuple[str, int, int]:
        return ("suspended", 0, self._nbytes) if self.is_out else ("resident", self._nbytes, 0)


def main() -> None:
    job, group, device, nbytes, context, kind = sys.argv[1:]
    state = State(device, int(nbytes), int(context), kind)
    registered = False
    print("up", flush=True)
    while sys.stdin.readline():
        with timeslice.hold(group, job=job, timeout=60) as lease:
            if not registered:  # loads its state in its first turn
                timeslice.register_workload(
                    group, on_suspend=state.suspend, on_restore=state.restore, probe=state.probe, job=job
                )
                state.show()
                registered = True
            print(lease.grant.how, not state.is_out, flush=True)
            if not sys.stdin.readline():
                return
        print("yielded", flush=True)


if __name__ == "__main__":
    main()
