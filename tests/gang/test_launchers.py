"""Who is a gang: what the caller says, what torchrun left in the environment, and what is refused before it is sent."""

from __future__ import annotations

from typing import Any

import pytest

import timeslice
from tests.client.world import World
from timeslice.client.gang import Gang, find_gang
from timeslice.errors import UsageError
from timeslice.settings import default_job

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "run/7",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "MASTER_ADDR": "node-1",
    "MASTER_PORT": "29500",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
}


SLURM = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "prterun-node-1-5@1"}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [*TORCHRUN, *SLURM, *OPEN_MPI]:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def torchrun(bare: None, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for variable, value in TORCHRUN.items():
        monkeypatch.setenv(variable, value)
    return monkeypatch


def rank_of(gang: Gang | None) -> tuple[int, int] | None:
    return (gang.rank, gang.world) if gang else None


def name_of(**given: Any) -> str:
    gang = find_gang(given.get("gang"), given.get("rank"), given.get("world_size"))
    assert gang
    return gang.name


def test_without_a_launcher_a_process_holds_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """RANK and WORLD_SIZE alone are also set by launchers whose ranks don't hold together."""
    assert find_gang(None, None, None) is None
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert find_gang(None, None, None) is None
    assert rank_of(find_gang(True, None, None)) == (0, 2)


def test_under_torchrun_the_ranks_are_a_gang(torchrun: pytest.MonkeyPatch) -> None:
    """accelerate sets the same variables. What the caller says wins; a world of one is an ordinary hold."""
    assert rank_of(find_gang(None, None, None)) == (1, 2)
    assert rank_of(find_gang(None, 3, 4)) == (3, 4)
    assert find_gang(False, None, None) is None
    assert find_gang(None, 0, 1) is None
    torchrun.setenv("WORLD_SIZE", "1")
    assert find_gang(None, None, None) is None


def test_all_ranks_of_one_start_have_one_name_and_no_other_start_has_it(torchrun: pytest.MonkeyPatch) -> None:
    """Another run, an elastic restart, another world."""
    names = [name_of()]
    torchrun.setenv("RANK", "0")
    assert name_of() == names[0]
    for variable, value in (("TORCHELASTIC_RESTART_COUNT", "1"), ("TORCHELASTIC_RUN_ID", "x"), ("MASTER_PORT", "1")):
        torchrun.setenv(variable, value)
        names.append(name_of())
    names.append(name_of(rank=0, world_size=3))
    assert len(set(names)) == len(names)


def test_the_nodes_of_one_start_may_count_restarts_differently(torchrun: pytest.MonkeyPatch) -> None:
    """Each agent of torchrun counts those that its own workers caused."""
    torchrun.setenv("WORLD_SIZE", "4")
    here = name_of()
    torchrun.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert name_of() == here


def test_a_gang_of_one_rank_from_each_node_is_none_of_one_node(torchrun: pytest.MonkeyPatch) -> None:
    """Though it has as many ranks as a node has."""
    torchrun.setenv("WORLD_SIZE", "4")
    here = name_of(rank=1, world_size=2)
    torchrun.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert name_of(rank=1, world_size=2) == here


def test_starts_on_one_node_each_are_told_apart_by_it(
    torchrun: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun's own address on each of them is "localhost", with the same port and without a run id."""
    for name, value in (("TORCHELASTIC_RUN_ID", "none"), ("MASTER_ADDR", "localhost")):
        torchrun.setenv(name, value)
    here = name_of()
    monkeypatch.setattr("platform.node", lambda: "another")
    assert name_of() != here
    torchrun.setenv("WORLD_SIZE", "4")  # on two nodes
    there = name_of()
    monkeypatch.undo()
    for name, value in {
        **TORCHRUN,
        "TORCHELASTIC_RUN_ID": "none",
        "MASTER_ADDR": "localhost",
        "WORLD_SIZE": "4",
    }.items():
        torchrun.setenv(name, value)
    assert name_of() == there


@pytest.mark.parametrize(("launcher", "told"), [(SLURM, "SLURM_STEP_ID"), (OPEN_MPI, "PMIX_NAMESPACE")])
def test_two_steps_of_a_launcher_of_tasks_are_two_starts(
    monkeypatch: pytest.MonkeyPatch, launcher: dict[str, str], told: str
) -> None:
    """Where each rank is a task of it. Where a task starts several ranks, or torchrun does, its steps say nothing."""
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    names = {rank: name_of(rank=0, world_size=rank) for rank in (2, 4)}
    monkeypatch.setenv(told, "1")
    assert name_of(rank=1, world_size=2) != names[2]
    assert name_of(rank=1, world_size=4) == names[4]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    under_torchrun = name_of(rank=1, world_size=2)
    monkeypatch.setenv(told, "2")
    assert name_of(rank=1, world_size=2) == under_torchrun


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((None, 2, 2), "rank 2 is none of 2: ranks are 0 to 1"),
        ((None, -1, 2), "rank -1 is none of 2"),
        ((None, 0, 0), "a gang of 0 can't hold"),
        ((None, 0, 1025), "1 to 1024 ranks, for one call"),
        ((None, 1, None), "world_size is missing"),
        ((None, None, 4), "rank is missing"),
        ((None, "0", 4), "rank='0' is no whole number"),
        ((None, True, 4), "rank=True is no whole number"),
        ((False, 0, 2), "leave out rank and world_size"),
        (("yes", None, None), "gang='yes'"),
        ((True, None, None), "RANK is not set. Start the program with torchrun"),
    ],
)
def test_what_can_not_be_is_refused_with_what_to_do(given: Any, words: str) -> None:
    """Before anything is sent."""
    with pytest.raises(UsageError) as error:
        find_gang(*given)
    assert words in str(error.value)


def test_variables_that_are_no_numbers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not taken for rank 0."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(UsageError, match="WORLD_SIZE is 'two'"):
        find_gang(True, None, None)


def test_the_job_is_torchrun_s_run(torchrun: pytest.MonkeyPatch) -> None:
    """Where no other is set; its default name says nothing."""
    assert default_job() == "run-7"
    torchrun.setenv("TIMESLICE_JOB", "mine")
    assert default_job() == "mine"
    torchrun.delenv("TIMESLICE_JOB")
    torchrun.setenv("TORCHELASTIC_RUN_ID", "none")
    assert default_job() not in {"none", "run-7"}


def test_ranks_without_a_job_in_common_are_told_so(torchrun: pytest.MonkeyPatch, world: World) -> None:
    """Each would else wait for the others under a name of its own."""
    torchrun.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(UsageError, match="rank 1 of 2 has no job in common with the other ranks"):
        timeslice.Client(world.url).acquire("g", lock_only=True)
    assert not world.view().exists
    with timeslice.hold("g", lock_only=True, gang=False):
        assert world.view().world == 0


def test_switched_off_a_gang_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """TIMESLICE_DISABLE=1 asks for nothing, so nothing is missing."""
    monkeypatch.setenv("TIMESLICE_DISABLE", "1")
    with timeslice.hold("g", rank=1, world_size=2) as lease:
        assert lease.state == "held"
