"""Faults of the network between one party and the server: the party comes back, the others never notice."""

from __future__ import annotations

import time

import pytest

from tests.faults.conftest import MakeStack
from tests.faults.situations import SITUATIONS, Situations
from tests.faults.stack import Stack
from tests.support.jobs import wait_until
from timeslice.locks.loader import load

LASTS_S = 0.7
PARTIES = {
    "jobs": SITUATIONS,
    "agents": ("n1", "n2"),
    "coordinator": ("coordinator",),
    "everybody": (*SITUATIONS, "n1", "n2", "coordinator"),
}
# What a hold, a swap and a yield are made of.
VERBS = (
    *("acquire", "renew", "yield", "register"),
    *("heartbeat", "report", "accepted", "ack"),
    *("own", "plan", "step", "poke", "promote", "look"),
)


@pytest.mark.parametrize(
    ("fault", "party"),
    [
        *((fault, party) for fault in ("cut", "stall") for party in PARTIES),
        *(pytest.param("half_open", party, marks=pytest.mark.slow) for party in ("agents", "everybody")),
    ],
)
def test_a_broken_connection_is_survived(make_stack: MakeStack, party: str, fault: str) -> None:
    """R05: cut, silent, or gone without a word, at any moment of a swap: nobody is lost, nobody is let in twice."""
    stack = make_stack()
    situations = Situations(stack)
    situations.arrange()
    for way in PARTIES[party]:
        getattr(stack.proxy(way), fault)()
    time.sleep(LASTS_S)
    for way in PARTIES[party]:
        stack.proxy(way).heal()
    situations.release()
    situations.converge()


def test_a_slow_network_only_takes_longer(make_stack: MakeStack) -> None:
    """Every message of everybody comes late: the same swaps, the same order."""
    stack = make_stack()
    for way in PARTIES["everybody"]:
        stack.proxy(way).delay(0.01)
    situations = Situations(stack)
    situations.arrange()
    situations.release()
    situations.converge()


def _everywhere(stack: Stack) -> int:
    return sum(proxy.lost_replies + proxy.repeated_requests for proxy in stack.proxies.values())


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("fault", ["lose_reply_to", "repeat_request_to"])
def test_a_lost_or_doubled_call_changes_nothing(make_stack: MakeStack, verb: str, fault: str) -> None:
    """R07: the first call of this verb by each party is done and its reply is lost, or it is done twice."""
    stack = make_stack()
    for way in PARTIES["everybody"]:
        getattr(stack.proxy(way), fault)(load(verb).sha)
    situations = Situations(stack)
    situations.arrange()
    situations.release()
    situations.converge()
    assert _everywhere(stack) > 0


def test_an_order_whose_delivery_is_lost_is_taken_all_the_same(make_stack: MakeStack) -> None:
    """The server has handed the order out and believes the agent has it: the agent reads what is pending first."""
    stack = make_stack()
    stack.serve("n1", "g")
    stack.coordinate()
    first = stack.enter("g", "a")
    second = stack.queue("g", "b")
    way = stack.proxy("n1")
    way.lose_reply_to("XREADGROUP")
    wait_until(lambda: not way.armed, "the agent reads orders again")
    stack.leave(first)
    stack.await_inside(second)
    assert way.lost_replies == 1
    assert len(stack.events("g", "SwapStarted")) == 1  # it was not given up and begun anew
    stack.leave(second)
    stack.judge()
