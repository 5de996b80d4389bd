"""What is sent straight to a script has a bound: it is stored, and handed out at every look."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from tests.locks.lab import Lab
from timeslice.embedded import EmbeddedServer
from timeslice.errors import TimeSliceError
from timeslice.locks import scripts
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.scripts import Call, Request

LONG = "x" * 300_000
WORDS = ("waiter", "job", "host", "label")
HONEST = Request(waiter="w" * 20, job="j" * 63, host="h" * 63, pid=2**22, start=2**53 - 1, label="l" * 63)


@pytest.fixture
def lab(server: EmbeddedServer, prefix: str) -> Iterator[Lab]:
    made = Lab(server.url, prefix)
    yield made
    made.redis.close()


def refused(lab: Lab, call: Call[Any]) -> str:
    """How the driver tells that the server did not take a call."""
    driver = SyncDriver(lab.url)
    try:
        with pytest.raises(TimeSliceError) as error:
            driver.run(call, deadline_s=1.0)
    finally:
        driver.close()
    return str(error.value)


@pytest.mark.parametrize("word", WORDS)
def test_a_giant_request_is_refused_and_leaves_nothing(lab: Lab, word: str) -> None:
    """Asking and renewing, in any of their words; the longest honest request is taken by both."""
    giant = Request(**{**asdict(HONEST), "lock_only": True, word: LONG})
    assert "300000 bytes; at most 256 are taken" in refused(lab, scripts.acquire(lab.group, giant))
    assert "300000 bytes; at most 256 are taken" in refused(lab, scripts.renew(lab.group, giant, 7, mode="lock"))
    assert list(lab.redis.scan_iter(f"{lab.group.state}*")) == []
    granted = lab.run(scripts.acquire(lab.group, replace(HONEST, lock_only=True)))
    assert isinstance(granted, scripts.Granted)
    assert isinstance(lab.run(scripts.renew(lab.group, HONEST, granted.token, mode="lock")), scripts.Renewed)


def operators(lab: Lab, by: str, why: str) -> Iterator[Call[Any]]:
    """Every verb that keeps what an operator says."""
    group = lab.group
    yield scripts.pause(group, True, by, why)
    yield scripts.revoke(group, "a", "w", 1, by, why)
    yield scripts.evict(group, "a", by, why)
    yield scripts.repair(group, by, why)
    yield scripts.drain(group, "n1", True, by, why)
    yield scripts.forget(group, "n1", by, why)
    yield scripts.cancel(group, "w", by=by + why)
    yield scripts.yield_(group, "w", None, by=by + why)


@pytest.mark.parametrize(("by", "why"), [(LONG, ""), ("me", LONG)], ids=["by", "why"])
def test_an_operators_words_have_a_bound_too(lab: Lab, by: str, why: str) -> None:
    """A pause with a book for a reason would be read by every waiter."""
    lab.join("n1")
    for call in operators(lab, by, why):
        assert "bytes; at most" in refused(lab, call)
    assert lab.view.state.get("paused", "") == ""
