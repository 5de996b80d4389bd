"""Runs an agent with the backends that are installed, or a coordinator, as a process that a test may kill.

Called with ``agent`` or ``coordinator`` and its options as JSON; prints ``ready`` when it serves.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

from timeslice import logs
from timeslice.agent.service import AgentOptions, run_agent
from timeslice.coordinator.service import CoordinatorOptions, run_coordinator


async def main(role: str, text: str) -> None:
    given = json.loads(text)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

    def ready() -> None:
        print("ready", flush=True)

    if role == "agent":
        given["state_dir"] = Path(given["state_dir"])
        await run_agent(AgentOptions(**given), stop=stop, ready=ready)
    else:
        await run_coordinator(CoordinatorOptions(**given), stop=stop, ready=ready)


if __name__ == "__main__":
    logs.set_up(as_json=False, level="info")
    asyncio.run(main(*sys.argv[1:]))
