"""The picture of a group, as people, coordinators and agents read it."""

from __future__ import annotations

import pytest

from tests.locks.lab import Lab
from timeslice.errors import InvalidNameError
from timeslice.locks import scripts
from timeslice.locks.keys import Keys
from timeslice.locks.scripts import Observed
from timeslice.locks.scripts.base import when


def test_a_group_that_nobody_made_is_empty(lab: Lab) -> None:
    """No error, and nothing but defaults."""
    view = lab.view
    assert (view.exists, view.mode, view.phase, view.reason, view.holder) == (False, "", "idle", "", "")
    assert (view.queue, view.members, view.since_s, view.counter, view.swap) == ((), (), 0.0, 0, 0)
    assert view.config.suspend_timeout_ms == 180_000


def test_the_holder_is_shown_until_its_lease_is_over(lab: Lab) -> None:
    """A lease whose time has passed is nobody's, even before a script has swept it up."""
    lab.grant("a1")
    assert lab.view.holder == "a"
    lab.pass_time(31)
    assert lab.view.holder == ""
    assert lab.view.state["lease_id"] == "a1"


def test_how_long_a_phase_lasts_and_a_waiter_waits(lab: Lab) -> None:
    """Seconds of the server's clock."""
    lab.grant("a1")
    lab.queue("b1", label="train")
    lab.pass_time(7)
    view = lab.view
    assert 7 <= view.since_s < 8
    (waiter,) = view.queue
    assert 7 <= waiter.waited_s < 8
    assert (waiter.job, waiter.label, waiter.host, waiter.pid, waiter.alive) == ("b", "train", "n1", 7, True)
    lab.pass_time(9)
    assert not lab.view.queue[0].alive


def test_a_deferral_is_shown_while_it_defers(lab: Lab) -> None:
    """Once something changed it is history."""
    lab.join("n1")
    token = lab.grant("a1", served=True)
    lab.queue("b1", served=True)
    lab.release("a1", token)
    lab.refuse(lab.own(), "n1", reason="no room")
    assert lab.view.queue[0].deferred == "no room"
    lab.pass_time(1)
    lab.plant(changed_ms=lab.view.now_ms)
    assert lab.view.queue[0].deferred == ""


def test_what_the_nodes_observed(lab: Lab) -> None:
    """By node and job; names with dots and dashes stay whole."""
    node, job = "node-1.rack-2.example", "run.7_a-b"
    lab.join(node)
    lab.report(node, Observed(job, "suspended", 123, 45, "cuda"))
    (member,) = lab.view.members
    assert (member.node, member.job, member.state) == (node, job, "suspended")
    assert (member.host_bytes, member.device_bytes, member.backend) == (123, 45, "cuda")
    assert lab.view.jobs[job].host_bytes == 123
    assert lab.view.nodes[node].alive
    assert lab.view.resident == ()


def test_large_numbers_are_exact(lab: Lab) -> None:
    """Bytes and counters beyond 1e14 keep every digit on the way through Lua."""
    lab.join("n1", "n2")
    for node in ("n1", "n2"):
        lab.report(node, Observed("a", "suspended", 2**52 + 1))
    assert lab.view.jobs["a"].host_bytes == 2**53 + 2
    lab.plant(counter=2**52 + 1)
    assert lab.own() == 2**52 + 2


def test_times_in_reasons_are_words(lab: Lab) -> None:
    """The state keeps milliseconds, people read a date."""
    lab.plant(reason="node n1 unreachable since @1700000000000")
    assert lab.view.reason == "node n1 unreachable since 2023-11-14 22:13:20 UTC"
    assert when(0) == "1970-01-01 00:00:00 UTC"


def test_the_job_s_account(lab: Lab) -> None:
    """Residency, usage, last grant and its token."""
    lab.join("n1")
    token = lab.grant("a1", served=True)
    lab.pass_time(5)
    lab.release("a1", token)
    job = lab.view.jobs["a"]
    assert (job.residency, job.token) == ("resident", token)
    assert 5 <= job.usage_s < 6
    assert 5 <= job.last_granted_s < 6


@pytest.mark.parametrize("prefix", ["ts", "a:b", "team/x"])
def test_keys_of_one_group_share_one_hash_tag(prefix: str) -> None:
    """So they share a cluster slot, and the grant keys with them."""
    group = Keys(prefix).group("g-1")
    for key in (*group.all, group.grant("w")):
        assert key.split("{", 1)[1].split("}", 1)[0] == "g-1"
    assert len(set(group.all)) == len(group.all)


@pytest.mark.parametrize("name", ["", "a{b", "a}b", "a b", ".a", "a" * 64, "a/b"])
def test_names_that_would_break_a_key_are_refused(name: str) -> None:
    """Case R03. Before a byte is sent."""
    with pytest.raises(InvalidNameError):
        Keys().group(name)
    with pytest.raises(InvalidNameError):
        Keys().commands(name)


def test_the_settings_are_in_the_picture(lab: Lab) -> None:
    """As they were set, the rest by default."""
    lab.run(scripts.configure(lab.group, {"order": "-3", "suspend_timeout_ms": "5000"}, mode="served"))
    config = lab.view.config
    assert (config.order, config.suspend_timeout_ms) == (-3, 5000)
