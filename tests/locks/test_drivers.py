"""Both drivers on real servers and over real connections: the same behaviour, by threads and by asyncio."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from tests.conftest import ServerFactory
from tests.locks.faces import Face
from tests.locks.lab import Lab
from tests.locks.proxy import Impostor
from tests.support.ports import free_port
from timeslice.errors import RedisUnreachableError, ServerUnsuitableError, UsageError
from timeslice.locks import flows, scripts
from timeslice.locks.drivers import AsyncDriver, SyncDriver
from timeslice.locks.flows import Entries, Grant, Wait
from timeslice.locks.scripts import Call, Granted, Yielded

T = TypeVar("T")
DEADLINE_S = 20.0


def acquire(lab: Lab, waiter: str) -> Call[Any]:
    return scripts.acquire(lab.group, lab.request(waiter))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def blocked(lab: Lab) -> int:
    """How many wait on a server, or on any of the cluster."""
    client: Any = lab.redis
    nodes = client.get_primaries() if hasattr(client, "get_primaries") else [None]
    found = [client.client_list(**({"target_nodes": node} if node else {})) for node in nodes]
    return sum(each["cmd"] == "xread" and "b" in each["flags"] for clients in found for each in clients)


def in_thread(work: Callable[[], T]) -> Callable[[], T]:
    """Start ``work``; the function returned waits for its result or raises its error."""
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()

    def join() -> T:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        if errors:
            raise errors[0]
        return results[0]

    return join


def test_a_waiter_is_woken_by_the_yield(face: Callable[[str], Face], site: Lab) -> None:
    """The whole way: queued, woken by its own stream, confirmed."""
    driver = face(site.url)
    token = site.grant("a1")
    join = in_thread(lambda: driver.drive(flows.acquire(site.group, site.request("b1"))))
    until(lambda: site.waiting == ["b1"])
    site.release("a1", token)
    grant = join()
    assert isinstance(grant, Grant)
    assert grant.token > token
    assert site.number("confirmed") == 1


def test_a_script_the_server_forgot_is_sent_again(face: Callable[[str], Face], site: Lab) -> None:
    """SCRIPT FLUSH between two calls is not noticed."""
    driver = face(site.url)
    site.redis.script_flush()
    assert isinstance(driver.run(acquire(site, "a1")), Granted)
    site.redis.script_flush()
    assert isinstance(driver.run(scripts.yield_(site.group, "a1", site.number("token"))), Yielded)


def test_a_call_whose_answer_is_lost_is_sent_again(face: Callable[[str], Face], plain: Lab, proxy: Impostor) -> None:
    """The script ran, its reply did not arrive: the second answer is the first one's."""
    driver = face(proxy.url)
    driver.run(acquire(plain, "z1"))
    driver.run(scripts.cancel(plain.group, "z1"))
    proxy.lose_reply_to("a1")
    assert isinstance(driver.run(acquire(plain, "a1")), Granted)
    assert proxy.lost_replies == 1
    assert len([event for event in plain.events("LeaseGranted") if event["waiter"] == "a1"]) == 1


def test_a_cut_connection_is_made_anew_within_the_deadline(
    face: Callable[[str], Face], plain: Lab, proxy: Impostor
) -> None:
    """The network comes back while the call is being tried."""
    driver = face(proxy.url)
    driver.run(acquire(plain, "a1"))
    proxy.cut()
    threading.Timer(0.3, proxy.heal).start()
    assert isinstance(driver.run(acquire(plain, "a1")), Granted)


def test_a_server_that_stays_away_is_unreachable_after_the_deadline(
    face: Callable[[str], Face], plain: Lab, proxy: Impostor
) -> None:
    """The error names the address; not before the deadline."""
    driver = face(proxy.url)
    proxy.cut()
    started = time.monotonic()
    with pytest.raises(RedisUnreachableError, match=rf"{proxy.url} does not answer"):
        driver.run(acquire(plain, "a1"), deadline_s=0.5)
    assert time.monotonic() - started > 0.2
    with pytest.raises(RedisUnreachableError):
        driver.wait(Wait(plain.group.grant("a1"), "0-0", 300))


def test_a_wait_goes_on_over_a_cut(face: Callable[[str], Face], plain: Lab, proxy: Impostor) -> None:
    """What was written meanwhile is read from where the wait began."""
    driver = face(proxy.url)
    join = in_thread(lambda: driver.wait(Wait(plain.group.grant("b1"), "0-0", 15_000)))
    until(lambda: proxy.connections > 0)
    proxy.cut()
    plain.redis.xadd(plain.group.grant("b1"), {"kind": "poke"})
    proxy.heal()
    ((_, fields),) = join()
    assert fields == {"kind": "poke"}


def test_a_wait_that_nothing_comes_of_ends_in_time(face: Callable[[str], Face], site: Lab) -> None:
    """No entry is an answer, not an error."""
    driver = face(site.url)
    assert driver.wait(Wait(site.group.grant("b1"), "0-0", 30)) == []
    assert driver.wait(Wait(site.group.grant("b1"), "0-0", 0)) == []


NOT_NOW = {
    "LOADING": b"-LOADING Redis is loading the dataset in memory\r\n",
    "BUSY": b"-BUSY Redis is busy running a script.\r\n",
    "READONLY": b"-READONLY You can't write against a read only replica.\r\n",
    "MASTERDOWN": b"-MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.\r\n",
    "OOM": b"-OOM command not allowed when used memory > 'maxmemory'.\r\n",
    "UNBLOCKED": b"-UNBLOCKED force unblock from blocking operation\r\n",
    "CLUSTERDOWN": b"-CLUSTERDOWN The cluster is down\r\n",
    "TRYAGAIN": b"-TRYAGAIN Multiple keys request during rehashing of slot\r\n",
    "NOREPLICAS": b"-NOREPLICAS Not enough good replicas to write.\r\n",
    "MISCONF": b"-MISCONF Errors writing to the AOF file: No space left on device\r\n",
    "clients": b"-ERR max number of clients reached\r\n",
    "NOAUTH": b"-NOAUTH Authentication required.\r\n",
    "WRONGPASS": b"-WRONGPASS invalid username-password pair or user is disabled.\r\n",
}
NEVER = {
    "MOVED": b"-MOVED 3999 127.0.0.1:6381\r\n",
    "CROSSSLOT": b"-CROSSSLOT Keys in request don't hash to the same slot\r\n",
    "NOPERM": b"-NOPERM this user has no permissions to run the 'evalsha' command\r\n",
    "WRONGTYPE": b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n",
}


@pytest.mark.parametrize("answer", NOT_NOW)
def test_an_answer_that_means_not_now_is_asked_again(
    face: Callable[[str], Face], plain: Lab, proxy: Impostor, answer: str
) -> None:
    """The server recovers while the call is being tried; the user notices nothing."""
    driver = face(proxy.url)
    driver.run(acquire(plain, "a1"))
    proxy.answer = NOT_NOW[answer]
    threading.Timer(0.15, lambda: setattr(proxy, "answer", b"")).start()
    assert isinstance(driver.run(acquire(plain, "a1")), Granted)


@pytest.mark.parametrize("answer", NOT_NOW)
def test_an_answer_that_goes_on_meaning_not_now_is_unreachable(
    face: Callable[[str], Face], plain: Lab, proxy: Impostor, answer: str
) -> None:
    """After the deadline the user is told, with the server's own words."""
    driver = face(proxy.url)
    driver.run(acquire(plain, "a1"))
    proxy.answer = NOT_NOW[answer]
    with pytest.raises(RedisUnreachableError) as raised:
        driver.run(acquire(plain, "a1"), deadline_s=0.1)
    assert NOT_NOW[answer].split(b" ", 3)[-1].decode().strip()[:20] in str(raised.value)
    assert ("Raise maxmemory" in str(raised.value)) == (answer == "OOM")
    assert "does not answer" not in str(raised.value)
    assert "Run: timeslice doctor" not in str(raised.value) or answer == "UNBLOCKED"


@pytest.mark.parametrize("answer", NEVER)
def test_an_answer_that_asking_again_can_t_change_is_an_error_at_once(
    face: Callable[[str], Face], plain: Lab, proxy: Impostor, answer: str
) -> None:
    """Not an outage to be ridden out: a waiter would ask at full speed for minutes."""
    driver = face(proxy.url)
    driver.run(acquire(plain, "a1"))
    proxy.answer = NEVER[answer]
    with pytest.raises(ServerUnsuitableError):
        driver.run(acquire(plain, "a1"), deadline_s=60)


def test_what_speaks_no_redis_is_named_as_such(face: Callable[[str], Face], plain: Lab, proxy: Impostor) -> None:
    """The URL points at some other service; the error says so at once and names the variable."""
    proxy.answer = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"
    with pytest.raises(ServerUnsuitableError, match=r"speaks no Redis.*TIMESLICE_URL"):
        face(proxy.url).run(acquire(plain, "a1"), deadline_s=60)


def test_a_wrong_password_is_an_error_at_once(face: Callable[[str], Face], server_factory: ServerFactory) -> None:
    """It is said without the password."""
    running = server_factory(port=free_port())
    plain = Lab(running.url)
    plain.redis.config_set("requirepass", "right")
    plain.redis.close()
    assert running.tcp_url is not None
    driver = face(running.tcp_url.replace("redis://", "redis://:wrong-one@"))
    lab = Lab("redis://:right@" + running.tcp_url.removeprefix("redis://"))
    with pytest.raises(ServerUnsuitableError, match="credentials") as raised:
        driver.run(acquire(lab, "a1"), deadline_s=60)
    assert "wrong-one" not in str(raised.value)
    lab.redis.close()


def test_an_address_that_can_t_be_read_is_a_usage_error(face: Callable[[str], Face]) -> None:
    """Before anything is sent."""
    with pytest.raises(UsageError):
        face("http://example.org")


def test_waiters_use_no_connection_of_the_pool(site: Lab) -> None:
    """Twenty threads wait while the pool has two connections, and calls go through all the same."""
    driver = SyncDriver(site.url + "?max_connections=2")
    site.grant("a1")
    joins = [
        in_thread(lambda n=n: driver.drive(flows.acquire(site.group, site.request(f"w{n}"))))  # type: ignore[misc]
        for n in range(20)
    ]
    until(lambda: len(site.waiting) == 20)
    until(lambda: blocked(site) >= 20)
    order = site.waiting
    driver.run(scripts.yield_(site.group, "a1", site.number("token")))
    for waiter in order:
        until(lambda waiter=waiter: site.holder == waiter and site.number("confirmed") == 1)  # type: ignore[misc]
        driver.run(scripts.yield_(site.group, waiter, site.number("token")))
    for join in joins:
        join()
    driver.close()


def test_many_tasks_wait_on_one_loop(site: Lab) -> None:
    """As above, for asyncio: all are granted, in order."""

    async def main() -> list[int]:
        driver = AsyncDriver(site.url + "?max_connections=2")

        async def one(n: int) -> int:
            grant = await driver.drive(flows.acquire(site.group, site.request(f"w{n}")))
            await driver.run(scripts.yield_(site.group, f"w{n}", grant.token))
            return grant.token

        try:
            return await asyncio.gather(*(one(n) for n in range(20)))
        finally:
            await driver.close()

    tokens = asyncio.run(main())
    assert len(set(tokens)) == 20


def test_a_cancelled_wait_does_not_hand_its_connection_on(site: Lab) -> None:
    """An answer that comes later would be read by the next wait as its own."""

    async def main() -> Entries:
        driver = AsyncDriver(site.url)
        task = asyncio.create_task(driver.wait(Wait(site.group.grant("b1"), "0-0", 10_000)))
        while not blocked(site):
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await driver.client.xadd(site.group.grant("b1"), {"kind": "for b"})
        found = await driver.wait(Wait(site.group.grant("c1"), "0-0", 50))
        await driver.close()
        return found

    assert asyncio.run(main()) == []


def test_a_forked_child_leaves_its_parent_s_connections_alone(site: Lab) -> None:
    """Parent and child wait and call on; each gets its own answers."""
    driver = SyncDriver(site.url)
    driver.wait(Wait(site.group.grant("b1"), "0-0", 1))
    site.redis.xadd(site.group.grant("b1"), {"kind": "b"})
    site.redis.xadd(site.group.grant("c1"), {"kind": "c"})
    child = os.fork()
    if child == 0:
        code = 1
        try:
            entries = driver.wait(Wait(site.group.grant("c1"), "0-0", 1000))
            reply = driver.run(acquire(site, "c1"))
            driver.close()
            code = 0 if entries[0][1] == {"kind": "c"} and isinstance(reply, Granted) else 2
        finally:
            os._exit(code)
    entries = driver.wait(Wait(site.group.grant("b1"), "0-0", 1000))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert entries[0][1] == {"kind": "b"}
    assert driver.wait(Wait(site.group.grant("b1"), "0-0", 1000)) == entries
    assert driver.run(scripts.cancel(site.group, "c1")) == "granted"
    driver.close()


def test_connections_that_broke_do_not_count_against_the_limit(plain: Lab) -> None:
    """However often the server closes them: the limit of the URL is for those that are open."""
    driver = SyncDriver(plain.url + "?max_connections=1")
    for _ in range(3):
        assert driver.view(plain.group).holder == ""
        for client in plain.redis.client_list():
            if client["cmd"] in {"eval_ro", "evalsha_ro"}:
                plain.redis.client_kill_filter(_id=client["id"])
    driver.close()


def test_the_view_is_one_moment(face: Callable[[str], Face], site: Lab) -> None:
    """Both drivers read the group in one transaction."""
    site.grant("a1")
    site.queue("b1")
    view = face(site.url).view(site.group)
    assert (view.holder, [waiter.job for waiter in view.queue]) == ("a", ["b"])


def test_a_client_told_to_decode_makes_no_difference(face: Callable[[str], Face], site: Lab) -> None:
    """Options in the URL do not change what the drivers read."""
    driver = face(site.url + "?decode_responses=True&protocol=3")
    token = driver.run(acquire(site, "a1")).token
    site.redis.xadd(site.group.grant("b1"), {"kind": "poke"})
    assert driver.wait(Wait(site.group.grant("b1"), "0-0", 100))[0][1] == {"kind": "poke"}
    assert driver.view(site.group).number("token") == token


def test_lua_errors_are_not_taken_for_outages(site: Lab) -> None:
    """A key of the wrong kind, put there by somebody else, is said at once."""
    site.redis.set(site.group.queue, "not a sorted set")
    driver = SyncDriver(site.url)
    with pytest.raises(ServerUnsuitableError, match="WRONGTYPE"):
        driver.run(acquire(site, "a1"))
    driver.close()
