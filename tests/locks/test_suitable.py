"""Which servers may hold locks."""

from __future__ import annotations

import pytest

from tests.conftest import ServerFactory
from timeslice.errors import ServerUnsuitableError
from timeslice.locks.drivers import AsyncDriver, SyncDriver
from timeslice.locks.suitable import check_server, verify, verify_async


@pytest.mark.parametrize("version", ["7.0.0", "7.0.15", "10.1", b"8.0.2"])
def test_new_enough_servers_are_taken(version: str | bytes) -> None:
    """7.0 is the oldest."""
    check_server({"redis_version": version, "maxmemory_policy": "noeviction"}, "here")


@pytest.mark.parametrize("version", ["6.2.14", "5.0"])
def test_older_servers_are_refused(version: str) -> None:
    """The message names the address, the version and what is needed."""
    with pytest.raises(ServerUnsuitableError, match=r"redis://x is version .*needs 7\.0 or newer"):
        check_server({"redis_version": version}, "redis://x")


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", b"allkeys-random"])
def test_servers_that_evict_are_refused(policy: str | bytes) -> None:
    """Any policy but noeviction, and the message says how to change it."""
    with pytest.raises(ServerUnsuitableError, match="CONFIG SET maxmemory-policy noeviction"):
        check_server({"redis_version": "7.2.0", "maxmemory_policy": policy}, "here")


def test_what_a_server_does_not_tell_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Where INFO is forbidden nothing can be checked."""
    check_server({}, "redis://x")
    assert "does not tell its version" in caplog.text
    assert "does not tell its eviction policy" in caplog.text


async def test_a_user_who_may_not_ask_is_let_through(server_factory: ServerFactory) -> None:
    """An ACL that forbids INFO is no reason to refuse the server."""
    server = server_factory()
    admin = SyncDriver(server.url)
    admin.client.execute_command("ACL SETUSER x on >secret ~* +@all -info")  # type: ignore[no-untyped-call]
    url = server.url.replace("unix://", "unix://x:secret@")
    sync, aio = SyncDriver(url), AsyncDriver(url)
    try:
        verify(sync)
        await verify_async(aio)
    finally:
        sync.close()
        await aio.close()
        admin.close()


async def test_a_real_server_is_asked_by_both_drivers(server_factory: ServerFactory) -> None:
    """The policy is read from INFO, which managed servers allow."""
    good, bad = server_factory(), server_factory(args=("--maxmemory-policy", "volatile-lru"))
    for url, fine in ((good.url, True), (bad.url, False)):
        sync, aio = SyncDriver(url), AsyncDriver(url)
        try:
            if fine:
                verify(sync)
                await verify_async(aio)
            else:
                with pytest.raises(ServerUnsuitableError, match="volatile-lru"):
                    verify(sync)
                with pytest.raises(ServerUnsuitableError, match="volatile-lru"):
                    await verify_async(aio)
        finally:
            sync.close()
            await aio.close()
