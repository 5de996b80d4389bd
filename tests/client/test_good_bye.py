"""What closes is closed: nothing that was under way brings a registration back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

import timeslice
from tests.client.world import World
from timeslice.client import server, workload
from timeslice.client.identity import registrations
from timeslice.client.registration import Registration
from timeslice.models import Target


def _nothing(*_: Any) -> None:
    pass


MAKE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "workload": (
        lambda: timeslice.register_workload("g", on_suspend=_nothing, on_restore=_nothing, job="a"),
        lambda made: made._driver,
        "retry",  # its look at the stream, before it repeats what it declared
    ),
    "server": (
        lambda: timeslice.register_server("g", "http://127.0.0.1:1", dialect="vllm", job="a"),
        lambda made: made,
        "_register",
    ),
}


@pytest.mark.parametrize("kind", MAKE)
def test_a_repeated_registration_does_not_come_after_the_good_bye(
    kind: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that repeats it is slow to send, and goes on while `close` is under way: the channel is gone all the
    same, or the agent would ask nobody until its deadline."""
    world.serve("g")
    for module in (workload, server):
        monkeypatch.setattr(module, "REFRESH_S", 0.2)
    make, place, name = MAKE[kind]
    made = make()
    sends, closes = threading.Event(), threading.Event()
    owner = place(made)
    original = getattr(owner, name)

    def stop_before(*what: Any, **how: Any) -> Any:
        if threading.current_thread() is made._thread:
            sends.set()
            assert closes.wait(20)
        return original(*what, **how)

    monkeypatch.setattr(owner, name, stop_before)
    assert sends.wait(20)
    closing = threading.Thread(target=made.close)
    closing.start()
    closing.join(0.5)  # as far as it comes meanwhile
    closes.set()
    closing.join(20)
    made._thread.join(20)
    (record,) = world.view().targets.values()
    assert Target.model_validate_json(record).channel == ""


@pytest.mark.parametrize("kind", ["workload", "server", "server with a process"])
def test_ctrl_c_while_it_registers_leaves_nothing(kind: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook, which goes on: it may be registered again, and no hold tells of what nobody can close."""
    world.serve("g")

    def make() -> Any:
        if kind == "workload":
            return MAKE[kind][0]()
        pid = os.getpid() if "process" in kind else None
        return timeslice.register_server("g", "http://127.0.0.1:1", dialect="vllm", job="a", pid=pid)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Registration, "_register", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make()
    told = [target.endpoints or target.channel for target in targets_told(world)]
    assert told == [""]
    made = make()
    assert any(target.endpoints or target.channel for target in targets_told(world))
    made.close()


def targets_told(world: World) -> list[Target]:
    """What a hold of this process tells of it, and of what is beside it."""
    return [Target.model_validate_json(str(call.args[-1])) for call in registrations(world.group(), "a", "n1", 0)]
