"""Runs an agent with the backend of `knobs`, as a process of its own that a test may kill.

Called with the options of the agent as JSON; prints ``ready`` when it serves. ``free_s`` among them is how long it
waits for memory to become free.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

from tests.agent.knobs import make
from timeslice.agent import moving
from timeslice.agent.service import AgentOptions, run_agent


async def main() -> None:
    given = json.loads(sys.argv[1])
    given["state_dir"] = Path(given["state_dir"])
    if "free_s" in given:
        vars(moving)["FREE_S"] = given.pop("free_s")
    given["groups"] = tuple(given["groups"])
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await run_agent(AgentOptions(**given), stop=stop, ready=lambda: print("ready", flush=True), make_backend=make)


if __name__ == "__main__":
    asyncio.run(main())
