"""`timeslice doctor` says what the current Redis user may not do."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cli.conftest import Cli, World
from timeslice.embedded import EmbeddedServer
from timeslice.locks.keys import Keys
from timeslice.locks.permissions import ROLES, user_rules

MakeUser = Callable[..., str]


@pytest.fixture
def user(server: EmbeddedServer, world: World) -> Iterator[MakeUser]:
    """Make a user with the rights of a role, in some groups, without some words; returns its URL."""
    client: Any = world.driver.client
    made: list[str] = []

    def make(role: str, *groups: str, without: str = "", more: tuple[str, ...] = ()) -> str:
        name = f"{role}-{secrets.token_hex(4)}"
        words = [word.replace(f" +{without} ", " ") for word in user_rules(role, world.keys, groups)]
        words = [word for word in words if word != f"+{without}"]
        client.execute_command("ACL", "SETUSER", name, "on", ">hunter2two", *words, *more)
        made.append(name)
        return server.url.replace("unix://", f"unix://{name}:hunter2two@")

    yield make
    for name in made:
        client.execute_command("ACL", "DELUSER", name)


def access(url: str, keys: Keys, *options: str) -> dict[str, str]:
    result = Cli(url, keys.prefix)("doctor", "--json", *options)
    found = [each for each in json.loads(result.stdout)["findings"] if each["check"] == "access"]
    assert len(found) == 1, result.output
    only: dict[str, str] = found[0]
    assert (only["level"] == "error") == bool(only["do"])
    assert only["level"] != "error" or result.exit_code == 1
    return only


@pytest.mark.parametrize("role", ROLES)
def test_a_user_with_a_role_s_rights_may_act_as_it(user: MakeUser, world: World, role: str) -> None:
    """Every role, from the very rules that `timeslice acl` prints, with no finding of its own."""
    world.serve("trainers")
    found = access(user(role), world.keys, "--role", role)
    assert (found["level"], found["what"].partition(" may ")[2]) == ("ok", f"act as {role}")


@pytest.mark.parametrize("role", ROLES)
def test_a_missing_command_is_named(user: MakeUser, world: World, role: str) -> None:
    """One word taken away: the command is named together with a key, and what gives it back."""
    world.serve("trainers")
    url = user(role, without="hget" if role == "viewer" else "zadd")
    found = access(url, world.keys, "--role", role)
    assert found["level"] == "error"
    assert f"may not act as {role}" in found["what"]
    assert ("HGET " if role == "viewer" else "ZADD ") + world.keys.prefix in found["what"]
    assert found["do"].startswith(f"give it the rules that `timeslice acl` prints for {role}")


def test_a_missing_key_is_named(user: MakeUser, world: World) -> None:
    """A user of one group is fit there; in the other group the first keys that it lacks are shown."""
    world.serve("trainers")
    world.serve("samplers")
    url = user("client", "trainers")
    assert access(url, world.keys, "--role", "client")["level"] == "ok"
    found = access(url, world.keys, "--role", "client", "--group", "samplers")
    assert found["level"] == "error"
    assert "{samplers}" in found["what"]
    assert "{trainers}" not in found["what"]


def test_a_user_that_may_run_no_script_is_fit_for_nothing(user: MakeUser, world: World) -> None:
    """That is what everything else stands on."""
    world.serve("trainers")
    found = access(user("client", without="eval"), world.keys, "--role", "client")
    assert "as client it lacks: EVAL" in found["what"]


def test_all_roles_are_tried_without_one_named(cli: Cli, world: World) -> None:
    """The default user may do everything; the roles are listed."""
    world.serve("trainers")
    found = access(cli.url, world.keys)
    assert found["what"] == f"user default may act as {', '.join(ROLES)}"


def test_nothing_is_written_by_the_question(cli: Cli, world: World) -> None:
    """Doctor asks what it may do by a script that does none of it."""
    world.serve("trainers")
    client: Any = world.driver.client
    before = {key: client.dump(key) for key in client.keys(world.keys.prefix + ":*")}
    assert cli("doctor").exit_code == 1  # no coordinator
    assert {key: client.dump(key) for key in client.keys(world.keys.prefix + ":*")} == before


def test_a_client_sees_its_groups_and_what_it_does_not_see_is_said(user: MakeUser, world: World) -> None:
    """`status`, `queue`, `nodes` and `jobs` show what this user may read, and name the rest."""
    world.serve("trainers")
    cli = Cli(user("client"), world.keys.prefix)
    for command in (["status"], ["status", "trainers"], ["queue", "trainers", "--json"], ["nodes"]):
        shown = cli(*command)
        assert shown.exit_code == 0, shown.output
        assert "trainers" in shown.stdout
        assert "not looked at: this user may not read that" in shown.stderr
    assert json.loads(cli("status", "--json").stdout)["groups"][0]["emulated"] is None
    assert json.loads(cli("nodes", "--json").stdout)["nodes"][0]["alive"] is True
    for command in (["jobs"], ["groups"], ["group", "show", "trainers"], ["events", "trainers"]):
        assert cli(*command).exit_code == 0, command
