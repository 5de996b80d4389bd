"""The agent's folder is its own alone, whatever the umask and whoever was there before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.rig import Rig, until
from timeslice.agent.folder import claim_folder, instance_of, private_folder
from timeslice.errors import RefusedError, UsageError


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> str:
    return f"{path.stat().st_mode & 0o777:o}"


def claim(folder: Path) -> None:
    os.close(claim_folder(folder))


@pytest.mark.usefixtures("umask")
def test_modes_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    """Folders 700, files 600, also those above that had to be made."""
    folder = tmp_path / "new" / "state"
    claim(folder)
    assert len(instance_of(folder)) == 16
    private_folder(folder / "groups" / "g")
    for made in (tmp_path / "new", folder, folder / "groups", folder / "groups" / "g"):
        assert mode(made) == "700", made
    for made in (folder / "lock", folder / "instance"):
        assert mode(made) == "600", made


def test_what_others_may_read_is_closed(tmp_path: Path) -> None:
    """A folder from an earlier version, or made by hand, is taken over and tightened."""
    inside = tmp_path / "groups" / "g"
    inside.mkdir(parents=True)
    (inside / "journal.json").write_text("{}")
    for path in (tmp_path, inside.parent, inside):
        path.chmod(0o755)
    (inside / "journal.json").chmod(0o644)
    claim(tmp_path)
    assert {mode(path) for path in (tmp_path, inside.parent, inside)} == {"700"}
    assert mode(inside / "journal.json") == "600"


@pytest.mark.parametrize("where", [".", "groups", "groups/journal.json"])
@pytest.mark.parametrize("bits", [0o020, 0o002])
def test_what_others_may_write_is_not_believed(tmp_path: Path, where: str, bits: int) -> None:
    """Whoever could write there could have raised or lowered the fence."""
    (tmp_path / "groups").mkdir(mode=0o700)
    (tmp_path / "groups" / "journal.json").touch(mode=0o600)
    path = tmp_path / where
    path.chmod(path.stat().st_mode | bits)
    with pytest.raises(UsageError, match="other users may write to it"):
        claim_folder(tmp_path)


@pytest.mark.parametrize("where", [".", "groups", "lock", "instance", "groups/journal.json", "groups/journal.new"])
def test_no_link_is_followed(tmp_path: Path, where: str) -> None:
    """A link in the agent's folder could have it write, with its rights, into any file."""
    target, folder = tmp_path / "target", tmp_path / "state"
    path = folder / where
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if where in {".", "groups"}:
        target.mkdir()
        if where == ".":
            folder.rmdir() if folder.exists() else None
            path = folder
    else:
        target.write_text("precious")
    path.symlink_to(target)
    with pytest.raises(UsageError, match="symbolic link"):
        claim_folder(folder)
    assert target.is_dir() or target.read_text() == "precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user's files")
@pytest.mark.parametrize("where", [".", "groups/journal.json"])
def test_another_users_files_are_refused(tmp_path: Path, where: str) -> None:
    """Also when nobody else may write to them now."""
    (tmp_path / "groups").mkdir(mode=0o700)
    (tmp_path / "groups" / "journal.json").touch(mode=0o600)
    os.chown(tmp_path / where, 65534, 65534)
    with pytest.raises(UsageError, match="belongs to user id 65534"):
        claim_folder(tmp_path)


def test_a_folder_that_everybody_can_replace_is_refused(tmp_path: Path) -> None:
    """A private folder inside of a public one is not private, unless only owners may move things there."""
    public = tmp_path / "public"
    public.mkdir()
    public.chmod(0o777)
    with pytest.raises(UsageError, match="everybody may write to"):
        claim_folder(public / "state")
    public.chmod(0o1777)
    claim(public / "state")


def test_a_pipe_in_a_files_place_is_refused(tmp_path: Path) -> None:
    """The agent would wait for ever to read it."""
    os.mkfifo(tmp_path / "instance", 0o600)
    with pytest.raises(UsageError, match="no plain file"):
        claim_folder(tmp_path)


def test_one_agent_a_folder(tmp_path: Path) -> None:
    """The lock names who has it."""
    lock = claim_folder(tmp_path)
    with pytest.raises(RefusedError, match=f"process {os.getpid()}"):
        claim_folder(tmp_path)
    os.close(lock)


async def test_a_running_agent_leaves_nothing_open_to_others(rig: Rig) -> None:
    """After a swap, every file and folder of it is private."""
    before = os.umask(0)
    try:
        async with rig.agent():
            await rig.job("a", 600)
            await rig.job("b", 500)
            await rig.swap("a", into="b")
            state = rig.folder / "state"
            await until((state / "groups" / rig.name / "targets.json").exists, "the processes are noted")
            found = {path: mode(path) for path in (state, *state.rglob("*"))}
    finally:
        os.umask(before)
    assert all(found[path] == ("700" if path.is_dir() else "600") for path in found if path.exists()), found
