"""`timeslice node drain`, `undrain` and `forget`: maintenance of a node, and its end."""

from __future__ import annotations

import json
import signal

from tests.cli.conftest import NODE, Cli, World
from tests.cli.operated import SIZE, StartJob
from tests.cli.stack import Up, ask, ready, shown
from timeslice.locks import scripts
from timeslice.locks.scripts import Observed


def test_a_node_is_emptied_and_put_back(up: Up, job: StartJob) -> None:
    """The holder is taken out only if told so; what stays in processes is listed; nobody is let in until the end of
    the maintenance, and then everybody goes on with what they had."""
    ready(up())
    node = shown("nodes")["nodes"][0]["node"]
    first, second = job("a"), job("b")
    first.do("hold", "inside")
    waited = ask("node", "drain", node, "--wait", "0.5")
    assert waited.exit_code == 4
    assert "trainers: job a holds it" in waited.stderr
    assert f"node {node} stays drained" in waited.stderr
    second.tell("hold")
    done = ask("node", "drain", node, "--revoke", "--reason", "new disk", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout) == {
        "schema": 1,
        "node": node,
        "safe": True,
        "busy": [],
        "host_copies": [{"group": "trainers", "job": "a", "host_bytes": SIZE}],
    }
    assert "lost if the machine restarts" in done.stderr
    assert "revoked it (new disk)" in first.until("lost:")
    (group,) = shown("status", "trainers")["groups"]
    assert (group["phase"], group["paused"], group["residents"]) == ("paused", True, [])
    assert f"node {node} by " in group["reason"]
    assert "timeslice node undrain" in group["waiters"][0]["why"]
    assert ask("node", "drain", node).exit_code == 0
    assert ask("node", "undrain", node).exit_code == 0
    second.until("inside")
    assert "was not drained" in ask("node", "undrain", node).stderr


def test_an_interrupt_leaves_it_drained_and_says_so(cli: Cli, world: World) -> None:
    """Ctrl-C while it waits for a holder: exit code 130."""
    world.serve("trainers")
    world.acquire("trainers", "a")
    process = cli.start("node", "drain", NODE)
    assert process.stderr is not None
    while "job a holds it" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    assert "stays drained; repeat this to go on" in process.stderr.read()
    assert process.wait(60) == 130
    assert world.driver.view(world.keys.group("trainers")).state["drains"].startswith(f"node {NODE} by ")


def test_another_operators_pause_outlives_the_drain(cli: Cli, world: World) -> None:
    """Undrain resumes only what the drain stopped."""
    world.serve("trainers")
    world.serve("samplers")
    assert cli("pause", "trainers").exit_code == 0
    assert cli("node", "drain", NODE).exit_code == 0
    assert cli.json("node", "undrain", NODE)["resumed"] == ["samplers", "trainers"]
    phases = {group["group"]: group["phase"] for group in cli.json("status")["groups"]}
    assert phases == {"samplers": "idle", "trainers": "paused"}


def test_what_can_t_be_moved_keeps_the_node_from_being_safe(cli: Cli, world: World) -> None:
    """A job of unknown state on it: the reason is shown and the node is not called safe."""
    world.serve("trainers")
    keys = world.keys.group("trainers")
    world.driver.run(scripts.own(keys, "c1"))
    world.driver.run(scripts.report(keys, NODE, world.driver.view(keys).counter, [Observed("a", "faulted", 0, 5)]))
    result = cli("node", "drain", NODE, "--wait", "0.3")
    assert result.exit_code == 4
    assert "the device state of job a is unknown" in result.stderr
    assert "safe" not in result.stderr


def test_unknown_nodes_are_exit_code_3(cli: Cli, world: World) -> None:
    """For each order about a node."""
    world.serve("trainers")
    for verb in ("drain", "undrain", "forget"):
        assert cli("node", verb, "node-9").exit_code == 3


def test_a_node_with_state_is_forgotten_only_with_each_job_named(cli: Cli, world: World) -> None:
    """Its machine is gone: what is lost must be said, and is in the events with who and why."""
    world.serve("trainers")
    world.serve("trainers", "node-2", ttl_ms=60_000)
    keys = world.keys.group("trainers")
    seen = [Observed("a", "suspended", 5), Observed("b", "suspended", 5)]
    world.driver.run(scripts.report(keys, "node-2", world.driver.view(keys).counter, seen))
    world.driver.client.zadd(keys.nodes, {"node-2": 1})
    for given_up in ((), ("--lose", "a")):
        refused = cli("node", "forget", "node-2", *given_up)
        assert refused.exit_code == 6
        assert "which would be lost" in refused.stderr
        assert "--lose b" in refused.stderr
    assert cli("node", "forget", "node-2", "--lose", "a", "--lose", "b", "--reason", "fire").exit_code == 0
    told = [json.loads(line) for line in cli("events", "trainers", "--json").stdout.splitlines()]
    (left,) = [each for each in told if each["event"] == "NodeLeft"]
    assert (sorted(left["lost"].split()), left["reason"], "@" in left["by"]) == (["a", "b"], "fire", True)


def test_what_is_refused_in_one_group_is_done_in_the_others(cli: Cli, world: World) -> None:
    """And the node stays in the index, for it still serves one."""
    world.serve("samplers", "node-2", ttl_ms=-1)
    world.serve("trainers", "node-2")
    result = cli("node", "forget", "node-2")
    assert result.exit_code == 6
    assert "forgot node node-2 in samplers" in result.stderr
    assert "is alive and serves trainers" in result.stderr
    assert cli("node", "forget", "node-2").exit_code == 6
    assert [each["node"] for each in cli.json("nodes")["nodes"]] == ["node-2"]


def test_what_is_in_the_way_without_a_holder(cli: Cli, world: World) -> None:
    """No coordinator moves what is on the node: that is said, times in words, and not to take groups from holders."""
    world.serve("trainers")
    world.serve("trainers", "node-2", ttl_ms=60_000)
    keys = world.keys.group("trainers")
    granted = world.acquire("trainers", "a")
    world.driver.run(scripts.yield_(keys, "w-a", granted.token))
    result = cli("node", "drain", NODE, "--wait", "0")
    assert result.exit_code == 4
    assert "no coordinator drives the swap; start one: timeslice coordinator" in result.stderr
    assert "--revoke" not in result.stderr
    world.driver.client.zadd(keys.nodes, {"node-2": 1})
    result = cli("node", "drain", NODE, "--wait", "0")
    assert "node node-2 unreachable since 1970-01-01" in result.stderr
