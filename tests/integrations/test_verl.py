"""The mix-ins on trainers of the shape of veRL's v1, in processes of their own."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.client.world import Job
from tests.integrations.conftest import Pools
from timeslice import LeaseLostError, UsageError
from timeslice.integrations.verl import OwnSamplers, WholeSteps

RUN = """
from types import SimpleNamespace
import verl
from verl.trainer.ppo.v1 import PPOTrainer, TRAINER_REGISTRY

def pause(trainer, what):
    if what in {stops!r}:
        say(what)
        if "fail" in hear():
            raise RuntimeError(what)
PPOTrainer.pause = pause
v1 = SimpleNamespace(trainer_mode={mode!r}, sync="settings", separate_async="settings")
config = SimpleNamespace(trainer=SimpleNamespace(v1=v1), steps={steps}, validates={validates}, **{more!r})
trainer = TRAINER_REGISTRY[v1.trainer_mode](config)
trainer.init()
try:
    trainer.fit(None)
except RuntimeError as error:
    say("failed:", error)
say("done", trainer.trainer_mode, trainer.step_settings)
hear()
"""


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainers are registered as a user without the entry point does it."""
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "timeslice.integrations.verl_plugin")


@pytest.fixture
def own_samplers(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIMESLICE_SAMPLER_GROUP")


@pytest.fixture(params=["0.9.0", "0.9.1"])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of the trainers: before 0.9.1 other hooks switch between generating and training."""
    monkeypatch.setenv("TEST_VERL", request.param)
    return str(request.param)


def trainer(
    pools: Pools,
    job: str,
    mode: str,
    stops: tuple[str, ...] = (),
    *,
    validates: bool = True,
    steps: int = 2,
    dies: bool = False,
    **more: bool,
) -> Job:
    run = RUN.format(mode=f"timeslice_{mode}", stops=stops, validates=validates, steps=steps, more=more)
    return pools.start(run, job, dies=dies)


@pytest.mark.parametrize("groups", ["one", "two"])
def test_whole_steps_of_two_jobs_alternate(pools: Pools, monkeypatch: pytest.MonkeyPatch, groups: str) -> None:
    """Each piece of device work of a colocated trainer, generation asked for before `on_sample_begin`, checkpoints and
    validation included, runs inside a turn; veRL sees its own name of the mode. One group or two, held together."""
    if groups == "one":
        monkeypatch.setenv("TIMESLICE_SAMPLER_GROUP", "trainers")
    jobs = [trainer(pools, job, "sync") for job in "ab"]
    assert [job.line() for job in jobs] == ["done sync settings"] * 2
    for job in "ab":
        assert pools.phases("trainers", job) == ["init", "eval", "step", "eval", "step", "eval"]
    assert pools.phases("samplers", "a") == ([] if groups == "one" else pools.phases("trainers", "a"))


def test_nobody_gets_in_during_a_step(pools: Pools) -> None:
    """Whatever the trainer does on the devices, both groups are its own meanwhile."""
    work = ("load", "ask for generation", "sleep_replicas", "train", "save", "update_weights", "validate")
    a = trainer(pools, "a", "sync", work)
    seen = set()
    while not (line := a.line()).startswith("done"):
        seen.add(line)
        assert pools.holders() == ("a", "a")
        a.tell()
    assert seen == set(work)


def test_the_last_step_lets_go_without_on_train_end(pools: Pools) -> None:
    """veRL returns from its last step without calling on_train_end; the process lives on and holds nothing."""
    a = trainer(pools, "a", "sync")
    assert a.line() == "done sync settings"
    assert a.process.poll() is None
    assert pools.holders() == ("", "")


def test_an_error_in_the_loop_lets_go(pools: Pools) -> None:
    """The error comes through, and the groups are free while the process lives on."""
    a = trainer(pools, "a", "sync", ("train",))
    assert a.line() == "train"
    assert a.process.stdin is not None
    a.process.stdin.write("fail\n")
    assert a.line() == "failed: train"
    assert pools.holders() == ("", "")


@pytest.mark.parametrize("mode", ["sync", "separate_async"])
@pytest.mark.usefixtures("own_samplers", "version")
def test_a_trainer_killed_in_mid_step_lets_the_other_in(pools: Pools, mode: str) -> None:
    """`kill -9` during training: the other job's trainer gets on when the lease is over."""
    a = trainer(pools, "a", mode, ("train",), dies=True)
    assert a.line() == "train"
    b = trainer(pools, "b", mode, ("load",))
    pools.until_queued("b", group="trainers")
    a.signal(signal.SIGKILL)
    assert b.line() == "load"


def waits_and_trains(a: Job, pools: Pools, stops: int) -> list[tuple[str, str]]:
    """Where it stopped, and who held the trainers then."""
    seen = []
    for _ in range(stops):
        seen.append((a.line(), pools.holder("trainers")))
        a.tell()
    assert a.line() == "done separate_async settings"
    return seen


@pytest.mark.usefixtures("own_samplers")
@pytest.mark.parametrize("validates", [True, False])
def test_own_samplers_generate_without_the_trainers(pools: Pools, version: str, *, validates: bool) -> None:
    """While a job with samplers of its own waits for a batch, the trainers are free, but not when they generate
    themselves: after the start, and after validation, until veRL takes them back. Between two batches of a step they
    stay its own."""
    a = trainer(pools, "a", "separate_async", ("wait for a batch", "train"), validates=validates)
    until_batch = version == "0.9.0"  # later ones take them back as the step begins
    first, later = ("a" if until_batch else ""), ("a" if until_batch and validates else "")
    step = [("train", "a"), ("wait for a batch", "a"), ("train", "a")]
    expected = [("wait for a batch", first), *step, ("wait for a batch", later), *step]
    assert waits_and_trains(a, pools, 8) == expected


@pytest.mark.usefixtures("own_samplers")
def test_trainers_that_are_lent_to_the_samplers_are_held(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    """`enable_switch` of 0.9.1: replicas on the trainers generate from the end of one step into the next."""
    monkeypatch.setenv("TEST_VERL", "0.9.1")
    stops = ("lend", "wait for a batch", "train")
    a = trainer(pools, "a", "separate_async", stops, validates=False, steps=3, enable_switch=True)
    step = [("train", "a"), ("wait for a batch", "a"), ("train", "a")]
    lent = [("lend", "a"), ("wait for a batch", "a"), *step]
    assert waits_and_trains(a, pools, 14) == [*lent, ("wait for a batch", ""), *step, *lent]
    assert pools.holders() == ("", "")


@pytest.mark.usefixtures("own_samplers")
def test_trainers_without_replicas_are_free_while_it_waits(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    """`hybrid_engine=False` of 0.9.1: nothing generates on the trainers, neither after the start nor in validation."""
    monkeypatch.setenv("TEST_VERL", "0.9.1")
    a = trainer(pools, "a", "separate_async", ("wait for a batch", "train"), hybrid_engine=False)
    step = [("wait for a batch", ""), ("train", "a"), ("wait for a batch", "a"), ("train", "a")]
    assert waits_and_trains(a, pools, 8) == [*step, *step]


@pytest.mark.usefixtures("own_samplers", "version")
@pytest.mark.parametrize("enable_switch", [True, False])
def test_jobs_with_own_samplers_share_the_trainers(pools: Pools, *, enable_switch: bool) -> None:
    """Two such jobs run to their ends, each on the trainers alone, whatever generates there."""
    jobs = [trainer(pools, job, "separate_async", steps=3, enable_switch=enable_switch) for job in "ab"]
    assert [job.line() for job in jobs] == ["done separate_async settings"] * 2


def test_samplers_that_never_pause_can_not_be_shared(pools: Pools) -> None:
    """A sampler's group is refused for that mode, before anything is built."""
    with pytest.raises(UsageError, match="TIMESLICE_SAMPLER_GROUP is set, but the samplers of trainer mode separate_a"):
        OwnSamplers(SimpleNamespace())


@pytest.mark.usefixtures("own_samplers")
def test_an_error_while_the_trainers_are_lent_takes_them_back(pools: Pools) -> None:
    """The process lives on, and its replicas generate no more beside the next job."""
    a = trainer(pools, "a", "separate_async", ("lend",), validates=False, enable_switch=True)
    assert a.line() == "lend"
    assert a.process.stdin is not None
    a.process.stdin.write("fail\n")
    assert a.line() == "failed: lend"
    assert trainer(pools, "b", "separate_async", steps=1).line() == "done separate_async settings"


class OtherVersion:
    """A trainer whose hooks have other arguments, and results."""

    def __init__(self, config: SimpleNamespace, resources: str) -> None:
        self.heard: list[object] = [resources]

    def _hook(self, *given: object, **named: object) -> object:
        self.heard.append((given, named))
        return len(self.heard)

    init = fit = on_step_begin = on_step_end = on_sample_end = on_validate_begin = on_validate_end = _hook
    switch_to_rollout = _hook


@pytest.mark.parametrize("turns", [OwnSamplers, WholeSteps])
@pytest.mark.usefixtures("own_samplers")
def test_arguments_and_results_of_hooks_are_passed_on(pools: Pools, turns: type[Any]) -> None:
    """Those of a version that is not known yet, too."""
    config = SimpleNamespace(trainer=SimpleNamespace(v1=SimpleNamespace(trainer_mode="")))
    trainer = type("Later", (turns, OtherVersion), {})(config, resources="all")
    hooks = ["init", "on_step_begin", "on_sample_end", "on_step_end", "on_validate_begin", "on_validate_end"]
    hooks += ["switch_to_rollout", "fit"]
    for count, hook in enumerate(hooks):
        assert getattr(trainer, hook)(count, since="0.10") == count + 2
    assert trainer.heard == ["all", *(((count,), {"since": "0.10"}) for count in range(len(hooks)))]
    assert pools.holders() == ("", "")


class Miniature:
    """A trainer whose device work is a function; it tells who held."""

    def __init__(self, config: SimpleNamespace) -> None:
        self.load: Callable[[], object] = config.load
        self.train: Callable[[], object] = config.train

    def init(self) -> None:
        self.load()

    def fit(self, agent_loop_manager: Any) -> None:
        self.on_sample_end()
        self.train()

    def on_sample_end(self) -> None: ...


class Trainer(OwnSamplers, Miniature):
    pass


def nothing() -> None: ...


def miniature(load: Callable[[], object] = nothing, train: Callable[[], object] = nothing) -> Trainer:
    v1 = SimpleNamespace(trainer_mode="")
    return Trainer(SimpleNamespace(trainer=SimpleNamespace(v1=v1), load=load, train=train))


@pytest.mark.usefixtures("own_samplers")
def test_an_error_of_the_first_load_lets_go(pools: Pools) -> None:
    """The error comes through, and the group is free while the process lives on, trainer and all."""

    def load() -> None:
        assert pools.holder("trainers") == "mine"
        raise RuntimeError("out of memory")

    trainer = miniature(load)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.init()
    assert pools.holders() == ("", "")


@pytest.mark.usefixtures("own_samplers")
def test_a_lease_lost_in_the_last_step_is_told(pools: Pools) -> None:
    """`fit` does not return as if the weights were good, and an error of its own is not covered up."""
    trainer = miniature(train=lambda: pools.take_away("trainers"))
    trainer.init()
    with pytest.raises(LeaseLostError, match=r"trainers: the lease of job mine .* is over"):
        trainer.fit(None)

    def fail() -> None:
        pools.take_away("trainers")
        raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        miniature(train=fail).fit(None)
