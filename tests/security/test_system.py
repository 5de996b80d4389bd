"""The whole system under the users of ``timeslice acl``, at debug level, with a password full of odd characters."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis
from click.testing import CliRunner, Result

from tests.conftest import valkey_binary
from tests.security.conftest import printed_users, refusals
from tests.support.jobs import wait_until
from tests.support.ports import free_port
from timeslice.cli.main import main
from timeslice.embedded import EmbeddedServer
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import Keys

ODD = 'p@ss/w:rd#%+ "x'
TIMESLICE = str(Path(sys.executable).with_name("timeslice"))
READS = (
    *(["status"], ["status", "g"], ["queue", "g"], ["events"], ["events", "g", "--json"], ["jobs"], ["nodes"]),
    *(["groups"], ["doctor"], ["status", "--json"]),
)
ORDERS = (
    *(["pause", "g"], ["resume", "g"], ["group", "set", "g", "--order", "3"]),
    *(["group", "create", "h", "--lock-only"], ["group", "delete", "h"]),
)
# Holds once, and lives on with its state where it is.
JOB = """
import sys, timeslice
with timeslice.hold("g", timeout=60):
    print("inside", flush=True)
sys.stdin.read()
"""


class System:
    """A server, a coordinator and an agent, each as a user of its own; everything that they say is kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = EmbeddedServer(binary=valkey_binary(), port=free_port()).start()
        self.admin = redis.Redis.from_url(self.server.url)
        for line in printed_users("--group", "g", "--group", "h", "--node", "n1"):
            words = [f">{ODD}" if word == ">s3cret" else word for word in shlex.split(line)]
            self.admin.execute_command(*words)  # type: ignore[no-untyped-call]
        self.processes: list[subprocess.Popen[str]] = []
        self.said = ""

    def environment(self, role: str) -> dict[str, str]:
        user = f"timeslice-{role}-{'n1' if role == 'agent' else 'g+h'}"
        url = f"redis://{quote(user)}:{quote(ODD, safe='')}@127.0.0.1:{self.server.port}"
        return {**os.environ, "TIMESLICE_URL": url, "TIMESLICE_NODE": "n1"}

    def daemon(self, role: str, *arguments: str) -> None:
        log = (self.folder / f"{role}.log").open("w")
        command = [TIMESLICE, *arguments, "--log-level", "debug"]
        self.processes.append(
            subprocess.Popen(
                command, env=self.environment(role), stdout=log, stderr=log, text=True, start_new_session=True
            )
        )
        log.close()
        wait_until(lambda: ": ready" in (self.folder / f"{role}.log").read_text(), f"{role} is ready")

    def run(self, role: str, *arguments: str) -> Result:
        """A command as the user of a role."""
        done = CliRunner().invoke(main, arguments, env=self.environment(role))
        self.said += done.output
        return done

    def job(self, name: str) -> subprocess.Popen[str]:
        """A job's process, once it was inside."""
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        environment = self.environment("client") | {"TIMESLICE_JOB": name}
        process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-c", JOB], env=environment, text=True, **pipes
        )
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "inside\n"
        return process

    def close(self) -> None:
        for process in reversed(self.processes):
            process.send_signal(signal.SIGKILL)
            process.wait()
            for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
                pipe.close()
        self.admin.close()
        self.server.kill()


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    made = System(tmp_path)
    yield made
    made.close()


def test_a_hold_with_a_swap_runs_with_the_least_rights_and_no_password_is_ever_said(system: System) -> None:
    """Two jobs take turns through agent and coordinator; viewers look and operators order; nobody is refused anything,
    and the password stands in no log, no output and no command line."""
    system.daemon("coordinator", "coordinator")
    system.daemon("agent", "agent", "--group", "g", "--node", "n1", "--backend", "process",
                  "--state-dir", str(system.folder / "state"))  # fmt: skip
    first = system.job("a")
    system.job("b")  # job a lives and was resident: this is a swap
    view = SyncDriver(system.server.url).view(Keys().group("g"))
    assert view.jobs["a"].residency == "suspended"
    assert "T" in Path(f"/proc/{first.pid}/stat").read_text().rsplit(")", 1)[1]
    for command in READS:
        done = system.run("viewer", *command)
        assert done.exit_code == 0, (command, done.output)
    for command in ORDERS:
        done = system.run("operator", *command)
        assert done.exit_code == 0, (command, done.output)
    refused = system.run("viewer", "pause", "g")
    assert refused.exit_code == 1
    assert "refuses" in refused.stderr
    for process in system.processes[:2]:
        command_line = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert quote(ODD, safe="").encode() not in command_line
    logs = "".join(path.read_text() for path in system.folder.glob("*.log"))
    for secret in (ODD, quote(ODD, safe=""), quote(ODD), "w:rd", "w%3Ard"):
        assert secret not in logs + system.said
    assert [each for each in refusals(system.admin) if "viewer" not in each] == []  # whose pause was refused


def test_a_server_that_refuses_says_so_without_the_password(system: System) -> None:
    """A wrong password, a user without rights: one clear line, and no secret in it."""
    system.admin.execute_command("ACL", "SETUSER", "timeslice-agent-n1", "resetpass", ">another")  # type: ignore[no-untyped-call]
    command = [TIMESLICE, "agent", "--group", "g", "--state-dir", str(system.folder / "state"), "--log-level", "debug"]
    done = subprocess.run(
        command, env=system.environment("agent"), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "refuses these credentials" in done.stderr
    for secret in ("w:rd", "w%3Ard", "Traceback"):
        assert secret not in done.stderr
