"""Registrations as a hostile client would write them: straight into the hash, whatever the script would refuse."""

from __future__ import annotations

import json
import logging

import pytest

from tests.security.registry import Known, Start
from tests.support.jobs import shows
from timeslice.agent.targets import MAX_ENDED, MAX_TARGETS

HOSTILE = {
    "giant": json.dumps({"job": "a", "tags": ["x" * 10_000_000]}),
    "deep": "[" * 100_000,
    "no object": "[]",
    "wrong types": json.dumps({"job": 1, "host": [], "pid": "x", "start": {}, "uid": -1, "pid_namespace": None}),
    "endless number": '{"pid": ' + "9" * 100_000 + "}",
    "path": json.dumps({"job": "a", "host": "n1", "pid": 77, "start": 1, "uid": 0, "pid_namespace": "pid:[1]",
                        "channel": "../../{x}:\n\x1b[2J"}),
    "unknown field": json.dumps({"job": "a", "host": "n1", "pid": 77, "start": 1, "uid": 0, "pid_namespace": "",
                                 "\x1b]0;owned\x07": "x"}),
    "half a character": '{"job": "\ud83d',
}  # fmt: skip


@pytest.mark.parametrize("record", HOSTILE.values(), ids=HOSTILE)
async def test_hostile_records_are_refused_in_one_clean_line(
    known: Known, record: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of them is believed, and nothing of them is repeated to the log's reader."""
    name = "a\x1b[31m\n/n1/77"
    with caplog.at_level(logging.WARNING):
        await known.registry.refresh({"a/n1/77": record, name: record, "/n1/": record, "a/n1/" + "7" * 5000: record})
        await known.registry.refresh({"a/n1/77": record, name: record})
    assert known.registry.jobs() == ()
    assert len(caplog.records) == 4  # each once
    for message in caplog.messages:
        assert message.isprintable()
        assert len(message) < 800
    assert all(line.isprintable() for line in known.registry.complaints())


async def test_ten_thousand_registrations_cost_little_and_hide_no_honest_one(
    known: Known, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """What is looked at, remembered and logged is capped; who was known before stays known."""
    honest = start(pass_fds=shows("a"))
    assert await known.claim(honest) == ""
    (target,) = known.registry.alive("a")
    flood = {
        f"x{number}/n1/{honest}": target.model_copy(update={"job": f"x{number}"}).model_dump_json()
        for number in range(10_000)
    }
    with caplog.at_level(logging.WARNING):
        await known.registry.refresh(flood | {f"a/n1/{honest}": target.model_dump_json()})
    assert known.registry.jobs() == ("a",)
    assert len(known.registry.refused) < MAX_TARGETS
    assert len(caplog.records) < 20
    assert len(known.registry.complaints()) < 20


async def test_ten_thousand_dead_ones_are_told_of_bit_by_bit(known: Known, start: Start) -> None:
    """Each costs a look at the device; what a node has to tell at once is bounded."""
    pid = start(pass_fds=shows("a"))
    await known.claim(pid)
    (target,) = known.registry.alive("a")
    flood = {
        f"x{number}/n1/{pid}": target.model_copy(update={"job": f"x{number}", "start": 1}).model_dump_json()
        for number in range(4000)
    }
    await known.registry.refresh(flood)
    assert len(known.registry.ended) == MAX_ENDED
    known.registry.ended.clear()  # the group has heard
    await known.registry.refresh(flood)
    assert len(known.registry.ended) == MAX_ENDED
    assert known.registry.jobs() == ("a",)
