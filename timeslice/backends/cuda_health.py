"""What would keep the ``cuda`` backend from working on this node: one sentence each, with the remedy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from timeslice.backends.cuda_tool import CudaTool
from timeslice.backends.nvml import Nvml, ask
from timeslice.backends.toolrun import ToolFailedError, ToolMissingError
from timeslice.errors import BackendError

OLDEST = 550  # driver


async def complaints(tool: CudaTool, nvml: Nvml, uuids: Sequence[str], proc: Path = Path("/proc")) -> list[str]:
    """All that is wrong, not the first thing only."""
    found = [await _tool(tool)]
    if os.geteuid() != 0:
        found.append("not root: the driver lets only root checkpoint other processes; run the agent as root")
    try:
        (proc / "1" / "stat").read_bytes()
    except OSError:
        found.append(
            "/proc hides other users' processes (hidepid); run the agent as root in the host's PID namespace, or mount "
            "/proc without hidepid"
        )
    try:
        found += await ask(lambda: _driver(nvml, uuids))
    except BackendError as error:
        found.append(str(error))
    return [line for line in found if line]


async def _tool(tool: CudaTool) -> str:
    name = tool.command[0]
    try:
        await tool.ask()
    except ToolMissingError:
        return (
            f"{name} was not found; get it from https://github.com/NVIDIA/cuda-checkpoint (bin/x86_64_Linux), put it "
            "into PATH or name it with --backend cuda:tool=/path, or use --backend cuda:driver=api"
        )
    except ToolFailedError as error:
        return f"{' '.join(tool.command)} -h failed: {error}"
    return ""


def _driver(nvml: Nvml, uuids: Sequence[str]) -> list[str]:
    found = []
    version = nvml.driver_version()
    if int(version.partition(".")[0]) < OLDEST:
        found.append(f"driver {version} is too old to checkpoint anything; it takes {OLDEST} or newer, better 580")
    asleep = [uuid for uuid in uuids or [each.uuid for each in nvml.devices()] if not nvml.persistence(uuid)]
    if asleep:
        found.append(
            f"persistence mode is off on {', '.join(asleep)}, so that a restore may find no driver; run "
            "nvidia-smi -pm 1 (or nvidia-persistenced)"
        )
    return found
