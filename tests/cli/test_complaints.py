"""What agents complain of, where people look."""

from __future__ import annotations

import json

from tests.cli.conftest import NODE, Cli, World

IDLE = "holder of trainers (job a) has no process on the device for 63 s: is it running on the CPU?"


def _complain(world: World, node: str, told: object) -> None:
    """As an agent writes its record."""
    world.driver.client.hset(world.keys.node_state(node), "complaints", json.dumps(told))


def test_status_and_nodes_tell_what_agents_complain_of(cli: Cli, world: World) -> None:
    """O18: in the status of that group, not of another one, and in the list of nodes."""
    world.serve("trainers")
    world.serve("samplers")
    _complain(world, NODE, {"trainers": [IDLE], "samplers": []})
    assert f"complaint of {NODE}: {IDLE}" in cli("status", "trainers").stdout
    assert "complaint" not in cli("status", "samplers").stdout
    assert IDLE in cli("nodes").stdout
    (group,) = cli.json("status", "trainers")["groups"]
    assert group["complaints"] == [{"node": NODE, "complaint": IDLE}]
    assert cli.json("queue", "trainers")["complaints"] == group["complaints"]


def test_what_a_node_said_that_is_not_there_any_more_is_not_told(cli: Cli, world: World) -> None:
    """Its record stays for a day; the group is told of by those who serve it."""
    world.serve("trainers")
    world.driver.client.sadd(world.keys.nodes, "old")
    _complain(world, "old", {"trainers": [IDLE]})
    assert cli.json("status", "trainers")["groups"][0]["complaints"] == []


def test_a_spoilt_record_stops_no_status(cli: Cli, world: World) -> None:
    """Whatever stands there, the rest is shown."""
    world.serve("trainers")
    for told in ([1], {"trainers": 7}, {"trainers": "text"}, "x", {"trainers": [{"a": 1}]}):
        _complain(world, NODE, told)
        assert cli("status", "trainers").exit_code == 0
        assert cli("nodes").exit_code == 0
