"""Which server is master, asked of sentinels.

Unlike redis-py's own search it says what is wrong, and it may run in several threads or tasks at once: that of 8.1
reorders its list of sentinels meanwhile, and may lose some of them for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis
import redis.asyncio.sentinel
import redis.sentinel

from timeslice.errors import ServerUnsuitableError

_FAULTS = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, redis.exceptions.ResponseError)


class Sentinels(redis.sentinel.Sentinel):
    """``discover_master`` raises ServerUnsuitableError for what asking again can't change: a master's name that no
    sentinel knows, credentials that they refuse, and servers that are no sentinels."""

    sentinels: list[Any]
    liked: Any = None  # the one that knew the answer last is asked first

    def discover_master(self, service_name: str) -> tuple[str, int]:
        search = _Search(self, service_name)
        for sentinel in search.order:
            try:
                masters: Any = sentinel.sentinel_masters()
            except _FAULTS as error:
                search.fault = error
            else:
                if found := search.look(sentinel, masters):
                    return found
        raise search.verdict()


class AsyncSentinels(redis.asyncio.sentinel.Sentinel):
    """As Sentinels, for asyncio."""

    liked: Any = None
    sentinels: list[Any]

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        search = _Search(self, service_name)
        for sentinel in search.order:
            try:
                masters: Any = await sentinel.sentinel_masters()
            except _FAULTS as error:
                search.fault = error
            else:
                if found := search.look(sentinel, masters):
                    return found
        raise search.verdict()


class _Search:
    """One question to all, until one of them knows a master that is up."""

    def __init__(self, asked: Sentinels | AsyncSentinels, name: str) -> None:
        self.order = sorted(asked.sentinels, key=lambda each: each is not asked.liked)
        self.fault: Exception | None = None  # the last one's
        self._asked, self._name = asked, name
        self._known: set[str] | None = None  # of those that answered

    def look(self, sentinel: Any, masters: Mapping[str, Mapping[str, Any]]) -> tuple[str, int] | None:
        self._known = {*(self._known or ()), *masters}
        state: Any = masters.get(self._name)
        if not state or not self._asked.check_master_state(state, self._name):
            return None
        self._asked.liked = sentinel
        return state["ip"], int(state["port"])

    def verdict(self) -> Exception:
        if self._known is not None:
            if self._name in self._known:
                return redis.sentinel.MasterNotFoundError(f"the sentinels say that {self._name!r} is down")
            names = ", ".join(sorted(self._known)) or "none at all"
            return ServerUnsuitableError(
                f"the sentinels know no master named {self._name!r}; they watch: {names}. Correct the URL."
            )
        if isinstance(self.fault, redis.exceptions.AuthenticationError):
            return ServerUnsuitableError(
                f"a sentinel refuses its credentials ({self.fault}). They are not the servers' own: add "
                "?sentinel_username=...&sentinel_password=... to the URL, percent-encoded"
            )
        if isinstance(self.fault, redis.exceptions.ResponseError):
            return ServerUnsuitableError(
                f"what should be a sentinel is none, or forbids the question ({self.fault}). redis+sentinel:// needs "
                "the addresses of sentinels (port 26379 as a rule), not those of the servers that they watch"
            )
        return redis.sentinel.MasterNotFoundError(f"no sentinel answers: {self.fault}")
