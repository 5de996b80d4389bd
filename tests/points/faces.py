"""A yield point of both clients, and one that gives way: what several tests here do."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from tests.client.faces import AsyncFace, Face, in_thread
from tests.support.jobs import DEADLINE_S


def at_point(face: Face, lease: Any, **options: Any) -> Future[bool]:
    """Start a yield point of the lease."""
    if isinstance(face, AsyncFace):
        return face.run(lease.yield_point(**options))
    return in_thread(lambda: lease.yield_point(**options))


def got(future: Future[Any]) -> Any:
    return future.result(DEADLINE_S)
