"""Bytes that need not be copied again, as backends of the emulated device tell of them."""

from __future__ import annotations

import pytest

from tests.backends.conftest import ALL, DEADLINE_S, SIZE, MakeRig
from timeslice.models import Residency


@pytest.mark.parametrize("kind", ["arena", "arena by tool", "channel"])
async def test_sealed_memory_is_moved_once_and_then_saved(make_rig: MakeRig, kind: str) -> None:
    """The same by the tool and by the workload itself; the device is free each time, and the content comes back."""
    rig = make_rig(kind)
    worker = rig.start()
    worker.process.call("seal")
    job = rig.job(worker)
    found = []
    for _ in range(3):
        await rig.backend.prepare(job, ALL, deadline_s=DEADLINE_S)
        outcome = await rig.backend.suspend(job, ALL, deadline_s=DEADLINE_S)
        found.append((outcome.moved_bytes, outcome.saved_bytes))
        assert (rig.used_bytes(), (await rig.backend.probe(job)).state) == (0, Residency.SUSPENDED)
        back = await rig.backend.restore(job, ALL, deadline_s=DEADLINE_S)
        assert (back.moved_bytes, back.saved_bytes) == (SIZE, 0)
        await rig.backend.release(job, deadline_s=DEADLINE_S)
    assert found == [(SIZE, 0), (0, SIZE), (0, SIZE)]
    assert worker.content_is_intact()
