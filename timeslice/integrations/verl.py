"""veRL: mix-ins that hold the devices of a job while its trainer, or a worker of it, uses them.

veRL's v1 trainers (``verl.trainer.ppo.v1``) are one process that tells GPU workers what to do, and have hooks for
subclasses. ``WholeSteps`` and ``OwnSamplers`` hold in that process; ``verl_plugin`` registers them under names of
their own. For trainers without hooks, ``timeslice.integrations.verl_worker`` holds in the workers instead. Take one of
the two: a worker would wait for what its own trainer holds. The groups come from the environment, as for PhaseCallback.

Nothing here imports veRL.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, ClassVar

from timeslice.errors import UsageError
from timeslice.integrations.phases import SAMPLER_GROUP, PhaseCallback

if TYPE_CHECKING:

    class _Trainer:
        """What is used of ``verl.trainer.ppo.v1.trainer_base.PPOTrainer``."""

        def __init__(self, config: Any) -> None: ...
        def init(self, *given: Any, **named: Any) -> Any: ...
        def fit(self, *given: Any, **named: Any) -> Any: ...
        def on_step_begin(self, *given: Any, **named: Any) -> Any: ...
        def on_step_end(self, *given: Any, **named: Any) -> Any: ...
        def on_sample_end(self, *given: Any, **named: Any) -> Any: ...
        def on_validate_begin(self, *given: Any, **named: Any) -> Any: ...
        def on_validate_end(self, *given: Any, **named: Any) -> Any: ...
        def switch_to_rollout(self, *given: Any, **named: Any) -> Any: ...
        def switch_to_trainer(self, *given: Any, **named: Any) -> Any: ...

else:
    _Trainer = object

log = logging.getLogger("timeslice")


class _Turns(_Trainer):
    """One phase at a time, the next begun before the last has ended, so that nobody gets in between.

    Each version of veRL may give its hooks more arguments, and use what they return: both are passed on unseen.
    """

    mode: ClassVar[str]  # the name that veRL itself compares its trainer mode with
    role: ClassVar[str]

    def __init__(self, config: Any, *given: Any, **named: Any) -> None:
        # The base class branches on the literal mode and reads its settings under it.
        config.trainer.v1.trainer_mode = self.mode
        self._phases = PhaseCallback()
        self._phase: str | None = None
        super().__init__(config, *given, **named)

    def init(self, *given: Any, **named: Any) -> Any:
        """Hold for the first load and the first weight sync."""
        self._turn_to("init")
        try:
            return super().init(*given, **named)
        except BaseException:
            self._phases.close()
            raise

    def fit(self, *given: Any, **named: Any) -> Any:
        """Let go at the end, however it comes: after the last step or an error veRL does not call ``on_train_end``."""
        try:
            result = self._fit(*given, **named)
            self._turn_to(None)
            return result
        finally:
            self._phase = None
            self._phases.close()

    def _fit(self, *given: Any, **named: Any) -> Any:
        try:
            result = super().fit(*given, **named)
        except Exception:
            try:
                self._stop_generating()
            except Exception:
                log.exception("veRL failed, and its replicas could not be stopped; they may still use the devices")
            raise
        self._stop_generating()
        return result

    def _stop_generating(self) -> None:
        """Before the devices are let go of for good."""

    def _turn_to(self, phase: str | None) -> None:
        before = self._phase
        if phase == before:
            return
        if phase:
            self._phases.on_phase_begin(phase, self.role)
        self._phase = phase
        if before:
            self._phases.on_phase_end(before, self.role)


class WholeSteps(_Turns):
    """For ``PPOTrainerSync``: rollout and training share the devices, and a turn is a whole step.

    A step asks for generation before ``on_sample_begin`` and syncs weights in ``on_step_end``, so the hold reaches
    from ``on_step_begin`` to behind ``on_step_end``: checkpoints are saved inside it. Validation is a turn of its own.
    """

    mode = "sync"
    role = "both"

    def init(self, *given: Any, **named: Any) -> Any:
        result = super().init(*given, **named)
        self._turn_to(None)
        return result

    def on_step_begin(self, *given: Any, **named: Any) -> Any:
        self._turn_to("step")
        return super().on_step_begin(*given, **named)

    def on_step_end(self, *given: Any, **named: Any) -> Any:
        result = super().on_step_end(*given, **named)
        self._turn_to(None)
        return result

    def on_validate_begin(self, *given: Any, **named: Any) -> Any:
        self._turn_to("eval")
        return super().on_validate_begin(*given, **named)

    def on_validate_end(self, *given: Any, **named: Any) -> Any:
        result = super().on_validate_end(*given, **named)
        self._turn_to(None)
        return result


class OwnSamplers(_Turns):
    """For ``PPOTrainerSeparateAsync``: samplers that never pause are the job's own, and only the trainer's devices
    are shared. They are held from when a batch is ready until the weights are synced.

    They stay held while their own ("hybrid") replicas generate: after the start, after validation, and wherever veRL
    lends them to the samplers between two steps (``hybrid_rollout.enable_switch``, since 0.9.1).
    """

    mode = "separate_async"
    role = "trainer"

    def __init__(self, config: Any, *given: Any, **named: Any) -> None:
        if os.environ.get(SAMPLER_GROUP):
            raise UsageError(
                f"{SAMPLER_GROUP} is set, but the samplers of trainer mode {self.mode} generate without a pause and "
                "can't be shared. Give the job samplers of its own and unset it."
            )
        super().__init__(config, *given, **named)

    def init(self, *given: Any, **named: Any) -> Any:
        result = super().init(*given, **named)
        self._keep_while_lent()
        return result

    def switch_to_rollout(self, *given: Any, **named: Any) -> Any:
        before = self._phase
        self._turn_to("generate")
        result = super().switch_to_rollout(*given, **named)
        if not self._is_lent():  # it has no replicas there (hybrid_engine=False)
            self._turn_to(before)
        return result

    def on_step_begin(self, *given: Any, **named: Any) -> Any:
        result = super().on_step_begin(*given, **named)
        self._keep_while_lent()  # since 0.9.1 replicas may end their work here, before a batch is there
        return result

    def on_sample_end(self, *given: Any, **named: Any) -> Any:
        self._turn_to("train")
        return super().on_sample_end(*given, **named)

    def on_step_end(self, *given: Any, **named: Any) -> Any:
        result = super().on_step_end(*given, **named)
        self._keep_while_lent()
        return result

    def _stop_generating(self) -> None:
        if self._mode() == "rollout":  # after a last validation, or when an error came while they were lent
            self.switch_to_trainer()

    def _mode(self) -> Any:
        """Of the trainer's devices, by veRL's own word (``HybridEngineMode``)."""
        mode = getattr(self, "current_mode", None)
        return getattr(mode, "value", mode)

    def _is_lent(self) -> bool:
        """Whether they generate, or may: only veRL can say that they don't."""
        return bool(self._mode() != "trainer")

    def _keep_while_lent(self) -> None:
        self._turn_to("generate" if self._is_lent() else None)
