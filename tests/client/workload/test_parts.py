"""Tags and slots: what is out is known by part, and nothing is asked for that was not registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.client.workload.conftest import Agent
from tests.client.world import World
from timeslice.client.callbacks import Callbacks, Moved, State
from timeslice.client.workload import Workload, register_workload
from timeslice.errors import UsageError
from timeslice.models import Residency

Part = tuple[str, ...]
OUT, IN = Residency.SUSPENDED, Residency.RESIDENT


class Adapters:
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.result: Any = 10

    def suspend(self, mode: str, tags: tuple[str, ...], slot: str) -> Any:
        self.calls.append((mode, tags, slot))
        return self.result

    def restore(self, tags: tuple[str, ...], slot: str) -> Any:
        self.calls.append((tags, slot))
        return self.result


@pytest.fixture
def adapters() -> Adapters:
    return Adapters()


@pytest.fixture
def state(adapters: Adapters) -> State:
    return State(
        Callbacks(
            on_suspend=adapters.suspend,
            on_restore=adapters.restore,
            modes=("offload", "discard"),
            tags=("base", "adapter"),
            slots=("red", "blue"),
        )
    )


def test_slots_are_out_one_by_one(state: State, adapters: Adapters) -> None:
    """One that is out is not asked for again, its neighbour is; the job can't run before the last is back."""
    state.suspend("offload", ("adapter",), "red")
    state.suspend("offload", ("adapter",), "red")
    state.suspend("offload", ("adapter",), "blue")
    state.restore(("adapter",), "red")
    state.restore(("adapter",), "red")
    assert state.look().state is OUT
    state.restore((), "")
    assert state.look().state is IN
    assert adapters.calls == [
        ("offload", ("adapter",), "red"),
        ("offload", ("adapter",), "blue"),
        (("adapter",), "red"),
        ((), ""),
    ]


def test_the_whole_leaves_when_a_part_of_it_had(state: State, adapters: Adapters) -> None:
    """That one slot is out does not mean that all is."""
    state.suspend("offload", (), "red")
    state.suspend("offload", ())
    state.suspend("offload", ("base",), "blue")
    assert adapters.calls == [("offload", (), "red"), ("offload", (), "")]


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda state: state.suspend("offload", ("kv",)), "tags kv .*registered: base, adapter"),
        (lambda state: state.suspend("offload", (), "green"), "slots green .*registered: red, blue"),
        (lambda state: state.restore(("adapter",), "green"), "slots green"),
    ],
)
def test_what_was_not_registered_is_refused(
    state: State, adapters: Adapters, ask: Callable[[State], Any], words: str
) -> None:
    """Whoever sends it; no callback is called."""
    with pytest.raises(UsageError, match=words):
        ask(state)
    assert adapters.calls == []


def test_bytes_are_counted_by_what_was_moved_and_saved(state: State, adapters: Adapters) -> None:
    """Of a workload without a probe: saved bytes left the device as well, dropped ones are nowhere."""
    adapters.result = Moved(bytes=30, saved=70)
    assert state.suspend("offload", ()) == adapters.result
    assert (state.look().device_bytes, state.look().host_bytes) == (0, 100)
    adapters.result = 100
    state.restore(())
    assert (state.look().device_bytes, state.look().host_bytes) == (100, 0)
    adapters.result = Moved(bytes=10, saved=30)
    state.suspend("discard", ("base",))
    assert (state.look().device_bytes, state.look().host_bytes) == (60, 0)


@pytest.mark.parametrize("seen", [IN, OUT])
def test_a_probe_does_not_make_a_part_the_whole(seen: Residency) -> None:
    """Suspended is said as soon as a part is out; the rest is still asked for. Resident says that all is back."""
    calls: list[Part] = []
    state = State(
        Callbacks(
            on_suspend=lambda _mode, tags: calls.append(tags),
            on_restore=calls.append,
            probe=lambda: (seen if calls else IN, 0, 0),
            tags=("weights", "kv"),
        )
    )
    state.suspend("offload", ("kv",))
    state.suspend("offload", ("kv",))
    assert calls == ([("kv",)] if seen is OUT else [("kv",), ("kv",)])
    state.suspend("offload", ())
    assert calls[-1] == ()


def test_slots_parts_and_savings_travel(world: World, adapters: Adapters, started: list[Workload], prefix: str) -> None:
    """From the registration to the callback, and from the callback to the answer."""
    world.serve("g")
    adapters.result = Moved(bytes=3, saved=4)
    made = register_workload(
        "g",
        on_suspend=adapters.suspend,
        on_restore=adapters.restore,
        probe=lambda: ("suspended", 5, 6, {"base": 5}),
        job="a",
        tags=("base",),
        slots=("red",),
    )
    started.append(made)
    assert (made.target.tags, made.target.slots) == (("base",), ("red",))
    adapters.calls.clear()
    answer = Agent(world.redis, prefix, made.target).ask("1", "restore", tags=("base",), slot="red")
    assert adapters.calls == [(("base",), "red")]
    assert (answer.moved_bytes, answer.saved_bytes, answer.parts) == (3, 4, {"base": 5})
    refused = Agent(world.redis, prefix, made.target).ask("2", "restore", slot="blue")
    assert (refused.ok, "slots blue" in refused.error) == (False, True)


def test_a_name_that_no_tag_can_have_is_refused(world: World, adapters: Adapters) -> None:
    """At registration: an agent would take the whole registration for invalid."""
    with pytest.raises(UsageError, match="slots"):
        register_workload("g", on_suspend=adapters.suspend, on_restore=adapters.restore, job="a", slots=("x" * 1000,))
