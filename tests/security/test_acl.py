"""What the users of ``timeslice acl`` may not do, on a real server."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner

from tests.security.conftest import GROUP, NODE, OTHER, OTHER_NODE, SECRET, Users, load_users, printed_users
from timeslice.cli.main import main
from timeslice.errors import RefusedError, ServerUnsuitableError
from timeslice.locks import scripts
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import Keys
from timeslice.locks.scripts import Granted, Request

DENIED = (redis.exceptions.NoPermissionError, redis.exceptions.ResponseError)


def refused(client: redis.Redis, *command: str) -> bool:
    """Whether the server says that this user may not."""
    try:
        client.execute_command(*command)  # type: ignore[no-untyped-call]
    except DENIED as error:
        told = str(error)
        return isinstance(error, redis.exceptions.NoPermissionError) or "permission" in told or "can't " in told
    return False


@pytest.mark.parametrize("everything", [False, True], ids=["one-group", "all-groups"])
def test_a_client_can_not_write_what_is_others(users: Users, everything: bool) -> None:
    """Neither a node's orders and record, nor the coordinators, nor the settings of its own group."""
    keys = Keys(users.prefix)
    client = users.client("client", everything=everything)
    commands, record = keys.commands(NODE), keys.node_state(NODE)
    assert refused(client, "XADD", commands, "*", "body", "{}")
    assert refused(client, "HSET", record, "instance", "mine")
    assert refused(client, "ZADD", keys.coordinators, "1", "me")
    assert refused(client, "SADD", keys.nodes, "evil")
    assert refused(client, "DEL", keys.groups)
    assert refused(client, "HSET", keys.group(GROUP).config, "order", "7")
    assert refused(client, "EVAL", "return redis.call('HSET', KEYS[1], 'order', '7')", "1", keys.group(GROUP).config)
    assert refused(client, "EVAL", "return redis.call('XADD', KEYS[1], '*', 'a', 'b')", "1", commands)
    assert refused(client, "SET", "elsewhere", "1")
    assert refused(client, "KEYS", "*")
    assert refused(client, "FLUSHALL")
    assert refused(client, "CONFIG", "GET", "*")
    assert not refused(client, "HSET", keys.group(GROUP).state, "_", "1")  # what ACLs can't keep apart
    assert not refused(client, "SADD", keys.groups, GROUP)


@pytest.mark.parametrize("role", ["client", "agent", "coordinator", "operator", "viewer"])
def test_a_user_of_one_group_touches_no_other(users: Users, role: str) -> None:
    """Groups are the boundary between tenants: no key of another group can be read or written, nor its channels."""
    keys = Keys(users.prefix)
    client = users.client(role)
    for key in keys.group(OTHER).all:
        assert refused(client, "HGETALL", key)
        assert refused(client, "HSET", key, "a", "b")
    channel = keys.channel("theirs", f"{OTHER}/n1.1.1")
    assert refused(client, "XADD", channel, "*", "kind", "command")
    assert refused(client, "XREAD", "STREAMS", channel, "0")
    # A group whose name begins with ours is another one, too.
    longer = keys.channel("theirs", f"{GROUP}.x/n1.1.1")
    assert refused(client, "XADD", longer, "*", "kind", "command")


def test_an_agent_of_one_node_touches_no_other(users: Users) -> None:
    """An agent that was taken over can't order another node's agent about, nor pose as it."""
    keys = Keys(users.prefix)
    agent = users.client("agent")
    for key in (keys.commands(OTHER_NODE), keys.node_state(OTHER_NODE)):
        assert refused(agent, "DEL", key)
        assert refused(agent, "HSET", key, "a", "b")
    assert refused(agent, "XADD", keys.commands(NODE), "*", "body", "{}")  # nor give itself orders
    assert not refused(agent, "HSET", keys.node_state(NODE), "a", "b")


@pytest.mark.parametrize("everything", [False, True], ids=["one-group", "all-groups"])
def test_a_viewer_writes_nothing(users: Users, everything: bool) -> None:
    """No key of any kind, not by a script either."""
    keys = Keys(users.prefix)
    viewer = users.client("viewer", everything=everything)
    every = [*keys.group(GROUP).all, keys.groups, keys.nodes, keys.coordinators, keys.node_state(NODE)]
    for key in every:
        for command in (("DEL", key), ("HSET", key, "a", "b"), ("SADD", key, "a"), ("ZADD", key, "1", "a")):
            assert refused(viewer, *command)
        assert refused(viewer, "EVAL", "return redis.call('DEL', KEYS[1])", "1", key)
    with pytest.raises(redis.exceptions.ResponseError, match=r"no permissions|can't run this command"):
        viewer.execute_command("EVAL_RO", "return redis.call('DEL', KEYS[1])", 1, every[0])  # type: ignore[no-untyped-call]


def test_a_prefix_with_glob_characters_opens_nothing_else(users: Users) -> None:
    """``*`` in a prefix stands for itself, and quotes in it survive the way into the server."""
    odd = f"{users.prefix}*?\"'\\[a]"
    load_users(users.admin, printed_users("--role", "client", prefix=odd))
    client = users.client("client", everything=True)
    assert not refused(client, "SADD", Keys(odd).groups, "x")
    assert refused(client, "SADD", Keys(f"{users.prefix}zz\"'\\a").groups, "x")
    assert refused(client, "SADD", Keys(users.prefix).groups, "x")
    load_users(users.admin, printed_users(prefix=users.prefix))


def test_no_user_is_open_and_a_password_file_is_printed_as_a_hash(users: Users, tmp_path: Path) -> None:
    """Nobody gets in without a password, and the one in the file opens the door without being shown."""
    assert all(" reset on >CHANGE-ME " in line for line in CliRunner().invoke(main, ["acl"]).stdout.splitlines())
    secret = 'p@ss/w:rd#%+ "x'
    (tmp_path / "pw").write_text(secret + "\n")
    printed = CliRunner().invoke(
        main, ["--prefix", users.prefix, "acl", "--role", "viewer", "--password-file", str(tmp_path / "pw")]
    )
    assert secret not in printed.output
    assert hashlib.sha256(secret.encode()).hexdigest() in printed.stdout
    load_users(users.admin, printed.stdout.splitlines())
    port = users.server.port
    assert redis.Redis(port=port or 0, username="timeslice-viewer", password=secret).ping()
    with pytest.raises(redis.exceptions.AuthenticationError):
        redis.Redis(port=port or 0, username="timeslice-viewer", password=SECRET).ping()


def test_a_password_file_is_for_one_user(tmp_path: Path) -> None:
    """One password for all roles would be none; an empty one neither."""
    (tmp_path / "pw").write_text("x\n")
    assert CliRunner().invoke(main, ["acl", "--password-file", str(tmp_path / "pw")]).exit_code == 2
    (tmp_path / "pw").write_text("\n")
    one = CliRunner().invoke(main, ["acl", "--role", "viewer", "--password-file", str(tmp_path / "pw")])
    assert one.exit_code == 2
    assert "open to everybody" in one.output
    (tmp_path / "pw").write_bytes("geheimnüs".encode("latin-1"))
    foreign = CliRunner().invoke(main, ["acl", "--role", "viewer", "--password-file", str(tmp_path / "pw")])
    assert foreign.exit_code == 2
    assert "no UTF-8" in foreign.output
    assert "geheim" not in foreign.output


def test_json_has_users_and_lines() -> None:
    """Programs get the words apart, and each agent its own user."""
    result = CliRunner().invoke(main, ["acl", "--role", "agent", "--node", "n1", "--node", "n2", "--json"])
    found = json.loads(result.stdout)["users"]
    assert [user["user"] for user in found] == ["timeslice-agent-n1", "timeslice-agent-n2"]
    assert all(user["line"].startswith(f"ACL SETUSER {user['user']} reset on >") for user in found)
    assert not any("n2" in rule for rule in found[0]["rules"])


def test_an_acl_file_takes_the_lines_too(tmp_path: Path, users: Users) -> None:
    """As the notes say: with ``user`` for ``ACL SETUSER`` they are an aclfile."""
    from timeslice.embedded import EmbeddedServer

    lines = [line.replace("ACL SETUSER", "user", 1) for line in printed_users()]
    path = tmp_path / "users.acl"
    path.write_text("\n".join(["user default on nopass ~* &* +@all", *lines]) + "\n")
    with EmbeddedServer(binary=users.server.binary, args=("--aclfile", str(path))) as server:
        known = redis.Redis.from_url(server.url).acl_users()
        assert {"timeslice-client", "timeslice-viewer"} <= {str(name) for name in known}


def test_bad_names_are_refused_before_anything_is_printed() -> None:
    """A name that would change the pattern is none."""
    result = CliRunner().invoke(main, ["acl", "--group", "a} ~*"])
    assert result.exit_code == 2
    assert result.stdout == ""


def test_what_a_client_may_do_to_its_own_group_is_as_the_threat_model_says(users: Users) -> None:
    """Within a group no right is apart: pausing works with a client's credentials; its settings do not."""
    group = Keys(users.prefix).group(GROUP)
    driver = SyncDriver(users.url("client"))
    request = Request(waiter="w", job="a", host="n1", pid=1, start=1, lock_only=True)
    granted = driver.run(scripts.acquire(group, request))
    assert isinstance(granted, Granted)
    driver.run(scripts.pause(group, True, "me"))
    assert driver.view(group).state["paused"] == "paused by me"
    driver.run(scripts.revoke(group, "a", "w", granted.token, "me", ""))
    assert driver.view(group).state["lease_id"] == ""
    driver.run(scripts.cancel(group, "w", by="me"))
    with suppress(RefusedError):  # by the group's state, not by the server
        driver.run(scripts.evict(group, "a", "me", ""))
    with pytest.raises(ServerUnsuitableError, match="lacks the right"):
        driver.run(scripts.configure(group, {"order": "priority"}))
    with pytest.raises(ServerUnsuitableError, match="lacks the right"):
        driver.run(scripts.pause(Keys(users.prefix).group(OTHER), True, "me"))
    driver.close()
