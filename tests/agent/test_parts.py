"""Parts of a real workload's state on an emulated device: one leaves, the other stays, and both are told apart."""

from __future__ import annotations

import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.agent.rig import Rig, until
from timeslice.arena import Device
from timeslice.backends.registry import get_backend

MIB = 1 << 20
WEIGHTS, CACHE = 6 * MIB, 4 * MIB
DEVICE = 16 * MIB
LEAVE = {"mode": "discard", "tags": ["kv_cache"]}

# A sampler that can drop its cache and keep its weights. Each line of input: a line that says what it has.
SAMPLER = f"""
import json, os, sys
path, job, leave, environment = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]
os.environ.update(pair.split("=", 1) for pair in environment)
import timeslice
from timeslice.arena import Arena
from timeslice.models import Residency
arena = Arena(path)
weights, cache, loads = arena.allocate({WEIGHTS}), [arena.allocate({CACHE})], [0]
weights[:] = b"w" * {WEIGHTS}

def suspend(mode, tags):
    arena.free(cache.pop())
    return 0

def restore(tags):
    cache.append(arena.allocate({CACHE}))
    loads[0] += 1

def probe():
    parts = dict(weights={WEIGHTS}, kv_cache={CACHE} * len(cache))
    return Residency.RESIDENT if cache else Residency.SUSPENDED, sum(parts.values()), 0, parts

timeslice.register_workload(
    "g", on_suspend=suspend, on_restore=restore, probe=probe, job=job,
    modes=("offload", "discard"), tags=("weights", "kv_cache"), leave=timeslice.Leave.model_validate_json(leave),
)
print("up", flush=True)
for _ in sys.stdin:
    print(weights[0] == weights[-1] == ord("w"), len(cache), loads[0], flush=True)
"""


@asynccontextmanager
async def _agent(rig: Rig, folder: Path) -> AsyncIterator[None]:
    try:
        async with rig.agent(get_backend, emulate={rig.name: DEVICE}, backends={}, ttl_s=0.9):
            yield
    finally:
        Device.open(folder / "devices" / rig.name).destroy(force=True)


def _sampler(rig: Rig, job: str, folder: Path, leave: dict[str, Any]) -> subprocess.Popen[str]:
    environment = [f"TIMESLICE_URL={rig.url}", f"TIMESLICE_PREFIX={rig.prefix}", f"TIMESLICE_NODE={rig.node}"]
    return rig.spawn(SAMPLER, str(folder / "devices" / rig.name), job, json.dumps(leave), *environment, job=job)


def _ask(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


async def _beats(rig: Rig, times: int) -> None:
    """That many heartbeats of the agent have come."""
    seen: set[float] = set()

    async def beat() -> bool:
        seen.add((await rig.driver.client.zscore(rig.group.nodes, rig.node)) or 0.0)
        return len(seen) > times

    await until(beat, f"{times} heartbeats")


async def test_a_part_that_stays_on_the_device_is_no_resident_job(rig: Rig, clean_environment: Path) -> None:
    """Two samplers whose weights fit beside each other drop only their caches. What stays is seen from outside too, at
    every heartbeat, and is not taken for a job that came back; the weights are never touched."""
    folder = clean_environment
    async with _agent(rig, folder):
        a = _sampler(rig, "a", folder, LEAVE)
        await until(lambda: rig.member_state("a"), "the agent sees a")
        await rig.swap("a", into="b")
        device = Device.open(folder / "devices" / rig.name)
        assert device.used_bytes() == WEIGHTS
        await _beats(rig, 3)
        member = await rig.member("a")
        assert (member.state, member.device_bytes, member.unheld) == ("suspended", WEIGHTS, False)
        assert (await rig.view()).resident == ("b",)
        assert not (await rig.view()).jobs["a"].needs_weights
        assert _ask(a) == "True 0 0"
        await rig.yield_("b")
        await rig.acquire("a")
        swap = await rig.plan("b", into="a")
        await rig.order(rig.command(swap, "prepare", "b", into="a"))
        await rig.step("prepare", "commit")
        assert (await rig.order(rig.command(swap, "commit", "b", into="a")))["step"] == "done"
        assert device.used_bytes() == WEIGHTS + CACHE
        assert _ask(a) == "True 1 1"
