"""A GRPOTrainer that is small enough for many tests, and a look at who holds what."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers  # type: ignore[import-not-found]
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import Keys

torch.set_num_threads(1)  # the matrices are tiny

ENDS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
WORDS = {word: number for number, word in enumerate([*ENDS.values(), *string.digits, "+", "="])}


class Watch:
    """Who held each group when something was done: (what, holders by group)."""

    def __init__(self, url: str, prefix: str, *groups: str) -> None:
        self._driver, self._keys, self._groups = SyncDriver(url), Keys(prefix), groups
        self.seen: list[tuple[str, tuple[str, ...]]] = []

    def note(self, what: str) -> None:
        self.seen.append((what, self.holders()))

    def holders(self) -> tuple[str, ...]:
        return tuple(self._driver.view(self._keys.group(group)).holder for group in self._groups)

    def waiting(self) -> int:
        return sum(len(self._driver.view(self._keys.group(group)).queue) for group in self._groups)

    def during(self, what: str) -> set[tuple[str, ...]]:
        """Who held whenever that was done."""
        found = {holders for done, holders in self.seen if done == what}
        assert found, f"{what} was never done; {[done for done, _ in self.seen]}"
        return found

    def close(self) -> None:
        self._driver.close()


class WatchedTrainer(GRPOTrainer):  # type: ignore[misc]  # untyped
    """Tells who holds when it uses the device."""

    watch: Watch | None = None

    def _note(self, what: str) -> None:
        if self.watch:
            self.watch.note(what if self.model.training else f"{what} for evaluation")

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        self._note("generate")
        return super()._generate_single_turn(*args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self._note("loss")
        return super().compute_loss(*args, **kwargs)

    def _save(self, *args: Any, **kwargs: Any) -> None:
        if self.watch:
            self.watch.note("save")
        super()._save(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        self._note("first load")
        return super().create_optimizer(*args, **kwargs)


class _Steps(TrainerCallback):  # type: ignore[misc]  # untyped
    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._watch.note("step begins")

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._watch.note("optimizer step")


def make_trainer(
    folder: Path, rewards: Callable[..., Any] | list[Any], watch: Watch | None = None, **options: Any
) -> Any:
    """Two steps of training with random weights, the same each time."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token=ENDS["pad_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    defaults: dict[str, Any] = {
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
    }
    trainer = WatchedTrainer(
        model=LlamaForCausalLM(shape),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ENDS),
        reward_funcs=rewards,
        train_dataset=Dataset.from_list([{"prompt": f"{a}+{b}="} for a in range(4) for b in range(4)]),
        eval_dataset=Dataset.from_list([{"prompt": "1+1="}]),
        callbacks=[_Steps(watch)] if watch else [],
        args=GRPOConfig(output_dir=str(folder), **{**defaults, **options}),
    )
    trainer.watch = watch
    return trainer


def history(trainer: Any, name: str = "reward") -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def weights(trainer: Any) -> Any:
    return torch.cat([parameter.detach().flatten().clone() for parameter in trainer.model.parameters()])
