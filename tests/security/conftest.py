"""A server with the users that ``timeslice acl`` prints."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from click.testing import CliRunner

from tests.agent.conftest import rig
from tests.conftest import NeedsTool, valkey_binary
from tests.security.registry import known, start
from tests.support.ports import free_port
from timeslice.cli.main import main
from timeslice.embedded import EmbeddedServer

__all__ = ["known", "rig", "start"]

SECRET = "s3cret"
GROUP, OTHER, NODE, OTHER_NODE = "g", "theirs", "n1", "n2"


def printed_users(*arguments: str, prefix: str = "ts") -> list[str]:
    """The lines of ``timeslice acl``, with a password."""
    result = CliRunner().invoke(main, ["--prefix", prefix, "acl", *arguments])
    assert result.exit_code == 0, result.output
    return [line.replace("CHANGE-ME", SECRET) for line in result.stdout.splitlines()]


def load_users(client: redis.Redis, lines: list[str]) -> None:
    for line in lines:
        client.execute_command(*shlex.split(line))  # type: ignore[no-untyped-call]


class Users:
    """A server whose users have the rights of one group and one node each. ``url`` is that of a role."""

    def __init__(self, server: EmbeddedServer, prefix: str) -> None:
        self.server, self.prefix = server, prefix
        self.admin = redis.Redis.from_url(server.url)
        one = printed_users("--group", GROUP, "--node", NODE, prefix=prefix)
        load_users(self.admin, one + printed_users(prefix=prefix))

    def url(self, role: str, *, everything: bool = False) -> str:
        scope = "" if everything else f"-{NODE if role == 'agent' else GROUP}"
        return f"redis://timeslice-{role}{scope}:{SECRET}@127.0.0.1:{self.server.port}"

    def client(self, role: str, **more: Any) -> redis.Redis:
        return redis.Redis.from_url(self.url(role, **more))

    def refusals(self) -> list[str]:
        return refusals(self.admin)


def refusals(admin: redis.Redis) -> list[str]:
    """What users were refused so far, from the server's own log."""
    entries: Any = admin.execute_command("ACL", "LOG")  # type: ignore[no-untyped-call]
    flat = [entry if isinstance(entry, dict) else dict(zip(entry[::2], entry[1::2], strict=True)) for entry in entries]
    told = [{_text(key): _text(value) for key, value in entry.items()} for entry in flat]
    found = [f"{each['username']}: {each['reason']} {each['object']}" for each in told]
    # How the tests' own plain clients introduce themselves.
    return [each for each in found if not each.endswith("client|setinfo")]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


@pytest.fixture(scope="module", params=["valkey", pytest.param("redis7", marks=pytest.mark.slow)])
def guarded(request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    """A server for users; each kind in turn."""
    binary = valkey_binary() if request.param == "valkey" else shutil.which("redis-server")
    if binary is None:
        pytest.skip("redis-server is not installed; .ci/run shows how to get it")
    with EmbeddedServer(binary=binary, port=free_port()) as running:
        yield running


@pytest.fixture
def users(guarded: EmbeddedServer, prefix: str, needs_tool: NeedsTool) -> Iterator[Users]:
    if "redis-server" in guarded.binary:
        needs_tool("redis-server")
    made = Users(guarded, prefix)
    made.admin.execute_command("ACL", "LOG", "RESET")  # type: ignore[no-untyped-call]
    yield made
    made.admin.close()
