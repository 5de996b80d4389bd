"""The shell scripts of the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_an_environment_that_is_up_to_date_is_left_alone(tmp_path: Path) -> None:
    """The second run of a script makes and installs nothing, and keeps what is in the environment."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "_venv", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    venv = tmp_path / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    project = (ROOT / "pyproject.toml").read_bytes()
    wanted = subprocess.run(["cksum"], input=project, capture_output=True, check=True).stdout.decode()
    (venv / ".made").write_text(f"{tmp_path} \n")  # as the script itself notes it, without TIMESLICE_PYTHON
    (venv / ".installed-dev").write_text(wanted)
    script = tmp_path / "scripts" / "some"
    script.write_text('set -eu\n. "$(dirname "$0")/_venv"\necho "$VENV"\n')
    run = subprocess.run(
        ["sh", script], capture_output=True, text=True, check=True, env={"PATH": "/usr/local/bin:/usr/bin:/bin"}
    )
    assert (run.stdout.strip(), run.stderr) == (str(venv), "")
    assert (venv / ".installed-dev").read_text() == wanted
