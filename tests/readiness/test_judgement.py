"""What a job is called in every situation that a group may be in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from timeslice.locks.view import GroupView, JobView, MemberView, NodeView, PartyView, WaiterView
from timeslice.models import GroupConfig
from timeslice.readiness import GroupReadiness, State, in_group, in_groups, in_one

NOW = 1_000_000
HELD = {"lease_id": "w", "job": "a", "confirmed": "1", "deadline_ms": str(NOW + 1), "label": "generate"}
OTHER = {**HELD, "job": "b", "label": "train"}
SWAP = {"swap_id": "7", "swap_step": "commit", "phase": "swapping"}


def view(
    residency: str, state: dict[str, str] | None = None, *, waits: bool = False, alive: bool = True, node: bool = True
) -> GroupView:
    """A served group of one node, in which job a has this residency."""
    waiter = WaiterView("w-a", "a", "n1", 1, 0, "eval", 1.0, "", alive)
    return GroupView(
        name="g",
        now_ms=NOW,
        state={"mode": "served"} | (state or {}),
        queue=(waiter,) if waits else (),
        jobs={"a": JobView("a", residency, 0, 0.0, 0.0, 1)} if residency else {},
        members=(MemberView("n1", "a", residency, 0, 0, "arena", unheld=False),) if residency else (),
        nodes={"n1": NodeView("n1", node, -1.0 if node else 40.0, 0, "", "", "")},
        config=GroupConfig(),
    )


TABLE: list[tuple[GroupView, State, str]] = [
    (view("resident", HELD), "ready", ""),
    (view("resident", HELD | {"confirmed": "0"}), "waiting", "granted"),
    (view("resident", HELD | {"deadline_ms": str(NOW - 1)}), "idle", "does not ask"),  # the lease is over
    (view("resident", HELD | SWAP), "waiting", "state is being moved"),
    (view("resident", HELD | {"gang": "2", "ending": "rank 1 (process 7 on node n1) ended"}), "waiting", "has died"),
    (view("restoring", HELD), "restoring", ""),
    (view("faulted", HELD), "faulted", "doctor"),
    (view("suspended", OTHER, waits=True), "suspended", "job b holds it (train)"),
    (view("suspended", OTHER), "suspended", "job b holds it (train)"),
    (view("suspending", SWAP | {"swap_job": "b"}), "suspended", "moved for b (commit)"),
    (view("resident", SWAP | {"swap_job": "b"}), "idle", "moved for b (commit)"),
    (view("suspended", SWAP | {"swap_job": "a"}, waits=True), "restoring", "brought in (commit)"),
    (view("", SWAP | {"swap_job": "a"}, waits=True), "restoring", ""),
    (view("", OTHER, waits=True), "waiting", "job b holds it"),
    (view("", {"phase": "blocked", "reason": "no agent serves this group"}, waits=True), "waiting", "no agent serves"),
    (view("", {"phase": "paused", "reason": "paused by eve"}, waits=True), "waiting", "paused by eve"),
    (view("", waits=True), "waiting", "about to be granted"),
    (view("", waits=True, alive=False), "absent", "waits for nothing"),
    (view("resident"), "idle", "does not ask"),
    (view("suspended"), "suspended", "does not ask"),
    (view(""), "absent", "holds nothing"),
    # Nobody has heard of the node for long: of a job that gives no sign of life itself nothing is known.
    (view("suspended", node=False), "unknown", "node n1 has been unreachable for 40 s"),
    (view("resident", node=False), "unknown", "node n1"),
    (view("suspended", waits=True, node=False), "suspended", ""),
    (view("resident", HELD, node=False), "ready", ""),
]


@pytest.mark.parametrize(("picture", "expected", "why"), TABLE)
def test_every_situation_has_its_state_and_reason(picture: GroupView, expected: State, why: str) -> None:
    """Ready only with a live, confirmed lease, all state on the device and nothing under way; else why not."""
    found = in_group(picture, "a")
    assert found.state == expected
    assert why in found.reason
    assert bool(found.reason) == (expected != "ready")


def test_the_phase_is_what_the_job_said() -> None:
    """Of its lease while it holds; what it does off the devices; of its request while it waits."""
    assert in_group(view("resident", HELD), "a").phase == "generate"
    busy = view("suspended", OTHER, waits=True)
    busy.jobs["a"] = replace(busy.jobs["a"], phase="verify")
    assert in_group(busy, "a").phase == "verify"
    assert in_group(view("suspended", OTHER, waits=True), "a").phase == "eval"
    assert in_group(view("suspended", OTHER, waits=True, alive=False), "a").phase == ""  # who asked is gone


def test_a_sampler_without_weights_is_not_ready() -> None:
    """Its memory is back and what was in it is not: nothing sensible could be answered before the sync."""
    picture = view("resident", HELD)
    picture.jobs["a"] = replace(picture.jobs["a"], needs_weights=True)
    found = in_group(picture, "a")
    assert (found.state, "synced" in found.reason) == ("restoring", True)


def test_a_rank_of_which_the_server_forgot_who_it_is_is_at_work() -> None:
    """After data loss, until it renews; one that was granted and is known has not begun."""
    gang = view("resident", HELD | {"gang": "2"})
    inside, forgotten = PartyView(0, "n1", "7", "1", "inside"), PartyView(1, "-", "-", "-", "arrived")
    assert in_group(replace(gang, parties=(inside, forgotten)), "a").state == "ready"
    late = replace(gang, parties=(inside, replace(forgotten, host="n1")))
    assert in_group(late, "a").reason == "gang: it was granted, and rank 1 has not begun"


def test_a_hold_is_all_where_nothing_is_moved() -> None:
    """In a lock-only group the holder is ready, and no residency is claimed."""
    found = in_group(view("", HELD | {"mode": "lock"}), "a")
    assert (found.state, found.residency) == ("ready", "")


def test_a_process_that_registered_is_known_before_it_asks() -> None:
    """It lives, and has nothing on the device yet."""
    picture = view("")
    picture.targets["a/n1/12"] = "{}"
    assert in_group(picture, "a").state == "idle"
    assert in_group(picture, "b").state == "absent"


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (("ready", "ready"), "ready"),
        (("ready", "absent"), "ready"),
        (("ready", "suspended"), "suspended"),
        (("waiting", "suspended"), "suspended"),
        (("suspended", "faulted"), "faulted"),
        (("suspended", "unknown"), "unknown"),
        (("absent", "absent"), "absent"),
        ((), "absent"),
    ],
)
def test_of_several_groups_the_worst_counts(states: tuple[State, ...], expected: State) -> None:
    """Ready means ready in every group that knows the job."""
    groups = [GroupReadiness(f"g{number}", each, reason="why") for number, each in enumerate(states)]
    found = in_groups("a", groups)
    assert (found.state, found.ready) == (expected, expected == "ready")
    assert [each.group for each in found.groups] == [each.group for each in groups if each.state != "absent"]


def test_a_job_that_only_unreadable_groups_may_know_is_not_called_absent() -> None:
    """A monitor must not take for dead what it could not see."""
    found: Any = in_groups("a", [GroupReadiness("g", "absent")], unread=["theirs"]).document()
    assert (found["state"], found["unread"]) == ("unknown", ["theirs"])


def test_a_group_that_is_not_there_tells_nothing_of_a_job() -> None:
    """Its name is misspelt, or Redis has lost it while its jobs live: nobody should start them again for that."""
    never_used = replace(view(""), state={})
    for picture in (None, never_used):
        found = in_one("a", "g", picture)
        assert (found.state, "no such group" in found.reason) == ("unknown", True)
    assert in_groups("a", [in_group(never_used, "a")]).state == "absent"
