"""Is this server fit to hold locks? Asked by every daemon when it starts, and by ``timeslice doctor``."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import redis

from timeslice.addresses import parse_url
from timeslice.errors import ServerUnsuitableError
from timeslice.locks.drivers import AsyncDriver, SyncDriver
from timeslice.locks.scripts import text

log = logging.getLogger("timeslice.locks")

OLDEST = (7, 0)
POLICY = "noeviction"


def check_server(info: Mapping[str, Any], where: str) -> None:
    """Raise ServerUnsuitableError for a server that is too old, or that may evict a lease to make room.

    ``info`` is the answer to INFO, empty where that is forbidden; what it does not tell is warned of. It also tells
    the eviction policy, so that CONFIG, which hosted servers forbid, is not needed. ``where``: without a password.
    """
    version = text(info.get("redis_version", ""))
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        log.warning("Redis at %s does not tell its version (INFO is forbidden?); 7.0 or newer is needed", where)
    elif (int(found[1]), int(found[2])) < OLDEST:
        raise ServerUnsuitableError(
            f"Redis at {where} is version {version}; timeslice needs 7.0 or newer, or Valkey. "
            "Upgrade it, or start one for this machine with: timeslice up"
        )
    policy = text(info.get("maxmemory_policy", ""))
    if not policy:
        log.warning("Redis at %s does not tell its eviction policy; it must be %s, or leases get lost", where, POLICY)
    elif policy != POLICY:
        raise ServerUnsuitableError(
            f"Redis at {where} may evict keys (maxmemory-policy {policy}), and with them who holds what. "
            f"Run: redis-cli CONFIG SET maxmemory-policy {POLICY}, and set it in the server's configuration too."
        )


def verify(driver: SyncDriver) -> None:
    """``check_server`` for every master behind a driver; RedisUnreachableError when one does not answer."""

    def attempt() -> Mapping[str, Mapping[str, Any]]:
        try:
            return driver.infos()
        except redis.exceptions.ResponseError as error:
            return _untold(error, driver.url)

    for where, info in driver.retry(attempt).items():
        check_server(info, where)


async def verify_async(driver: AsyncDriver) -> None:
    """As ``verify``, for asyncio."""

    async def attempt() -> Mapping[str, Mapping[str, Any]]:
        try:
            return await driver.infos()
        except redis.exceptions.ResponseError as error:
            return _untold(error, driver.url)

    for where, info in (await driver.retry(attempt)).items():
        check_server(info, where)


def _untold(error: redis.exceptions.ResponseError, url: str) -> Mapping[str, Mapping[str, Any]]:
    """Nothing, where INFO is forbidden or was renamed away; any other fault is the caller's."""
    if isinstance(error, redis.exceptions.NoPermissionError) or "unknown command" in str(error):
        return {parse_url(url).shown: {}}
    raise error
