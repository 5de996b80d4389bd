"""What fleets of every topology share: servers by name, to be killed, stopped and started one by one."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from timeslice.embedded import EmbeddedServer
from timeslice.errors import RedisUnreachableError

HOST = "127.0.0.1"
ASK_S = 1.0  # a server that is stopped or busy dying is not waited for longer
_POLL_S = 0.02
# Below the ports that systems lend for outgoing connections, also with 10,000 more for the cluster bus.
_PORTS = range(11_000, 22_000)
_BUS = 10_000


@dataclass(frozen=True)
class Tls:
    """Files of a private certificate authority, and of a certificate for 127.0.0.1 that it signed."""

    ca: Path
    certificate: Path
    key: Path


@dataclass(frozen=True)
class FleetOptions:
    """What all servers of a fleet have in common."""

    folder: Path
    aof: bool = True
    binary: str | None = None
    password: str = ""
    tls: Tls | None = None

    def url(self, kind: str, ports: list[int], path: str = "", *, sentinel_secret: bool = False) -> str:
        """``kind`` is empty for a single server. Options of TLS and the password are put in."""
        scheme = ("rediss" if self.tls else "redis") + (f"+{kind}" if kind else "")
        secret = f":{quote(self.password, safe='')}@" if self.password else ""
        options = [f"sentinel_password={quote(self.password, safe='')}"] if secret and sentinel_secret else []
        if self.tls:
            options.append(f"ssl_ca_certs={quote(str(self.tls.ca), safe='')}")
        hosts = ",".join(f"{HOST}:{port}" for port in ports)
        return f"{scheme}://{secret}{hosts}{path}" + ("?" + "&".join(options) if options else "")


class Fleet(ABC):
    """Servers on private ports of this machine. They end with the process that started them.

    ``url`` is what clients get. Names stay what they are, whichever role a server has. A killed server keeps its
    files, and finds them again when it is started.
    """

    kind: ClassVar[str]

    def __init__(self, options: FleetOptions) -> None:
        self.options = options
        self.servers: dict[str, EmbeddedServer] = {}
        self.ports: dict[str, int] = {}
        self._paused: set[str] = set()

    @property
    @abstractmethod
    def url(self) -> str: ...

    @abstractmethod
    def start(self) -> Self:
        """Start all, and return when the fleet serves."""

    @abstractmethod
    def holder_of(self, key: str) -> str:
        """Name of the server that is master for a key. RedisUnreachableError while there is none."""

    def names(self) -> tuple[str, ...]:
        return tuple(self.servers)

    def stop(self) -> None:
        """End all servers at once, as nobody needs what they hold."""
        for name in self.names():
            self.kill(name)

    def kill(self, name: str) -> None:
        """SIGKILL. Harmless for a server that does not run."""
        self._paused.discard(name)
        self.servers[name].kill()

    def start_one(self, name: str) -> None:
        """Start a server that was killed, with what it had on disk."""
        self.servers[name].start()

    def pause(self, name: str) -> None:
        """SIGSTOP: it answers nothing, and its connections stay."""
        self._paused.add(name)
        os.kill(self.servers[name].pid, signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        """SIGCONT."""
        os.kill(self.servers[name].pid, signal.SIGCONT)
        self._paused.discard(name)

    def client(self, name: str, *, timeout_s: float = ASK_S, password: str = "") -> redis.Redis:
        """One server by its socket, whatever the topology. It asks once. The caller closes it. ``password``: the one it
        has now, if that is not the fleet's."""
        return redis.Redis(
            unix_socket_path=str(self.servers[name].socket),
            password=password or self.options.password or None,
            socket_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _add(self, name: str, config: str = "", args: tuple[str, ...] = (), *, data: bool = True) -> None:
        """A server with a config file of its own, not started. It finds out by itself where its data is."""
        options, folder = self.options, self.options.folder / name
        port = free_port(self.ports.values())
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file, tls = folder / "server.conf", options.tls
        if options.password:
            config += f"requirepass {quoted(options.password)}\n"
        file.touch(mode=0o600)
        file.write_text(config)
        if tls:
            args += ("--tls-port", str(port), "--tls-auth-clients", "no", "--tls-replication", "yes")
            args += ("--tls-cert-file", str(tls.certificate), "--tls-key-file", str(tls.key))
            args += ("--tls-ca-cert-file", str(tls.ca))
        self.servers[name] = EmbeddedServer(
            folder,
            data=folder / "data" if data and options.aof else None,
            port=None if tls else port,
            binary=options.binary,
            config=file,
            args=args,
        )
        self.ports[name] = port

    def _ask(self, name: str, *command: str | int) -> Any:
        """One answer of one server; None if it gives none."""
        if name in self._paused or not self.servers[name].running:
            return None
        with self.client(name) as client:
            try:
                return client.execute_command(*command)
            except (redis.exceptions.RedisError, OSError):
                return None


def quoted(value: str) -> str:
    """A word of a server's config file."""
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def free_port(taken: Collection[int] = ()) -> int:
    """A port that is free together with the cluster bus's port that belongs to it, and not given away: who has one of
    ``taken`` may not listen yet."""
    while True:
        port = random.choice(_PORTS)  # noqa: S311 - no secret
        if not {port, port + _BUS, port - _BUS}.isdisjoint(taken):
            continue
        try:
            for each in (port, port + _BUS):
                socket.create_server((HOST, each)).close()
        except OSError:
            continue
        return port


def await_true(what: str, condition: Callable[[], bool], *, deadline_s: float = 20.0) -> None:
    """Poll; RedisUnreachableError after the deadline."""
    until = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > until:
            raise RedisUnreachableError(f"{what} did not happen within {deadline_s:g} s; see the servers' logs")
        time.sleep(_POLL_S)
