"""R02: a replica is promoted without the last writes. No two residents, tokens rise, and all goes on by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.conftest import ServerFactory
from tests.locks.lab import Lab, start_swap
from tests.locks.pair import Pair
from timeslice.errors import StaleCommandError
from timeslice.locks import scripts
from timeslice.locks.scripts import Granted, Lost, Observed, Queued, Renewed


@pytest.fixture
def pair(server_factory: ServerFactory, prefix: str) -> Iterator[Pair]:
    made = Pair(server_factory, prefix)
    yield made
    made.close()


def beat(lab: Lab, node: str, floor: int, *seen: Observed) -> None:
    """A heartbeat of an agent, which looks and reports if the group has not heard of it."""
    pulse = lab.run(scripts.heartbeat(lab.group, node, 15_000, floor=floor))
    if not pulse.known:
        lab.run(scripts.report(lab.group, node, max(floor, pulse.counter), seen, floor=floor))


def over(lab: Lab) -> None:
    """The time passes in which nobody is granted after data loss."""
    lab.plant(quiet_until_ms=0)


def test_a_first_load_is_not_granted_on_the_word_of_an_old_picture(pair: Pair) -> None:
    """R02: the grant of a first load is lost. The heir's picture shows an empty device; before its agent has looked,
    nobody is let in, though the next one to ask knows of nothing. Then the holder's renewal puts its lease back."""
    lab = pair.lab
    lab.join("n1")
    pair.cut()
    token = lab.grant("a1", served=True)
    pair.fail_over()
    reply = lab.queue("b1", served=True)
    assert "n1" in reply.reason
    beat(lab, "n1", token, Observed("a", "resident", device_bytes=10))
    assert isinstance(lab.renew("a1", token, served=True, floor=token), Renewed)
    assert (lab.holder, lab.number("token")) == ("a1", token)
    lab.release("a1", token)
    over(lab)
    lab.queue("b1", served=True)
    assert lab.view.state["swap_job"] == "b"


def test_a_resident_job_is_not_let_in_on_the_word_of_an_old_picture(pair: Pair) -> None:
    """R02: a whole swap is lost. In the heir's picture a is on the device and free to go on; in truth b is inside."""
    lab = pair.lab
    lab.join("n1")
    first = lab.grant("a1", served=True)
    lab.release("a1", first)
    epoch = lab.own()
    pair.cut()
    lab.queue("b1", served=True)
    lab.carry_out(epoch, "n1", seen=[Observed("a", "suspended", 10), Observed("b", "resident")])
    token = lab.number("token")
    assert isinstance(lab.renew("b1", token, served=True), Renewed)
    pair.fail_over()
    reply = lab.ask("a2", served=True)
    assert isinstance(reply, Queued)
    beat(lab, "n1", token, Observed("a", "suspended", 10), Observed("b", "resident", device_bytes=10))
    assert isinstance(lab.renew("b1", token, served=True, floor=token), Renewed)
    assert lab.holder == "b1"
    assert lab.view.resident == ("b",)
    assert lab.counter >= token


def test_a_server_that_merely_starts_again_is_looked_at_again(pair: Pair) -> None:
    """Which writes a restart lost nobody can tell: each node says once what is there, and all goes on."""
    lab = pair.lab
    lab.join("n1", "n2")
    lab.release("a1", lab.grant("a1", served=True))
    pair.cut()
    pair.fail_over()
    assert isinstance(lab.ask("a2", served=True), Queued)
    for node in ("n1", "n2"):
        beat(lab, node, 0, Observed("a", "resident"))
    assert isinstance(lab.ask("a2", served=True), Granted)


def test_a_lock_only_holder_comes_back(pair: Pair) -> None:
    """R02: its grant is lost. Unless somebody else was faster, its renewal puts the lease back with its token."""
    lab = pair.lab
    lab.release("z1", lab.grant("z1"))
    pair.cut()
    token = lab.grant("a1")
    pair.fail_over()
    assert isinstance(lab.renew("a1", token), Renewed)
    assert isinstance(lab.ask("b1"), Queued)
    assert (lab.holder, lab.number("token")) == ("a1", token)


def test_a_lock_only_group_may_have_two_holders_until_a_renewal(pair: Pair) -> None:
    """R02, as documented: whoever asks before the holder renews gets in, with a newer token; the holder is told at its
    next renewal, and can't take the lease back."""
    lab = pair.lab
    lab.release("z1", lab.grant("z1"))
    pair.cut()
    token = lab.grant("a1")
    pair.fail_over()
    newer = lab.grant("b1")
    assert newer > token
    assert isinstance(lab.renew("a1", token), Lost)
    assert lab.holder == "b1"


def test_a_lost_waiter_enters_again_at_its_old_place(pair: Pair) -> None:
    """R02: the refresh of a waiter whose entry was lost puts it back before those who came later."""
    lab = pair.lab
    token = lab.grant("a1")
    pair.cut()
    score = lab.queue("b1").score
    pair.fail_over()
    lab.queue("c1")
    lab.queue("b1", score=score)
    assert lab.waiting == ["b1", "c1"]
    lab.release("a1", token)
    assert lab.holder == "b1"


def test_a_lost_yield_is_yielded_again(pair: Pair) -> None:
    """R02: the answer to a yield came from the master; on the heir the lease runs out like a dead holder's."""
    lab = pair.lab
    token = lab.grant("a1")
    lab.queue("b1")
    pair.cut()
    lab.release("a1", token)
    pair.fail_over()
    assert lab.holder == "a1"
    lab.pass_time(31)
    lab.redis.zadd(lab.group.alive, {"b1": lab.view.now_ms + 15_000})
    lab.queue("c1")
    assert lab.holder == "b1"


def test_nobody_vouches_for_a_lease_whose_yield_was_lost(pair: Pair) -> None:
    """R02: the process lives, so its agent would keep the lease alive for minutes. It may again once the client itself
    has renewed."""
    lab = pair.lab
    lab.join("n1")
    token = lab.grant("a1", served=True, pid=41)
    pair.cut()
    lab.release("a1", token)
    pair.fail_over()
    vouch = scripts.heartbeat(lab.group, "n1", 15_000, vouch="a1")
    lab.pass_time(29)
    lab.run(vouch)
    lab.pass_time(2)
    beat(lab, "n1", token, Observed("a", "resident", device_bytes=10))
    assert lab.holder == ""
    assert [event["why"] for event in lab.events("LeaseReclaimed")] == ["expired"]


def test_a_lost_ownership_is_taken_again_with_a_higher_epoch(pair: Pair) -> None:
    """R02: the order of the epochs stands, and orders of the lost epoch are refused."""
    lab = pair.lab
    lab.join("n1")
    pair.cut()
    lost = lab.own("c1")
    pair.fail_over()
    reply = lab.run(scripts.own(lab.group, "c1", floor=lost))
    assert isinstance(reply, scripts.Mine)
    assert reply.epoch > lost
    other = lab.run(scripts.own(lab.group, "c2"))
    assert isinstance(other, scripts.OwnedBy)


DONE = (Observed("a", "suspended", 10), Observed("b", "resident"))
STEPS: dict[str, Callable[[Lab, int], object]] = {
    "plan": lambda lab, epoch: lab.run(scripts.plan(lab.group, lab.swap, epoch, "{}", 10_000)),
    "prepared": lambda lab, epoch: lab.ack("n1", command(lab, epoch, "prepare"), outcome="prepared"),
    "commit": lambda lab, epoch: (
        lab.run(scripts.step(lab.group, lab.swap, epoch, "prepare", "commit", 10_000)) and None
    ),
    "done": lambda lab, epoch: lab.ack("n1", command(lab, epoch, "commit"), *DONE, outcome="done"),
    "promote": lambda lab, epoch: lab.run(scripts.promote(lab.group, lab.swap, epoch, "restored")),
}


def command(lab: Lab, epoch: int, step: str) -> str:
    """An order accepted under the id that it always has: a repeat is answered like the first."""
    order = f"{lab.swap}/n1/{step}/{epoch}.1"
    lab.run(scripts.accepted(lab.group, "n1", lab.swap, epoch, step, order))
    return order


@pytest.mark.parametrize("kept", range(len(STEPS)), ids=["nothing", *list(STEPS)[:-1]])
def test_a_swap_that_was_lost_from_a_step_on_is_finished(pair: Pair, kept: int) -> None:
    """R02: the swap was carried out, and its grant not confirmed yet; of its steps the heir knows only the first few.
    They are taken again, under the same ids, and the waiter gets in, once, with a token above all before."""
    lab = pair.lab
    epoch = start_swap(lab, "n1")
    steps = list(STEPS.values())
    for step in steps[:kept]:
        step(lab, epoch)
    pair.cut()
    for step in steps[kept:]:
        step(lab, epoch)
    token = lab.number("token")
    assert lab.holder == "b1"
    pair.fail_over()
    for step in steps[kept:]:
        step(lab, epoch)
    assert lab.holder == "b1"
    assert lab.number("token") > token
    assert isinstance(lab.renew("b1", token, served=True), Lost)
    assert isinstance(lab.renew("b1", lab.number("token"), served=True), Renewed)
    assert lab.view.resident == ("b",)


def test_a_lost_swap_is_nobodys_any_more_when_its_end_is_known(pair: Pair) -> None:
    """R02: the swap ended, b is in and has confirmed. The heir thinks that it is in the middle; the agent, which knows
    the token of b's grant, has it dropped, and the orders for it are refused."""
    lab = pair.lab
    epoch = start_swap(lab, "n1")
    steps = list(STEPS.values())
    steps[0](lab, epoch)
    steps[1](lab, epoch)
    swap = lab.swap
    pair.cut()
    for step in steps[2:]:
        step(lab, epoch)
    token = lab.number("token")
    lab.renew("b1", token, served=True)
    pair.fail_over()
    assert lab.swap == swap
    beat(lab, "n1", token, *DONE)
    assert lab.swap == 0
    with pytest.raises(StaleCommandError):
        lab.run(scripts.accepted(lab.group, "n1", swap, epoch, "prepare", f"{swap}/n1/prepare/{epoch}.2", floor=token))
    assert isinstance(lab.renew("b1", token, served=True, floor=token), Renewed)
    assert lab.holder == "b1"
