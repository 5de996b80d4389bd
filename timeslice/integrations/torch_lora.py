"""Adapters of one base model that are jobs of their own, in one process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from timeslice.client.workload import Workload
from timeslice.errors import UsageError
from timeslice.integrations.torch_find import Piece, adapter_parts
from timeslice.integrations.torch_guards import Guards
from timeslice.integrations.torch_state import DeviceState, register_state


class LoraSlots:
    """One base, and a job for each of its adapters: what moves between their turns is the adapters.

    ::

        slots = LoraSlots("trainers", model)                            # a PEFT model
        slots.register("math", optimizers=[for_math], job="run-math")
        slots.register("code", optimizers=[for_code], job="run-code")

        with timeslice.hold("trainers", job="run-math"):
            model.set_adapter("math")
            ...

    The base stays on the device, so all jobs of the group that are not of this process need room beside it.
    """

    def __init__(self, group: str, *modules: Any) -> None:
        self.group = group
        self._modules = modules

    def register(self, adapter: str, *, optimizers: Iterable[Any] = (), job: str | None = None) -> Workload:
        """Let the adapter's parameters, their gradients and their part of the optimizers' state be what moves when
        another job has the group. Meanwhile the layers refuse to run with it, and others go on. An optimizer that is
        given here has to be this adapter's alone.

        Raises UsageError when there is no such adapter, and what ``timeslice.register_workload`` raises.
        """
        return register_state(AdapterState(self.group, self._modules, adapter, optimizers), job=job)


class AdapterState(DeviceState):
    """The memory of one adapter."""

    def __init__(self, group: str, modules: Iterable[Any], adapter: str, optimizers: Iterable[Any]) -> None:
        parts = (tuple(modules), tuple(optimizers))
        super().__init__(group, lambda: parts)
        self._adapter = adapter
        if adapter not in (known := super().slots):
            raise UsageError(f"group {group}: no adapter {adapter!r}; the model has {', '.join(known) or 'none'}")

    @property
    def tags(self) -> tuple[str, ...]:
        return ("lora",)

    @property
    def slots(self) -> tuple[str, ...]:
        return (self._adapter,)

    def _pieces(self) -> list[Piece]:
        return [piece for piece in super()._pieces() if piece.tag == "lora" and piece.slot == self._adapter]

    def _guard(self, guards: Guards) -> None:
        modules, optimizers = self._parts()

        def refuse_if_active(layer: Any, *_: Any) -> None:
            if self._adapter in layer.active_adapters:
                guards.refuse()

        for layer, name, value in adapter_parts(modules):
            if name == self._adapter:
                guards.before_forward(layer, refuse_if_active)
                guards.put([value] if isinstance(value, nn.Module) else [], [])
        guards.put([], optimizers)
