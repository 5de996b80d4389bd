"""Random and hostile content in every key: readers ignore it or say so; no daemon ends, no terminal is steered."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pty
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.agent.rig import Rig, until
from tests.locks.lab import Lab, start_swap
from timeslice import events
from timeslice.coordinator.service import CoordinatorOptions, run_coordinator
from timeslice.embedded import EmbeddedServer
from timeslice.errors import RefusedError, TimeSliceError
from timeslice.locks import scripts
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import GroupKeys, Keys
from timeslice.locks.scripts import Request
from timeslice.locks.view import look
from timeslice.logs import set_up

TIMESLICE = str(Path(sys.executable).with_name("timeslice"))
STEERING = "\x1b]0;owned\x07\x1b[2J\r\nforged\u202e"

# Bytes that look like what stands there, and bytes that do not.
VALUES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [b"", b"-1", b"inf", b"nan", b"1e400", b"9" * 5000, b"\xff\xfe", "\u00b2".encode(), b"0x10", b"1 2"]
    ),
    st.integers(-(2**70), 2**70).map(lambda number: str(number).encode()),
    st.sampled_from([STEERING.encode(), b"[" * 3000, b'{"a":', b"served", b"lock", b"n1", b"a"]),
)
STATE = (
    *("mode", "phase", "reason", "since_ms", "clock_ms", "counter", "seq", "lease_id", "job", "token", "granted_at_ms"),
    *("deadline_ms", "confirmed", "host", "pid", "start", "lease_ms", "renewed_at_ms", "swap_id", "swap_waiter"),
    *(
        "swap_job",
        "swap_step",
        "plan",
        "owner",
        "owner_epoch",
        "owner_deadline_ms",
        "evict",
        "unheard",
        "quiet_until_ms",
    ),
    *("gang", "point_token", "max_point", "yield_at"),
)
GANG = [
    b"w/world",
    b"w/name",
    b"w/arrived",
    b"w/left",
    b"w/score",
    b"w/party/0",
    b"w/party/1",
    b"w/gang",
    b"@g.a.2",
    b"w/0",
]
NAMES = st.sampled_from([b"a", b"b1", b"n1", b"@", STEERING.encode(), b"\xff", b"x" * 400])
FIELDS = st.one_of(
    st.builds(lambda *parts: b"/".join(parts), NAMES, NAMES, st.sampled_from([b"state", b"residency", b"token", b"1"])),
    st.sampled_from(GANG),
)


def plant(lab: Lab, kind: str, field: bytes, value: bytes) -> None:
    """Put something into one of the group's keys."""
    redis, group = lab.redis, lab.group
    match kind:
        case "state":
            redis.hset(group.state, field, value)
        case "jobs" | "members" | "waiters" | "targets" | "config":
            redis.hset(getattr(group, kind), field, value)
        case "queue" | "alive" | "ended" | "nodes":
            redis.zadd(getattr(group, kind), {field: len(value) * 1e17 if value[:1] == b"-" else float("-inf")})
        case _:
            redis.xadd(getattr(group, kind), {field: value, b"type": value, b"kind": b"grant", b"v": b"1"})


PLANTED = st.lists(
    st.one_of(
        st.tuples(st.just("state"), st.sampled_from([name.encode() for name in STATE]), VALUES),
        st.tuples(
            st.sampled_from(
                ["jobs", "members", "waiters", "targets", "queue", "alive", "ended", "nodes", "inbox", "events"]
            ),
            FIELDS,
            VALUES,
        ),
    ),
    min_size=1,
    max_size=8,
)


def calls(group: GroupKeys) -> Iterator[scripts.Call[Any]]:
    """One of each verb that clients, agents and coordinators send."""
    request = Request("w", "a", "n1", 1, 1)
    yield look(group)
    yield scripts.acquire(group, request)
    yield scripts.renew(group, request, 7)
    rank = replace(request, party=scripts.Party("g", 0, 2))
    yield scripts.join(group, rank)
    yield scripts.join(group, replace(rank, waiter="v"), gang="w")
    yield scripts.renew(group, rank, 7)
    yield scripts.gang_point(group, "w", 0, 1, 0)
    yield scripts.yield_(group, "w", 7, rank=0)
    yield scripts.register(group, "a", "n1", 1, "{}")
    yield scripts.heartbeat(group, "n1", 15_000, vouch="w")
    yield scripts.report(group, "n1", 1, [scripts.Observed("a", "resident", 1, 1)], [scripts.Exited("a", 1, 1)])
    yield scripts.own(group, "c1")
    yield scripts.plan(group, 1, 1, "{}", 1000)
    yield scripts.accepted(group, "n1", 1, 1, "prepare", "c")
    yield scripts.ack(group, "n1", 1, "c", [scripts.Observed("a", "suspended", 1, 1)], outcome="done")
    yield scripts.step(group, 1, 1, "prepare", "commit", 1000)
    yield scripts.poke(group, 1, 1)
    yield scripts.promote(group, 1, 1, "restored")
    yield scripts.settle(group, 1, 1, "x", 1000)
    yield scripts.pause(group, True, "me")
    yield scripts.pause(group, False, "me")
    yield scripts.yield_(group, "w", None)
    yield scripts.cancel(group, "w")
    yield scripts.leave(group, "n1")
    yield scripts.delete(group)


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(planted=PLANTED, swapping=st.booleans())
def test_every_verb_answers_or_refuses_whatever_stands_in_the_group(
    server: EmbeddedServer, planted: list[tuple[str, bytes, bytes]], swapping: bool
) -> None:
    """An error is one of ours, in words; nothing else comes out of a parser."""
    lab = Lab(server.url)
    driver = SyncDriver(server.url)
    try:
        if swapping:
            start_swap(lab)
        for kind, field, value in planted:
            plant(lab, kind, field, value)
        for call in calls(lab.group):
            with suppress(TimeSliceError):
                driver.run(call, deadline_s=0.1)
    finally:
        lab.lose_everything()
        driver.close()
        lab.redis.close()


def test_a_registration_that_is_too_much_is_refused_and_never_handed_out(server: EmbeddedServer, prefix: str) -> None:
    """The script bounds each record and their number; one that was written past the script is shown to nobody."""
    lab = Lab(server.url, prefix)
    lab.join("n1")
    with pytest.raises(RefusedError, match="too long"):
        lab.run(scripts.register(lab.group, "a", "n1", 1, "x" * 9000))
    lab.redis.hset(lab.group.targets, "a/n1/1", "x" * 9000)
    lab.redis.hset(lab.group.targets, "a" * 300 + "/n1/1", "{}")
    assert lab.view.targets == {}
    lab.redis.hset(lab.group.targets, mapping={f"a{number}/n1/{number}": "{}" for number in range(10_000)})
    with pytest.raises(RefusedError, match="10000 processes are registered already"):
        lab.run(scripts.register(lab.group, "b", "n1", 1, "{}"))
    assert lab.run(scripts.register(lab.group, "a7", "n1", 7, '{"more": 1}'))
    assert len(lab.view.targets) <= 10_000
    lab.redis.close()


EVENT_NAMES = st.text(max_size=8) | st.sampled_from(["type", "v", "at_ms", "job", "token"])
EVENT_VALUES = st.text(max_size=30) | st.sampled_from(["1", "9" * 5000, "LeaseGranted", "\u00b2"])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    fields=st.dictionaries(EVENT_NAMES, EVENT_VALUES, max_size=90),
    entry_id=st.sampled_from(["1-0", f"{2**64 - 1}-0", "x", ""]),
)
def test_any_event_can_be_shown(fields: dict[str, str], entry_id: str) -> None:
    """What is no event of ours is an unknown one, of bounded size."""
    found = events.decode("g", entry_id, fields)
    assert 0 <= found.at_ms <= 10**14
    assert len(found.model_dump_json()) < 2_000_000


SPOILT = {
    "state": ("set", "x"),
    "queue": ("hset", "a", "b"),
    "targets": ("set", "x"),
    "events": ("set", "x"),
    "members": ("sadd", "x"),
}


def spoil(rig: Rig) -> list[tuple[Any, ...]]:
    """Commands that put something of the wrong type, or hostile words, into another group's keys."""
    theirs = rig.keys.group("theirs")
    wrong = [(verb, getattr(theirs, kind), *rest) for kind, (verb, *rest) in SPOILT.items()]
    names = [("sadd", rig.keys.groups, "theirs", STEERING, "a b", "x" * 300), ("sadd", rig.keys.nodes, STEERING)]
    record = (
        "hset",
        rig.keys.node_state("n9"),
        "emulated",
        "[" * 5000,
        "heartbeat_at_ms",
        "\u00b2",
        "memory",
        STEERING,
    )
    return [*wrong, *names, ("sadd", rig.keys.nodes, "n9"), record]


async def test_a_spoilt_group_stops_no_daemon_and_no_other_group(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """One tenant fills its own keys with rubbish, and the indexes: another's swap goes through all the same."""
    stop = asyncio.Event()
    coordinator = asyncio.create_task(
        run_coordinator(CoordinatorOptions(url=rig.url, prefix=rig.prefix, lease_ms=1500), stop=stop)
    )
    try:
        for verb, *words in spoil(rig):
            await rig.driver.client.execute_command(verb, *words)  # type: ignore[no-untyped-call]
        async with rig.agent():
            await rig.driver.client.hset(rig.group.targets, "x/n1/\xff".encode("latin-1"), b"\xff" * 9000)
            await rig.driver.client.xadd(rig.keys.commands(rig.node), {"body": b"\xff{" * 200_000})
            await rig.driver.client.xadd(rig.keys.commands(rig.node), {b"\xff": STEERING})
            await rig.job("a", 600)
            await rig.job("b", 500)
            await rig.acquire("a")
            await rig.acquire("b")
            await rig.yield_("a")

            async def granted() -> bool:
                return (await rig.view()).holder == "b"

            await until(granted, "the swap of the healthy group")
            assert not coordinator.done()
    finally:
        stop.set()
        await coordinator
    assert caplog.text.count("theirs: left alone") == 1


LOOKS = [
    *([each] for each in ("status", "events", "jobs", "nodes", "groups", "doctor")),
    ["queue", "g"],
    ["status", "g"],
]


@pytest.mark.parametrize("command", LOOKS, ids=" ".join)
def test_nothing_hostile_reaches_a_terminal(server: EmbeddedServer, prefix: str, command: list[str]) -> None:
    """Names, labels, reasons, events and records of strangers are shown on a real terminal without what steers it."""
    lab = Lab(server.url, prefix)
    lab.redis.sadd(Keys(prefix).groups, "g", "bad", STEERING)
    lab.redis.sadd(Keys(prefix).nodes, "n1", STEERING)
    lab.join("n1")
    lab.ask("w1", "a", served=True, label=STEERING)
    lab.ask("w2", "b", served=True, label=STEERING)
    lab.plant(reason=STEERING, plan=STEERING, owner=STEERING, paused=STEERING)
    for kind, field in (("members", f"n1/{STEERING}/state"), ("members", "n1/@/error"), ("members", "n1/a/backend"),
                        ("jobs", f"{STEERING}/residency"), ("jobs", "a/residency")):  # fmt: skip
        lab.redis.hset(getattr(lab.group, kind), field, STEERING)
    lab.redis.hset(lab.group.members, "n1/@/step", "failed")
    lab.redis.xadd(lab.group.events, {"type": STEERING, "v": "1", STEERING: STEERING})
    record: dict[Any, Any] = {"version": STEERING, "complaints": json.dumps({"g": [STEERING]}), "emulated": "[" * 5000}
    lab.redis.hset(Keys(prefix).node_state("n1"), mapping=record)
    lab.redis.set(Keys(prefix).group("bad").state, STEERING)
    shown, code = on_a_terminal([TIMESLICE, "--url", server.url, "--prefix", prefix, *command])
    assert code in {0, 1}, shown
    assert "Traceback" not in shown
    for each in ("\x1b]", "\x1b[2J", "\x07", "\u202e", "\nforged"):
        assert each not in shown, shown
    lab.lose_everything()
    lab.redis.close()


def on_a_terminal(command: list[str]) -> tuple[str, int]:
    """What a command shows on a terminal, and its exit code."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True)
    os.close(theirs)
    shown = b""
    try:
        while select.select([ours], [], [], 60)[0]:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # the last writer has gone
                break
            if not piece:
                break
            shown += piece
    finally:
        os.close(ours)
    return shown.decode(errors="replace").replace("\r\n", "\n"), process.wait(60)


def test_a_log_line_can_not_be_forged(capsys: pytest.CaptureFixture[str]) -> None:
    """What strangers wrote is written out where it could steer a terminal or look like another record."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        set_up(level="debug")
        logging.getLogger("timeslice").warning("job %s", STEERING)
        logging.getLogger("timeslice").error("failed", exc_info=ValueError(STEERING))
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    lines = capsys.readouterr().err.split("\n")
    assert all(line.isprintable() for line in lines)
    starts = [line for line in lines if line and not line.startswith("  ")]
    assert len(starts) == 2
