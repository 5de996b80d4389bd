"""Operations: found by their ids, bounded, and never begun twice at a time."""

from __future__ import annotations

import asyncio

import pytest

from tests.agent.rig import until
from timeslice.errors import RefusedError
from timeslice.gateway import operations as module
from timeslice.gateway.operations import FullError, Moved, Operation, Operations


@pytest.fixture
def operations() -> Operations:
    return Operations()


async def nothing() -> Moved:
    return Moved()


async def ended(operation: Operation) -> Operation:
    await until(lambda: operation.ended, f"{operation.kind} of {operation.job} ends")
    return operation


async def test_a_repeated_request_is_the_same_operation_while_it_is_pending(operations: Operations) -> None:
    """One that is of another job, group or kind, or that comes later, is another one."""
    gate = asyncio.Event()

    async def wait() -> Moved:
        await gate.wait()
        return Moved(storage_bytes=7)

    first = operations.start("snapshot", "g", "a", wait)
    assert operations.start("snapshot", "g", "a", nothing) is first
    others = [operations.start(*what, nothing) for what in
              (("restore", "g", "a"), ("snapshot", "h", "a"), ("snapshot", "g", "b"))]  # fmt: skip
    assert len({first.id, *(other.id for other in others)}) == 4
    assert operations.find(first.id) is first
    assert first.ended is None
    gate.set()
    assert (await ended(first)).moved == Moved(storage_bytes=7)
    assert operations.find(first.id) is first
    assert operations.start("snapshot", "g", "a", nothing) is not first
    await operations.close()


async def test_what_fails_says_why(operations: Operations, caplog: pytest.LogCaptureFixture) -> None:
    """Our own errors speak for themselves; what nobody foresaw is in the log with its traceback."""

    async def refused() -> Moved:
        raise RefusedError("no room")

    async def broken() -> Moved:
        raise ZeroDivisionError("oh")

    assert (await ended(operations.start("snapshot", "g", "a", refused))).error == "no room"
    assert not caplog.records
    found = await ended(operations.start("snapshot", "g", "a", broken))
    assert found.error == "ZeroDivisionError: oh; see the gateway's log"
    assert "Traceback" in caplog.text


async def test_finished_ones_are_kept_for_a_while(operations: Operations, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many, the newest, and so long."""
    monkeypatch.setattr(module, "KEPT", 3)
    found = [await ended(operations.start("snapshot", "g", "a", nothing)) for _ in range(5)]
    assert [operations.find(each.id) for each in found] == [None, None, *found[2:]]
    monkeypatch.setattr(module, "KEEP_S", -1.0)
    assert [operations.find(each.id) for each in found] == [None] * 5


async def test_so_many_may_be_pending(operations: Operations, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is refused and leaves no trace; when one has ended there is room again."""
    monkeypatch.setattr(module, "PENDING_MAX", 2)
    gate = asyncio.Event()

    async def wait() -> Moved:
        await gate.wait()
        return Moved()

    first, second = operations.start("snapshot", "g", "a", wait), operations.start("snapshot", "g", "b", wait)
    with pytest.raises(FullError, match="2 operations are pending"):
        operations.start("snapshot", "g", "c", nothing)
    gate.set()
    await ended(first)
    await ended(second)
    await ended(operations.start("snapshot", "g", "c", nothing))


async def test_closing_gives_up_what_is_pending(operations: Operations) -> None:
    """Its work is cancelled, and has time to clean up."""
    cleaned: list[str] = []

    async def wait() -> Moved:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append("up")
        return Moved()

    operations.start("snapshot", "g", "a", wait)
    await asyncio.sleep(0)  # so that it has begun
    await operations.close()
    assert cleaned == ["up"]
