"""`timeslice agent --check`: which backends would work on this machine, without a server and without a group."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.cli.conftest import TIMESLICE
from tests.gpu.fixtures import gpu_node
from tests.gpu.node import GIB, Node, uuid
from timeslice.backends.registry import names
from timeslice.cli.main import main

__all__ = ["gpu_node"]

OTHERS = """
from timeslice.backends.noop import NoopBackend

class Sick(NoopBackend):
    name = "sick"

    async def health(self):
        return ["the licence is over; buy another", "and it is cold here"]

class Broken(NoopBackend):
    name = "broken"

    def __init__(self, context):
        raise KeyError("nothing that we know")
"""


NOBODY = {"TIMESLICE_URL": "redis://127.0.0.1:1"}  # serves Redis there


def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command as a user runs it, in an environment that only a process of its own can have."""
    surroundings = {**os.environ, **NOBODY, **environment}
    return subprocess.run(
        [TIMESLICE, "agent", "--check", *args],
        env=surroundings,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def check(*args: str) -> Result:
    """The same in this process."""
    return CliRunner(env=NOBODY).invoke(main, ["agent", "--check", *args])


def told(*args: str, environment: Mapping[str, str] | None = None, code: int = 0) -> dict[str, Any]:
    if environment:
        done = run(*args, "--json", **environment)
        status, out, err = done.returncode, done.stdout, done.stderr
    else:
        result = check(*args, "--json")
        status, out, err = result.exit_code, result.stdout, result.stderr
    assert status == code, err
    document: dict[str, Any] = json.loads(out)
    return document


def backends(document: dict[str, Any]) -> dict[str, Any]:
    return {each["backend"]: each for each in document["backends"]}


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends that another distribution brings."""
    folder = tmp_path / "others"
    (folder / "others-1.0.dist-info").mkdir(parents=True)
    (folder / "others.py").write_text(OTHERS)
    (folder / "others-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    entries = "[timeslice.backends]\nsick = others:Sick\nbroken = others:Broken\nabsent = nowhere:At\n"
    (folder / "others-1.0.dist-info" / "entry_points.txt").write_text(entries)
    monkeypatch.syspath_prepend(folder)


def test_every_installed_backend_has_a_line(tmp_path: Path) -> None:
    """All that are installed are named, one line each; those that need nothing are ok; nothing is left behind."""
    done = run(TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    heading, *lines = done.stdout.splitlines()
    assert heading.split()[:3] == ["BACKEND", "WORKS", "HERE"]
    assert [line.split()[0] for line in lines] == names()
    rows = {line.split()[0]: line for line in lines}
    assert rows["channel"].split()[1] == "ok"
    assert rows["arena"].split()[1] == "ok"
    assert "on an emulated device" in rows["arena"]
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    assert list(tmp_path.iterdir()) == []


def test_backends_of_others_are_looked_at_too(others: None) -> None:
    """One that is sick says what it lacks, one that raises is no crash of ours, one that can't be loaded is named."""
    found = backends(told())
    assert found["sick"]["problems"] == ["the licence is over; buy another", "and it is cold here"]
    assert "failed in an unexpected way: KeyError" in found["broken"]["problems"][0]
    assert "can't be loaded" in found["absent"]["problems"][0]
    assert [found[name]["ok"] for name in ("sick", "broken", "absent", "noop")] == [False, False, False, True]
    line = next(line for line in check().stdout.splitlines() if line.startswith("sick"))
    assert line.split()[1] == "no"
    assert "the licence is over; buy another; and it is cold here" in line


def test_the_exit_code_is_about_the_backends_that_are_named(others: None) -> None:
    """1 as soon as one that --backend names can't work, with any options of a real agent; else 0."""
    assert told("--backend", "noop")["schema"] == 1
    told("--backend", "trainers=sick", "--group", "trainers", code=1)
    missing = backends(told("--backend", "nothere", code=1))["nothere"]
    assert missing["asked"] is True
    assert "no backend 'nothere'; installed are:" in missing["problems"][0]


def test_what_is_no_more_than_a_stage_does_not_work_alone() -> None:
    """An agent refuses it as a backend of its own, so the check does when it is asked; else its line says what for."""
    line = next(line for line in check().stdout.splitlines() if line.startswith("quiesce"))
    assert line.split(maxsplit=2) == ["quiesce", "ok", "as a stage of composite"]
    alone = backends(told("--backend", "quiesce", code=1))["quiesce"]
    assert alone["stage"] is True
    assert "composite:stages=quiesce+cuda" in alone["problems"][0]


def test_the_real_devices_are_told(gpu_node: Node) -> None:
    """What NVML shows, or why it shows nothing; only those asked for by --device. One that is not there is said, and
    an agent would not start with it: status 1."""
    gpu_node.add_device(uuid(1), GIB, model="Other-GPU")
    document = told(environment=gpu_node.environment)
    assert [(each["uuid"], each["name"]) for each in document["devices"]] == [
        (uuid(0), "Stub-GPU"),
        (uuid(1), "Other-GPU"),
    ]
    assert (document["driver"], document["devices_problem"]) == ("570.86.10", "")
    chosen = told("--device", "trainers=1", environment=gpu_node.environment)
    assert [each["uuid"] for each in chosen["devices"]] == [uuid(1)]
    wrong = run("--device", "trainers=5", **gpu_node.environment)
    assert wrong.returncode == 1
    assert f"no device '5' on this node; there are: {uuid(0)} (GPU 0, Stub-GPU, 1024 MiB); {uuid(1)}" in wrong.stderr
    gpu_node.set("nvml", "not_loaded")
    assert "the NVIDIA driver is not loaded" in run(**gpu_node.environment).stderr
    assert run("--device", "trainers=0", **gpu_node.environment).returncode == 1


def test_every_field_is_documented(gpu_node: Node) -> None:
    """docs/reference/json.md names what the document has."""
    document = told(environment=gpu_node.environment)
    page = (Path(__file__).parents[2] / "docs" / "reference" / "json.md").read_text()
    section = page.partition("## `agent --check`")[2].partition("\n## ")[0]
    words = set(re.findall(r"\w+", section))
    fields = {*document, *document["devices"][0], *document["backends"][0]} - {"schema"}
    assert sorted(fields - words) == []


def test_json_is_only_for_the_check() -> None:
    """An agent that serves prints no result."""
    done = CliRunner().invoke(main, ["agent", "--group", "trainers", "--json"])
    assert done.exit_code == 2
    assert "--json goes with --check" in done.stderr
