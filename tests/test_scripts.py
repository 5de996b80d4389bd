"""The shell scripts of the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def up_to_date(tmp_path: Path) -> Path:
    """An environment of a checkout in this folder, in which nothing is left to do."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "_venv", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    venv = tmp_path / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    project = (ROOT / "pyproject.toml").read_bytes()
    wanted = subprocess.run(["cksum"], input=project, capture_output=True, check=True).stdout.decode()
    (venv / ".made").write_text(f"{tmp_path} \n")  # as the script itself notes it, without TIMESLICE_PYTHON
    (venv / ".installed-dev").write_text(wanted)
    return venv


def run_script(folder: Path, code: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A script that sources `_venv` and does this."""
    script = folder / "scripts" / "some"
    script.write_text(f'set -eu\n. "$(dirname "$0")/_venv"\n{code}\n')
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", **more}
    return subprocess.run(["sh", script], capture_output=True, text=True, check=True, env=environment)


def test_an_environment_that_is_up_to_date_is_left_alone(tmp_path: Path) -> None:
    """The second run of a script makes and installs nothing, and keeps what is in the environment."""
    venv = up_to_date(tmp_path)
    installed = (venv / ".installed-dev").read_text()
    run = run_script(tmp_path, 'echo "$VENV"')
    assert (run.stdout.strip(), run.stderr) == (str(venv), "")
    assert (venv / ".installed-dev").read_text() == installed


def test_processes_that_a_script_starts_keep_their_bytecode(tmp_path: Path) -> None:
    """Where a machine switches it off, each of the many hundred processes would compile all that it imports."""
    up_to_date(tmp_path)
    code = '"$VENV/bin/python" -c "import sys; print(sys.dont_write_bytecode)"'
    assert run_script(tmp_path, code, PYTHONDONTWRITEBYTECODE="1").stdout == "False\n"
