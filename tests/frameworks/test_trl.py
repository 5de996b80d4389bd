"""The real GRPOTrainer takes turns."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import timeslice
from tests.frameworks.tiny import Watch, history, make_trainer, weights
from timeslice.errors import LeaseLostError, LeaseUncertainError, UsageError
from timeslice.integrations import patience
from timeslice.integrations.trl import _state_of, share
from timeslice.integrations.turn import Turn
from timeslice.locks import scripts
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import Keys

EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_grpo.py"
GROUP, SAMPLERS = "trainers", "samplers"
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL's, of transformers


def by_length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch, redis_url: str, prefix: str) -> Iterator[Watch]:
    """This process is job a; both groups are plain locks."""
    for name, value in {"URL": redis_url, "PREFIX": prefix, "JOB": "a"}.items():
        monkeypatch.setenv(f"TIMESLICE_{name}", value)
    for group in (GROUP, SAMPLERS):
        with timeslice.hold(group, lock_only=True):
            pass
    made = Watch(redis_url, prefix, GROUP, SAMPLERS)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_jobs_learn_together_what_they_learn_alone(tmp_path: Path) -> None:
    """Two real jobs that move their state in and out by turns get the rewards and the weights of their solo runs to the
    bit, and never compute at the same time."""
    report = tmp_path / "trl.json"
    run = subprocess.run(
        [sys.executable, EXAMPLE, "--jobs", "2", "--steps", "3", "--verifier", "0.2", "--json", report],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(report.read_text())
    assert (found["rewards_equal"], found["overlaps"], found["jobs"], found["device"]) == (True, 0, 2, "cpu, emulated")
    assert found["swaps"] >= 4
    assert found["bytes_moved"] > 4 * 20e6
    assert len({job["weights"] for job in found["runs"].values()}) == 2
    assert f"gain {found['gain']:.2f}" in run.stdout


def test_the_reference_model_is_copied_once(tmp_path: Path) -> None:
    """It is not trained, so it leaves without a copy from the second time on; unless TRL lets it follow the policy."""
    trainer = make_trainer(tmp_path, by_length)
    trainer.ref_model = type(trainer.model)(trainer.model.config).eval()  # as TRL loads it by its name
    state = _state_of(trainer, "g")
    state.adopt()
    size = sum(parameter.nbytes for parameter in trainer.ref_model.parameters())
    assert state.suspend().saved == 0
    state.restore()
    before = weights(trainer)
    assert state.suspend().saved >= size
    state.restore()
    assert torch.equal(weights(trainer), before)
    weight = next(trainer.ref_model.parameters())
    weight.data.mul_(0.5).add_(next(trainer.model.parameters()).data, alpha=0.5)  # as its SyncRefModelCallback does
    followed = weight.clone()
    assert state.suspend().saved < size
    state.restore()
    assert torch.equal(weight, followed)


def test_the_group_is_free_while_rewards_are_computed(tmp_path: Path, watch: Watch) -> None:
    """From the first load on the job holds for all work on its device, and a rival gets in during the rewards."""

    def rewards(completions: list[str], **_: Any) -> list[float]:
        watch.note("rewards")
        with timeslice.hold(GROUP, job="b", timeout=10):
            watch.note("rival")
        return by_length(completions)

    trainer = make_trainer(tmp_path, rewards, watch)
    share(trainer, GROUP, register=False)
    trainer.train()
    for held in ("first load", "generate", "loss", "optimizer step"):
        assert watch.during(held) == {("a", "")}
    assert watch.during("rewards") == {("", "")}
    assert watch.during("rival") == {("b", "")}
    assert watch.holders() == ("", "")
    assert [done for done, _ in watch.seen].count("rival") == 2


def test_evaluation_and_saving_are_held(tmp_path: Path, watch: Watch) -> None:
    """In training and called by hand, evaluation and saving hold the group, and the rewards of an evaluation do not."""

    def rewards(completions: list[str], **_: Any) -> list[float]:
        watch.note("rewards")
        return by_length(completions)

    held = ("generate for evaluation", "loss for evaluation", "save")
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(tmp_path, rewards, watch, **options)
    share(trainer, GROUP, register=False)
    trainer.train()
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-2"}
    before = len(watch.seen)
    assert "eval_reward" in trainer.evaluate()
    trainer.save_model(str(tmp_path / "model"))
    trainer.predict(trainer.eval_dataset)
    by_hand = {done.removesuffix(" for evaluation") for done, _ in watch.seen[before:]}
    assert by_hand == {"generate", "rewards", "loss", "save"}
    for what in held:
        assert watch.during(what) == {("a", "")}
    assert watch.during("rewards") == {("", "")}
    assert watch.holders() == ("", "")


def test_all_reward_functions_cost_one_turn(tmp_path: Path, watch: Watch) -> None:
    """Plain and asynchronous functions beside a reward model: all get the batch, once; the turn is given up once for a
    batch; and their rewards are those of a trainer that is not shared."""
    calls: list[str] = []

    def first(completions: list[str], **_: Any) -> list[float]:
        calls.append("first")
        watch.note("first")
        return by_length(completions)

    async def second(completions: list[str], trainer_state: Any, **_: Any) -> list[float | None]:
        calls.append("second")
        return [float(trainer_state.global_step) if text else None for text in completions]

    def third(completion_ids: list[list[int]], **_: Any) -> list[float]:
        calls.append("third")
        return [float(sum(ids)) for ids in completion_ids]

    functions = [first, second, third]
    plain = make_trainer(tmp_path / "plain", list(functions))
    plain.train()
    calls.clear()
    shared = make_trainer(tmp_path / "shared", list(functions), watch)
    share(shared, GROUP, register=False)
    shared.train()
    assert sorted(calls) == sorted(["first", "second", "third"] * 2)
    assert watch.during("first") == {("", "")}
    for name in ("first", "second", "third"):
        assert history(shared, f"rewards/{name}/mean") == history(plain, f"rewards/{name}/mean")
    assert torch.equal(weights(shared), weights(plain))
    grants = [fields for _, fields in events(watch) if fields[b"type"] == b"LeaseGranted" and fields[b"job"] == b"a"]
    assert len(grants) == 2 + 1 + 2  # of the fixture; the first load; after the rewards of each batch


def events(watch: Watch) -> Any:
    client: Any = watch._driver.client
    return [entry for group in (GROUP, SAMPLERS) for entry in client.xrange(watch._keys.group(group).events)]


def test_without_rewards_elsewhere_a_turn_ends_with_its_step(tmp_path: Path, watch: Watch) -> None:
    """Where only a reward model judges, on the device, the group is still given up after each step."""

    class Judge(nn.Module):  # type: ignore[misc]  # untyped
        config = type("Config", (), {"_name_or_path": "judge"})()

        def forward(self, input_ids: Any, **_: Any) -> Any:
            watch.note("judge")
            return type("Output", (), {"logits": input_ids.float().mean(1, keepdim=True)})()

    trainer = make_trainer(tmp_path, by_length, watch)
    trainer.reward_funcs, trainer.reward_processing_classes = [Judge()], [trainer.processing_class]
    share(trainer, GROUP, register=False)
    trainer.train()
    assert watch.during("judge") == {("a", "")}
    assert [holders[0] for done, holders in watch.seen if done == "step begins"] == ["a", ""]


def fail(*_: Any, **__: Any) -> Any:
    raise ArithmeticError("broken")


def interrupt(*_: Any, **__: Any) -> Any:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("where", ["rewards", "generate", "save"])
@pytest.mark.parametrize(("broken", "error"), [(fail, ArithmeticError), (interrupt, KeyboardInterrupt)])
def test_an_error_leaves_nothing_behind(
    tmp_path: Path, watch: Watch, where: str, broken: Callable[..., Any], error: type[BaseException]
) -> None:
    """Whatever raises, Ctrl-C included, train() ends with that error, nobody holds and nobody waits."""
    trainer = make_trainer(tmp_path, broken if where == "rewards" else by_length, watch, save_strategy="steps")
    if where != "rewards":
        setattr(trainer, {"generate": "_generate_single_turn", "save": "_save"}[where], broken)
    share(trainer, GROUP, register=False)
    with pytest.raises(error):
        trainer.train()
    assert (watch.holders(), watch.waiting()) == (("", ""), 0)
    with timeslice.hold(GROUP, job="b", timeout=5):
        pass


def take_away(turn: Turn, url: str, prefix: str) -> None:
    """As an operator does, and its holder is told."""
    lease = turn._lease
    driver = SyncDriver(url)
    group = Keys(prefix).group(GROUP)
    driver.run(scripts.revoke(group, "a", lease.lease_id, lease.fencing_token, "me", "", at_once=True))
    lease.note_renewal(driver.run(lease.renewal()), time.monotonic(), lease.lease_id)
    driver.close()


def test_a_lost_lease_ends_an_evaluation(watch: Watch, redis_url: str, prefix: str) -> None:
    """What was computed without the lease is not returned as if it were good."""
    turn = Turn(GROUP, device=torch.device("cpu"), job=None, timeout=5)
    with pytest.raises(LeaseLostError, match="revoked"), turn.inside("eval"):
        take_away(turn, redis_url, prefix)
    assert watch.holders() == ("", "")


@pytest.mark.parametrize("nested", [True, False])
def test_training_inside_of_a_hold_is_warned_of(
    tmp_path: Path, watch: Watch, caplog: pytest.LogCaptureFixture, *, nested: bool
) -> None:
    """Whose own hold keeps the group through all rewards is told, once; else nobody is."""
    trainer = make_trainer(tmp_path, by_length, watch)
    share(trainer, GROUP, register=False)
    with timeslice.hold(GROUP) if nested else contextlib.nullcontext():
        trainer.train()
    told = [record.message for record in caplog.records if "inside a hold of your own" in record.message]
    assert len(told) == nested
    assert watch.holders() == ("", "")


def test_a_lost_lease_ends_the_training(tmp_path: Path, watch: Watch, redis_url: str, prefix: str) -> None:
    """When an operator takes the group away in the middle of a step, train() raises, and the step changes nothing."""
    trainer = make_trainer(tmp_path, by_length, watch, max_steps=5)
    shared = share(trainer, GROUP, register=False)
    known = []

    class Taken(type(trainer)):  # type: ignore[misc]  # untyped
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 1:
                known.append(weights(self))
                take_away(shared._turn, redis_url, prefix)
            return super().compute_loss(*args, **kwargs)

    trainer.__class__ = Taken
    with pytest.raises(LeaseLostError, match="revoked"):
        trainer.train()
    assert torch.equal(weights(trainer), known[0])
    assert (watch.holders(), watch.waiting()) == (("", ""), 0)


def test_a_server_that_is_away_is_waited_for(monkeypatch: pytest.MonkeyPatch, watch: Watch) -> None:
    """A lease that can't be confirmed for the moment does not end the training; one that stays so does."""
    monkeypatch.setattr(patience, "_ASK_S", 0.01)
    turn = Turn(GROUP, device=torch.device("cpu"), job=None, timeout=5)
    with turn.inside("train"):
        answers = iter([True, True, False])
        uncertain = LeaseUncertainError("nobody answers")

        def ensure_held() -> None:
            if next(answers):
                raise uncertain

        with monkeypatch.context() as patch:
            patch.setattr(turn._lease, "ensure_held", ensure_held)
            turn.ensure_held()
            assert list(answers) == []
            answers = iter([True] * 2)
            patch.setattr(patience, "UNCERTAIN_S", 0.0)
            with pytest.raises(LeaseUncertainError):
                turn.ensure_held()


def test_disabled_there_is_nothing_to_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With TIMESLICE_DISABLE=1 and no server a shared trainer trains as always."""
    monkeypatch.setenv("TIMESLICE_DISABLE", "1")
    plain = make_trainer(tmp_path, by_length)
    plain.train()
    shared = make_trainer(tmp_path, by_length)
    share(shared, GROUP)
    shared.train()
    assert history(shared) == history(plain)


def test_closed_it_is_a_plain_trainer_again(tmp_path: Path, watch: Watch) -> None:
    """After close() nothing is held any more, and the trainer can be shared again."""
    trainer = make_trainer(tmp_path, by_length, watch)
    shared = share(trainer, GROUP)
    assert shared.workload is not None
    with pytest.raises(UsageError, match="shared already"):
        share(trainer, GROUP)
    shared.close()
    trainer.train()
    assert {holders for _, holders in watch.seen} == {("", "")}
    assert trainer.reward_funcs == [by_length]
    share(trainer, GROUP).close()


class Server:
    """Stands in for TRL's client of a vLLM server: always the same completion."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def sync_weights(self) -> None:
        self._watch.note("sync")

    def generate(self, *, prompts: list[Any], **_: Any) -> Any:
        self._watch.note("generate on the server")
        return prompts, [[5, 6, 2]] * len(prompts), [[[-1.0]] * 3] * len(prompts), None


def test_with_a_server_both_groups_are_held_only_for_the_weights(tmp_path: Path, watch: Watch) -> None:
    """With a vLLM server the samplers are held while it generates and the trainers are free then; a weight sync has
    both; training and log-probabilities have the trainers alone."""
    trainer = make_trainer(tmp_path, by_length, watch)
    trainer.use_vllm, trainer.vllm_mode, trainer.vllm_generation = True, "server", Server(watch)
    trainer._last_loaded_step = -1
    share(trainer, GROUP, samplers=SAMPLERS, register=False)
    trainer.train()
    assert watch.during("generate on the server") == {("", "a")}
    assert watch.during("sync") == {("a", "a")}
    assert watch.during("loss") == {("a", "")}
    assert watch.holders() == ("", "")


def test_what_can_not_be_shared_is_refused_with_the_reason(tmp_path: Path, watch: Watch) -> None:
    """Another trainer, another version, a second group without a server, and memory that would stay on the device."""
    trainer = make_trainer(tmp_path, by_length)
    with pytest.raises(UsageError, match="object is no GRPOTrainer"):
        share(object(), GROUP)
    with pytest.raises(timeslice.InvalidNameError):
        share(trainer, "no/name")
    with pytest.raises(UsageError, match="generates with its own model"):
        share(trainer, GROUP, samplers=SAMPLERS)
    trainer.use_vllm, trainer.vllm_mode = True, "colocate"
    with pytest.raises(UsageError, match="vllm_enable_sleep_mode=True"):
        share(trainer, GROUP)
    trainer.use_vllm = False
    trainer._finalize_training = None
    with pytest.raises(UsageError, match=r"TRL 1\.\d.* has no _finalize_training; known is TRL 1\.16"):
        share(trainer, GROUP)
    del trainer._finalize_training
    share(trainer, GROUP).close()
