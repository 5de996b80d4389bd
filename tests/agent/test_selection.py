"""What of a job's state leaves: by its processes' word and the group's settings, carried out by a real agent."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.agent.rig import Rig, until
from timeslice.agent import moving, selection
from timeslice.backends.base import Selection
from timeslice.locks import scripts
from timeslice.models import GroupConfig, Leave, Target

BOTH = ("offload", "discard")
KV = Leave(mode="discard", tags=("kv_cache",))


def _target(leave: Leave, pid: int = 1, **more: Any) -> Target:
    known = {"tags": ("kv_cache", "lora", "weights"), "modes": BOTH, "slots": ("a", "b"), "channel": "g/c"}
    place = {"job": "a", "host": "n1", "pid": pid, "start": 1, "uid": 0, "pid_namespace": "x"}
    return Target(**{**place, **known, **more}, leave=leave)


SILENT_LAUNCHER = {"tags": (), "modes": (), "slots": (), "channel": ""}


@pytest.mark.parametrize(
    ("leaves", "config", "expected"),
    [
        ([Leave()], {}, Selection()),
        ([Leave()], {"mode": "discard", "tags": "kv_cache"}, Selection(mode="discard", tags=("kv_cache",))),
        ([Leave(tags=("lora",), slot="a")], {"tags": "kv_cache"}, Selection(tags=("lora",), slot="a")),
        ([Leave(tags=("lora",))], {"mode": "discard"}, Selection(mode="discard", tags=("lora",))),
        ([KV, KV], {}, Selection(mode="discard", tags=("kv_cache",))),
        ([KV, Leave(tags=("lora",))], {}, Selection(tags=("kv_cache", "lora"))),
        ([KV, Leave(mode="discard", tags=("lora",))], {}, Selection(tags=("kv_cache", "lora"))),
        ([KV, Leave()], {}, Selection()),
        ([Leave(tags=("lora",), slot="a"), Leave(tags=("lora",), slot="b")], {}, Selection(tags=("lora",))),
    ],
)
def test_processes_of_a_job_leave_alike(leaves: list[Leave], config: dict[str, str], expected: Selection) -> None:
    """The processes' word goes before the group's settings. Of different words so much leaves that each is content,
    and nothing is dropped that one of them wants kept; a launcher that says nothing has no say."""
    targets = [_target(leave, pid) for pid, leave in enumerate(leaves, 1)]
    launcher = _target(Leave(), 99, **SILENT_LAUNCHER)
    assert selection.resolve([*targets, launcher], GroupConfig.model_validate(config), BOTH) == expected


def test_a_tag_that_one_process_does_not_know_makes_all_of_it_leave() -> None:
    """What one process calls a part means nothing to another, and they leave alike."""
    other = _target(Leave(tags=("adapter",)), 2, tags=("adapter",))
    assert selection.resolve([_target(KV), other], GroupConfig(), BOTH) == Selection()


def test_who_can_only_discard_discards() -> None:
    """Without a word the content is dropped only where that is all that the job can do."""
    config = GroupConfig()
    assert selection.resolve([_target(Leave(), modes=("discard",))], config, BOTH) == Selection(mode="discard")
    assert selection.resolve([_target(Leave(), modes=("discard",))], config, ("offload",)) == Selection()


@pytest.mark.parametrize(
    ("asked", "lost"),
    [
        (Selection(mode="discard"), True),
        (Selection(mode="discard", tags=("kv_cache", "weights")), True),
        (Selection(mode="discard", tags=("kv_cache",)), False),
        (Selection(tags=("weights",)), False),
    ],
)
def test_a_weight_sync_is_due_after_all_or_the_weights_were_dropped(asked: Selection, *, lost: bool) -> None:
    """G21: a cache that was dropped is built anew; weights have to be brought."""
    assert selection.loses_weights(asked) is lost


def test_all_of_it_is_kept_where_only_a_part_was_to_go_or_the_backend_can_not_drop() -> None:
    """By force a backend works from outside, which may know no parts and no other mode."""
    targets = [_target(Leave())]
    assert selection.whole(targets, Selection(mode="discard", tags=("kv_cache",)), BOTH) == Selection()
    assert selection.whole(targets, Selection(mode="discard"), ("offload",)) == Selection()
    assert selection.whole(targets, Selection(mode="discard"), BOTH) == Selection(mode="discard")


async def _load(rig: Rig, job: str, leave: Leave, *, modes: tuple[str, ...] = BOTH, **parts: int) -> None:
    process = rig.spawn(job=job)
    told = {"modes": modes, "tags": tuple(parts), "slots": ("a",), "leave": leave}
    await rig.register(rig.target(job, process.pid).model_copy(update=told))
    rig.fake.load(job, **parts)
    rig.fake.write(job, {**rig.fake.read(job), "pid": process.pid})


async def _needs_weights(rig: Rig, job: str) -> bool:
    return (await rig.view()).jobs[job].needs_weights


async def test_a_part_leaves_and_comes_back(rig: Rig) -> None:
    """The selected part makes room, the rest stays and is shown; the job counts as suspended, and its next grant brings
    back what is out. What was selected outlives the agent."""
    async with rig.agent():
        await _load(rig, "a", KV, kv_cache=300, weights=500)
        await rig.job("b", 400)
        await rig.swap("a", into="b")
        assert rig.fake.on_device("a") == {"weights": 500}
        member = await rig.member("a")
        assert (member.state, member.device_bytes) == ("suspended", 500)
        assert not await _needs_weights(rig, "a")
    async with rig.agent():
        assert rig.fake.asked() == ["prepare a discard kv_cache", "suspend a discard kv_cache"]
        await rig.yield_("b")
        await rig.acquire("a")
        swap = await rig.plan("b", into="a")
        await rig.order(rig.command(swap, "prepare", "b", into="a"))
        await rig.step("prepare", "commit")
        assert (await rig.order(rig.command(swap, "commit", "b", into="a")))["step"] == "done"
        assert rig.fake.on_device("a") == {"kv_cache": 300, "weights": 500}
        assert rig.fake.asked()[2:] == ["prepare b offload", "suspend b offload", "restore a discard"]
        assert not await _needs_weights(rig, "a")


async def test_weights_that_were_dropped_are_due(rig: Rig) -> None:
    """G21: the group knows that the job may not compute before its weights were synced."""
    async with rig.agent():
        await _load(rig, "a", Leave(mode="discard", tags=("weights",)), kv_cache=300, weights=500)
        await rig.job("b", 400)
        await rig.swap("a", into="b")
        assert await _needs_weights(rig, "a")


async def test_no_weights_are_due_before_they_were_dropped(rig: Rig) -> None:
    """Who can only discard is prepared for that, and still has everything; so it has if the swap ends there."""
    async with rig.agent():
        await _load(rig, "a", Leave(), modes=("discard",), weights=500)
        swap = await rig.begin_swap("a", into="b")
        assert (await rig.order(rig.command(swap, "prepare", "a", into="b")))["step"] == "prepared"
        assert rig.fake.asked() == ["prepare a discard"]
        assert not await _needs_weights(rig, "a")


async def test_who_does_not_fit_beside_the_rest_is_refused_by_name(rig: Rig) -> None:
    """What stays takes its room: the next job is not let in, the reason names who holds how much, and who had left is
    whole again."""
    async with rig.agent():
        await _load(rig, "b", Leave(), all=700)
        await rig.swap("b", into="a")
        await _load(rig, "a", KV, kv_cache=300, weights=500)
        await rig.yield_("a")
        await rig.acquire("b")
        swap = await rig.plan("a", into="b")
        await rig.order(rig.command(swap, "prepare", "a", into="b"))
        await rig.step("prepare", "commit")
        failed = await rig.order(rig.command(swap, "commit", "a", into="b"))
        pid = rig.fake.read("a")["pid"]
        assert failed["step"] == "failed"
        assert f"700 bytes needed, 500 free; process {pid} holds 500" in failed["error"]
        assert rig.fake.on_device("a") == {"kv_cache": 300, "weights": 500}
        assert (rig.fake.state("a"), rig.fake.locked("a"), rig.fake.state("b")) == ("resident", False, "suspended")


@pytest.mark.parametrize(
    ("leave", "why"),
    [
        (Leave(mode="discard"), "can't discard; it registered: offload"),
        (Leave(tags=("lora",)), "knows no tag lora; it registered: weights"),
        (Leave(tags=("weights",), slot="b"), "knows no slot b; it registered: a"),
    ],
)
async def test_what_a_workload_can_not_do_is_refused_before_anything_is_sent(rig: Rig, leave: Leave, why: str) -> None:
    """G21: the waiter hears why, the job keeps the device as it is, not even locked."""
    async with rig.agent():
        await _load(rig, "a", leave, modes=("offload",), weights=500)
        swap = await rig.begin_swap("a", into="b")
        refused = await rig.order(rig.command(swap, "prepare", "a", into="b"))
        assert (refused["step"], refused["kind"]) == ("failed", "unsupported")
        assert why in refused["error"]
        assert rig.fake.calls() == []


async def test_what_leaves_is_fixed_for_a_swap(rig: Rig) -> None:
    """Host memory was admitted for what was selected at the prepare; a later word counts for the next swap."""
    async with rig.agent():
        await _load(rig, "a", KV, kv_cache=300, weights=500)
        swap = await rig.begin_swap("a", into="b")
        await rig.order(rig.command(swap, "prepare", "a", into="b"))
        record = Target.model_validate_json(next(iter((await rig.view()).targets.values())))
        await rig.register(record.model_copy(update={"leave": Leave()}))
    async with rig.agent():  # one that has just started has heard of the later word
        await rig.step("prepare", "commit")
        assert (await rig.order(rig.command(swap, "commit", "a", into="b")))["step"] == "done"
        assert rig.fake.on_device("a") == {"weights": 500}
        assert rig.fake.asked() == ["prepare a discard kv_cache", "suspend a discard kv_cache"]


async def test_what_stayed_of_a_job_takes_its_own_room_too(rig: Rig) -> None:
    """Only what left has to fit again, and not where the rest of the job itself is."""
    async with rig.agent():
        await _load(rig, "a", KV, kv_cache=300, weights=500)
        await rig.swap("a", into="b")
        squatter = rig.spawn()
        rig.fake.load("squatter", 300)
        rig.fake.write("squatter", {**rig.fake.read("squatter"), "pid": squatter.pid})
        await rig.yield_("b")
        await rig.acquire("a")
        swap = await rig.plan(into="a")
        await rig.order(rig.command(swap, "prepare", into="a"))
        await rig.step("prepare", "commit")
        failed = await rig.order(rig.command(swap, "commit", into="a"))
        assert failed["step"] == "failed"
        assert "not restored, its saved copy is intact" in failed["error"]
        assert f"300 bytes needed, 200 free; process {rig.fake.read('a')['pid']} holds 500" in failed["error"]
        assert "restore a" not in rig.fake.calls()


async def test_a_process_that_registers_again_leaves_as_it_said_last(rig: Rig) -> None:
    """Each hold may say something else of the same process."""
    async with rig.agent():
        await _load(rig, "a", Leave(), kv_cache=300, weights=500)
        await until(lambda: rig.member_state("a"), "the agent knows the job")
        record = Target.model_validate_json(next(iter((await rig.view()).targets.values())))
        await rig.register(record.model_copy(update={"leave": KV}))
        await rig.swap("a", into="b")
        assert rig.fake.on_device("a") == {"weights": 500}


async def test_settings_of_the_group_count_from_the_next_swap(rig: Rig) -> None:
    """`group set --mode --tag`: also when they were changed a moment before."""
    async with rig.agent():
        await _load(rig, "a", Leave(), kv_cache=300, weights=500)
        settings = {"mode": "discard", "tags": "kv_cache"}
        await rig.driver.run(scripts.configure(rig.group, settings))
        await rig.swap("a", into="b")
        assert rig.fake.asked() == ["prepare a discard kv_cache", "suspend a discard kv_cache"]


@pytest.mark.parametrize("changes", [{"force": True}, {"into": None}], ids=["by force", "nobody comes in"])
async def test_all_of_it_leaves_by_force_and_when_nobody_comes_in(rig: Rig, changes: dict[str, Any]) -> None:
    """An operator who evicts wants the device empty; what was only to leave as a part that is dropped, is kept then."""
    async with rig.agent():
        await _load(rig, "a", KV, kv_cache=300, weights=500)
        swap = await rig.begin_swap("a", into="b")
        order: dict[str, Any] = {"into": "b", **changes}
        await rig.order(rig.command(swap, "prepare", "a", **order))
        await rig.step("prepare", "commit")
        assert (await rig.order(rig.command(swap, "commit", "a", **order)))["step"] == "done"
        assert rig.fake.asked() == ["prepare a offload", "suspend a offload"]
        assert rig.fake.on_device("a") == {}


async def test_the_freed_share_is_due_of_the_part(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """F06: a part that is said to be out and is still taken is no suspend; the rest that stays is no fault."""
    monkeypatch.setattr(moving, "FREE_S", 0.5)
    async with rig.agent():
        await _load(rig, "a", KV, kv_cache=300, weights=500)
        rig.fake.knob("suspend", share=0.5)
        swap = await rig.begin_swap("a", into="b")
        await rig.order(rig.command(swap, "prepare", "a", into="b"))
        await rig.step("prepare", "commit")
        failed = await rig.order(rig.command(swap, "commit", "a", into="b"))
        assert failed["step"] == "failed"
        assert "only 150 of its 300 bytes were measured free" in failed["error"]
        assert rig.fake.on_device("a") == {"kv_cache": 300, "weights": 500}


async def test_what_needed_no_copy_is_told_of_each_step(rig: Rig) -> None:
    """What a step saved is in its event and, until the next one, beside the job's state."""
    async with rig.agent():
        rig.fake.knob("suspend", saved=200)
        await _load(rig, "a", Leave(), weights=500)
        await rig.swap("a", into="b")
        assert (await rig.events("JobSuspended"))[-1]["saved"] == "200"
        assert (await rig.member("a")).saved_bytes == 200
        rig.fake.knob("restore", saved=100)
        await rig.yield_("b")
        await rig.acquire("a")
        swap = await rig.plan("b", into="a")
        await rig.order(rig.command(swap, "prepare", "b", into="a"))
        assert (await rig.member("a")).saved_bytes == 200
        await rig.step("prepare", "commit")
        assert (await rig.order(rig.command(swap, "commit", "b", into="a")))["step"] == "done"
        assert (await rig.events("JobRestored"))[-1]["saved"] == "100"
        assert (await rig.member("a")).saved_bytes == 100


@pytest.mark.parametrize("moment", [pytest.param("before", marks=pytest.mark.slow), "after"])
async def test_an_agent_killed_while_a_part_leaves_finishes_the_same_part(rig: Rig, moment: str) -> None:
    """The selection is on disk before anything moves; the next run goes on with it, and knows later how it left."""
    agent = rig.spawn_agent()
    await _load(rig, "a", Leave(mode="discard", tags=("weights",)), kv_cache=300, weights=500)
    rig.fake.knob("suspend", die=moment)
    swap = await rig.begin_swap("a", into="b")
    await rig.order(rig.command(swap, "prepare", "a", into="b"))
    await rig.step("prepare", "commit")
    command = rig.command(swap, "commit", "a", into="b")
    await rig.send(command)
    assert await until(agent.poll, "the agent died") == -signal.SIGKILL
    rig.fake.write("knobs", {})
    rig.spawn_agent()
    assert (await rig.outcome(command))["step"] == "done"
    assert rig.fake.on_device("a") == {"kv_cache": 300}
    assert {line for line in rig.fake.asked() if line.startswith("suspend")} == {"suspend a discard weights"}
    assert await _needs_weights(rig, "a")
