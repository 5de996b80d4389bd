"""`timeslice revoke`: a group is taken away from a holder that does not give it up."""

from __future__ import annotations

import json
import signal

import pytest

from tests.cli.conftest import NODE, Cli, World, eventually
from tests.cli.operated import SIZE, StartJob
from tests.cli.stack import Up, ask, ready, shown
from timeslice.locks import scripts


def member(job: str) -> dict[str, object]:
    """What the only node says of a job's state in `trainers`."""
    (group,) = shown("status", "trainers")["groups"]
    return next((each for each in group["nodes"][0]["jobs"] if each["job"] == job), {})


def test_a_holder_in_an_endless_loop_is_taken_out(up: Up, job: StartJob) -> None:
    """L28, L08: its memory leaves the device, B is inside only after that (both do not fit), and A reads who did it."""
    ready(up())
    first, second = job("a"), job("b")
    first.do("hold", "inside")
    first.do("hang", "hangs")
    second.tell("hold")
    done = ask("revoke", "trainers", "--job", "a", "--reason", "loops since noon", "--json")
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["job"], told["already"], told["moved"]["state"]) == ("a", False, "out")
    second.until("inside")
    assert member("a")["residency"] == "suspended"
    assert member("a")["host_bytes"] == SIZE
    lost = first.until("lost:")
    assert "revoked it (loops since noon)" in lost
    assert told["by"] in lost
    late = ask("revoke", "trainers", "--job", "a")
    assert late.exit_code == 6
    assert "job a does not hold trainers; job b does" in late.stderr


def test_a_workload_that_does_not_let_go_is_moved_from_outside_and_back(up: Up, job: StartJob) -> None:
    """G19: it answers "busy" for ever. Nobody waits; a second order finds it done. The job may hold again, and finds
    its state as it was, brought back the way it left."""
    ready(up())
    first = job("a", "busy")
    first.do("hold", "inside")
    assert ask("revoke", "trainers").exit_code == 0
    again = ask("revoke", "trainers", "--json")
    assert again.exit_code == 0
    assert json.loads(again.stdout)["already"] is True
    assert member("a")["residency"] == "suspended"
    first.until("lost:")
    first.do("yield", "yielded")
    assert first.do("hold", "inside").endswith("same")


def test_a_stopped_holder_is_taken_out_before_its_lease_is_over(up: Up, job: StartJob) -> None:
    """L08: it would hold the group for another half hour."""
    ready(up())
    first, second = job("a", lease_s=1800.0), job("b")
    first.do("hold", "inside")
    first.process.send_signal(signal.SIGSTOP)
    second.tell("hold")
    assert ask("revoke", "trainers").exit_code == 0
    second.until("inside")
    assert member("a")["residency"] == "suspended"


def test_what_could_not_be_done_is_told_with_a_next_step(cli: Cli, world: World) -> None:
    """Pending (4) while the agent has not moved it; failed (1) with the reason and the processes once it was tried."""
    world.serve("trainers")
    keys = world.keys.group("trainers")
    world.driver.run(scripts.own(keys, "c1"))
    world.acquire("trainers", "a")
    world.driver.run(scripts.register(keys, "a", NODE, 77, "{}"))
    pending = cli("revoke", "trainers", "--wait", "0.3")
    assert pending.exit_code == 4
    assert "job a is not off the device of trainers yet: moving, not planned yet" in pending.stderr
    view = world.driver.view(keys)
    world.driver.run(scripts.settle(keys, view.swap, view.epoch, "the tool is missing", 30_000))
    failed = cli("revoke", "trainers")
    assert failed.exit_code == 1
    assert "was revoked already" in failed.stderr
    assert "could not be moved off the device of trainers: the tool is missing" in failed.stderr
    assert f"End its processes ({NODE} process 77)" in failed.stderr
    assert cli.json("status", "trainers")["groups"][0]["phase"] == "blocked"


def test_an_order_without_a_wait_is_only_given(cli: Cli, world: World) -> None:
    """--wait 0: exit code 0 though nothing has moved yet."""
    world.serve("trainers")
    world.acquire("trainers", "a")
    assert cli("revoke", "trainers", "--wait", "0").exit_code == 0


def test_a_lock_only_group_is_granted_when_the_lease_is_over(cli: Cli, world: World) -> None:
    """Unless told to do so at once, with a warning that the body may still run."""
    granted = world.hold_lock_only("licences", "a")
    world.acquire("licences", "b", lock_only=True)
    first = cli.json("revoke", "licences")
    assert 20 < first["quiet_s"] <= 30
    assert cli.json("queue", "licences")["holder"] is None
    result = cli("revoke", "licences", "--now")
    assert result.exit_code == 0
    assert "warning: the body of job a may still run" in result.stderr
    assert cli.json("queue", "licences")["holder"]["job"] == "b"
    renewed = world.driver.run(scripts.renew(world.keys.group("licences"), world.request("a"), granted.token))
    assert isinstance(renewed, scripts.Lost)
    assert "@" in renewed.by


def test_who_does_not_hold_is_not_revoked(cli: Cli, world: World) -> None:
    """Exit code 6: another job holds, nobody does; 3 for an unknown group. Nothing has changed."""
    world.hold_lock_only("trainers", "a")
    other = cli("revoke", "trainers", "--job", "b")
    assert other.exit_code == 6
    assert "job b does not hold trainers; job a does" in other.stderr
    assert cli.json("queue", "trainers")["holder"]["job"] == "a"
    world.driver.run(scripts.yield_(world.keys.group("trainers"), "w-a", None))
    for _ in range(2):
        nobody = cli("revoke", "trainers")
        assert nobody.exit_code == 6
        assert "nobody holds trainers" in nobody.stderr
    assert cli("revoke", "trainer").exit_code == 3


def test_a_reason_can_t_steer_the_holder_s_terminal(cli: Cli, world: World) -> None:
    """On the real stderr of its process: no control codes, no line that looks like one of its own, and not without
    end; the command itself takes no such length."""
    holder = cli.start(
        "hold", "licences", "--lock-only", "--job", "a", "--lease", "9", "--kill-on-lost", "--", "sleep", "60"
    )
    eventually(lambda: world.driver.view(world.keys.group("licences")).holder)
    state = world.driver.view(world.keys.group("licences")).state
    long = "\x1b]0;owned\x07\rred\x1b[31m\nerror: all is lost" + "x" * 5000
    assert cli("revoke", "licences", "--reason", long).exit_code == 2
    call = scripts.revoke(world.keys.group("licences"), "a", state["lease_id"], int(state["token"]), "eve\x1b[2J", long)
    world.driver.run(call)
    _, err = holder.communicate(timeout=60)
    (line,) = [line for line in err.splitlines() if "revoked it" in line]
    assert line.isprintable()
    assert "error: all is lost" in line
    assert line.endswith("more characters))")
    assert len(err) < 2000


def test_without_a_coordinator_it_says_to_start_one(cli: Cli, world: World) -> None:
    """Nothing goes on by itself then, and nobody has to be killed."""
    world.serve("trainers")
    world.acquire("trainers", "a")
    result = cli("revoke", "trainers", "--wait", "0.3")
    assert result.exit_code == 4
    assert "Start one: timeslice coordinator" in result.stderr
    assert "end its processes" not in result.stderr


@pytest.mark.parametrize("order", [("revoke", "trainers"), ("evict", "a")])
def test_an_interrupt_says_that_the_order_stands(cli: Cli, world: World, order: tuple[str, ...]) -> None:
    """Ctrl-C while it waits is no failure of the move: exit code 130."""
    world.serve("trainers")
    keys = world.keys.group("trainers")
    world.driver.run(scripts.own(keys, "c1", 60_000))
    granted = world.acquire("trainers", "a")
    if order[0] == "evict":
        world.driver.run(scripts.yield_(keys, "w-a", granted.token))
    process = cli.start(*order)
    assert process.stderr is not None
    while "moving, not planned yet" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    told = process.stderr.read()
    assert "interrupted: the order stands" in told
    assert "Aborted" not in told
    assert process.wait(60) == 130
    assert world.driver.view(keys).state["evict"] == "a"
