"""Agents that are away while something happens that they should know of, and leases that end between two grants."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import redis

from timeslice.errors import TimeSliceError
from timeslice.locks import scripts
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import Keys
from timeslice.torture.deeds import Deed, World
from timeslice.torture.processes import Child
from timeslice.torture.schedule import Planned
from timeslice.torture.stage import SERVED

_POLL_S = 0.03
_START_S = 0.3
_LATER_S = 1.5  # an agent starts so long after the jobs of its node, which ask by then


def trimmed(world: World, planned: Planned, agent: Child, now: float) -> Deed:
    """An agent is killed, and the orders that come for it meanwhile are lost: a short stream, or a failover."""
    label, key, dropped = agent.label, Keys().commands(agent.node), 0
    until = now + planned.lasts_s / 2  # what was lost has to show while the fault lasts

    def lose() -> None:
        nonlocal dropped
        while time.monotonic() < until and agent.label == label:
            time.sleep(_POLL_S)
        with (
            suppress(TimeSliceError, redis.exceptions.RedisError, OSError),
            world.fleet.client(world.fleet.holder_of(key)) as client,
        ):
            there = client.xlen(key)
            if agent.label == label:
                client.xtrim(key, maxlen=0, approximate=False) if planned.pick < 0.5 else client.delete(key)
                dropped = int(there)
        agent.again_at = 0.0

    def kill() -> None:
        world.processes.kill(agent, again_at=until + planned.lasts_s, fault=planned.id)
        _aside(lose)

    detail = f"orders of node {agent.node}"
    return Deed(
        harm="trim",
        label=label,
        groups=agent.groups,
        detail=detail,
        kills=(label,),
        do=kill,
        took=lambda: dropped > 0,
        heal=None,
        late=True,
    )


def joining(world: World, planned: Planned, agent: Child, now: float) -> Deed:
    """An agent leaves its groups, as no job is left on its node. Jobs come and ask; then the agent joins."""
    label = agent.label
    jobs = [child for child in world.processes.having("job") if child.node == agent.node]
    again, gone = now + planned.lasts_s / 2, False  # that it has joined has to show while the fault lasts

    def leave() -> None:
        for job in jobs:
            world.processes.kill(job, again_at=again)
        agent.heals.append(planned.id)
        world.processes.tell_to_stop(agent, again_at=again + _LATER_S)

    def joined() -> bool:
        nonlocal gone
        gone = gone or (not agent.running and any(not _serves(world, agent.node, group) for group in agent.groups))
        return gone and agent.label != label and agent.running

    return Deed(
        harm="join",
        label=label,
        groups=agent.groups,
        detail=f"node {agent.node}",
        kills=tuple(job.label for job in jobs),
        do=leave,
        took=joined,
        heal=None,
        late=True,
    )


def starting_alone(world: World, agent: Child, now: float) -> Deed:
    """An agent starts while its server is away."""
    label, name = agent.label, world.fleet.names()[0]

    def kill() -> None:
        world.fleet.kill(name)
        world.processes.kill(agent, again_at=now + _START_S)

    def started() -> bool:
        return agent.label != label and not world.fleet.servers[name].running

    return Deed(
        harm="outage",
        label=name,
        detail=f"{name} is away, and {agent.name} starts",
        kills=(label,),
        do=kill,
        took=started,
        heal=lambda: world.fleet.start_one(name),
        late=True,
    )


def revoked(world: World, planned: Planned, now: float) -> Deed:
    """Who holds one group and waits for another has the first taken away."""
    held, *others = SERVED
    until, stop, taken = now + planned.lasts_s, threading.Event(), False

    def take() -> None:
        nonlocal taken
        driver, keys = SyncDriver(world.fleet.url), Keys()
        try:
            while not taken and time.monotonic() < until and not stop.wait(_POLL_S):
                with suppress(TimeSliceError):  # it is asked again, or somebody else was quicker
                    taken = _take(driver, keys, held, others)
        finally:
            driver.close()

    return Deed(
        harm="revoke",
        groups=(held,),
        detail=f"{held}, from who waits for {', '.join(others)}",
        do=lambda: _aside(take),
        took=lambda: taken,
        heal=stop.set,
        late=True,
    )


def _take(driver: SyncDriver, keys: Keys, held: str, others: list[str]) -> bool:
    group = driver.view(keys.group(held))
    holder = (group.state.get("job", ""), group.state.get("pid", ""))
    lease = group.state.get("lease_id", "")
    if not lease or all(
        (waiter.job, str(waiter.pid)) != holder for other in others for waiter in driver.view(keys.group(other)).queue
    ):
        return False
    call = scripts.revoke(keys.group(held), holder[0], lease, group.number("token"), "torture", "", floor=group.counter)
    driver.run(call)
    return True


def _serves(world: World, node: str, group: str) -> bool:
    key = Keys().group(group).nodes
    with world.fleet.client(world.fleet.holder_of(key)) as client:
        return client.zscore(key, node) is not None


def _aside(work: Callable[[], None]) -> None:
    threading.Thread(target=work, daemon=True, name="torture-deed").start()
