"""What servers do to their clients. Each is over when it returns."""

from __future__ import annotations

import threading
import time
from typing import Any

import redis

from timeslice.embedded import EmbeddedServer

LASTS_S = 0.7  # as long as it takes that everybody notices
FULL = "1"  # a maxmemory that nothing fits into


def dial(server: EmbeddedServer) -> Any:
    """A plain client for the harm itself."""
    return redis.Redis.from_url(server.url)


def crash(server: EmbeddedServer) -> None:
    """SIGKILL and a new start; what the append-only file has is still there."""
    server.kill()
    time.sleep(LASTS_S)
    server.start()


def restart(server: EmbeddedServer) -> None:
    """A clean stop and a new start; without an append-only file everything is lost."""
    server.restart()


def flush_all(server: EmbeddedServer) -> None:
    with dial(server) as client:
        client.flushall()


def kill_clients(server: EmbeddedServer) -> None:
    """Every connection is closed by the server, twice in a row."""
    with dial(server) as client:
        for _ in range(2):
            client.client_kill_filter(_type="normal", skipme=True)


def pause_clients(server: EmbeddedServer) -> None:
    """The server reads nothing for a while."""
    with dial(server) as client:
        client.client_pause(int(LASTS_S * 1000), all=True)
    with dial(server) as client:
        client.ping()


def flush_scripts(server: EmbeddedServer) -> None:
    with dial(server) as client:
        client.script_flush()


def become_replica_and_return(server: EmbeddedServer) -> None:
    """A failover that is taken back: the server refuses writes and ends blocked reads, then is master again."""
    with dial(server) as client:
        client.replicaof("127.0.0.1", "1")
        time.sleep(LASTS_S)
        client.replicaof("NO", "ONE")


def fill_and_make_room(server: EmbeddedServer) -> None:
    """maxmemory is reached, and raised after a while."""
    with dial(server) as client:
        client.config_set("maxmemory", FULL)
        time.sleep(LASTS_S)
        client.config_set("maxmemory", "0")


def sleep(server: EmbeddedServer, seconds: float = LASTS_S) -> None:
    """The server stands still, as in a long command or a swapped-out page."""
    with dial(server) as client:
        asking = threading.Thread(target=client.execute_command, args=("DEBUG", "SLEEP", str(seconds)))
        asking.start()
        asking.join()
