"""Ports for servers that tests start."""

from __future__ import annotations

import socket

_BUS = 10_000  # a node of a cluster listens so much above its own port, too
_reserved: list[socket.socket] = []


def free_port() -> int:
    """Of this test run's own: bound here for good, so that nobody else gets it. Who sets SO_REUSEADDR, as servers do,
    may listen there all the same."""
    return _bound(0)


def cluster_port() -> int:
    """The same, together with the port of the cluster bus that belongs to it."""
    while True:
        port = free_port()
        try:
            _bound(port + _BUS)
        except (OSError, OverflowError):
            continue  # somebody has it, or there is none of this number
        return port


def _bound(port: int) -> int:
    found = socket.socket()
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(("127.0.0.1", port))
    except (OSError, OverflowError):
        found.close()
        raise
    _reserved.append(found)
    return int(found.getsockname()[1])
