"""The code of the pages for frameworks that are not installed here, run on modules of the same shape.

The stand-ins have the names and the order of calls of SkyRL's ``trainer.py``, NeMo-RL's ``grpo.py`` and OpenRLHF's
``ppo_trainer.py``, as cited in the pages. Each says which groups are held while it is called.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.integrations.conftest import Pools
from tests.test_docs import blocks_of

PAGES = Path(__file__).parent.parent.parent / "docs" / "researchers"
BOTH, TRAINERS, SAMPLERS, NONE = "trainers samplers", "trainers", "samplers", ""


class Seen:
    """Notes which groups are held when a stand-in is called."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self.calls: list[tuple[str, str]] = []

    def note(self, name: str) -> None:
        held = [group for group in ("trainers", "samplers") if self._pools.holder(group) == "mine"]
        self.calls.append((name, " ".join(held)))

    def does(self, name: str) -> Callable[..., None]:
        def call(*_arguments: object, **_named: object) -> None:
            self.note(name)

        return call

    def awaits(self, name: str) -> Callable[..., Any]:
        async def call(*_arguments: object) -> None:
            self.note(name)

        return call

    def has(self, name: str, *methods: str) -> type:
        return type(name, (), {method: self.does(method) for method in methods})


@pytest.fixture
def seen(pools: Pools) -> Seen:
    return Seen(pools)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Make a module importable, with its packages."""

    def make(name: str, **content: Any) -> ModuleType:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            module = sys.modules.get(".".join(parts[:end])) or ModuleType(".".join(parts[:end]))
            monkeypatch.setitem(sys.modules, module.__name__, module)
            if end > 1:
                setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
        vars(sys.modules[name]).update(content)
        return sys.modules[name]

    return make


def code_of(page: str) -> dict[str, Any]:
    """What the blocks of a page that are not run with the other docs define."""
    names: dict[str, Any] = {"__name__": page}
    for block in blocks_of((PAGES / page).read_text()):
        assert block.not_run, page
        exec(compile(block.code, page, "exec"), names)
    return names


def test_skyrl(pools: Pools, seen: Seen, install: Callable[..., ModuleType]) -> None:
    """Each phase of SkyRL's loop holds its groups, coroutines and the weight sync of the dispatch included."""
    trainer = seen.has("RayPPOTrainer", "init_weight_sync_state", "load_checkpoints", "fwd_logprobs_values_reward",
                       "train_critic_and_policy", "save_checkpoints", "save_models")  # fmt: skip
    trainer.generate, trainer.eval = seen.awaits("generate"), seen.awaits("eval")  # type: ignore[attr-defined]

    def build_models(self: Any, *_workers: object) -> None:
        seen.note("build_models")
        self.dispatch = SimpleNamespace(save_weights_for_sampler=seen.awaits("save_weights_for_sampler"))

    trainer.build_models = build_models  # type: ignore[attr-defined]

    class BasePPOExp:
        def get_trainer(self) -> Any:
            raise NotImplementedError

        def _setup_trainer(self) -> Any:
            seen.note("engines")
            made = self.get_trainer()
            made.build_models("policy")
            return made

    install("skyrl.train.entrypoints.main_base", BasePPOExp=BasePPOExp)
    install("skyrl.train.trainer", RayPPOTrainer=trainer)
    install("skyrl.train.utils.callbacks", TrainingCallback=object)
    names = code_of("skyrl.md")
    made = names["Experiment"]()._setup_trainer()

    async def train() -> None:
        made.init_weight_sync_state()
        made.load_checkpoints()
        await made.dispatch.save_weights_for_sampler()
        await made.eval()
        await made.generate("input")
        seen.note("postprocess")
        made.fwd_logprobs_values_reward("input")
        made.train_critic_and_policy("input")
        made.save_checkpoints()
        made.save_models()
        await made.dispatch.save_weights_for_sampler()

    asyncio.run(train())
    assert seen.calls == [
        ("engines", BOTH),
        ("build_models", BOTH),
        ("init_weight_sync_state", BOTH),
        ("load_checkpoints", TRAINERS),
        ("save_weights_for_sampler", BOTH),
        ("eval", SAMPLERS),
        ("generate", SAMPLERS),
        ("postprocess", NONE),
        ("fwd_logprobs_values_reward", TRAINERS),
        ("train_critic_and_policy", TRAINERS),
        ("save_checkpoints", TRAINERS),
        ("save_models", TRAINERS),
        ("save_weights_for_sampler", BOTH),
    ]
    turns = names["Turns"]()
    turns.on_step_start(made, None, None)
    assert pools.holders() == ("mine", "mine")
    turns.on_step_end(made, None, None)
    turns.on_eval_start(made, None, None)
    assert pools.holders() == ("mine", "mine")
    turns.on_eval_end(made, None, None)
    assert pools.holders() == ("", "")


def test_nemo_rl(seen: Seen, install: Callable[..., ModuleType]) -> None:
    """What GRPO's function calls holds its groups; the functions are looked up in their module, as there."""
    methods = ("prepare_for_lp_inference", "get_logprobs", "get_reference_policy_logprobs", "prepare_for_training",
               "train", "save_checkpoint")  # fmt: skip
    functions = ("setup", "refit_policy_generation", "validate", "run_multi_turn_rollout",
                 "run_async_multi_turn_rollout")  # fmt: skip
    policies = seen.has("Policy", *methods)
    grpo = install("nemo_rl.algorithms.grpo", **{name: seen.does(name) for name in functions})
    install("nemo_rl.models.policy.lm_policy", Policy=policies)
    code_of("nemo-rl.md")
    policy = policies()
    for name in functions:
        getattr(grpo, name)()
    for name in methods:
        getattr(policy, name)()
    assert [held for _, held in seen.calls] == [BOTH, BOTH, SAMPLERS, SAMPLERS, SAMPLERS, *[TRAINERS] * 6]
    assert [name for name, _ in seen.calls] == [*functions, *methods]


def test_openrlhf(seen: Seen, install: Callable[..., ModuleType]) -> None:
    """Each phase of the PPO trainer holds its groups."""
    trainers = seen.has("BasePPOTrainer", "ppo_train", "broadcast_to_vllm", "save_best_checkpoint",
                        "save_logs_and_checkpoints")  # fmt: skip
    makers = seen.has("RemoteExperienceMaker", "make_experience_batch")
    generators = seen.has("SamplesGenerator", "generate_samples", "generate_eval_samples")
    install("openrlhf.trainer.ppo_trainer", BasePPOTrainer=trainers)
    install("openrlhf.trainer.ppo_utils.experience_maker", RemoteExperienceMaker=makers)
    install("openrlhf.trainer.ppo_utils.samples_generator", SamplesGenerator=generators)
    code_of("openrlhf.md")
    trainer, maker, generator = trainers(), makers(), generators()
    generator.generate_samples()
    maker.make_experience_batch()
    trainer.ppo_train()
    trainer.broadcast_to_vllm()
    trainer.save_logs_and_checkpoints()
    generator.generate_eval_samples()
    trainer.save_best_checkpoint()
    assert [held for _, held in seen.calls] == [SAMPLERS, TRAINERS, TRAINERS, BOTH, TRAINERS, SAMPLERS, TRAINERS]
