"""The backend `process` stops the very process that held: whoever looks is told, and how it goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import NODE, Cli, World, eventually
from tests.cli.test_daemons import until_said
from timeslice.locks import scripts
from timeslice.locks.scripts import Observed

BODY = """
import timeslice
with timeslice.hold("trainers", job="a", lease=3) as lease:
    print("inside", flush=True)
    lease.lost.wait()
    try:
        lease.ensure_held()
    except timeslice.LeaseLostError as error:
        print(error, flush=True)
"""


@pytest.fixture
def holder(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A job that holds `trainers`, whose agent has the backend `process` alone."""
    monkeypatch.setenv("TIMESLICE_NODE", NODE)
    until_said(cli.start("coordinator"), ": ready")
    until_said(
        cli.start("agent", "--group", "trainers", "--backend", f"process:state={tmp_path / 'marks'}", "--node", NODE,
                  "--state-dir", str(tmp_path / "state")),
        ": ready",
    )  # fmt: skip
    where = {"TIMESLICE_URL": cli.url, "TIMESLICE_PREFIX": cli.prefix}
    with subprocess.Popen(
        [sys.executable, "-c", BODY], stdout=subprocess.PIPE, text=True, env={**os.environ, **where}
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "inside\n"
        yield process
        process.kill()


def test_a_holder_that_was_frozen_is_named_with_the_way_on(cli: Cli, holder: subprocess.Popen[str]) -> None:
    """By `revoke` itself, and by all that shows jobs, until it runs again: then it learns who took the group."""
    eventually(lambda: cli.json("jobs")["jobs"][0]["processes"])
    revoked = cli("revoke", "trainers")
    assert revoked.exit_code == 0, revoked.stderr
    advice = re.search(r"kill -CONT (\d+)", revoked.stderr)
    assert advice
    assert int(advice[1]) == holder.pid
    assert f"job a is frozen by the backend process on {NODE}" in revoked.stderr
    assert cli.json("status")["groups"][0]["frozen"] == [{"job": "a", "node": NODE, "pids": [holder.pid]}]
    assert f"kill -CONT {holder.pid}" in cli("status", "trainers").stdout
    assert cli.json("jobs")["jobs"][0]["frozen"] is True
    assert f"kill -CONT {holder.pid}" in cli("doctor").stdout
    os.kill(holder.pid, signal.SIGCONT)
    assert holder.stdout is not None
    assert "revoked it" in holder.stdout.readline()
    eventually(lambda: cli.json("status")["groups"][0]["frozen"] == [])


def test_a_job_that_asks_again_is_not_called_frozen(cli: Cli, world: World) -> None:
    """Its asking process runs, so its turn brings the others back."""
    world.serve("trainers")
    keys = world.keys.group("trainers")
    seen = [Observed("a", "suspended", backend="process"), Observed("b", "suspended", backend="arena")]
    world.driver.run(scripts.report(keys, NODE, world.driver.view(keys).counter, seen))
    assert [each["job"] for each in cli.json("status")["groups"][0]["frozen"]] == ["a"]
    world.acquire("trainers", "a")
    assert cli.json("status")["groups"][0]["frozen"] == []
