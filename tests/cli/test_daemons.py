"""`timeslice coordinator` and `timeslice agent` as processes of their own."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.cli.conftest import Cli, eventually
from tests.conftest import ServerFactory
from tests.support.ports import free_port
from timeslice.cli.daemons import default_state_dir, parse_backend

Agent = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def agent(cli: Cli, tmp_path: Path, clean_environment: Path) -> Iterator[Agent]:
    """Start an agent with an emulated device for `trainers`."""

    def start(*args: str, node: str = "node-1", **options: Any) -> subprocess.Popen[str]:
        state = str(tmp_path / f"state-{node}")
        more = ("--emulate", "trainers=8M", "--node", node, "--state-dir", state, *args)
        return cli.start("agent", *more, **options)

    yield start
    cli.close()
    for line in Path("/proc/mounts").read_text().splitlines():
        if str(clean_environment) in line:
            subprocess.run(["umount", "-l", line.split()[1]], check=False)


def until_said(process: subprocess.Popen[str], what: str) -> list[str]:
    """The lines of its log up to the one that says it."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if what in line:
            return seen
    pytest.fail(f"it ended without saying {what!r}:\n" + "".join(seen))


def test_two_daemons_make_a_served_group(cli: Cli, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a coordinator and an agent two jobs take turns; both daemons stop cleanly on SIGTERM."""
    coordinator, node = cli.start("coordinator", "--name", "c1"), agent()
    until_said(coordinator, "coordinator c1: ready")
    until_said(node, "agent of node node-1: ready")
    monkeypatch.setenv("TIMESLICE_NODE", "node-1")
    for job in ("a", "b"):
        done = cli.start("hold", "trainers", "--job", job, "--timeout", "30", "--", "true")
        assert done.wait(60) == 0
    assert eventually(lambda: cli.json("status", "trainers")["groups"][0]["coordinator"]) == "c1"
    for process in (coordinator, node):
        process.send_signal(signal.SIGTERM)
        until_said(process, "stopped")
        assert process.wait(30) == 0


def test_a_stopped_agents_node_stays_unless_it_leaves(cli: Cli, agent: Agent) -> None:
    """Nobody may take a device whose agent only went away: the node leaves with --leave, else it stays."""
    for options, nodes in (((), ["node-1"]), (("--leave",), [])):
        process = agent(*options)
        until_said(process, "ready")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert [each["node"] for each in cli.json("status", "trainers")["groups"][0]["nodes"]] == nodes


def test_the_log_can_be_json_and_hides_the_password(server_factory: ServerFactory, prefix: str) -> None:
    """--log-json gives an object a line; the URL appears without its password."""
    server = server_factory()
    with redis.Redis.from_url(server.url) as client:
        client.config_set("requirepass", "geheim")
    cli = Cli(f"{server.url}?password=geheim", prefix)
    try:
        process = cli.start("coordinator", "--log-json")
        lines = until_said(process, "ready")
    finally:
        cli.close()
    assert all(json.loads(line)["level"] for line in lines)
    assert "geheim" not in "".join(lines)
    assert "unix://:***@/" in lines[0]


@pytest.mark.parametrize("stopped", [False, True], ids=["it comes", "stopped before"])
@pytest.mark.parametrize("daemon", ["coordinator", "agent"])
def test_a_daemon_waits_for_a_server_that_is_away(
    server_factory: ServerFactory, prefix: str, tmp_path: Path, daemon: str, stopped: bool
) -> None:
    """One that starts in an outage says so and goes on when it is over; told to stop meanwhile it ends cleanly."""
    port = free_port()
    cli = Cli(f"redis://127.0.0.1:{port}", prefix)
    agent = ("agent", "--group", "g", "--node", "n1", "--state-dir", str(tmp_path))
    process = cli.start(*(agent if daemon == "agent" else (daemon,)))
    try:
        until_said(process, f"waiting for Redis: Redis at redis://127.0.0.1:{port} does not answer")
        if not stopped:
            server_factory(port=port)
            assert any("answers again" in line for line in until_said(process, ": ready"))
        process.send_signal(signal.SIGTERM)
        until_said(process, "stopped")
        assert process.wait(60) == 0
    finally:
        cli.close()


def test_daemons_take_a_password_that_is_changed_for_an_outage(
    server_factory: ServerFactory, prefix: str, tmp_path: Path
) -> None:
    """Coordinator and agent say it once each, without a traceback, and go on when it is set right."""
    server = server_factory(port=(port := free_port()))
    with redis.Redis.from_url(server.url) as admin:
        admin.config_set("requirepass", "old")
        cli = Cli(f"redis://:old@127.0.0.1:{port}", prefix)
        agent = ("agent", "--group", "g", "--node", "n1", "--state-dir", str(tmp_path))
        processes = [cli.start("coordinator"), cli.start(*agent)]
        try:
            for process in processes:
                until_said(process, ": ready")
            admin.config_set("requirepass", "new")
            admin.client_kill_filter(_type="normal", skipme=True)
            for process in processes:
                until_said(process, "refuses these credentials")
            admin.config_set("requirepass", "old")
            for process in processes:
                said = until_said(process, "answers again")
                process.send_signal(signal.SIGTERM)
                said += until_said(process, "stopped")
                assert [line for line in said if "credentials" in line or "Traceback" in line] == []
        finally:
            cli.close()


@pytest.mark.parametrize("daemon", ["coordinator", "agent"])
def test_a_daemon_that_starts_while_a_password_is_changed_waits(
    daemon: str, server_factory: ServerFactory, prefix: str, tmp_path: Path
) -> None:
    """It says what is refused, and starts when it is set right."""
    server = server_factory(port=(port := free_port()))
    with redis.Redis.from_url(server.url) as admin:
        admin.config_set("requirepass", "new")
        cli = Cli(f"redis://:old@127.0.0.1:{port}", prefix)
        options = {"coordinator": (), "agent": ("--group", "g", "--node", "n1", "--state-dir", str(tmp_path))}
        process = cli.start(daemon, *options[daemon])
        try:
            until_said(process, "refuses these credentials")
            admin.config_set("requirepass", "old")
            said = until_said(process, ": ready")
            assert [line for line in said if "Traceback" in line] == []
            process.send_signal(signal.SIGTERM)
            until_said(process, "stopped")
        finally:
            cli.close()


def test_a_second_agent_of_a_node_is_refused(agent: Agent) -> None:
    """Exit code 6 naming the first; that one goes on."""
    first = agent()
    until_said(first, "ready")
    second = agent()
    _, err = second.communicate(timeout=60)
    assert second.returncode == 6
    assert str(first.pid) in err
    assert first.poll() is None


def test_daemons_refuse_a_server_that_evicts(server_factory: ServerFactory, prefix: str) -> None:
    """An error with the remedy at start, not a lost lease later."""
    server = server_factory(args=["--maxmemory-policy", "allkeys-lru"])
    cli = Cli(server.url, prefix)
    process = cli.start("coordinator")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "noeviction" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--emulate", "trainers"),
        ("--emulate", "trainers=much"),
        ("--group", "trainers", "--backend", "samplers=noop"),
        ("--group", "no good"),
        ("--emulate", "trainers=8M", "--state-dir", "/proc/nope"),
    ],
    ids=["no group", "no size", "bad size", "backend of another group", "bad name", "no state folder"],
)
def test_wrong_command_lines_of_an_agent_are_usage_errors(cli: Cli, arguments: tuple[str, ...]) -> None:
    """Told before anything starts."""
    assert cli("agent", *arguments).exit_code == 2


def test_backends_are_given_for_all_groups_or_for_one() -> None:
    """NAME:KEY=VALUE is not mistaken for GROUP=NAME."""
    assert parse_backend("cuda") == (None, "cuda")
    assert parse_backend("cuda:binary=/opt/cuda-checkpoint") == (None, "cuda:binary=/opt/cuda-checkpoint")
    assert parse_backend("trainers=cuda:binary=/x") == ("trainers", "cuda:binary=/x")


def test_the_state_of_an_agent_has_a_place_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each node's tokens and journal lie apart, for root where services keep their state."""
    monkeypatch.setattr("os.getuid", lambda: 0)
    assert default_state_dir("n1") == Path("/var/lib/timeslice/n1")
    monkeypatch.setattr("os.getuid", lambda: 1000)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_state_dir("n1") == tmp_path / "timeslice" / "n1"
