"""What people and programs are shown of gangs, also by data that is old or broken."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from tests.gang.lab import GangLab
from timeslice.cli.main import main


class Shown:
    def __init__(self, lab: GangLab) -> None:
        self.lab = lab
        lab.redis.sadd(f"{lab.group.prefix}:groups", lab.group.name)

    def __call__(self, *args: str) -> str:
        result = CliRunner().invoke(main, ["--url", self.lab.url, "--prefix", self.lab.group.prefix, *args])
        assert result.exit_code == 0, result.output
        return result.stdout

    def json(self, *args: str) -> Any:
        return json.loads(self(*args, "--json"))


@pytest.fixture
def show(lab: GangLab) -> Shown:
    return Shown(lab)


@pytest.mark.parametrize("command", [("queue", "g"), ("status", "g"), ("status",)], ids=" ".join)
def test_who_has_not_arrived_is_named(lab: GangLab, show: Shown, command: tuple[str, ...]) -> None:
    """In the queue, in a group's status, and in the line of all groups."""
    for number in (0, 1, 3):
        lab.rank(number, 4).ask()
    assert "gang 3/4, rank 2 has not arrived" in show(*command)


def test_events_name_who_has_not_arrived(lab: GangLab, show: Shown) -> None:
    """And who ended a gang, in what way."""
    ranks = [lab.rank(n, 3) for n in range(2)]
    lab.twice = False
    for rank in [*ranks, *ranks]:
        rank.ask()
    ranks[0].give_up("it was not granted within 5 s")
    told = show("events")
    assert "arrived=2" in told
    assert "missing=rank 2 of 3 has not arrived" in told
    assert "reason=rank 0 (process 100 on node n1) gave up: it was not granted within 5 s" in told


def test_programs_read_the_ranks(lab: GangLab, show: Shown) -> None:
    """Of who forms, waits and holds; a waiter that is no gang has none."""
    holding = lab.holding(2)
    holding[1].leave()
    waiting = lab.gang(2, "c")
    lab.queue("d1")
    forming = lab.rank(1, 3, "e")
    forming.ask()
    document = show.json("queue", "g")
    holder = document["holder"]
    assert (holder["job"], holder["world"], holder["lease_id"]) == ("a", 2, holding[0].gang)
    assert holder["ranks"] == [
        {"rank": 0, "host": "n1", "pid": 100, "state": "inside"},
        {"rank": 1, "host": "n1", "pid": 101, "state": "left"},
    ]
    gang, alone = document["waiters"]
    assert (gang["waiter"], gang["world"], len(gang["ranks"])) == (waiting[0].gang, 2, 2)
    assert (alone["job"], alone["world"], alone["ranks"]) == ("d", None, [])
    (early,) = document["forming"]
    assert (early["job"], early["missing"], early["world"]) == ("e", [0, 2], 3)
    assert early["why"] == "gang 1/3, ranks 0, 2 have not arrived"
    assert "gang of 2; rank 1 left" in show("status", "g")


def test_a_gang_that_forms_is_cancelled_by_its_job_s_name(lab: GangLab, show: Shown) -> None:
    """As any waiter."""
    rank = lab.rank(0, 2)
    rank.ask()
    assert show.json("cancel", "g", "--job", "a")["cancelled"] == [{"waiter": rank.gang, "was": "queued"}]
    assert lab.view.forming == ()


def test_what_is_no_gang_is_not_shown_as_one(lab: GangLab) -> None:
    """Fields that somebody else wrote, or an older version left out, are passed over."""
    lab.grant("a1")
    lab.queue("b1")
    lab.plant(gang="9" * 30)
    lab.redis.hset(
        lab.group.waiters,
        mapping={
            "b1/world": "9" * 17,
            "b1/party/x": "a b c d e",
            "b1/party/1": "too few words",
            "a1/party/0": "i n1 7 1 123",
            "@n": "x",
        },
    )
    view = lab.view
    assert view.world in {0, 1024}
    assert [party.rank for party in view.parties] == [0]
    assert (view.queue[0].world, view.queue[0].parties) == (1024, ())
    assert len(view.queue[0].missing) == 1024
