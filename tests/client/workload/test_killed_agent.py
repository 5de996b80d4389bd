"""An agent that is killed when it asks a workload: the next one asks the same again, and it is done once."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.client.workload.conftest import Model
from tests.client.world import World
from timeslice.client.workload import Workload
from timeslice.models import ChannelCommand

ASK = """
import asyncio, sys
from timeslice.torture import killpoints
spec, url, prefix, job, process, command = sys.argv[1:]
if spec:
    killpoints.arm(spec)
from timeslice.agent.channels import StreamChannel
from timeslice.locks.drivers import AsyncDriver
from timeslice.locks.keys import Keys
from timeslice.models import ChannelCommand

async def main():
    channel = StreamChannel(AsyncDriver(url), Keys(prefix), lambda job, pid, start: None)
    answer = await channel.ask(job, process, ChannelCommand.model_validate_json(command), deadline_s=20)
    print(answer.ok, flush=True)

asyncio.run(main())
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_the_entry_on_the_channel(world: World, workload: Workload, model: Model, when: str) -> None:
    """Before the XADD the workload has not heard of it, after it it has; the same command again is answered."""
    command = ChannelCommand.model_validate({"id": "1", "action": "suspend"})
    target = workload.target
    given = [world.url, world.keys.prefix, target.job, target.channel, command.model_dump_json()]
    leaf = world.keys.channel(target.job, target.channel).rpartition(":")[2]
    point = f"xadd {leaf}+expire {leaf}"
    line = [sys.executable, "-c", ASK]
    killed = subprocess.run([*line, f"agent:{point}:{when}:1", *given], check=False, timeout=30)
    assert killed.returncode == -signal.SIGKILL
    again = subprocess.run([*line, "", *given], check=True, timeout=30, capture_output=True, text=True)
    assert again.stdout == "True\n"
    assert [call[0] for call in model.calls] == ["suspend"]
