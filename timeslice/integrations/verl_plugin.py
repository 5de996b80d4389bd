"""Registers ``timeslice_sync`` and ``timeslice_separate_async`` as trainer modes of veRL's v1 trainers.

veRL imports this module in each of its processes: as an entry point of the group ``verl.plugins``, or because
``VERL_USE_EXTERNAL_MODULES`` names it. Select a mode with ``trainer.v1.trainer_mode=timeslice_sync``.
"""

from __future__ import annotations

from importlib import import_module

from timeslice.integrations.verl import OwnSamplers, WholeSteps

_v1 = import_module("verl.trainer.ppo.v1")

for _turns, _base in ((WholeSteps, _v1.PPOTrainerSync), (OwnSamplers, _v1.PPOTrainerSeparateAsync)):
    _v1.register_trainer(f"timeslice_{_turns.mode}")(type(f"Timeslice{_base.__name__}", (_turns, _base), {}))
