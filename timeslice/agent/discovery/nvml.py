"""Which processes the driver sees on real devices."""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence

from timeslice.agent.discovery.environment import Sighting
from timeslice.backends.nvml import Nvml, ask


async def sizes_on(uuids: Sequence[str]) -> dict[int, int]:
    """Bytes of each process with memory on these devices, by its number as the driver has it. One of which it tells no
    figure may have some, and counts with 0; one with 0 bytes has none, and is left out. NvmlError."""

    def sizes() -> dict[int, int]:
        found: dict[int, int] = {}
        for pid, size in (each for uuid in uuids for each in Nvml().processes(uuid)):
            if size is None or size > 0:
                found[pid] = found.get(pid, 0) + (size or 0)
        return found

    return await ask(sizes)


def is_among(sighting: Sighting, numbers: Collection[int], here: Container[int]) -> bool:
    """Whether a process is one of them. Most drivers count as the host does, some as the process's own pid namespace:
    that number counts where nobody ``here`` has it."""
    inner = sighting.inner
    return sighting.pid in numbers or (inner != sighting.pid and inner in numbers and inner not in here)
