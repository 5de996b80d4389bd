"""What a process registered it goes on to show: an agent that is started later believes nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import timeslice
from tests.client.world import World
from tests.support.jobs import wait_until
from timeslice.client import server, workload


def _nothing(*_: Any) -> None:
    pass


def _shown(job: str) -> list[int]:
    """Descriptors of this process that show the job."""
    links = {fd.name: str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}
    return [int(number) for number, link in links.items() if link == f"/memfd:timeslice:g/{job} (deleted)"]


MAKE: dict[str, Callable[[str], Any]] = {
    "workload": lambda job: timeslice.register_workload("g", on_suspend=_nothing, on_restore=_nothing, job=job),
    "server": lambda job: timeslice.register_server("g", "http://127.0.0.1:1", dialect="vllm", job=job),
}


@pytest.mark.parametrize("kind", MAKE)
def test_a_program_that_closes_its_files_is_shown_again(
    kind: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It closes all that it has open, as daemons do, and takes no hold of its own that would show it."""
    world.serve("g")
    for module in (workload, server):
        monkeypatch.setattr(module, "REFRESH_S", 0.2)
    job = f"closing-{kind}"
    made = MAKE[kind](job)
    try:
        (first,) = _shown(job)
        os.close(first)
        wait_until(lambda: len(_shown(job)) == 1, "the process shows it again")
    finally:
        made.close()
