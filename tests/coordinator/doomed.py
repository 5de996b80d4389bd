"""A coordinator that kills or stops itself at a chosen point of a swap: ``doomed.py URL PREFIX NAME POINT [SIGNAL]``.

POINT is ``before VERB`` or ``after VERB``. The verb is a script's name, or ``orders`` with the step that is ordered.
SIGNAL is SIGKILL, or SIGSTOP: then, once it was continued, it goes on from there and never stops again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

from timeslice.coordinator.group import GroupActor
from timeslice.coordinator.service import CoordinatorOptions, run_coordinator
from timeslice.coordinator.swap import Send
from timeslice.locks.drivers import AsyncDriver
from timeslice.locks.scripts import Call
from timeslice.locks.view import GroupView

LEASE_MS = 1200  # one that is only held up by a busy machine keeps its groups


async def main(url: str, prefix: str, name: str, point: str, number: str = "SIGKILL") -> None:
    def reached(here: str) -> None:
        nonlocal point
        if here == point:
            point = ""
            os.kill(os.getpid(), signal.Signals[number])

    run, send = AsyncDriver.run, GroupActor._send

    async def doomed_run(self: AsyncDriver, call: Call[Any], **options: Any) -> Any:
        verb = call.script.name
        if verb == "step":
            verb += f" {call.args[4]}"
        reached(f"before {verb}")
        reply = await run(self, call, **options)
        reached(f"after {verb}")
        return reply

    async def doomed_send(self: GroupActor, action: Send, view: GroupView) -> None:
        reached(f"before orders {action.step}")
        await send(self, action, view)
        reached(f"after orders {action.step}")

    AsyncDriver.run = doomed_run  # type: ignore[method-assign]
    GroupActor._send = doomed_send  # type: ignore[method-assign]
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    options = CoordinatorOptions(url=url, prefix=prefix, name=name, lease_ms=LEASE_MS)
    await run_coordinator(options, stop=stop)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
