"""What a long queue costs the server."""

from __future__ import annotations

import pytest

from tests.conftest import ServerFactory
from tests.locks.lab import Lab
from timeslice.errors import RefusedError
from timeslice.locks import scripts
from timeslice.locks.scripts import Observed

WAITERS = 200
MOST = 10_000  # as the scripts have it


def none_serves(lab: Lab) -> str:
    lab.run(scripts.configure(lab.group, {}, mode="served"))
    return "no agent serves this group"


def none_has_told(lab: Lab) -> str:
    lab.beat("n1")
    return "node n1 joined and has not yet told what is on its devices"


def none_knows(lab: Lab) -> str:
    lab.join("n1")
    lab.report("n1", Observed("x", "faulted"))
    return "the device state of job x is unknown"


def none_answers(lab: Lab) -> str:
    lab.join("n1")
    lab.pass_time(16)
    return "node n1 unreachable since"


@pytest.mark.parametrize("blocked", [none_serves, none_has_told, none_knows, none_answers])
def test_a_block_that_is_the_same_for_all_costs_one_look(blocked: object, server_factory: ServerFactory) -> None:
    """However many wait, a refresh reads the record of the first only: hundreds of them would else fill the server."""
    lab = Lab(server_factory().url)
    assert callable(blocked)
    reason = blocked(lab)
    for number in range(WAITERS):
        assert reason in lab.queue(f"w{number}", f"job{number}", served=True).reason
    lab.redis.config_resetstat()
    lab.queue("w0", "job0", served=True)
    assert lab.redis.info("commandstats")["cmdstat_hmget"]["calls"] < 10
    lab.redis.close()


def crowd(lab: Lab, size: int) -> list[str]:
    """So many signs of life in the group, all of them good for a while."""
    names = [f"x{number}" for number in range(size)]
    lab.redis.zadd(lab.group.alive, dict.fromkeys(names, lab.view.now_ms + 600_000))
    return names


def test_a_queue_has_an_end(lab: Lab) -> None:
    """Who comes new to ten thousand is refused and leaves nothing. Who waits, or comes back to its place after data
    loss, does not notice it, and the group goes on. With one less there is room again."""
    token = lab.grant("a1")
    place = lab.queue("b1").score
    names = crowd(lab, MOST - 1)
    with pytest.raises(RefusedError, match=r"10000 requests wait already.* job c .*timeslice queue g") as refused:
        lab.ask("c1")
    assert (refused.value.group, refused.value.job) == ("g", "c")
    assert lab.redis.hget(lab.group.waiters, "c1/job") is None
    assert lab.queue("b1").score == place
    lab.queue("d1", score=place)
    assert lab.waiting == ["b1", "d1"]
    lab.release("a1", token)
    assert lab.holder == "b1"
    lab.redis.zrem(lab.group.alive, *names[:2])
    lab.queue("c1")
    assert lab.waiting == ["d1", "c1"]


def test_the_dead_make_room(lab: Lab) -> None:
    """However many they are: each call takes some of them away before it counts."""
    lab.grant("a1")
    names = crowd(lab, MOST)
    lab.redis.zadd(lab.group.alive, dict.fromkeys(names, 1))
    lab.queue("b1")
    assert lab.redis.zcard(lab.group.alive) < MOST
