"""What a group's event stream tells of its leases: right histories, and some that break just that rule."""

from __future__ import annotations

import pytest

from tests.torture.cases import Cases, Write, judge, name
from tests.torture.tale import Tale

CASES = Cases()
good, breaks = CASES.good, CASES.breaks


@good
def one_after_the_other() -> Tale:
    tale = Tale()
    for waiter, end in (
        ("a-1", "LeaseYielded"),
        ("b-1", "LeaseReclaimed"),
        ("c-1", "LeaseRevoked"),
        ("a-2", "GrantExpired"),
        ("b-2", "WaiterCancelled"),
    ):
        tale.granted(waiter)
        tale.told(end, waiter, token=str(tale.token))
    tale.granted("c-2")
    return tale


@breaks("granted")
def granted_while_it_is_held() -> Tale:
    tale = Tale()
    tale.granted("a-1")
    tale.granted("b-1")
    return tale


@breaks("granted")
def the_end_of_another_lease_frees_nothing() -> Tale:
    tale = Tale()
    tale.granted("a-1")
    tale.told("WaiterCancelled", "c-1")
    tale.granted("b-1")
    return tale


@breaks("granted")
def granted_long_after_a_loss() -> Tale:
    tale = Tale()
    tale.heals(tale.fault("flush"))
    tale.wait(4)
    tale.granted("a-1")
    tale.granted("b-1")
    return tale


@good
def nobody_came_for_long_after_the_end_was_lost() -> Tale:
    tale = Tale()
    tale.granted("a-1")
    tale.heals(tale.fault("flush"))
    tale.wait(60)
    tale.granted("b-1")
    return tale


@good
def the_end_was_lost_with_the_data() -> Tale:
    tale = Tale()
    tale.granted("a-1")
    tale.heals(tale.fault("failover"))
    tale.granted("b-1")
    return tale


@good
def a_lease_is_put_back_over_a_forgotten_one() -> Tale:
    tale = Tale()
    tale.granted("a-1", token=7)
    tale.told("StateLost")
    tale.told("LeaseReinstalled", "a-1", token="7")
    tale.told("LeaseReclaimed", "a-1", token="7")
    tale.told("LeaseReinstalled", "b-1", token="8")
    return tale


@breaks("granted", "touched", "overlap")
def a_holder_is_moved_for_a_second_grant() -> Tale:
    """Both work and both yield by themselves: no end before the second grant."""
    tale = Tale()
    tale.enters("a.1", 1001)
    tale.granted("a-1", 1001)
    tale.checks("a.1", "x", "x")
    tale.granted("b-1", 1002)
    tale.moves("a", "prepare", "suspend")
    tale.enters("b.1", 1002)
    tale.checks("b.1", "y", "y")
    tale.checks("a.1", "x", "x")
    tale.leaves("b.1")
    tale.told("LeaseYielded", "b-1", token="1002")
    tale.leaves("a.1")
    tale.told("LeaseYielded", "a-1", token="1001")
    return tale


def _an_older_one_comes_back(*, lock_only: bool, after_s: float) -> Tale:
    tale = Tale(lock_only=lock_only)
    tale.enters("a.1", 1001)
    tale.granted("a-1", 1001)
    stop = tale.fault("stop", "a.1")
    tale.told("LeaseReclaimed", "a-1", token="1001")
    if not lock_only:
        tale.moves("a", "prepare", "suspend")
    tale.granted("b-1", 1002)
    tale.enters("b.1", 1002)
    tale.leaves("b.1")
    tale.yields("b-1")
    tale.heals(stop)
    tale.heals(tale.fault("flush"))
    tale.wait(after_s)
    tale.told("LeaseReinstalled", "a-1", token="1001")
    tale.loses("a.1")
    return tale


@breaks("tokens")
def an_older_lease_is_put_back() -> Tale:
    return _an_older_one_comes_back(lock_only=False, after_s=0)


@good
def an_older_lock_only_lease_is_put_back_by_its_first_renewal() -> Tale:
    return _an_older_one_comes_back(lock_only=True, after_s=0)


@breaks("tokens")
def an_older_lock_only_lease_is_put_back_later() -> Tale:
    return _an_older_one_comes_back(lock_only=True, after_s=5)


@breaks("tokens")
def an_older_lease_is_put_back_after_one_whose_grant_was_lost_untold() -> Tale:
    tale = Tale()
    tale.enters("b.1", 1002)
    tale.leaves("b.1")
    tale.heals(tale.fault("flush"))
    tale.wait(2)
    tale.told("LeaseReinstalled", "a-1", token="1001")
    return tale


@good
def what_a_new_master_wrote_is_told_after_what_the_old_one_granted() -> Tale:
    tale = Tale()
    tale.enters("b.1", 10**7)  # later than the entry that tells of the older lease
    tale.granted("b-1", 10**7)
    tale.leaves("b.1")
    tale.wait(2)
    tale.told("StateLost")
    tale.told("LeaseReinstalled", "a-1", token="1001")
    return tale


@good
def the_stream_of_a_new_master_is_read_from_its_beginning() -> Tale:
    tale = Tale()
    for waiter in ("a-1", "b-1"):
        tale.granted(waiter)
        tale.told("LeaseYielded", waiter)
    tale.starts_over()
    tale.granted("a-1", 1001)
    return tale


@good
def an_unused_grant_does_not_bar_an_older_lease() -> Tale:
    tale = Tale()
    tale.enters("a.1", 1001)
    tale.granted("a-1", 1001)
    tale.told("StateLost")
    tale.granted("b-1", 1002)
    tale.told("GrantExpired", "b-1", token="1002")
    tale.told("LeaseReinstalled", "a-1", token="1001")
    return tale


@pytest.mark.parametrize(("write", "broken"), CASES.all, ids=name)
def test_a_history_breaks_just_the_rules_that_it_should(write: Write, broken: set[str]) -> None:
    """No false alarm on what the design allows; what it does not is caught, by the rules that are about it alone."""
    assert {violation.rule for violation in judge(write()).violations} == broken
