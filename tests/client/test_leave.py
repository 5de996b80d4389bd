"""What a hold says of the job's state, as its process's registration carries it to the agents."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest

import timeslice
from tests.client.faces import Face
from tests.client.test_hold import got
from tests.client.world import World
from tests.support.jobs import wait_until
from timeslice import Leave
from timeslice.client.identity import LEAVE_VARIABLE, leaves_written, overlaid
from timeslice.errors import InvalidNameError, UsageError
from timeslice.models import Mode, Target

BOTH: tuple[Mode, ...] = ("offload", "discard")


def _leave(world: World, job: str) -> Leave:
    """As this process is registered for the job."""
    return Target.model_validate_json(world.view().targets[f"{job}/n1/{os.getpid()}"]).leave


def _ignore(_: Any) -> None:
    pass


def _commands_of(world: World, observer: Any, prefix: str, work: Any) -> int:
    """How many commands about the group the server gets during ``work``."""
    with observer.monitor() as monitor:
        work()
        world.redis.echo("all is done")
        seen = 0
        for entry in monitor.listen():
            if "all is done" in entry["command"]:
                return seen
            seen += f"{prefix}:{{g}}:" in entry["command"] and entry["client_type"] != "lua"
    raise AssertionError


def test_a_hold_says_what_leaves_after_it(face: Face, world: World) -> None:
    """G21: what the hold asks for is registered before its body runs; a hold that says nothing takes it back."""
    world.serve("g")
    client = face.client(job="j")
    seen: list[Leave] = []

    def look(_: Any) -> None:
        seen.append(_leave(world, "j"))

    got(face.hold(client, "g", body=look, mode="discard", tags=["kv_cache", "kv_cache"], slot="a"))
    assert _leave(world, "j") == Leave(mode="discard", tags=("kv_cache",), slot="a")
    got(face.hold(client, "g", body=look))
    assert seen == [Leave(mode="discard", tags=("kv_cache",), slot="a"), Leave()]


def test_the_same_word_again_costs_nothing(face: Face, world: World, observer: Any, prefix: str) -> None:
    """A hold alone is one round trip to get in and one to get out; one more only when it says something new."""
    world.serve("g")
    client = face.client(job="k")

    def hold(**leave: Any) -> int:
        return _commands_of(world, observer, prefix, lambda: got(face.hold(client, "g", body=_ignore, **leave)))

    got(face.hold(client, "g", body=_ignore))
    assert [hold(), hold(mode="discard"), hold(mode="discard"), hold(), hold()] == [2, 3, 2, 3, 2]


def test_another_client_of_the_process_knows_what_was_told(face: Face, world: World) -> None:
    """The registration is the process's: what one client's hold said, the silent hold of another takes back."""
    world.serve("g")
    got(face.hold(face.client(job="l"), "g", body=_ignore, mode="discard"))
    got(face.hold(face.client(job="l"), "g", body=_ignore))
    assert _leave(world, "l") == Leave()


def test_a_hold_goes_before_what_the_workload_registered(face: Face, world: World) -> None:
    """And what it does not say is as the workload has it; without a word of the hold all is."""
    world.serve("g")
    default = Leave(mode="discard", tags=("kv_cache",))
    workload = timeslice.register_workload(
        "g", on_suspend=_ignore, on_restore=_ignore, job="m", modes=BOTH, tags=("kv_cache", "lora"), leave=default
    )
    try:
        client = face.client(job="m")
        got(face.hold(client, "g", body=_ignore))
        assert _leave(world, "m") == default
        got(face.hold(client, "g", body=_ignore, tags=("lora",)))
        assert _leave(world, "m") == Leave(mode="discard", tags=("lora",))
        got(face.hold(client, "g", body=_ignore))
        assert _leave(world, "m") == default
    finally:
        workload.close()


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"tags": ("lorra",)}, "it knows no tag lorra; it registered: kv_cache, lora"),
        ({"tags": ("lora",), "slot": "c"}, "it knows no slot c; it registered: a, b"),
        ({"mode": "discard"}, "it can't discard; it registered: offload"),
    ],
)
def test_a_hold_that_asks_for_what_is_not_registered_is_refused(
    face: Face, world: World, asked: dict[str, Any], why: str
) -> None:
    """Before it waits: the agent would refuse that, and the next job would wait for ever for another one's typing
    error. The same words are the workload's own mistake when it registers with them."""
    world.serve("g")
    able: dict[str, Any] = {"tags": ("kv_cache", "lora"), "slots": ("a", "b")}
    workload = timeslice.register_workload("g", on_suspend=_ignore, on_restore=_ignore, job="t", **able)
    try:
        client = face.client(job="t")
        with pytest.raises(UsageError, match=why):
            got(face.hold(client, "g", body=_ignore, **asked))
        got(face.hold(client, "g", body=_ignore, tags=("lora",), slot="a"))
    finally:
        workload.close()
    with pytest.raises(UsageError, match=f"can't leave as leave= says: {why}"):
        timeslice.register_workload(
            "g", on_suspend=_ignore, on_restore=_ignore, job="t", **able, leave=Leave.model_validate(asked)
        )


@pytest.mark.parametrize("given", ["modes", "tags", "slots"])
def test_a_word_is_no_list_of_names(given: str) -> None:
    """Its letters would be taken for names."""
    asked: dict[str, Any] = {given: "lora"}
    with pytest.raises(UsageError, match=f"{given}='lora': give a list of names"):
        timeslice.register_workload("g", on_suspend=_ignore, on_restore=_ignore, **asked)


def test_servers_can_not_be_asked_for_what_they_did_not_register(face: Face, world: World) -> None:
    """G21: neither by their registration nor by a hold, whether they have a process here or it stands in for them."""
    world.serve("g")
    with pytest.raises(UsageError, match="can't leave as mode= says: it can't discard; it registered: offload"):
        timeslice.register_server("g", "http://127.0.0.1:1", dialect="vllm", job="u", mode="discard")
    engine = subprocess.Popen(["sleep", "600"])
    try:
        for pid, who in ((engine.pid, f"the server of process {engine.pid}"), (None, "the workload of this process")):
            server = timeslice.register_server("g", "http://127.0.0.1:1", dialect="vllm", job="u", pid=pid)
            with pytest.raises(UsageError, match=f"{who} can't leave so: it knows no tag lora"):
                got(face.hold(face.client(job="u"), "g", body=_ignore, tags=("lora",)))
            server.close()
    finally:
        engine.kill()
        engine.wait()


def test_servers_beside_a_holder_leave_as_its_hold_says(face: Face, world: World) -> None:
    """The holder talks for the servers whose state it uses, whether they have a process here or it stands in for them;
    and what they repeat is not the older word."""
    world.serve("g")
    shown = {"TIMESLICE_JOB": "o", "TIMESLICE_GROUPS": "g"}
    engine = subprocess.Popen(["sleep", "600"], env={**os.environ, **shown})
    servers = [
        timeslice.register_server("g", "http://127.0.0.1:1", dialect="vllm", job="o", modes=BOTH, pid=engine.pid),
        timeslice.register_server("g", "http://127.0.0.1:2", dialect="vllm", job="o", modes=BOTH),
    ]
    try:
        asked = Leave(mode="discard", tags=("kv_cache",))
        got(face.hold(face.client(job="o"), "g", body=_ignore, mode="discard", tags=("kv_cache",)))
        for pid in (os.getpid(), engine.pid):
            record = Target.model_validate_json(world.view().targets[f"o/n1/{pid}"])
            assert (record.leave, len(record.endpoints)) == (asked, 1)
        before = dict(world.view().targets)
        world.redis.delete(world.group().targets)
        wait_until(lambda: world.view().targets == before, "the servers are registered again")
    finally:
        for server in servers:
            server.close()
        engine.kill()
        engine.wait()


def test_a_process_inside_of_a_hold_inherits_its_word(
    face: Face, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`timeslice hold GROUP --mode ... -- COMMAND`: COMMAND's workload leaves as the hold said."""
    world.serve("g")
    said = Leave(mode="discard", tags=("kv_cache",))
    monkeypatch.setenv(LEAVE_VARIABLE, leaves_written({"g": said, "other": Leave(slot="a")}))
    workload = timeslice.register_workload("g", on_suspend=_ignore, on_restore=_ignore, job="n", tags=("kv_cache",))
    try:
        assert _leave(world, "n") == said
    finally:
        workload.close()


@pytest.mark.parametrize(
    ("default", "asked", "both"),
    [
        (Leave(tags=("lora",), slot="a"), Leave(tags=("kv",)), Leave(tags=("kv",))),
        (Leave(tags=("lora",), slot="a"), Leave(slot="b"), Leave(tags=("lora",), slot="b")),
        (Leave(mode="discard"), Leave(mode="offload"), Leave(mode="offload")),
    ],
)
def test_a_slot_belongs_to_the_tags_it_came_with(default: Leave, asked: Leave, both: Leave) -> None:
    """A hold that names other parts does not mean the workload's slot of them."""
    assert overlaid(default, asked) == both


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"mode": "drop"}, UsageError),
        ({"tags": "kv_cache"}, UsageError),
        ({"tags": ("a,b",)}, InvalidNameError),
        ({"slot": "{a}"}, InvalidNameError),
        ({"mode": "discard", "lock_only": True}, UsageError),
    ],
)
def test_what_can_not_be_meant_is_refused_before_anything_is_sent(asked: dict[str, Any], error: type) -> None:
    """Also what a plain lock has no use for."""
    with pytest.raises(error):
        timeslice.hold("g", **asked)
