"""PyTorch: models and optimizers that leave the device when their job's turn is over, and come back as they were.

::

    with timeslice.hold("trainers", phase="init"):
        model, optimizer = ...                      # on the device
        timeslice.integrations.torch.register_module("trainers", model, optimizers=[optimizer])

What moves is memory, not tensors: the same Parameter objects point to the same storages before and after, whatever
shares a storage still shares it, and every byte is as it was. Only addresses on the device are others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from timeslice.client.workload import Workload
from timeslice.errors import UsageError
from timeslice.integrations.torch_engine import register_engine
from timeslice.integrations.torch_find import Parts, Static, frozen, synchronize
from timeslice.integrations.torch_lora import LoraSlots
from timeslice.integrations.torch_state import DeviceState, register_state

__all__ = [
    "DeviceState",
    "LoraSlots",
    "Parts",
    "frozen",
    "register_engine",
    "register_module",
    "register_state",
    "synchronize",
]


def register_module(
    group: str,
    *modules: Any,
    optimizers: Iterable[Any] = (),
    static: Static | Any = (),
    verify: bool = True,
    job: str | None = None,
) -> Workload:
    """Let the agent of this node move these modules and optimizers while another job has ``group``.

    Parameters, gradients, buffers and the optimizers' state are looked up at each move, so what appears later moves
    too. Moves happen on a thread of the workload, only while this process does not hold the group: a step has to be
    over by then, for an autograd graph that lives longer keeps its activations on the device. Until the next hold
    calling a module, stepping an optimizer, and ``state_dict`` and ``load_state_dict`` of both raise UsageError.
    PyTorch has no place to refuse other ways to touch a tensor, such as ``clip_grad_norm_``,
    ``zero_grad(set_to_none=False)``, ``to()`` or reading it: they have an undefined outcome, and may end the process.
    Memory comes back at other addresses, so a CUDA graph has to be captured again.

    Host memory is kept from one move to the next. ``static`` says what hardly changes: modules, such as a reference
    model (they need not be among ``modules``), or a function that is called with the name and the tensor of each
    parameter and buffer, such as ``frozen``. What is static and was copied once is only dropped, if it is the same as
    then. That is seen by a fingerprint of 64 bits that the device makes of it; ``verify=False`` leaves that out and
    trusts PyTorch's version counters, which miss changes by ``.data``, through numpy and by fused optimizers: a change
    that was missed is lost. Parameters that take gradients are always copied.

    A part can be chosen by the tags ``weights``, ``gradients``, ``optimizer``, ``static`` and ``lora``. Adapters that
    PEFT made before this call are slots, and all that is an adapter's is ``lora`` and nothing else.

    Of a model that is on a device, tensors in host memory stay where they are; a model on the CPU moves as a whole.
    Memory that is a file's, a numpy array's or, by ``share_memory()``, other processes' too is replaced by memory of
    this module's own: what changes there is no longer seen here, nor the other way round.

    Raises UsageError for sparse tensors and DeepSpeed engines, and what ``timeslice.register_workload`` raises.
    """
    for module in modules:
        if hasattr(module, "offload_states"):
            raise UsageError(f"group {group}: a {type(module).__name__} moves its own state; use register_engine")
    parts = (modules, tuple(optimizers))
    return register_state(DeviceState(group, lambda: parts, static=static, verify=verify), job=job)
