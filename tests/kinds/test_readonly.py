"""The disk of the state folder becomes read-only, as the kernel makes it after an error."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kinds.world import World
from timeslice.errors import UsageError

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")]


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nobody can write below the folder, not even root."""
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


async def test_nothing_is_moved_without_a_note_of_it(world: World) -> None:
    """Orders fail before anything is touched, and say why; the job that is in may go on taking its turns; once the disk
    can be written again, everything goes on by itself."""
    await world.start("n1")
    await world.load("a")
    await world.job("b")
    rig = world.rig("n1")
    with read_only(rig.folder / "state" / "groups"):
        turn = world.ask("b")
        view = await world.until(lambda view: any(entry.deferred for entry in view.queue), "the waiter is put off")
        assert "can't be written (Read-only file system)" in view.queue[0].deferred
        assert (rig.fake.calls(), rig.fake.state("a")) == ([], "resident")
        assert (await world.enter("a")).how == "no-op"
    await world.leave("a")
    await world.inside(turn)
    assert rig.fake.state("a") == "suspended"


async def test_an_agent_does_not_start_on_it(world: World, tmp_path: Path) -> None:
    """It could not keep what must survive it; the error names the folder and the option."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with (
        read_only(disk),
        pytest.raises(UsageError, match=r"state \(Read-only file system\); give this agent another --state-dir"),
    ):
        await world.agent("n1", state_dir=str(disk / "state"))
