"""One node of many fails: the others are as they were, its waiter is put off, and the rest of the queue goes on."""

from __future__ import annotations

import pytest

from tests.kinds.world import World

NODES = ("n1", "n2", "n3", "n4")
IN, OUT = ("resident", False), ("suspended", False)


@pytest.mark.parametrize("operation", ["prepare", "suspend", "restore", "release"])
async def test_a_failure_of_one_node_is_undone_on_all(world: World, operation: str) -> None:
    """F03: with four nodes, one of which fails once at this step: everything is rolled back everywhere, the waiter is
    put off and says why, whoever needs no move passes it, and it gets in afterwards."""
    await world.start(*NODES)
    await world.load("a")
    await world.load("b")
    assert world.states("a") == dict.fromkeys(NODES, OUT)
    world.rig("n3").fake.knob(operation, fail=1, kind="poisoned")
    first = world.ask("a")
    await world.queued(first)
    second = world.ask("b")
    passed = await world.inside(second)
    assert passed.how == "no-op"
    assert (world.states("a"), world.states("b")) == (dict.fromkeys(NODES, OUT), dict.fromkeys(NODES, IN))
    view = await world.view()
    assert [(waiter.job, waiter.deferred.startswith("node n3: ")) for waiter in view.queue] == [("a", True)]
    assert not first.task.done()
    await world.leave("b")
    grant = await world.inside(first)
    assert (grant.how, grant.token > passed.token) == ("restored", True)
    assert (world.states("a"), world.states("b")) == (dict.fromkeys(NODES, IN), dict.fromkeys(NODES, OUT))
