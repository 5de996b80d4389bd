"""Host memory that a sleep needs: what a server tells of its cache is not asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backends.http.conftest import ALL, DISCARD, KV_CACHE, MIB, WEIGHTS, Lab
from timeslice.arena import Device
from timeslice.backends.base import Selection

CACHE = 64 * MIB


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Lab]:
    """With room for a cache that is large enough to be told in hundredths of a GiB."""
    device = Device.create(tmp_path / "large", 128 * MIB)
    made = Lab(device, tmp_path)
    yield made
    for server in made.servers:
        server.end()
    device.destroy(force=True)


async def test_a_cache_that_is_told_is_dropped_and_needs_no_room(large: Lab) -> None:
    """SGLang tells of its cache in its state. Never less is asked for than the weights, which stay."""
    server = large.start("sglang", "--kv-cache", str(CACHE))
    job = large.job(server, dialect="sglang")
    need = await large.backend.estimate(job, ALL)
    assert WEIGHTS <= need < WEIGHTS + CACHE / 3
    assert await large.backend.estimate(job, Selection(tags=("kv_cache",))) == 0
    await large.out(job, Selection(tags=("kv_cache",)))
    assert (await large.backend.probe(job)).host_bytes == 0
    await large.back(job)
    await large.out(job)
    assert await large.backend.estimate(job, ALL) == 0
    assert (await large.backend.probe(job)).host_bytes == need


async def test_a_cache_of_a_size_that_was_asked_for_is_told(lab: Lab) -> None:
    """vLLM tells of its cache where it was started with a size for it; of two servers each counts for its own."""
    servers = [lab.start("vllm", "--kv-cache-memory-bytes", str(KV_CACHE), seed=seed) for seed in (1, 2)]
    need = await lab.backend.estimate(lab.job(servers[0]), ALL)
    assert WEIGHTS <= need < WEIGHTS + KV_CACHE / 10
    assert await lab.backend.estimate(lab.job(*servers), ALL) >= 2 * WEIGHTS


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_where_nothing_is_told_all_of_it_may_be_needed(lab: Lab, kind: str) -> None:
    """At most: what is on the device. Nothing for what is dropped, or for servers that sleep."""
    server = lab.start(kind)  # type: ignore[arg-type]
    job = lab.job(server, dialect=kind, modes=("offload", "discard"))
    assert await lab.backend.estimate(job, ALL) == lab.device.used_bytes()
    assert await lab.backend.estimate(job, DISCARD) == 0
