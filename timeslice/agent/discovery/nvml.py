"""Which processes the driver sees on real devices."""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence

from timeslice.agent.discovery.environment import Sighting
from timeslice.backends.nvml import Nvml, ask


async def numbers_on(uuids: Sequence[str]) -> frozenset[int]:
    """Numbers of the processes with memory on these devices, as the driver has them. One of which it tells no figure
    may have some; one with 0 bytes has none. NvmlError."""

    def numbers() -> frozenset[int]:
        told = (each for uuid in uuids for each in Nvml().processes(uuid))
        return frozenset(pid for pid, size in told if size is None or size > 0)

    return await ask(numbers)


def is_among(sighting: Sighting, numbers: Collection[int], here: Container[int]) -> bool:
    """Whether a process is one of them. Most drivers count as the host does, some as the process's own pid namespace:
    that number counts where nobody ``here`` has it."""
    inner = sighting.inner
    return sighting.pid in numbers or (inner != sighting.pid and inner in numbers and inner not in here)
