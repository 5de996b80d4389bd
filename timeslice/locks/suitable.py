"""Is this server fit to hold locks? Asked by every daemon when it starts, and by ``timeslice doctor``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from timeslice.errors import ServerUnsuitableError
from timeslice.locks.drivers import AsyncDriver, SyncDriver
from timeslice.locks.scripts import text
from timeslice.settings import redact_url

OLDEST = (7, 0)
POLICY = "noeviction"


def check_server(info: Mapping[str, Any], where: str = "this server") -> None:
    """Raise ServerUnsuitableError for a server that is too old, or that may evict a lease to make room.

    ``info`` is the answer to INFO, whose memory section also tells the policy: managed servers often forbid
    CONFIG GET. ``where`` is the address without its password.
    """
    version = text(info.get("redis_version", ""))
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found or (int(found[1]), int(found[2])) < OLDEST:
        raise ServerUnsuitableError(
            f"{where} runs version {version or '?'}; timeslice needs Redis 7.0 or newer, or Valkey. Upgrade it."
        )
    policy = text(info.get("maxmemory_policy", POLICY))
    if policy != POLICY:
        raise ServerUnsuitableError(
            f"{where} has maxmemory-policy {policy} and could evict a lease when memory is short. "
            f"Run: redis-cli CONFIG SET maxmemory-policy {POLICY} (and set it in the server's configuration)"
        )


def verify(driver: SyncDriver) -> None:
    """``check_server`` for the server behind a driver; RedisUnreachableError when it does not answer."""
    check_server(driver.retry(driver.client.info), redact_url(driver.url))


async def verify_async(driver: AsyncDriver) -> None:
    """As ``verify``, for asyncio."""
    check_server(await driver.retry(driver.client.info), redact_url(driver.url))
