"""A third party's backend, from its folder in the examples to a swap: built, installed, found, checked, used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.agent.rig import Rig
from timeslice.backends.base import Context
from timeslice.backends.registry import get_backend, names

PACKAGE = Path(__file__).parent.parent / "examples" / "backend_package"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the distribution is installed in, as by its user, without a network."""
    source, target = tmp_path_factory.mktemp("source") / "package", tmp_path_factory.mktemp("site")
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    quiet = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([sys.executable, "-m", "pip", "install", *quiet, "--target", target, source], check=True)
    return target


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    fast.mkdir()
    slow.mkdir()
    return fast, slow


@pytest.fixture
def spec(folders: tuple[Path, Path]) -> str:
    return f"tmpcopy:fast={folders[0]},slow={folders[1]}"


@pytest.fixture
async def rig(redis_url: str, prefix: str, tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(redis_url, prefix, tmp_path)
    yield made
    await made.close()


def test_it_is_found_by_its_entry_point(
    site: Path, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed, it is there; nothing of timeslice names it."""
    assert "tmpcopy" not in names()
    monkeypatch.syspath_prepend(str(site))
    assert "tmpcopy" in names()
    options = {"fast": str(folders[0]), "slow": str(folders[1])}
    assert get_backend("tmpcopy", Context(group="g", node="n1", options=options)).name == "tmpcopy"


def test_its_own_tests_pass_as_it_is_installed(site: Path) -> None:
    """With the conformance checks that timeslice offers."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(PACKAGE / "tests")]
    done = subprocess.run(command, cwd=PACKAGE, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_agent_s_check_finds_it(site: Path, spec: str) -> None:
    """`timeslice agent --check` lists it, and says that it works here."""
    command = [sys.executable, "-m", "timeslice", "agent", "--check", "--group", "g", "--backend", spec, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    (found,) = [each for each in json.loads(done.stdout)["backends"] if each["backend"] == "tmpcopy"]
    assert (found["ok"], found["asked"], found["problems"]) == (True, True, [])


async def test_an_agent_moves_jobs_with_it(
    site: Path, spec: str, folders: tuple[Path, Path], rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs take turns: the file of the one that waits is in the slow folder, and comes back as it was."""
    monkeypatch.syspath_prepend(str(site))
    from timeslice_tmpcopy import state_file

    async with rig.agent(get_backend, backends={rig.name: [spec]}):
        files = {}
        for name in "ab":
            process = await rig.job(name)
            target = rig.target(name, process.pid)
            files[name] = [state_file(folder, target.pid, target.start) for folder in folders]
        content = os.urandom(4096)
        files["a"][0].write_bytes(content)
        await rig.swap("a", into="b")
        assert not files["a"][0].exists()
        assert files["a"][1].read_bytes() == content
        files["b"][0].write_bytes(b"b")
        await rig.yield_("b")
        await rig.acquire("a")
        swap = await rig.plan("b", into="a")
        assert (await rig.order(rig.command(swap, "prepare", "b", into="a")))["step"] == "prepared"
        await rig.step("prepare", "commit")
        assert (await rig.order(rig.command(swap, "commit", "b", into="a")))["step"] == "done"
        assert files["a"][0].read_bytes() == content
        assert files["b"][1].read_bytes() == b"b"
        assert not files["a"][0].with_suffix(".locked").exists()
        assert files["b"][0].with_suffix(".locked").exists()
