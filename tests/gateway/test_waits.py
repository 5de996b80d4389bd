"""Who waits at a gateway, and who leaves: never is a group held for nobody, and never do waits take all it has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from tests.agent.rig import until
from tests.client.world import World
from tests.gateway.conftest import Caller, Code, MakeGateway, queued, refused
from tests.gateway.test_leases import grant, leases
from timeslice.errors import TimeSliceError
from timeslice.gateway.faults import UnavailableError
from timeslice.gateway.leases import Leases
from timeslice.gateway.operations import FullError
from timeslice.locks import loader, scripts
from timeslice.locks.scripts import Observed

__all__ = ["leases"]  # a fixture

pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.fixture
async def patient() -> AsyncIterator[None]:
    """A test that would wait for ever fails."""
    async with asyncio.timeout(30):
        yield


async def granted(leases: Leases) -> None:
    """Return in the moment of a grant, before its caller is told."""
    while not leases._held:
        await asyncio.sleep(0)


@pytest.mark.usefixtures("lock")
async def test_the_wait_ends_before_the_callers_deadline(caller: Caller, world: World) -> None:
    """A grant that arrived when its caller had gone would block the group, so the gateway gives up a little earlier."""
    await caller.acquire("a")
    for timeout in (1.0, 8.0, 25.0):  # a machine under load may need some more time to answer
        code, words = await refused(caller.acquire("b", timeout=timeout))
        assert code == Code.DEADLINE_EXCEEDED
        if "it has left the queue" in words:
            break
    else:
        pytest.fail(f"the caller's own deadline ended it: {words}")
    await queued(world)
    await caller.yield_("a")
    assert world.holder() == ""


@pytest.mark.usefixtures("lock")
async def test_what_is_granted_to_a_caller_that_just_left_is_given_up(leases: Leases, world: World) -> None:
    """Nobody would ever yield it; also if it is cancelled once more meanwhile."""
    taking = asyncio.create_task(leases.take("g", "a"))
    await granted(leases)
    assert taking.cancel()
    await asyncio.sleep(0)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    await leases.end_waits()  # a gateway that stops sees to it, too
    assert (world.holder(), world.event_types()[-1]) == ("", "LeaseYielded")


@pytest.mark.usefixtures("lock")
async def test_what_another_caller_has_is_not_given_up(leases: Leases, world: World) -> None:
    """A caller that leaves takes nothing from one that asked for the same job, be it here, at another gateway, or
    before this one started."""
    stays, leaves = (asyncio.create_task(leases.take("g", "a")) for _ in "ab")
    await granted(leases)
    leaves.cancel()
    assert (await stays)[1]
    with pytest.raises(asyncio.CancelledError):
        await leaves
    assert world.holder() == "a"
    await leases.give_up("g", "a")

    leaves = asyncio.create_task(leases.take("g", "c"))
    await granted(leases)
    comes = asyncio.create_task(leases.take("g", "c"))  # before the first one knows of its grant
    await asyncio.sleep(0)
    leaves.cancel()
    lease, _ = await comes
    assert (world.holder(), world.view().number("token")) == ("c", lease.fencing_token)
    assert world.event_types().count("LeaseGranted") == 2
    await leases.give_up("g", "c")

    grant(world, "b")
    taking = asyncio.create_task(leases.take("g", "b"))
    await granted(leases)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert world.holder() == "b"


@pytest.mark.usefixtures("lock", "patient")
async def test_who_asks_after_the_last_has_left_asks_anew(leases: Leases, world: World) -> None:
    """A withdrawn request has no say in later ones."""
    await leases.take("g", "a")
    for _ in range(2):
        taking = asyncio.create_task(leases.take("g", "b"))
        await queued(world, "b")
        taking.cancel()
        await asyncio.wait({taking})
        assert world.queue() == []
    taking = asyncio.create_task(leases.take("g", "b"))
    await queued(world, "b")
    await leases.give_up("g", "a")
    await taking
    assert world.holder() == "b"


@pytest.mark.usefixtures("lock", "patient")
async def test_a_gateway_that_stops_asks_for_nothing(leases: Leases, world: World) -> None:
    """A call that came just before is told to ask again."""
    await leases.end_waits()
    with pytest.raises(UnavailableError, match="the gateway stops"):
        await leases.take("g", "a")
    assert world.event_types().count("LeaseGranted") == 0


@pytest.mark.usefixtures("patient")
async def test_who_waits_while_a_state_is_unknown(leases: Leases, world: World) -> None:
    """Whoever asks is refused at once, if nobody holds; a holder may bring it in order, so that those behind wait."""
    world.serve("g")
    await leases.take("g", "a")
    world.run(scripts.report(world.group(), "n1", world.view().counter, [Observed("z", "faulted", 0)]))
    waiting = asyncio.create_task(leases.take("g", "b"))
    await queued(world, "b")
    await leases.look_after_all()
    assert not waiting.done()
    await leases.give_up("g", "a")
    with pytest.raises(UnavailableError, match="the device state of job z is unknown"):
        await leases.take("g", "c")
    await leases.look_after_all()
    with pytest.raises(UnavailableError, match="the device state of job z is unknown"):
        await waiting


@pytest.mark.usefixtures("lock", "patient")
async def test_only_so_many_calls_wait(make_gateway: MakeGateway, world: World, declare: Callable[[str], None]) -> None:
    """One more is told to ask later, and takes no place in the queue; who holds may yield, and then it may wait."""
    caller = (await make_gateway(max_waits=2)).caller()
    await caller.acquire("a")
    waiting = [caller.acquire("b"), caller.acquire("b")]
    await queued(world, "b")
    code = Code.OK
    while code != Code.RESOURCE_EXHAUSTED:  # the second call of b may still be on its way
        code, words = await refused(caller.acquire("c", timeout=1))
    assert "--max-waits" in words
    assert world.queue() == ["b"]
    await caller.yield_("a")
    assert [(await each).success for each in waiting] == [True, True]
    declare("h")
    assert (await caller.acquire("c", "h")).success


@pytest.mark.usefixtures("lock", "patient")
async def test_calls_that_do_not_wait_are_limited_too(
    make_gateway: MakeGateway, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs a connection to Redis while it is answered."""
    monkeypatch.setattr("timeslice.gateway.server._OTHERS", 0)
    caller = (await make_gateway(max_waits=1)).caller()
    await caller.acquire("a")
    waiting = caller.acquire("b")
    await queued(world, "b")
    assert await refused(caller.status()) == (Code.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")
    waiting.cancel()


@pytest.mark.usefixtures("lock", "patient")
async def test_a_full_queue_refuses_callers_too(caller: Caller, world: World) -> None:
    """With the words that any client gets; who holds is not touched."""
    await caller.acquire("a")
    world.redis.zadd(world.group().alive, dict.fromkeys(map(str, range(10_000)), world.view().now_ms + 600_000))
    code, words = await refused(caller.acquire("b"))
    assert (code, "10000 requests wait already" in words) == (Code.FAILED_PRECONDITION, True)
    assert (world.holder(), world.queue()) == ("a", [])


@pytest.mark.usefixtures("lock")
async def test_a_full_gateway_makes_an_error_of_its_own(leases: Leases, world: World) -> None:
    """All waits of a job count, and what the caller is told names group and job."""
    await leases.take("g", "a")
    waiting = [asyncio.create_task(leases.take("g", job)) for job in "bbc"]
    await until(lambda: sorted(world.queue()) == ["b", "c"], "they wait")
    with pytest.raises(FullError, match=r"group g: 3 calls wait.* job d is not queued"):
        await leases.take("g", "d")
    await leases.end_waits()
    told = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(each, TimeSliceError) for each in told)


@pytest.mark.usefixtures("lock")
async def test_no_script_is_read_later(
    make_gateway: MakeGateway, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that can't open a file any more still renews and yields: it read all scripts at its start."""
    loader.load.cache_clear()
    gateway = await make_gateway()

    def closed(_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("timeslice.locks.loader.resources.files", closed)
    caller = gateway.caller()
    grant(world, "a", lease_ms=3000)
    began = world.view().number("renewed_at_ms")
    await caller.acquire("a")
    await until(lambda: world.view().number("renewed_at_ms") > began + 1000, "it is renewed")
    assert (await caller.yield_("a")).success
