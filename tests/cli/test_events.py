"""Events: from the scripts' entries to typed values, and on to what `timeslice events` prints."""

from __future__ import annotations

import itertools
import json
import re
import select
import signal
from importlib import resources

import pytest
from pydantic import ValidationError

from tests.cli.conftest import Cli, World, eventually
from timeslice.events import KINDS, Event, LeaseGranted, NodeJoined, StepFailed, UnknownEvent, decode
from timeslice.locks import scripts


def emitted() -> set[str]:
    """The kinds that the Lua scripts write."""
    folder = resources.files("timeslice.locks") / "lua"
    files = [*folder.iterdir(), *(folder / "include").iterdir()]
    source = "\n".join(each.read_text() for each in files if each.name.endswith(".lua"))
    found = set(re.findall(r"\b(?:emit|end_lease|end_unused)\('(\w+)'", source))
    table = re.search(r"local EVENTS = \{(.*?)\}", source)
    assert table
    return found | set(re.findall(r"'(\w+)'", table[1]))


def test_every_kind_that_a_script_writes_is_known_and_no_other() -> None:
    """The table of events and the Lua sources name the same kinds."""
    assert emitted() == set(KINDS)


def test_the_table_names_each_class_as_the_stream_does() -> None:
    """A class is found under its own name."""
    assert {name: kind.__name__ for name, kind in KINDS.items()} == {name: name for name in KINDS}


def test_a_real_history_is_understood_to_the_last_field(world: World) -> None:
    """Grants, swaps, faults and reports of a real group decode without loss: no unknown kind, no dropped field."""
    world.serve("trainers")
    world.swap("trainers", out="a", into="b")
    keys = world.keys.group("trainers")
    view = world.driver.view(keys)
    world.driver.run(
        scripts.ack(
            keys, "node-1", view.swap, "c2", [scripts.Observed("a", "suspended", 5)], outcome="failed", kind="busy"
        )
    )
    world.driver.run(scripts.settle(keys, view.swap, view.epoch, "busy", 1000))
    world.driver.run(scripts.pause(keys, True, "me@here"))
    world.driver.run(scripts.configure(keys, {"order": "1"}))
    world.driver.run(scripts.cancel(keys, "w-b", by="me@here"))
    world.unheld("trainers", "c")
    world.driver.run(scripts.drain(keys, "node-1", True, "me@here", "new disk"))
    world.driver.client.zadd(keys.nodes, {"node-1": 1})
    world.driver.run(scripts.forget(keys, "node-1", "tester", "gone", lose=["a", "b", "c"]))
    kinds = set()
    for entry_id, fields in world.entries(keys.events):
        event = decode("trainers", entry_id, fields)
        assert not isinstance(event, UnknownEvent), fields
        own = set(fields) - {"v", "type", "at_ms"}
        assert own == {name for name, value in event.details().items() if name in own}
        assert {name: str(value) for name, value in event.details().items() if name in own} == {
            name: fields[name] for name in own
        }
        kinds.add(event.name)
    assert kinds >= {"NodeJoined", "LeaseGranted", "WaiterQueued", "LeaseYielded", "SwapStarted", "SwapPlanned"}
    assert kinds >= {"JobSuspended", "StepFailed", "SwapDeferred", "JobUnheld", "WaiterCancelled", "NodeLeft"}


def test_values_have_their_types() -> None:
    """Numbers are numbers, and the name says what happened."""
    fields = {"v": "1", "type": "LeaseGranted", "at_ms": "7", "job": "a", "waiter": "w", "token": "9", "waited_ms": "3"}
    event = decode("trainers", "7-0", fields)
    assert event == LeaseGranted(id="7-0", group="trainers", at_ms=7, job="a", waiter="w", token=9, waited_ms=3)
    assert decode("g", "1-0", {"v": "1", "type": "StepFailed", "at_ms": "1", "node": "n", "swap": "2", "kind": "busy"})
    assert event.name == "LeaseGranted"


def test_a_fault_keeps_its_kind() -> None:
    """The kind of a fault does not get mixed up with the kind of event."""
    fields = {"v": "1", "type": "StepFailed", "at_ms": "1", "node": "n", "swap": "2", "kind": "busy", "error": "x"}
    event = decode("g", "1-0", fields)
    assert isinstance(event, StepFailed)
    assert (event.name, event.kind) == ("StepFailed", "busy")


@pytest.mark.parametrize(
    "fields",
    [
        {"v": "1", "type": "JobTeleported", "at_ms": "5", "job": "a"},
        {"v": "2", "type": "NodeJoined", "at_ms": "5", "node": "n"},
        {"v": "1", "type": "NodeJoined", "at_ms": "5"},
        {"v": "1", "type": "LeaseGranted", "at_ms": "5", "job": "a", "waiter": "w", "token": "many"},
        {"type": "decode"},
        {"v": "1", "type": "__class__"},
        {},
    ],
    ids=["kind", "version", "missing", "malformed", "unversioned", "python", "empty"],
)
def test_what_can_not_be_read_is_kept_as_it_is(fields: dict[str, str]) -> None:
    """Unknown kinds, other versions and broken entries never raise and never lose a field."""
    event = decode("g", "5-0", fields)
    assert isinstance(event, UnknownEvent)
    assert event.fields == fields
    assert event.at_ms == 5
    assert event.name == fields.get("type", "")


def test_a_field_of_a_newer_script_loses_nothing() -> None:
    """Extra fields are ignored, not fatal."""
    event = decode("g", "5-0", {"v": "1", "type": "NodeJoined", "at_ms": "5", "node": "n", "mood": "good"})
    assert event == NodeJoined(id="5-0", group="g", at_ms=5, node="n")


def test_events_are_values() -> None:
    """They can't be changed, and their fields are named."""
    event = NodeJoined(id="5-0", group="g", at_ms=5, node="n")
    with pytest.raises(ValidationError, match="frozen"):
        event.node = "m"
    assert isinstance(event, Event)


def test_events_of_all_groups_come_in_the_order_of_time(cli: Cli, world: World) -> None:
    """`events` merges the groups; --last counts for each group; with a name only that group's."""
    for group, job in (("one", "a"), ("two", "b"), ("one", "c")):
        world.acquire(group, job, lock_only=True)
        stamp = world.now_ms()
        eventually(lambda: world.now_ms() > stamp)  # noqa: B023 - equal stamps have no order
    told = [json.loads(line) for line in cli("events", "--json").stdout.splitlines()]
    assert [(each["group"], each["event"], each["job"]) for each in told] == [
        ("one", "LeaseGranted", "a"),
        ("two", "LeaseGranted", "b"),
        ("one", "WaiterQueued", "c"),
    ]
    assert all(each["schema"] == 1 for each in told)
    assert len(cli("events", "--last", "1").stdout.splitlines()) == 2
    assert len(cli("events", "one", "--last", "0").stdout.splitlines()) == 0


def test_an_unknown_event_is_printed_with_its_fields(cli: Cli, world: World) -> None:
    """Whoever looks sees also what this version can't read."""
    world.hold_lock_only("one", "a")
    world.driver.client.xadd(world.keys.group("one").events, {"v": "9", "type": "JobTeleported", "job": "a"})
    told = json.loads(cli("events", "--json").stdout.splitlines()[-1])
    assert told["event"] == "JobTeleported"
    assert told["fields"] == {"v": "9", "type": "JobTeleported", "job": "a"}
    assert "JobTeleported" in cli("events").stdout


def test_following_prints_what_happens_and_ends_by_an_interrupt(cli: Cli, world: World) -> None:
    """--follow shows new events, also of groups that come into being meanwhile, and Ctrl-C is a normal end."""
    world.hold_lock_only("one", "a")
    process = cli.start("events", "--follow", "--last", "0", "--json")
    assert process.stdout is not None
    reader = process.stdout
    numbers = itertools.count()

    def provoke() -> bool:
        # The follower's first look is not to be seen from here: repeat until it speaks.
        world.acquire("two", f"b{next(numbers)}", lock_only=True)
        return bool(select.select([reader], [], [], 0.2)[0])

    eventually(provoke)
    assert json.loads(reader.readline())["group"] == "two"
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0


def test_more_old_events_than_there_can_be_is_a_usage_error(cli: Cli) -> None:
    """Not an error of the server."""
    assert cli("events", "--last", "9" * 23).exit_code == 2
