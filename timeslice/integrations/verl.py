"""veRL: mix-ins that hold the devices of a job while its trainer, or a worker of it, uses them.

veRL's v1 trainers (``verl.trainer.ppo.v1``) are one process that tells GPU workers what to do, and have hooks for
subclasses. ``WholeSteps`` and ``OwnSamplers`` hold in that process; ``verl_plugin`` registers them under names of
their own. For trainers without hooks, ``timeslice.integrations.verl_worker`` holds in the workers instead. Take one of
the two: a worker would wait for what its own trainer holds. The groups come from the environment, as for PhaseCallback.

Nothing here imports veRL.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar

from timeslice.errors import UsageError
from timeslice.integrations.phases import SAMPLER_GROUP, PhaseCallback

if TYPE_CHECKING:

    class _Trainer:
        """What is used of ``verl.trainer.ppo.v1.trainer_base.PPOTrainer``."""

        def __init__(self, config: Any) -> None: ...
        def init(self) -> None: ...
        def fit(self, agent_loop_manager: Any) -> None: ...
        def on_step_begin(self) -> None: ...
        def on_step_end(self) -> None: ...
        def on_sample_end(self) -> None: ...
        def on_validate_begin(self) -> None: ...
        def on_validate_end(self) -> None: ...
        def switch_to_rollout(self) -> None: ...

else:
    _Trainer = object


class _Turns(_Trainer):
    """One phase at a time, the next begun before the last has ended, so that nobody gets in between."""

    mode: ClassVar[str]  # the name that veRL itself compares its trainer mode with
    role: ClassVar[str]

    def __init__(self, config: Any) -> None:
        # The base class branches on the literal mode and reads its settings under it.
        config.trainer.v1.trainer_mode = self.mode
        self._phases = PhaseCallback()
        self._phase: str | None = None
        super().__init__(config)

    def init(self) -> None:
        """Hold for the first load and the first weight sync."""
        self._turn_to("init")
        try:
            super().init()
        except BaseException:
            self._phases.close()
            raise

    def fit(self, agent_loop_manager: Any) -> None:
        """Let go at the end, however it comes: after the last step or an error veRL does not call ``on_train_end``."""
        try:
            super().fit(agent_loop_manager)
            self._turn_to(None)
        finally:
            self._phase = None
            self._phases.close()

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

    def init(self) -> None:
        super().init()
        self._turn_to(None)

    def on_step_begin(self) -> None:
        self._turn_to("step")
        super().on_step_begin()

    def on_step_end(self) -> None:
        super().on_step_end()
        self._turn_to(None)

    def on_validate_begin(self) -> None:
        self._turn_to("eval")
        super().on_validate_begin()

    def on_validate_end(self) -> None:
        super().on_validate_end()
        self._turn_to(None)


class OwnSamplers(_Turns):
    """For ``PPOTrainerSeparateAsync``: samplers that never pause are the job's own, and only the trainer's devices
    are shared. They are held from when a batch is ready until the weights are synced.

    Between two steps, and while the trainer's devices generate themselves (after the start and after validation),
    they stay held until the next step is over.
    """

    mode = "separate_async"
    role = "trainer"

    def __init__(self, config: Any) -> None:
        if os.environ.get(SAMPLER_GROUP):
            raise UsageError(
                f"{SAMPLER_GROUP} is set, but the samplers of trainer mode {self.mode} generate without a pause and "
                "can't be shared. Give the job samplers of its own and unset it."
            )
        super().__init__(config)

    def init(self) -> None:
        super().init()
        self._turn_to("generate")

    def switch_to_rollout(self) -> None:
        self._turn_to("generate")
        super().switch_to_rollout()

    def on_sample_end(self) -> None:
        self._turn_to("train")
        super().on_sample_end()

    def on_step_end(self) -> None:
        super().on_step_end()
        self._turn_to(None)
