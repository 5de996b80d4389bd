"""``trainer_base.py``, ``trainer_sync.py`` and ``trainer_separate_async.py``, as in 0.9.0 or 0.9.1 (TEST_VERL): the
same hooks with the same arguments in the same order."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from enum import Enum
from types import SimpleNamespace
from typing import Any

from tests.integrations.miniatures.device import SAMPLERS, TRAINERS, use

TRAINER_REGISTRY: dict[str, type[PPOTrainer]] = {}


def register_trainer(name: str) -> Callable[[type[PPOTrainer]], type[PPOTrainer]]:
    def decorator(cls: type[PPOTrainer]) -> type[PPOTrainer]:
        if TRAINER_REGISTRY.setdefault(name, cls) is not cls:
            raise ValueError(f"{name} is registered")
        return cls

    return decorator


class PPOTrainer:
    """One process that tells the workers what to do. ``pause`` is told each piece of device work from inside it."""

    pools: tuple[str, ...]  # of the worker group; the standalone samplers are not among them
    pause: Callable[[str], object] = bool
    generates = False  # whatever the trainer does meanwhile, its replicas use the devices

    def __init__(self, config: SimpleNamespace) -> None:
        self.config = config
        self.trainer_mode = config.trainer.v1.trainer_mode
        self.step_settings = getattr(config.trainer.v1, self.trainer_mode)  # read under the literal mode
        self.parameter_sync_step = 2 if self.trainer_mode == "separate_async" else 1
        self.global_steps = 0

    def init(self) -> None:
        self._setup()
        self.on_init_end()

    def _setup(self) -> None:
        self._work("load")

    def fit(self, agent_loop_manager: Any) -> None:
        self.agent_loop_manager = agent_loop_manager
        self._test()
        self.global_steps += 1
        self.on_train_begin()
        while self.global_steps <= self.config.steps:
            is_last_step = self.global_steps >= self.config.steps
            metrics: dict[str, Any] = {}
            self.on_step_begin()
            self.step(metrics, {})
            self._save_checkpoint()
            self.on_step_end()
            metrics.update(self._consume_sync_metrics())
            self._test()
            self.global_steps += 1
            if is_last_step:
                return  # on_train_end is not called here
        self.on_train_end()

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> None:
        if NEW:
            metrics.update(self.prepare_step())
        else:
            self._add_batch_to_generate()
        for _ in range(self.parameter_sync_step):
            self._step_once(metrics, timing_raw)

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> None:
        self.on_sample_begin()
        self.sample()
        self.on_sample_end()
        self._work("train")

    def prepare_step(self) -> dict[str, Any]:
        self._add_batch_to_generate()
        return {}

    def _add_batch_to_generate(self) -> None:
        self._work("ask for generation")  # before on_sample_begin

    def sample(self) -> None:
        """``replay_buffer.sample``: until a batch is there."""

    def _save_checkpoint(self) -> None:
        self._work("save")

    def _test(self) -> None:
        if self.config.validates:
            self.on_validate_begin()
            self._validate()
            self.on_validate_end()

    def _validate(self) -> None:
        self._work("validate")

    def _consume_sync_metrics(self) -> dict[str, Any]:
        return {}

    def _work(self, what: str) -> None:
        with nullcontext() if self.generates else use(*self.pools):
            self.pause(what)

    def on_init_end(self) -> None: ...
    def on_train_begin(self) -> None: ...
    def on_train_end(self) -> None: ...
    def on_validate_begin(self) -> None: ...
    def on_validate_end(self) -> None: ...
    def on_step_begin(self) -> None: ...
    def on_step_end(self) -> None: ...
    def on_sample_begin(self) -> None: ...
    def on_sample_end(self) -> None: ...


@register_trainer("sync")
class PPOTrainerSync(PPOTrainer):
    """Rollout and training on the same devices."""

    pools = (TRAINERS, SAMPLERS)

    def on_init_end(self) -> None:
        self._work("update_weights")

    def on_sample_end(self) -> None:
        self._work("sleep_replicas")

    def on_step_end(self) -> None:
        self._work("update_weights")


class HybridEngineMode(Enum):
    TRAINER = "trainer"
    ROLLOUT = "rollout"


class _SeparateAsync(PPOTrainer):
    """Standalone samplers besides. Replicas on the trainer's devices use them from ``switch_to_rollout`` to
    ``switch_to_trainer``."""

    pools = (TRAINERS,)
    hybrid = True

    def _setup(self) -> None:
        super()._setup()
        self._replicas = ExitStack()
        self.current_mode = HybridEngineMode.TRAINER
        if self.hybrid:
            self.current_mode = HybridEngineMode.ROLLOUT
            self._resume()

    def sample(self) -> None:
        self.pause("wait for a batch")

    def _add_batch_to_generate(self) -> None:
        """Only the standalone samplers hear of it."""

    def on_init_end(self) -> None:
        self._work("update_weights")

    def _validate(self) -> None:
        if self.current_mode is HybridEngineMode.ROLLOUT:
            self._work("validate")

    def _resume(self) -> None:
        self._replicas.enter_context(use(*self.pools))
        self.generates = True

    def _sleep(self) -> None:
        self._work("sleep_replicas")
        self._replicas.close()
        self.generates = False


class SeparateAsyncOf090(_SeparateAsync):
    """Its replicas generate until a batch is there."""

    def on_validate_begin(self) -> None:
        if self.current_mode == HybridEngineMode.TRAINER:
            self.switch_to_rollout()

    def on_sample_begin(self) -> None:
        if self.current_mode == HybridEngineMode.TRAINER and self.should_switch_to_rollout():
            self.switch_to_rollout()

    def on_sample_end(self) -> None:
        if self.current_mode == HybridEngineMode.ROLLOUT:
            self.switch_to_trainer()

    def on_step_end(self) -> None:
        self._work("update_weights")

    def switch_to_rollout(self) -> None:
        self._work("update_weights")
        self._resume()
        self.current_mode = HybridEngineMode.ROLLOUT

    def switch_to_trainer(self) -> None:
        self._sleep()
        self.current_mode = HybridEngineMode.TRAINER

    def should_switch_to_rollout(self) -> bool:
        return False


class SeparateAsyncOf091(_SeparateAsync):
    """With ``enable_switch`` its replicas generate from the end of a step until enough is there for the next one:
    seen at the begin of every second step, waited for in the others."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__(config)
        self.hybrid = getattr(config, "hybrid_engine", True)
        self.enable_switch = getattr(config, "enable_switch", False)

    def on_validate_begin(self) -> None:
        if self.current_mode == HybridEngineMode.TRAINER:
            self.switch_to_rollout()

    def on_step_begin(self) -> None:
        if self.current_mode != HybridEngineMode.ROLLOUT:
            return
        if not self.enable_switch or self.global_steps % 2 == 0:
            self.switch_to_trainer()

    def prepare_step(self) -> dict[str, Any]:
        metrics = super().prepare_step()
        if self.current_mode == HybridEngineMode.ROLLOUT:
            self.pause("lend")
            self.switch_to_trainer()
        return metrics

    def on_step_end(self) -> None:
        should_switch = self.enable_switch and self.global_steps < self.config.steps
        if should_switch:
            self.add_replicas_to_balancer()
        self._work("update_weights")
        if should_switch:
            self.switch_to_rollout(already_registered=True)

    def switch_to_rollout(self, *, already_registered: bool = False) -> None:
        if not self.hybrid:
            return
        self._work("update_weights")
        self._resume()
        if not already_registered:
            self.add_replicas_to_balancer()
        self.current_mode = HybridEngineMode.ROLLOUT

    def switch_to_trainer(self) -> None:
        if not self.hybrid:
            return
        self._sleep()
        self.current_mode = HybridEngineMode.TRAINER

    def add_replicas_to_balancer(self) -> None: ...


NEW = os.environ.get("TEST_VERL", "0.9.1") >= "0.9.1"
PPOTrainerSeparateAsync: type[_SeparateAsync] = SeparateAsyncOf091 if NEW else SeparateAsyncOf090
register_trainer("separate_async")(PPOTrainerSeparateAsync)
