"""`timeslice ready`: the same answer as an exit code."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from tests.cli.conftest import Cli, World, eventually
from tests.security.conftest import GROUP, OTHER, Users, guarded, users
from timeslice.cli.main import main
from timeslice.locks import scripts

__all__ = ["guarded", "users"]


def test_the_exit_code_says_it_and_the_table_why(cli: Cli, world: World) -> None:
    """0 for the holder, 1 with state and reason for who waits, 3 for whom nobody knows, in a group or at all."""
    world.hold_lock_only("samplers", "a")
    world.acquire("samplers", "b", lock_only=True)
    ready, waiting = cli("ready", "a"), cli("ready", "b", "--group", "samplers")
    assert (ready.exit_code, ready.stdout.split()[5:8]) == (0, ["samplers", "ready", "-"])
    assert waiting.exit_code == 1
    assert "waiting" in waiting.stdout
    assert "job a holds it" in waiting.stdout
    unknown = cli("ready", "c")
    assert (unknown.exit_code, unknown.stdout) == (3, "")
    assert "no group knows job c" in unknown.stderr
    assert cli("ready", "c", "--group", "samplers").exit_code == 3
    misspelt = cli("ready", "a", "--group", "sampler")
    assert misspelt.exit_code == 3
    assert "did you mean samplers" in misspelt.stderr


def test_it_says_what_it_may_not_read(users: Users) -> None:
    """As the port does: a job that only another tenant's group may know is not called absent."""
    admin = World(users.server.url, users.prefix)
    admin.hold_lock_only(GROUP, "a")
    admin.hold_lock_only(OTHER, "b")
    cli = Cli(users.url("agent"), users.prefix)
    try:
        known = cli("ready", "a")
        assert known.exit_code == 0
        assert f"can't read {OTHER}" in known.stderr
        result = cli("ready", "b", "--json")
        document = json.loads(result.stdout)
        assert (result.exit_code, document["state"], document["unread"]) == (1, "unknown", [OTHER])
    finally:
        admin.driver.close()


def test_the_job_may_come_from_the_environment(cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container, whose probe can't expand variables."""
    world.hold_lock_only("samplers", "a")
    assert cli("ready").exit_code == 2
    monkeypatch.setenv("TIMESLICE_JOB", "a")
    assert cli.json("ready")["job"] == "a"
    assert cli("ready", "-a").exit_code == 2


def test_json_is_printed_whether_it_is_ready_or_not(cli: Cli, world: World) -> None:
    """Programs read the state; the exit code stays."""
    world.hold_lock_only("samplers", "a")
    result = cli("ready", "b", "--json")
    assert result.exit_code == 3
    assert '"state": "absent"' in result.stdout


def test_it_waits_for_a_job_that_is_not_there_yet(cli: Cli, world: World) -> None:
    """--wait ends with the readiness, else with 4 when its time is over."""
    world.hold_lock_only("samplers", "b")
    assert cli("ready", "a", "--wait", "0.3").exit_code == 4
    waiting = cli.start("ready", "a", "--group", "samplers", "--wait", "60", "--json")
    world.acquire("samplers", "a", lock_only=True)
    group = world.keys.group("samplers")
    assert waiting.poll() is None
    world.driver.run(scripts.yield_(group, "w-b", world.driver.view(group).number("token")))
    eventually(lambda: world.driver.view(group).holder == "a")
    world.driver.run(scripts.renew(group, world.request("a"), world.driver.view(group).number("token")))
    out, _ = waiting.communicate(timeout=60)
    assert (waiting.returncode, '"ready": true' in out) == (0, True)


def test_a_server_that_is_away_has_its_own_code() -> None:
    """A probe must not take it for a job that is gone."""
    assert CliRunner().invoke(main, ["--url", "redis://127.0.0.1:1", "ready", "a", "--wait", "60"]).exit_code == 5
