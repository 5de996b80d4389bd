"""slime's drivers in miniature: the same calls in the same order, with the devices of this folder.

After ``train.py`` and ``train_async.py`` of github.com/aishukamal/slime, branch feat/phase-callbacks, the branch that
has ``--phase-callback-path``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from tests.integrations.miniatures.device import SAMPLERS, TRAINERS, use

Pause = Callable[[str], object]


def load(path: str) -> Any:
    """As slime loads what ``--phase-callback-path`` names."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)()


def train(path: str, rollouts: int, *, offload: bool = False, pause: Pause = bool) -> None:
    """The synchronous driver; ``pause`` is told the name of each phase from inside it."""
    callback = load(path)

    def phase(name: str, role: str, *pools: str, **context: int) -> None:
        callback.on_phase_begin(name, role, *([context] if context else []))
        with use(*pools):
            pause(name)
        callback.on_phase_end(name, role, *([context] if context else []))

    phase("init", "both", TRAINERS, SAMPLERS)
    for rollout in range(rollouts):
        if rollout == 0:
            phase("eval", "sampler", SAMPLERS, rollout_id=rollout)
        phase("generate", "sampler", SAMPLERS, rollout_id=rollout)
        if offload:
            phase("offload", "sampler", SAMPLERS, rollout_id=rollout)
        phase("train", "trainer", TRAINERS, rollout_id=rollout)
        if offload:
            phase("onload", "sampler", SAMPLERS, rollout_id=rollout)
        phase("weight_sync", "both", TRAINERS, SAMPLERS, rollout_id=rollout)
        if offload:
            phase("onload", "sampler", SAMPLERS, rollout_id=rollout)
        phase("eval", "sampler", SAMPLERS, rollout_id=rollout)
    callback.close()


def train_async(path: str, rollouts: int, *, pause: Pause = bool) -> None:
    """The pipelined driver: the next generation begins inside a training phase and ends after it."""
    callback = load(path)
    callback.on_phase_begin("init", "both")
    callback.on_phase_end("init", "both")
    callback.on_phase_begin("generate", "sampler", {"rollout_id": 0})
    generating = True
    for rollout in range(rollouts):
        context = {"rollout_id": rollout}
        if generating:
            callback.on_phase_end("generate", "sampler", context)
            generating = False
        callback.on_phase_begin("train", "trainer", context)
        if rollout + 1 < rollouts:
            callback.on_phase_begin("generate", "sampler", {"rollout_id": rollout + 1})
            generating = True
        with use(TRAINERS, *([SAMPLERS] if generating else [])):
            pause("train")
        callback.on_phase_end("train", "trainer", context)
        if generating:
            callback.on_phase_end("generate", "sampler", context)
            generating = False
        callback.on_phase_begin("weight_sync", "both", context)
        with use(TRAINERS, SAMPLERS):
            pause("weight_sync")
        callback.on_phase_end("weight_sync", "both", context)
        callback.on_phase_begin("eval", "sampler", context)
        callback.on_phase_end("eval", "sampler", context)
    callback.close()
