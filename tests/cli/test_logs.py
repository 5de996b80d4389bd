"""Logging of the daemons: readable, parseable, and never with a password."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from timeslice import logs


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Give pytest its own logging back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def written(*, as_json: bool, level: str = "info") -> str:
    """What a daemon's typical messages look like."""
    stream = io.StringIO()
    logs.set_up(as_json=as_json, level=level, stream=stream)
    log = logging.getLogger("timeslice.test")
    log.debug("hidden")
    log.info("talking to %s", "redis://user:geheim@host:6379", extra={"group": "trainers"})
    try:
        int("rediss://:geheim@host")  # its error quotes the text
    except ValueError:
        log.exception("it failed")
    return stream.getvalue()


@pytest.mark.parametrize("as_json", [False, True])
def test_passwords_never_reach_the_log(as_json: bool) -> None:
    """Not in messages, not in exceptions, in neither form."""
    text = written(as_json=as_json)
    assert "geheim" not in text
    assert "redis://user:***@host:6379" in text


def test_plain_lines_name_time_level_and_place() -> None:
    """One line a record, with what was passed as extra."""
    first = written(as_json=False).splitlines()[0]
    assert first.endswith("Z info    timeslice.test: talking to redis://user:***@host:6379 group=trainers")


def test_json_lines_parse_one_by_one() -> None:
    """--log-json gives one object a line, exceptions inside."""
    records = [json.loads(line) for line in written(as_json=True).splitlines()]
    assert [each["level"] for each in records] == ["info", "error"]
    assert records[0]["group"] == "trainers"
    assert "ValueError" in records[1]["error"]


def test_the_level_is_a_threshold() -> None:
    """What is below it is not written."""
    assert "hidden" not in written(as_json=True)
    assert "talking" not in written(as_json=True, level="error")
    assert "hidden" in written(as_json=True, level="debug")
