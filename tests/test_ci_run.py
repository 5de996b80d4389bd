"""`.ci/run` runs what failed once more, alone: on small projects of a test's own, with real runs of pytest."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.test_scripts import ROOT

HEADER = """
from pathlib import Path
import pytest

def fails_once(name):
    path = Path(__file__).with_suffix(f".{name}")
    was = path.exists()
    path.touch()
    assert was
"""
# Plugins that nobody needs here take most of pytest's start.
SETTINGS = "[pytest]\naddopts = -p no:cacheprovider -p xdist\nmarkers = slow\n"


class Project:
    """A checkout with a few tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failed = folder / "failed"
        self.failed.touch()
        (folder / "pytest.ini").write_text(SETTINGS)
        (folder / "conftest.py").write_text('pytest_plugins = ["tests.support.failures"]\n')
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

    def write(self, name: str, code: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(HEADER + dedent(code))

    def tier(self, *arguments: str, note: bool = True) -> int:
        """Exit status of pytest, run as by a tier of `.ci/run`."""
        more = {"FAILED_TESTS": str(self.failed)} if note else {}
        return self.run(sys.executable, "-m", "pytest", "-q", *arguments, **more).returncode

    def note(self, *tests: str) -> None:
        """As if they had failed in a tier."""
        self.failed.write_text("".join(f"{json.dumps([sys.executable, test])}\n" for test in tests))

    def rerun(self) -> tuple[int, list[str]]:
        """Exit status and what was printed."""
        run = self.run(sys.executable, str(ROOT / "scripts" / "rerun.py"), str(self.failed))
        return run.returncode, run.stdout.splitlines()

    def run(self, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
        environment = {**self.environment, **more}
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def flaky(lines: list[str]) -> list[str]:
    return [line.split()[1] for line in lines if line.startswith("flaky: ")]


def test_where_nothing_failed_nothing_is_run_or_said_again(project: Project) -> None:
    """A clean run ends with its last tier's closing line."""
    project.write("test_a.py", "def test_good(): pass")
    assert project.tier() == 0
    assert project.rerun() == (0, [])


def test_what_passes_alone_is_listed_as_flaky_and_let_through(project: Project) -> None:
    """Tests of several tiers, by name, parameter and group of xdist; pytest's closing line is the last."""
    code = """
    @pytest.mark.xdist_group("one")
    @pytest.mark.parametrize("url", ["redis://user@host"])
    def test_grouped(url): fails_once("grouped")
    def test_good(): pass
    """
    project.write("test_a.py", code)
    project.write("test_b.py", "def test_plain(): fails_once('plain')")
    assert project.tier("-n", "1", "--dist", "loadgroup", "test_a.py") == 0
    assert project.tier("test_b.py") == 0
    status, lines = project.rerun()
    assert (status, flaky(lines)) == (0, ["test_a.py::test_grouped[redis://user@host]", "test_b.py::test_plain"])
    assert lines[-1].startswith("2 passed in ")


def test_what_fails_again_fails_the_run(project: Project) -> None:
    """It is no flaky test, and its failure is shown; the closing line tells of it."""
    project.write("test_a.py", "def test_bad(): assert 1 == 2, 'the reason'\ndef test_flaky(): pass")
    project.note("test_a.py::test_bad", "test_a.py::test_flaky")
    status, lines = project.rerun()
    assert (status, flaky(lines)) == (1, ["test_a.py::test_flaky"])
    assert any("the reason" in line for line in lines)
    assert lines[-1].startswith("1 failed, 1 passed in ")


def test_three_flaky_tests_fail_the_run(project: Project) -> None:
    """So many are no accident."""
    project.write("test_a.py", "@pytest.mark.parametrize('n', range(3))\ndef test_flaky(n): pass")
    project.note(*(f"test_a.py::test_flaky[{n}]" for n in range(3)))
    status, lines = project.rerun()
    assert (status, len(flaky(lines))) == (1, 3)
    assert lines[-1].startswith("3 passed in ")


def test_where_very_many_failed_some_are_run_again_and_the_run_fails(project: Project) -> None:
    """A machine that was out for a while does not double the time of the run."""
    project.write("test_a.py", "def test_bad(): assert 0")
    project.note(*["test_a.py::test_bad"] * 10, "test_b.py::test_never_run")
    status, lines = project.rerun()
    assert (status, lines[0]) == (1, "Once more, alone: 10 of the 11 tests that failed.")
    assert lines[-1].startswith("1 failed in ")


def test_a_test_that_can_not_be_run_again_fails_the_run(project: Project) -> None:
    """Only a pass is a pass, also of the tests beside it."""
    project.write("test_a.py", "def test_good(): pass")
    project.note("test_a.py::test_good", "test_a.py::test_gone")
    status, lines = project.rerun()
    assert (status, flaky(lines)) == (1, [])


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        ("import nothing_of_this_name", ()),
        ("import nothing_of_this_name", ("-n", "1")),
        ("import os\ndef test_crashes(): os.abort()", ("-n", "1")),
        ("def helper(): pass", ("-n", "1")),
    ],
    ids=["collection", "collection in a worker", "crash", "no tests"],
)
def test_what_is_no_failed_test_fails_its_tier(project: Project, code: str, arguments: tuple[str, ...]) -> None:
    """Nothing is noted, although a test failed beside it."""
    project.write("test_a.py", code)
    if "helper" not in code:
        project.write("test_b.py", "def test_bad(): assert False")
    assert project.tier(*arguments) != 0
    assert project.failed.read_text() == ""


def test_by_hand_a_failure_is_a_failure(project: Project) -> None:
    """Without the order to note it, as in a pytest that is started by a test of a tier."""
    code = """
    import subprocess, sys
    def test_outer():
        run = subprocess.run([sys.executable, "-m", "pytest", "-q", "inner.py"], check=False)
        assert run.returncode == 1
    """
    project.write("test_a.py", code)
    project.write("inner.py", "def test_bad(): assert False")
    assert project.tier("test_a.py") == 0
    assert project.failed.read_text() == ""
    assert project.tier("inner.py", note=False) == 1


@pytest.mark.slow
def test_the_whole_run_goes_on_over_failed_tests(project: Project) -> None:
    """Each tier is run, and its failures once more in its own environment; here each has one, which is too many."""
    for path in (".ci/run", "scripts/test", "scripts/_pytest", "scripts/rerun.py"):
        (project.folder / path).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, project.folder / path)
    workers = project.folder / "scripts" / "_pytest"
    workers.write_text(workers.read_text().replace("-n 4", "-n 1"))
    programs = project.folder / "bin"
    programs.mkdir()
    for name in ("redis-server", "openssl", "faketime", "cc", "spin", "python3"):  # nothing is to be installed
        (programs / name).symlink_to("/bin/true")
    stand_ins = {
        "scripts/_venv": f'ROOT=$PWD\nVENV={sys.prefix}\nfind_python() {{ echo "$1"; }}\n',
        "scripts/check": "#!/bin/sh\necho checked\n",
        "scripts/frameworks": f"#!/bin/sh\nexec {sys.executable} -m pytest -q tests/frameworks\n",
    }
    for path, text in stand_ins.items():
        (project.folder / path).write_text(text)
        (project.folder / path).chmod(0o755)
    for name in ("locks/test_drivers.py", "client/test_interrupts.py"):
        project.write(f"tests/{name}", "def test_good(): pass")
    project.write("tests/client/test_hold.py", "def test_client(): fails_once('client')")
    project.write("tests/frameworks/test_f.py", "@pytest.mark.slow\ndef test_framework(): fails_once('framework')")
    project.write("tests/test_s.py", "@pytest.mark.slow\ndef test_slow(): fails_once('slow')")
    for git in (["init", "-q"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a", "--allow-empty"]):
        subprocess.run(["git", *git], cwd=project.folder, check=True)
    run = project.run("bash", ".ci/run", PATH=f"{programs}:/usr/bin:/bin", VENV=sys.prefix)
    lines = run.stdout.splitlines()
    expected = ["client/test_hold.py::test_client", "frameworks/test_f.py::test_framework", "test_s.py::test_slow"]
    assert (run.returncode, sorted(flaky(lines))) == (1, [f"tests/{test}" for test in expected]), (
        run.stdout + run.stderr
    )
    assert lines[-1].startswith("3 passed in ")
    assert [name for name in lines if name == "checked"] == ["checked"]
