"""TRL: a GRPOTrainer that takes turns.

::

    with timeslice.hold("trainers", phase="init"):            # the constructor loads the model
        trainer = GRPOTrainer(...)
        timeslice.integrations.trl.share(trainer, "trainers")
    trainer.train()

TRL has no bracket around generation, so methods of this one trainer are wrapped. It holds the group from the first
load on and gives it up while rewards are computed: a turn trains on one batch and generates the next, so that its
state moves once a step. Evaluation and saving are held too.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from timeslice.client.phases import phase
from timeslice.client.workload import Workload
from timeslice.errors import UsageError
from timeslice.integrations.torch import DeviceState, Parts, frozen, register_state
from timeslice.integrations.turn import Turn
from timeslice.names import check_name

log = logging.getLogger("timeslice")

KNOWN = "TRL 1.16 with transformers 5.24"
# Held as a whole, unless the trainer holds already; but for rewards, which are computed outside also there.
_HELD = {
    "train": "init",  # what comes before the first step: optimizer, checkpoint to go on from
    "evaluate": "eval",
    "predict": "eval",
    "save_model": "save",
    "_finalize_training": "train",  # reads the loss, and loads the best model
}
_STEP, _AFTER_STEP = "training_step", "_maybe_log_save_evaluate"
_READ = ("reward_funcs", "ref_model", "is_fsdp_enabled", "num_iterations", "use_vllm", "_step", "_buffered_inputs")


def share(
    trainer: Any,
    trainers: str = "trainers",
    *,
    samplers: str | None = None,
    register: bool = True,
    job: str | None = None,
    timeout: float | None = None,
) -> Shared:
    """Let this trainer hold the group ``trainers`` whenever it computes on its device, and only then.

    ``samplers``: the group of a vLLM server that is shared too; held for its generations, and together with
    ``trainers`` while weights go there. Without a server the trainer generates on its own device, and one group is all.
    ``register``: move model, reference model, reward models and optimizer off the device between turns
    (``timeslice.integrations.torch``); False if something else does. ``job`` and ``timeout`` as for ``timeslice.hold``.

    Call it inside of the hold in which the trainer was made. Raises UsageError if the trainer can't be shared.
    """
    _check(trainer, trainers, samplers, register=register)
    turn = Turn(trainers, device=trainer.accelerator.device, job=job, timeout=timeout)
    workload = register_state(_state_of(trainer, trainers), job=job) if register else None
    return Shared(trainer, turn, samplers, workload)


class Shared:
    """A trainer that takes turns, until ``close``."""

    def __init__(self, trainer: Any, turn: Turn, samplers: str | None, workload: Workload | None) -> None:
        self.workload = workload
        self._trainer, self._turn, self._samplers = trainer, turn, samplers
        self._callback = _Callback(turn)
        self._undo: list[tuple[Any, str]] = []  # attributes that hide those of the class
        self._reward_funcs = list(trainer.reward_funcs)
        # Ranks that wait for the first one do so in a collective on the device, which must not leave it then.
        self._leaves_to_generate = _by_server(trainer) and trainer.accelerator.num_processes == 1
        self._gives_way = self._leaves_to_generate or not all(map(_is_model, self._reward_funcs))  # for each batch
        trainer.timeslice = self
        self._wrap()

    def close(self) -> None:
        """Give the trainer its own methods back, with its state on the device, which no agent moves from now on."""
        with self._turn.inside("save"):
            if self.workload:
                self.workload.close()
        for owner, name in self._undo:
            delattr(owner, name)
        self._trainer.reward_funcs[:] = self._reward_funcs
        self._trainer.remove_callback(self._callback)
        del self._trainer.timeslice

    def _wrap(self) -> None:
        trainer = self._trainer
        for method, name in _HELD.items():
            self._replace(trainer, method, _held(self._turn, getattr(trainer, method), name))
        self._replace(trainer, _STEP, self._step(getattr(trainer, _STEP)))
        self._replace(trainer, _AFTER_STEP, self._after_step(getattr(trainer, _AFTER_STEP)))
        if _by_server(trainer):
            server = trainer.vllm_generation
            self._replace(server, "generate", self._elsewhere(server.generate))
            self._replace(server, "sync_weights", self._to_samplers(server.sync_weights))
        trainer.reward_funcs[:] = _off_device(trainer, self._turn, trainer.reward_funcs)
        trainer.add_callback(self._callback)

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        setattr(owner, name, function)
        self._undo.append((owner, name))

    def _step(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Enter, and stay in: the optimizer's step comes after the last of these."""

        @functools.wraps(method)
        def step(*args: Any, **kwargs: Any) -> Any:
            self._turn.enter("train")
            return method(*args, **kwargs)

        return step

    def _after_step(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Logging, evaluation and saving; at the end of an epoch there may be none to do. Then the turn goes on if it
        ends soon by itself: with the rewards of the next batch, or with the training."""

        @functools.wraps(method)
        def after_step(*args: Any, **kwargs: Any) -> Any:
            control = self._trainer.control
            if not (self._turn.held or control.should_log or control.should_evaluate or control.should_save):
                return method(*args, **kwargs)
            self._turn.enter("eval" if control.should_evaluate else "save")
            result = method(*args, **kwargs)
            self._turn.ensure_held()
            soon = self._trainer.control.should_training_stop or (self._gives_way and _generates(self._trainer))
            if not soon:
                self._turn.leave()
            return result

        return after_step

    def _elsewhere(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Generation on the server's devices."""

        @functools.wraps(method)
        def generate(*args: Any, **kwargs: Any) -> Any:
            with contextlib.ExitStack() as stack:
                if self._leaves_to_generate:
                    stack.enter_context(self._turn.outside())
                if self._samplers:
                    stack.enter_context(self._turn.hold(self._samplers, phase="generate"))
                return method(*args, **kwargs)

        return generate

    def _to_samplers(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def sync_weights(*args: Any, **kwargs: Any) -> Any:
            groups = [self._turn.group, *([self._samplers] if self._samplers else [])]
            with self._turn.hold(*groups, phase="weight_sync"):
                return method(*args, **kwargs)

        return sync_weights


class _Callback(TrainerCallback):  # type: ignore[misc]  # untyped
    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if self._turn.nested:
            log.warning(
                "group %s: train() runs inside a hold of your own, so the group is not given up while rewards are "
                "computed. Call train() outside of it.",
                self._turn.group,
            )

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._turn.ensure_held()  # what was computed without the lease must not get into the weights


def _held(turn: Turn, method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def held(*args: Any, **kwargs: Any) -> Any:
        with turn.inside(name):
            return method(*args, **kwargs)

    return held


def _off_device(trainer: Any, turn: Turn, functions: list[Any]) -> list[Any]:
    """Replacements for the reward functions. The first one calls all of them, off the device, so that a batch costs
    one turn and not one for each function; the others hand out what theirs returned. Reward models compute on the
    device and stay as they are."""
    ours = [function for function in functions if not _is_model(function)]
    results: dict[int, Any] = {}

    def call_all(batch: dict[str, Any]) -> None:
        later = {number: each for number, each in enumerate(ours) if _is_async(each)}
        results.update({number: each(**batch) for number, each in enumerate(ours) if number not in later})
        if later:

            async def together() -> list[Any]:
                return await asyncio.gather(*(each(**batch) for each in later.values()))

            answers = asyncio.run_coroutine_threadsafe(together(), trainer.async_loop).result()
            results.update(zip(later, answers, strict=True))

    def stand_in(number: int) -> Callable[..., Any]:
        def rewards(**batch: Any) -> Any:
            if number == 0:
                with turn.outside(), phase("verify", job=turn.job):
                    call_all(batch)
            return results.pop(number)

        return rewards

    numbers = iter(range(len(ours)))
    return [each if _is_model(each) else stand_in(next(numbers)) for each in functions]


def _is_model(function: Any) -> bool:
    return isinstance(function, torch.nn.Module)


def _is_async(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(function.__call__)


def _generates(trainer: Any) -> bool:
    """Whether the next training step begins with a new batch."""
    every = trainer.args.steps_per_generation * trainer.num_iterations
    return trainer._step % every == 0 or trainer._buffered_inputs is None  # noqa: SLF001 - TRL's own question


def _by_server(trainer: Any) -> bool:
    return bool(trainer.use_vllm and trainer.vllm_mode == "server")


def _state_of(trainer: Any, group: str) -> DeviceState:
    """What is frozen, such as the reference model and the base of adapters, is copied once."""
    if _is_model(trainer.ref_model) and not trainer.is_fsdp_enabled:  # FSDP has its parameters in buffers of its own
        trainer.ref_model.requires_grad_(requires_grad=False)  # TRL trains it never, and leaves this as it was loaded
    return DeviceState(group, lambda: _parts(trainer), static=frozen)


def _parts(trainer: Any) -> Parts:
    models = [trainer.model, trainer.ref_model, *trainer.reward_funcs]
    return list(filter(_is_model, models)), [trainer.optimizer] if trainer.optimizer else []


def _missing(trainer: Any) -> Iterator[str]:
    yield from (name for name in (*_HELD, _STEP, _AFTER_STEP) if not callable(getattr(trainer, name, None)))
    yield from (name for name in _READ if not hasattr(trainer, name))


def _check(trainer: Any, trainers: str, samplers: str | None, *, register: bool) -> None:
    check_name("group", trainers)
    if not isinstance(trainer, GRPOTrainer):
        raise UsageError(f"{type(trainer).__name__} is no GRPOTrainer: only that one's phases are known")
    if missing := ", ".join(_missing(trainer)):
        raise UsageError(
            f"GRPOTrainer of TRL {version('trl')} with transformers {version('transformers')} has no {missing}; known "
            f"is {KNOWN}. Install that, or hold by hand: `with timeslice.hold({trainers!r})`."
        )
    if hasattr(trainer, "timeslice"):
        raise UsageError("this trainer is shared already; close() that first", group=trainers)
    if samplers is not None:
        check_name("group", samplers)
        if samplers != trainers and not _by_server(trainer):
            raise UsageError(
                f"group {samplers}: this trainer generates with its own model on its own device, which is in group "
                f"{trainers} already. Leave samplers out; a second group takes vllm_mode='server'.",
                group=samplers,
            )
    if register and trainer.use_vllm and not _by_server(trainer) and not trainer.args.vllm_enable_sleep_mode:
        raise UsageError(
            "vLLM in the trainer's process keeps its memory between turns: set vllm_enable_sleep_mode=True, or pass "
            "register=False if something else moves it",
            group=trainers,
        )
    if register and trainer.is_deepspeed_enabled:
        raise UsageError(
            "DeepSpeed keeps state where it can't be found from outside: pass register=False, and let a backend that "
            "works from outside of the process move it",
            group=trainers,
        )
