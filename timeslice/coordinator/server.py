"""Is this a server that timeslice can rely on?"""

from __future__ import annotations

import logging
import re
from typing import Any

import redis

from timeslice.errors import ServerUnsuitableError
from timeslice.locks.drivers import AsyncDriver
from timeslice.settings import redact_url

log = logging.getLogger("timeslice.coordinator")

OLDEST = (7, 0)
START_DEADLINE_S = 10.0  # a server that has just been started may still be loading


async def check_server(driver: AsyncDriver) -> None:
    """Raise ServerUnsuitableError for a server that is too old or may evict keys. What it won't tell is warned of.

    INFO tells all of it, so that CONFIG, which hosted servers forbid, is not needed.
    """
    where = redact_url(driver.url)

    async def attempt() -> dict[str, Any]:
        try:
            return await driver.client.info()
        except redis.exceptions.NoPermissionError:
            return {}
        except redis.exceptions.ResponseError as error:
            if "unknown command" in str(error):  # renamed away
                return {}
            raise

    info = await driver.retry(attempt, deadline_s=START_DEADLINE_S)
    version = str(info.get("redis_version", ""))
    if numbers := re.match(r"(\d+)\.(\d+)", version):
        if (int(numbers[1]), int(numbers[2])) < OLDEST:
            raise ServerUnsuitableError(
                f"Redis at {where} is version {version}; timeslice needs 7.0 or newer, or Valkey. "
                "Upgrade it, or start one for this machine with: timeslice up"
            )
    else:
        log.warning("Redis at %s does not tell its version (INFO is forbidden?); 7.0 or newer is needed", where)
    policy = info.get("maxmemory_policy")
    if policy is None:
        log.warning("Redis at %s does not tell its eviction policy; it must be noeviction, or holders get lost", where)
    elif policy != "noeviction":
        raise ServerUnsuitableError(
            f"Redis at {where} may evict keys (maxmemory-policy {policy}), and with them who holds what. "
            "Run: redis-cli CONFIG SET maxmemory-policy noeviction, and set it in the server's configuration too."
        )
