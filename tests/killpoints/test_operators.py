"""An operator's command that dies at its write is given again, and does what it says, once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis

from tests.killpoints.duel import GROUP, NODE, Duel
from timeslice.locks import scripts
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import Keys
from timeslice.locks.scripts import Request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

COMMAND = """
import sys
from timeslice.torture import killpoints
if sys.argv[1]:
    killpoints.arm(sys.argv[1])
from timeslice.cli.main import main
main(sys.argv[2:])
"""
SPARE = "spare"
# verb: the command, what ends its effect, and its exit code when the one that died had done it
COMMANDS: dict[str, tuple[list[str], list[str], int]] = {
    "pause": (["pause", GROUP], ["resume", GROUP], 0),
    "configure": (["group", "set", GROUP, "--order", "3"], [], 0),
    "drain": (["node", "drain", NODE], ["node", "undrain", NODE], 0),
    "repair": (["repair", GROUP], [], 6),  # a living holder is left
    "delete": (["group", "delete", SPARE], [], 3),
}


@pytest.fixture(scope="module")
def duel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Duel]:
    with ExitStack() as stack:
        running = Duel(tmp_path_factory.mktemp("operated"), stack)
        running.both_take_turns()
        yield running


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("verb", COMMANDS)
def test_a_command_that_was_killed_is_given_again(duel: Duel, verb: str, when: str) -> None:
    """Killed right before or after its call; the same command again brings it about, and jobs take turns after it."""
    line, undo, done_code = COMMANDS[verb]
    run(duel, "group", "create", SPARE, "--lock-only")
    assert run(duel, *line, kill_at=f"operator:{verb}:{when}:1") == -signal.SIGKILL
    # Whether repair leaves a living holder depends on the moment; the others' answers do not.
    allowed = {0, done_code} if verb == "repair" else {done_code if when == "after" else 0}
    assert run(duel, *line) in allowed
    if verb == "delete":
        with redis.Redis.from_url(duel.url) as client:
            assert not client.sismember(Keys().groups, SPARE)
    if undo:
        assert run(duel, *undo) == 0
    duel.both_take_turns()
    # Of moves that an operator ordered the checker knows nothing: they are for no waiter.
    assert [each for each in duel.report().violations if each.rule != "order"] == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_order_against_a_holder_that_was_killed_is_given_again(duel: Duel, when: str) -> None:
    """Killed before its call, `revoke` has taken nothing, and takes the lease then; killed after it, it says so."""
    driver, keys = SyncDriver(duel.url), Keys().group(SPARE)
    run(duel, "group", "create", SPARE, "--lock-only")
    driver.run(scripts.acquire(keys, Request(f"w-{when}", "c", "n1", 1, 1, lease_ms=600_000, lock_only=True)))
    order = ["revoke", SPARE, "--now"]
    assert run(duel, *order, kill_at=f"operator:revoke:{when}:1") == -signal.SIGKILL
    assert driver.view(keys).holder == ("c" if when == "before" else "")
    assert run(duel, *order) == 0
    assert driver.view(keys).holder == ""
    entries: Any = driver.client.xrange(keys.events)
    told = [(fields[b"type"], fields.get(b"waiter")) for _, fields in entries]
    assert told.count((b"LeaseRevoked", f"w-{when}".encode())) == 1
    assert run(duel, "group", "delete", SPARE) == 0
    driver.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_order_to_move_a_job_out_that_was_killed_is_given_again(duel: Duel, when: str) -> None:
    """Killed at its call, `evict` leaves no job out for good; given again it is done, or refused for the holder."""
    order = ["evict", "a", "--group", GROUP, "--wait", "0"]
    assert run(duel, *order, kill_at=f"operator:evict:{when}:1") == -signal.SIGKILL
    assert run(duel, *order) in {0, 6}
    duel.both_take_turns()
    assert [each for each in duel.report().violations if each.rule != "order"] == []


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("point", "done_code"), [("forget", 0), ("srem nodes", 3)])
def test_a_node_is_forgotten_although_the_command_was_killed(duel: Duel, point: str, done_code: int, when: str) -> None:
    """Between its group and the list of nodes, too: the same command again leaves nothing of the node."""
    keys, gone = Keys(), "gone-1"
    driver = SyncDriver(duel.url)
    driver.run(scripts.heartbeat(keys.group(SPARE), gone, 1))
    driver.client.sadd(keys.groups, SPARE)
    driver.client.sadd(keys.nodes, gone)
    duel.until(lambda: not driver.view(keys.group(SPARE)).nodes[gone].alive, "its heartbeat is overdue")
    order = ["node", "forget", gone]
    assert run(duel, *order, kill_at=f"operator:{point}:{when}:1") == -signal.SIGKILL
    assert run(duel, *order) == (done_code if when == "after" else 0)
    assert gone not in driver.view(keys.group(SPARE)).nodes
    assert not driver.client.sismember(keys.nodes, gone)
    assert run(duel, "group", "delete", SPARE) == 0
    driver.close()


def run(duel: Duel, *line: str, kill_at: str = "") -> int:
    """Exit code of the command as a process of its own."""
    command = [sys.executable, "-c", COMMAND, kill_at, "--url", duel.url, *line]
    with subprocess.Popen(command, env=dict(os.environ), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        duel.until(lambda: process.poll() is not None, f"{' '.join(line)} ends")
        assert process.stderr
        print(process.stderr.read().decode())
        return process.returncode
