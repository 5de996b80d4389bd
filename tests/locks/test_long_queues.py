"""What a long queue costs the server."""

from __future__ import annotations

import pytest

from tests.conftest import ServerFactory
from tests.locks.lab import Lab
from timeslice.locks import scripts
from timeslice.locks.scripts import Observed

WAITERS = 200


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
