"""Descriptors of an agent, and processes that are hidden from it: what it can't look into does not end it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.agent.rig import Rig, until
from tests.agent.workers import watched


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208


async def _complaints(rig: Rig) -> str:
    stored: Any = await rig.driver.client.hget(rig.keys.node_state(rig.node), "complaints")
    return str(json.loads(stored or b"{}").get(rig.name, []))


async def test_an_agent_without_a_descriptor_left_serves_on(rig: Rig) -> None:
    """More processes register than it may have descriptors for: it says of the rest what to do, loses none of those
    that it has, goes on, and takes the others as soon as it may open more."""
    agent = rig.spawn_agent(ttl_s=1.5)
    known = await rig.job("a", 600)
    await until(lambda: known.pid in watched(rig), "the first one is watched")
    _, hard = resource.prlimit(agent.pid, resource.RLIMIT_NOFILE)
    before = _descriptors(agent.pid)
    resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (before + 3, hard))
    more = [await rig.job(job) for job in "bcdbcd"]

    began = time.monotonic()

    async def told() -> bool:
        if time.monotonic() > began + 5:  # a new connection has the last one, and what to do can't even be told
            resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (before + 5, hard))
        return agent.poll() is not None or "let the agent open more files (ulimit -n)" in await _complaints(rig)

    await until(told, "what to do is told")
    assert agent.poll() is None, "the agent has ended"
    assert known.pid in watched(rig)
    resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (hard, hard))
    await until(lambda: {process.pid for process in more} <= watched(rig).keys(), "all are watched")
    assert _descriptors(agent.pid) <= before + len(more) + 6, "some were left open"


def test_an_agent_may_open_as_many_files_as_its_user() -> None:
    """Many systems give 1024 to who does not ask, and each process that is watched takes one."""
    code = "import resource as r; from timeslice.agent import service as s; s._allow_files(); print(*r.getrlimit(7))"
    line = ["prlimit", "--nofile=256:4096", sys.executable, "-c", code]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["4096", "4096"]


HIDDEN = """
import ctypes, os
from timeslice.agent import procfs
from timeslice.agent.proof import examine

os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)  # only now: that user need not be able to read this Python
assert ctypes.CDLL(None).prctl(4, 1, 0, 0, 0) == 0  # PR_SET_DUMPABLE: as one that this user started
assert procfs.look_at(1) is None
assert os.getpid() in procfs.ancestors()
assert not procfs.elsewhere().whole
print(examine(os.getpid(), procfs.look_at(os.getpid()).start).uid)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("hidepid", ["1", "2"])
def test_processes_that_are_hidden_are_nobodys_trouble(hidepid: str) -> None:
    """Where /proc shows each user its own processes only, an agent that is one of them serves its user's jobs."""
    script = f'mount -t proc -o hidepid={hidepid} proc /proc && exec "$@"'
    line = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", HIDDEN]
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=root)
    assert done.stdout == "65534\n", done.stderr
