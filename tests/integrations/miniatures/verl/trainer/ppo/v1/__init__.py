"""``trainer_base.py``, ``trainer_sync.py`` and ``trainer_separate_async.py``."""

from __future__ import annotations

from collections.abc import Callable
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

    def __init__(self, config: SimpleNamespace) -> None:
        self.config = config
        self.trainer_mode = config.trainer.v1.trainer_mode
        self.step_settings = getattr(config.trainer.v1, self.trainer_mode)  # read under the literal mode

    def init(self) -> None:
        self._work("load")
        self.on_init_end()

    def fit(self, agent_loop_manager: Any) -> None:
        self._validate()
        self.on_train_begin()
        for step in range(1, self.config.steps + 1):
            self.on_step_begin()
            self.step()
            self._work("save")
            self.on_step_end()
            self._validate()
            if step == self.config.steps:
                return  # on_train_end is not called here
        self.on_train_end()

    def step(self) -> None:
        self._work("ask for generation")  # before on_sample_begin
        self.on_sample_begin()
        self.on_sample_end()
        self._work("train")

    def _validate(self) -> None:
        if self.config.validates:
            self.on_validate_begin()
            self._work("validate")
            self.on_validate_end()

    def _work(self, what: str) -> None:
        with use(*self.pools):
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


@register_trainer("separate_async")
class PPOTrainerSeparateAsync(PPOTrainer):
    """Standalone samplers besides; the trainer's devices generate too until a batch is sampled."""

    pools = (TRAINERS,)

    def init(self) -> None:
        super().init()
        self.current_mode = "rollout"

    def step(self) -> None:
        self.on_sample_begin()
        if self.current_mode == "rollout":
            self._work("generate beside the samplers")
        self.pause("wait for a batch")
        self.on_sample_end()
        self._work("train")

    def on_init_end(self) -> None:
        self._work("update_weights")

    def on_validate_begin(self) -> None:
        if self.current_mode == "trainer":
            self.switch_to_rollout()

    def on_sample_end(self) -> None:
        if self.current_mode == "rollout":
            self.switch_to_trainer()

    def on_step_end(self) -> None:
        self._work("update_weights")

    def switch_to_rollout(self) -> None:
        self._work("update_weights")
        self.current_mode = "rollout"

    def switch_to_trainer(self) -> None:
        self._work("sleep_replicas")
        self.current_mode = "trainer"
