"""Redis goes away while a daemon starts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from timeslice.agent import service
from timeslice.agent.heartbeat import Heartbeat
from timeslice.agent.service import AgentOptions, run_agent
from timeslice.embedded import EmbeddedServer
from timeslice.locks.scripts import Observed
from timeslice.torture.proxy import Proxy


async def test_an_agent_whose_first_beat_meets_an_outage_joins_after_it(
    server: EmbeddedServer, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it lasts: the agent neither ends nor tells what it saw before, and serves when it is over."""
    proxy = Proxy(server.socket)
    monkeypatch.setattr(service, "CALL_DEADLINE_S", 0.2)
    beat, third_try = Heartbeat._tell_all, asyncio.Event()
    tries = 0

    async def told(heart: Heartbeat, *, first: bool) -> list[Observed]:
        nonlocal tries
        tries += 1
        if tries == 1:
            proxy.cut()
        if tries == 3:
            third_try.set()
        return await beat(heart, first=first)

    monkeypatch.setattr(Heartbeat, "_tell_all", told)
    stop, ready = asyncio.Event(), asyncio.Event()
    options = AgentOptions(url=proxy.url, node="n1", groups=("g",), state_dir=tmp_path, prefix=prefix)
    agent = asyncio.create_task(run_agent(options, stop=stop, ready=ready.set))
    for event in (third_try, ready):
        happens = asyncio.create_task(event.wait())
        await asyncio.wait({agent, happens}, return_when=asyncio.FIRST_COMPLETED)
        assert not agent.done()
        proxy.heal()
    stop.set()
    await agent
    proxy.close()
