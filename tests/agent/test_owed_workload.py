"""A real workload that says it let go of the device, and did not: nobody but itself can be asked (G06)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.agent.rig import Rig, until
from timeslice.agent import moving
from timeslice.arena import Device
from timeslice.backends.registry import get_backend

MIB = 1 << 20
SIZE, DEVICE = 6 * MIB, 16 * MIB

# Keeps its memory although it says otherwise, and can't be told to come back. A line of input: it lets go.
LIAR = f"""
import os, sys
path, job, *environment = sys.argv[1:]
os.environ.update(pair.split("=", 1) for pair in environment)
import timeslice
from timeslice.arena import Arena
from timeslice.models import Residency
arena = Arena(path)
state, out = arena.allocate({SIZE}), []

def suspend(mode, tags):
    out.append(True)
    return {SIZE}

def restore(tags):
    raise RuntimeError("no")

def probe():
    return (Residency.SUSPENDED, 0, {SIZE}) if out else (Residency.RESIDENT, {SIZE}, 0)

timeslice.register_workload("g", on_suspend=suspend, on_restore=restore, probe=probe, job=job)
print("up", flush=True)
sys.stdin.readline()
arena.free(state)
print("free", flush=True)
sys.stdin.readline()
"""


async def test_a_workload_that_kept_its_memory_is_asked_until_it_let_go(
    rig: Rig, clean_environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not out while the device shows its bytes, whatever it says. It is asked at each heartbeat, for no other
    backend could see it, and counts as out once its memory was measured free."""
    monkeypatch.setattr(moving, "FREE_S", 0.3)
    folder = clean_environment
    try:
        async with rig.agent(get_backend, emulate={rig.name: DEVICE}, backends={rig.name: ["channel"]}, ttl_s=0.9):
            environment = [f"TIMESLICE_URL={rig.url}", f"TIMESLICE_PREFIX={rig.prefix}", f"TIMESLICE_NODE={rig.node}"]
            liar = rig.spawn(LIAR, str(folder / "devices" / rig.name), "a", *environment, job="a")
            swap = await rig.begin_swap("a", into="b")
            prepared = await rig.order(rig.command(swap, "prepare", "a", into=None))
            assert prepared["step"] == "prepared", prepared
            await rig.step("prepare", "commit")
            failed = await rig.order(rig.command(swap, "commit", "a", into=None, restore_timeout_ms=2000))
            assert f"only 0 of its {SIZE} bytes were measured free" in failed["error"]
            assert await rig.member_state("a") == "suspending"
            await rig.settle(swap)
            assert liar.stdin is not None
            assert liar.stdout is not None
            liar.stdin.write("\n")
            liar.stdin.flush()
            assert liar.stdout.readline() == "free\n"

            async def settled() -> bool:
                return await rig.member_state("a") == "suspended"

            await until(settled, "job a counts as out")
            ledger = json.loads((rig.folder / "state" / "groups" / rig.name / "journal.json").read_text())
            assert ledger["owed"] == {}
    finally:
        Device.open(folder / "devices" / rig.name).destroy(force=True)
