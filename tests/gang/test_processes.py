"""Ranks as processes of their own, killed at each stage: the others go on with an error that names the dead.

What a silent or ended rank means at each stage, the tests of the scripts say (test_verbs, test_served); in the fast
tier one stage is killed for real.
"""

from __future__ import annotations

import signal

import pytest

import timeslice
from tests.client.world import Job, World
from tests.support.jobs import wait_until
from timeslice.locks import scripts
from timeslice.locks.loader import load
from timeslice.locks.scripts import Exited

# A rank with a short term, so that a silence is over soon. It tells what became of it.
CODE = """
    try:
        with timeslice.hold("g", lock_only=LOCK, lease=5, rank=RANK, world_size=WORLD) as lease:
            say("inside", lease.fencing_token)
            if not lease.lost.wait(20):
                say("never lost")
            lease.ensure_held()
    except timeslice.TimeSliceError as error:
        say(type(error).__name__, error)
"""
# As above, but the process kills itself before it confirms its grant.
UNCONFIRMED = """
    from timeslice.locks import scripts
    scripts.renew = lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL)
"""


def start(world: World, rank: int, *, of: int = 2, lock: bool = True, before: str = "", ttl_ms: int = 4000) -> Job:
    values = {"LOCK": lock, "RANK": rank, "WORLD": of}
    lines = "".join(f"    {name} = {value}\n" for name, value in values.items())
    return world.job(f"{before}\n{lines}{CODE}", ttl_ms=ttl_ms)


def kill(job: Job) -> int:
    job.signal(signal.SIGKILL)
    return job.pid


def until_arrived(world: World, number: int) -> None:
    wait_until(lambda: sum(len(gang.parties) for gang in world.view().forming) == number, f"{number} ranks arrived")


def told(job: Job, kind: str, rank: int, pid: int) -> str:
    line = job.line()
    assert line.startswith(kind), line
    assert f"rank {rank} (process {pid} on node n1)" in line, line
    return line


@pytest.mark.slow
def test_a_rank_killed_in_forming_ends_the_wait(world: World) -> None:
    """The others wait no longer than its term."""
    dead, other = start(world, 0, of=3), start(world, 1, of=3)
    until_arrived(world, 2)
    told(other, "GangEndedError", 0, kill(dead))
    assert world.view().forming == ()


@pytest.mark.slow
def test_a_rank_killed_in_the_queue_ends_the_wait(world: World) -> None:
    """The next waiter is not held up."""
    with timeslice.hold("g", job="b", lock_only=True):
        dead, other = start(world, 0), start(world, 1)
        world.until_queued("a")
        told(other, "GangEndedError", 0, kill(dead))
        wait_until(lambda: world.queue() == [], "nobody waits")


@pytest.mark.slow
def test_a_rank_killed_before_it_confirmed_ends_the_lease(world: World) -> None:
    """No body has begun, the other's neither; it learns why, and the group is free."""
    dead = start(world, 0, before=UNCONFIRMED)
    until_arrived(world, 1)
    told(start(world, 1), "GangEndedError", 0, dead.pid)
    assert world.holder() == ""


def test_a_rank_killed_inside_ends_the_lease(world: World) -> None:
    """The other finds it lost at a renewal; nothing is left."""
    ranks = [start(world, 0), start(world, 1)]
    assert len({rank.line() for rank in ranks}) == 1
    told(ranks[1], "LeaseLostError", 0, kill(ranks[0]))
    wait_until(lambda: world.holder() == "", "the group is free")
    assert world.redis.hlen(world.group().waiters) == world.redis.zcard(world.group().alive) == 0


@pytest.mark.parametrize("stage", [pytest.param("forming", marks=pytest.mark.slow), "inside"])
def test_an_agent_that_saw_the_process_end_ends_it_at_once(world: World, stage: str) -> None:
    """In a served group nobody waits for the term."""
    world.serve("g")
    ranks = [start(world, 0, lock=False, of=2 if stage == "inside" else 3)]
    until_arrived(world, 1)
    ranks.append(start(world, 1, lock=False, of=2 if stage == "inside" else 3))
    if stage == "inside":
        assert len({rank.line() for rank in ranks}) == 1
        party = world.view().parties[0]
    else:
        until_arrived(world, 2)
        party = world.view().forming[0].parties[0]
    kill(ranks[0])
    ended = Exited("a", int(party.pid), int(party.start))
    world.run(scripts.report(world.group(), "n1", world.view().counter, [], [ended], whole=False))
    kind = "LeaseLostError" if stage == "inside" else "GangEndedError"
    assert told(ranks[1], kind, 0, ranks[0].pid).count("ended")


def test_a_rank_that_raises_leaves_and_the_others_too(world: World) -> None:
    """An exception in one body is a yield of that rank like any other: the lease ends when the last has left."""
    code = """
    try:
        with timeslice.hold("g", lock_only=True, rank=RANK, world_size=2):
            say("inside")
            hear()
            if RANK:
                raise ValueError("of the body")
    except ValueError as error:
        say(error)
    """
    ranks = [world.job(code.replace("RANK", str(rank))) for rank in range(2)]
    assert [rank.line() for rank in ranks] == ["inside", "inside"]
    ranks[1].tell()
    assert ranks[1].line() == "of the body"
    assert world.holder() == "a"
    ranks[0].tell()
    wait_until(lambda: world.holder() == "", "the group is free")


def test_an_elastic_restart_is_another_gang(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of the new start don't complete the round of the old one, whose processes are gone."""
    for name, value in (("TORCHELASTIC_RUN_ID", "run"), ("LOCAL_WORLD_SIZE", "2"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)

    def torchrun(rank: int, restart: int) -> Job:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
        return world.job("""
            with timeslice.hold("g", lock_only=True) as lease:
                say("inside", lease.lease_id)
                hear()
        """)

    old = torchrun(0, 0)
    until_arrived(world, 1)
    kill(old)
    new = torchrun(1, 1)
    until_arrived(world, 2)
    assert [gang.missing for gang in world.view().forming] == [(1,), (0,)]
    again = torchrun(0, 1)
    assert again.line() == new.line()


def test_a_rank_that_is_started_again_while_the_gang_forms_takes_its_place(world: World) -> None:
    """The launcher of one node restarts it; its earlier self is dead, and is not waited for."""
    dead = start(world, 0, ttl_ms=60_000)
    until_arrived(world, 1)
    kill(dead)
    again = start(world, 0, ttl_ms=60_000)
    wait_until(
        lambda: [p.pid for g in world.view().forming for p in g.parties] == [str(again.pid)], "it took the place"
    )
    other = start(world, 1)
    assert other.line() == again.line()


def test_two_programs_with_one_job_id_are_told_so(world: World) -> None:
    """Two ranks of each, given by hand, and the first of one completes the second of the other. Once all four have
    taken part, those that came second end with what to set."""
    code = """
    try:
        while True:
            with timeslice.hold("g", lock_only=True, rank=RANK, world_size=2):
                say("inside")
                hear()
    except timeslice.GangEndedError as error:
        say(error)
    """
    one = [world.job(code.replace("RANK", str(rank))) for rank in range(2)]
    assert [rank.line() for rank in one] == ["inside", "inside"]
    other = [world.job(code.replace("RANK", str(rank))) for rank in range(2)]
    wait_until(lambda: [len(gang.parties) for gang in world.view().queue] == [2], "the others wait")
    for rank in one:
        rank.tell()
    assert [rank.line() for rank in other] == ["inside", "inside"]
    wait_until(lambda: world.view().waiting == 1, "the first wait again")
    for rank in other:
        rank.tell()
    for rank in other:
        assert "two programs with one job id, give each its own TIMESLICE_JOB" in rank.line()
    assert [rank.line() for rank in one] == ["inside", "inside"]


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.slow), "after"])
def test_a_rank_killed_around_its_join_leaves_nothing_behind(world: World, when: str) -> None:
    """Whether the server had the call or not, the others end or form anew."""
    world.redis.script_load(load("join").source)
    arm = f"""
    from timeslice.torture.killpoints import arm
    arm("client:join:{when}:1")
    """
    other = start(world, 1, of=3)
    until_arrived(world, 1)
    dead = start(world, 0, of=3, before=arm)
    dead.process.wait(60)
    if when == "after":
        told(other, "GangEndedError", 0, dead.pid)
        assert world.redis.hlen(world.group().waiters) == 0
    else:
        assert [gang.missing for gang in world.view().forming] == [(0, 2)]
