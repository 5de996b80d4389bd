"""What the workers of the Ray tests run."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray

from timeslice.arena import Arena
from timeslice.integrations.ray import TimesliceActor, share

DEADLINE_S = 60.0
STATE_BYTES = 4 << 20

# A driver that is killed while a call of its own runs inside of a hold.
DRIVER = """
import sys, ray
from timeslice.integrations import ray_holder
from timeslice.integrations.ray import runtime_env, share
from tests.frameworks.ray_workers import Plain

ray.init(address=sys.argv[1], runtime_env=runtime_env("dies"), configure_logging=False)
worker = share(ray.remote(Plain).options(num_cpus=0).remote(), "samplers", job="dies")
ray.get(worker.stay.remote(sys.argv[2], "dies", "never"))
"""


class Stays:
    def stay(self, folder: str, name: str, until: str) -> str:
        """Say that it is inside, once a call, and leave when a file is there."""
        (Path(folder) / f"{name}-inside").touch(exist_ok=False)
        await_file(Path(folder) / until)
        (Path(folder) / f"{name}-left").touch()
        return name


class OnDevice(Stays):
    """Has state on an emulated device."""

    def __init__(self, device: str) -> None:
        self.arena = Arena(Path(device), label=type(self).__name__)
        self.state: Any = None
        super().__init__()

    def load(self, seed: int) -> str:
        """Fill the device; to be held for."""
        self.state = np.frombuffer(self.arena.allocate(STATE_BYTES), np.uint8)
        self.state[:] = np.random.default_rng(seed).integers(0, 256, STATE_BYTES, np.uint8)
        return self.digest()

    def digest(self) -> str:
        return hashlib.sha256(self.state.tobytes()).hexdigest()

    def where(self) -> tuple[str, int, int]:
        """Needs no device: state, bytes there, bytes saved."""
        return self.arena.state, self.arena.bytes_on_device, self.arena.bytes_on_host

    def pid(self) -> int:
        return os.getpid()

    def die(self) -> None:
        os._exit(3)


class Known(OnDevice, TimesliceActor):
    """Is moved from outside."""


class MovesItself(Known):
    """Is asked to move."""

    def __init__(self, device: str) -> None:
        self.asked: list[str] = []
        super().__init__(device)

    def on_suspend(self, mode: str, _tags: tuple[str, ...]) -> int:
        self.asked.append(f"suspend {mode}")
        return self.arena.suspend()

    def on_restore(self, _tags: tuple[str, ...]) -> int:
        self.asked.append("restore")
        return self.arena.resume()

    def on_probe(self) -> tuple[str, int, int]:
        if "probe" not in self.asked:
            self.asked.append("probe")
        on_device = self.arena.bytes_on_device
        state = "suspended" if self.arena.state == "checkpointed" else "resident" if on_device else "absent"
        return state, on_device, self.arena.bytes_on_host

    def were(self) -> list[str]:
        return self.asked


class HalfCallbacks(TimesliceActor):
    """Forgot one of the two."""

    def on_suspend(self, _mode: str, _tags: tuple[str, ...]) -> int:
        return 0

    def ready(self) -> bool:
        return True


class Plain(Stays):
    """Knows nothing of timeslice."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def note(self, number: int) -> int:
        self.seen.append(number)
        return number

    def noted(self) -> list[int]:
        return self.seen

    def fail(self) -> None:
        raise ValueError("no luck")

    @ray.method(num_returns=2)  # type: ignore[untyped-decorator]
    def pair(self, first: Any) -> tuple[Any, int]:
        return first, 2

    def stream(self) -> Any:
        yield 1

    def pid(self) -> int:
        return os.getpid()

    def die(self) -> None:
        os._exit(3)


class Loads(Plain):
    """Takes as long to start as it is let."""

    def __init__(self, until: Path) -> None:
        super().__init__()
        await_file(until)


class Shares:
    """Makes a call of its own to an actor that others call too."""

    def load(self, actor: Any, job: str) -> Any:
        return ray.get(share(actor, "samplers", job=job).load.remote(0))


class Async:
    async def double(self, number: int) -> int:
        await asyncio.sleep(0)
        return 2 * number


def await_file(path: Path) -> None:
    end = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} did not come"
        time.sleep(0.01)
