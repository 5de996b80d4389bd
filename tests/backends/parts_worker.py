"""A job whose state has parts: a base, and two adapters of which each is a slot. Run by the tests, not by pytest."""

from __future__ import annotations

import os
from random import Random
from typing import Any

from tests.backends.worker import Job, serve
from timeslice.arena import Arena

MIB = 1 << 20
SIZES = {"base": 4 * MIB, "red": MIB, "blue": 2 * MIB}


class PartsJob(Job):
    """Its base does not change, so that after the first time the copy in host memory is still good."""

    def parts(self, device: str, url: str, prefix: str, group: str, job: str) -> str:
        os.environ["TIMESLICE_PREFIX"] = prefix
        from timeslice.client.workload import register_workload

        for seed, (name, size) in enumerate(SIZES.items()):
            arena = Arena(device)
            view = arena.allocate(size)
            view[:] = Random(seed).randbytes(size)
            self._arenas.append(arena)
            self._views.append(view)
            self.by_name[name] = arena
        self._workload = register_workload(group, self, job=job, url=url)
        return str(self._workload.target.model_dump_json())

    tags = ("base", "adapter")
    slots = ("red", "blue")

    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, Arena] = {}
        self.had_base_out = False

    def suspend(self, _mode: str, tags: tuple[str, ...], slot: str) -> Any:
        from timeslice import Moved

        moved = saved = 0
        for name in self._named(tags, slot):
            if self.by_name[name].state != "checkpointed":
                size = self.by_name[name].suspend()
                if name == "base" and self.had_base_out:
                    saved += size
                else:
                    moved += size
                self.had_base_out |= name == "base"
        return Moved(bytes=moved, saved=saved)

    def restore(self, tags: tuple[str, ...], slot: str) -> int:
        out = [name for name in self._named(tags, slot) if self.by_name[name].state == "checkpointed"]
        return sum(self.by_name[name].resume() for name in out)

    def probe(self) -> tuple[str, int, int, dict[str, int]]:
        out = {name for name, arena in self.by_name.items() if arena.state == "checkpointed"}
        left = {name: size for name, size in SIZES.items() if name not in out}
        parts = {"base": left.get("base", 0), "adapter": left.get("red", 0) + left.get("blue", 0)}
        state = "suspended" if out else "resident"
        return state, sum(left.values()), sum(SIZES[name] for name in out), parts

    def _named(self, tags: tuple[str, ...], slot: str) -> list[str]:
        names = ["base"] if not tags or "base" in tags else []
        if not tags or "adapter" in tags:
            names += [name for name in self.slots if slot in ("", name)]
        return names


if __name__ == "__main__":
    serve(PartsJob())
