"""Sentinels that say what is wrong: redis-py knows only that no master was found."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import redis
import redis.asyncio.sentinel
import redis.sentinel

from timeslice.errors import ServerUnsuitableError


class Sentinels(redis.sentinel.Sentinel):
    """``discover_master`` raises ServerUnsuitableError for what asking again can't change: a master's name that no
    sentinel knows, credentials that they refuse, and servers that are no sentinels."""

    def discover_master(self, service_name: str) -> Any:
        try:
            return super().discover_master(service_name)  # type: ignore[no-untyped-call]
        except redis.exceptions.ResponseError as error:
            raise _no_sentinel(error) from error
        except redis.sentinel.MasterNotFoundError:
            known: set[str] | None = None
            for sentinel in self.sentinels:
                try:
                    masters: Any = sentinel.sentinel_masters()
                    known = {*(known or ()), *masters}
                except redis.exceptions.AuthenticationError as error:
                    raise _refused(error) from error
                except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
                    continue
            if known is not None and service_name not in known:
                raise _unknown(service_name, known) from None
            raise


class AsyncSentinels(redis.asyncio.sentinel.Sentinel):
    """As Sentinels, for asyncio."""

    async def discover_master(self, service_name: str) -> Any:
        try:
            return await super().discover_master(service_name)
        except redis.exceptions.ResponseError as error:
            raise _no_sentinel(error) from error
        except redis.asyncio.sentinel.MasterNotFoundError:
            known: set[str] | None = None
            for sentinel in self.sentinels:
                try:
                    masters: Any = await sentinel.sentinel_masters()
                    known = {*(known or ()), *masters}
                except redis.exceptions.AuthenticationError as error:
                    raise _refused(error) from error
                except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
                    continue
            if known is not None and service_name not in known:
                raise _unknown(service_name, known) from None
            raise


def _unknown(name: str, known: Iterable[str]) -> ServerUnsuitableError:
    names = ", ".join(sorted(known)) or "none at all"
    return ServerUnsuitableError(f"the sentinels know no master named {name!r}; they watch: {names}. Correct the URL.")


def _refused(error: Exception) -> ServerUnsuitableError:
    return ServerUnsuitableError(
        f"a sentinel refuses its credentials ({error}). They are not the servers' own: add "
        "?sentinel_username=...&sentinel_password=... to the URL, percent-encoded"
    )


def _no_sentinel(error: Exception) -> ServerUnsuitableError:
    return ServerUnsuitableError(
        f"what should be a sentinel is none, or forbids the question ({error}). redis+sentinel:// needs the addresses "
        "of sentinels (port 26379 as a rule), not those of the servers that they watch"
    )
