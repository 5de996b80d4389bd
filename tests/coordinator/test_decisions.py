"""The pure planner and the pure decisions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.coordinator.model import NOW, Model, view_of
from timeslice.coordinator import swap
from timeslice.coordinator.swap import Memory, decide, make_plan
from timeslice.models import Plan, Step

NODES = {"n1": (7, "prepared"), "n2": (7, "prepared")}


def test_everything_that_may_be_on_the_device_goes_out() -> None:
    """Half-moved and doubtful jobs too, and a job whose lease was reclaimed even where it is believed out."""
    jobs = {
        "a": "resident", "b": "suspended", "c": "restoring", "d": "faulted", "e": "gone", "f": "suspending",
        "g": "absent",
    }  # fmt: skip
    view = view_of(state={"swap_job": "b", "evict": "g"}, jobs=jobs, nodes={"n2": (0, ""), "n1": (0, "")})
    assert make_plan(view) == Plan(out=("a", "c", "d", "f", "g"), into="b", nodes=("n1", "n2"))


@pytest.mark.parametrize(
    ("where", "into"),
    [("suspended", "b"), ("restoring", "b"), ("suspending", "b"), ("absent", None), ("gone", None), ("resident", None)],
)
def test_what_was_saved_comes_back(where: str, into: str | None) -> None:
    """A job comes in by its saved state, if any of it may be in host memory."""
    assert make_plan(view_of(state={"swap_job": "b"}, jobs={"b": where})).into == into


def test_an_eviction_brings_nobody_in() -> None:
    """A swap without a job to swap in."""
    assert make_plan(view_of(state={"evict": "a"}, jobs={"a": "resident"})) == Plan(out=("a",))


@pytest.mark.parametrize(
    ("where", "into", "how"),
    [
        ("resident", "b", "restored"),
        ("absent", None, "first load"),
        ("gone", "b", "first load"),
        ("resident", None, "no-op"),
    ],
)
def test_the_grant_says_what_the_job_finds(where: str, into: str | None, how: str) -> None:
    """Its state brought back, nothing at all, or its state as it left it."""
    plan = Plan(out=("a",), into=into, nodes=("n1",)).model_dump_json()
    state = {"swap_id": 7, "swap_job": "b", "swap_step": "commit", "plan": plan}
    view = view_of(state=state, jobs={"a": "suspended", "b": where}, nodes={"n1": (7, "done")})
    assert decide(view, Memory()) == swap.Promote(how)


def test_a_swap_for_nobody_says_so() -> None:
    """An eviction is no first load of anybody."""
    plan = Plan(out=("a",), into=None, nodes=("n1",)).model_dump_json()
    state = {"swap_id": 7, "swap_step": "commit", "plan": plan}
    view = view_of(state=state, jobs={"a": "suspended"}, nodes={"n1": (7, "done")})
    assert decide(view, Memory()) == swap.Promote("out")


def test_a_new_owner_goes_on_with_the_stored_plan() -> None:
    """Whatever a plan would be now, the orders of a new owner are those of the plan that is stored."""
    plan = Plan(out=("x",), into=None, nodes=("n1", "n2"))
    state = {"swap_id": 7, "swap_job": "b", "swap_step": "commit", "plan": plan.model_dump_json()}
    view = view_of(state={**state, "swap_deadline_ms": NOW + 5}, jobs={"a": "resident", "b": "suspended"}, nodes=NODES)
    assert decide(view, Memory()) == swap.Send("commit", ("n1", "n2"), plan)


@pytest.mark.parametrize("state", [{"swap_step": "prepare", "plan": "{"}, {"swap_step": ""}, {"swap_step": "bogus"}])
def test_a_half_written_swap_is_undone(state: dict[str, str]) -> None:
    """L24: a plan that can't be read, or an unknown step: nodes that began undo it, then it ends."""
    view = view_of(state={"swap_id": 7, "swap_job": "b", **state}, nodes={"n1": (7, "prepared")})
    action = decide(view, Memory())
    assert isinstance(action, swap.Move)
    assert (action.before, action.after) == (state["swap_step"], "rollback")
    unbegun = view_of(state={"swap_id": 7, "swap_job": "b", **state}, nodes={"n1": (3, "done")})
    assert isinstance(decide(unbegun, Memory()), swap.Settle)


def test_a_node_that_left_and_came_back_is_not_committed() -> None:
    """It has forgotten that it prepared, so it would move a job that is not locked: the swap is undone."""
    plan = Plan(out=("a",), nodes=("n1", "n2")).model_dump_json()
    state = {"swap_id": 7, "swap_job": "b", "swap_step": "commit", "plan": plan}
    view = view_of(state=state, jobs={"a": "suspended"}, nodes={"n1": (7, "done"), "n2": (0, "")})
    action = decide(view, Memory())
    assert isinstance(action, swap.Move)
    assert action.after == "rollback"


@pytest.mark.parametrize("step", ["prepare", "commit", "rollback"])
def test_an_unreachable_node_is_shown_at_once(step: str) -> None:
    """F01: a node that began falls silent: the group says so long before the deadline, once, and the swap is not
    given up; when it beats again the reason goes."""
    plan = Plan(out=("a",), nodes=("n1",)).model_dump_json()
    state = {"swap_id": 7, "swap_job": "b", "swap_step": step, "plan": plan, "swap_deadline_ms": NOW + 300_000}
    nodes, memory = {"n1": (7, f"begun {step}")}, Memory(sent={"n1": NOW})
    alive = view_of(state=state, jobs={"a": "suspending"}, nodes=nodes)
    assert isinstance(decide(alive, memory), swap.Wait)
    silent = {"n1": replace(alive.nodes["n1"], alive=False, heartbeat_age_s=2.0)}
    reason = f"node n1 unreachable since @{NOW - 2000}; goes on by itself when its agent returns"
    assert decide(replace(alive, nodes=silent), memory) == swap.Hang(step, reason)
    shown = {**alive.state, "reason": reason}
    assert isinstance(decide(replace(alive, nodes=silent, state=shown), memory), swap.Wait)
    assert decide(replace(alive, state=shown), memory) == swap.Hang(step, "")


@pytest.mark.parametrize("step", ["prepare", "commit", "rollback"])
def test_a_step_without_an_answer_is_ordered_again(step: Step) -> None:
    """The order that a node has begun may be lost with its stream while its agent was away: it is given again, by the
    same id, every few seconds while the node beats; also by a new owner, and after the step's time is over."""
    plan = Plan(out=("a",), nodes=("n1",))
    state = {"swap_id": 7, "swap_job": "b", "swap_step": step, "plan": plan.model_dump_json(), "owner_epoch": 9}
    view = view_of(state={**state, "swap_deadline_ms": NOW + 300_000}, nodes={"n1": (7, f"begun {step}")})
    at = replace(view.nodes["n1"], command=f"7/n1/{step}/4.1")
    begun, again = replace(view, nodes={"n1": at}), swap.Send(step, ("n1",), plan)
    assert decide(begun, Memory()) == again
    assert swap.command_id(begun, Memory(), step, "n1") == at.command
    sent = swap.sent(Memory(), ["n1"], NOW)
    assert isinstance(decide(begun, sent), swap.Wait)
    later = replace(begun, now_ms=NOW + swap.AGAIN_MS)
    assert decide(later, sent) == again
    silent = {"n1": replace(at, alive=False, heartbeat_age_s=2.0)}
    assert not isinstance(decide(replace(later, nodes=silent), sent), swap.Send)
    if step == "commit":
        overdue = replace(later, now_ms=NOW + 400_000)
        hang = decide(overdue, sent)
        assert isinstance(hang, swap.Hang)
        assert decide(replace(overdue, state={**overdue.state, "reason": hang.reason}), sent) == again


def test_pauses_double_up_to_thirty_seconds() -> None:
    """A waiter that is refused again and again is tried less and less often, but at least twice a minute."""
    assert [swap.pause_ms(n) for n in (0, 1, 2, 3, 4, 5, 6, 99)] == [
        1000, 2000, 4000, 8000, 16_000, 30_000, 30_000, 30_000
    ]  # fmt: skip


@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_it_never_grants_on_a_guess_and_always_ends(data: st.DataObject) -> None:
    """Nodes that take, drop, fail, delay and forget orders, die over them, join and leave, owners that change, clocks
    that run on, intruders: whenever it promotes, every node has reported that what must be out is out and what must be
    in is in; and once nobody misbehaves any more the swap ends."""
    names = data.draw(st.lists(st.sampled_from(["n1", "n2", "n3"]), unique=True, min_size=1))
    model = Model(dict.fromkeys(names, (3, "done")), saved=data.draw(st.booleans()))
    model.lively = data.draw(st.sampled_from([True, True, True, True, False]))
    calm, is_calm = ["take", "move", "well"], data.draw(st.booleans())
    for _ in range(data.draw(st.integers(0, 40))):
        action = decide(model.view(), model.memory)
        if model.ended:
            break
        if not isinstance(action, swap.Wait):
            model.act(action)
            continue
        node = data.draw(st.sampled_from(sorted(model.nodes) or ["n1"]))
        match data.draw(st.sampled_from(calm if is_calm else [*calm, "ill", "late", "lost", "dies", "owner", "odd"])):
            case "take":
                model.take(node)
            case "move":
                model.progress(node)
            case "well":
                model.report(node, well=True)
            case "ill":
                model.report(node, well=False)
            case "late":
                model.now += data.draw(st.integers(1, 400_000))
            case "lost":
                model.orders.pop(node, None)
            case "dies":
                model.die(node)
            case "owner":
                model.memory = Memory()
            case "odd":
                model.intruder = data.draw(st.booleans())
                if data.draw(st.booleans()):
                    model.leave(node)
                else:
                    model.join(data.draw(st.sampled_from(["n1", "n4"])))
    model.settle_down()
    event(model.ended)
    assert model.ended
