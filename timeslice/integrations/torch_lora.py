"""Adapters of one base model: what moves between two of them is the adapters, never the base."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch

from timeslice.client.callbacks import Moved
from timeslice.client.workload import Workload, register_workload
from timeslice.errors import UsageError
from timeslice.integrations.torch_find import Piece, Static, adapter_parts, tensors_of
from timeslice.integrations.torch_guards import Guards
from timeslice.integrations.torch_state import DeviceState
from timeslice.models import Residency


class LoraSlots:
    """A model with adapters, as PEFT makes them, of which some are on the device and the others in host memory.

    ::

        slots = LoraSlots("trainers", model, optimizers=[for_math, for_code], static=frozen)
        slots.register()

        with timeslice.hold("trainers"):
            slots.use("math")                   # its weights, gradients and optimizer state come, all others' leave
            model.set_adapter("math")
            ...

    Between holds it moves as by ``register_module``, whose arguments these are; an adapter that was in host memory
    before stays there. Give each adapter an optimizer of its own: one is refused to step as long as some of what it
    trains is away.
    """

    def __init__(
        self,
        group: str,
        *modules: Any,
        optimizers: Iterable[Any] = (),
        static: Static | torch.nn.Module = (),
        verify: bool = True,
    ) -> None:
        self.group = group
        self._modules, self._optimizers = modules, tuple(optimizers)
        names = sorted({name for _, name, _ in adapter_parts(modules)})
        self._base = _Base(names, group, lambda: (modules, self._optimizers), static=static, verify=verify)
        self._adapters = {name: _Adapter(group, modules, name, self._optimizers) for name in names}
        self._taken: set[str] = set()  # adapters that left with their job
        self._changing = threading.RLock()
        if not self._adapters:
            raise UsageError(f"group {group}: the model has no adapters; make them before", group=group)

    def register(self, *, job: str | None = None) -> Workload:
        """Let the agent of this node move the base and whichever adapters are there; the slots are the adapters. Raises
        what ``timeslice.register_workload`` raises."""
        for state in (self._base, *self._adapters.values()):
            state.adopt()
        return register_workload(
            self.group,
            on_suspend=lambda _mode, tags, slot: self.suspend(tags, slot),
            on_restore=self.restore,
            probe=self.probe,
            job=job,
            tags=(*self._base.tags, "lora"),
            slots=tuple(self._adapters),
        )

    def use(self, *adapters: str) -> Moved:
        """Have these adapters on the device and no others. UsageError for an unknown one, or when the turn is over."""
        with self._changing:
            if unknown := sorted(set(adapters) - set(self._adapters)):
                known = ", ".join(self._adapters)
                raise UsageError(f"group {self.group}: no adapter {', '.join(unknown)}; the model has {known}")
            if self._base.suspended or self._taken:
                self._base.refuse()
            moved = [state.suspend() for name, state in self._adapters.items() if name not in adapters]
            moved += [self._adapters[name].restore() for name in adapters]
            return _sum(moved)

    def suspend(self, tags: Iterable[str] = (), slot: str = "") -> Moved:
        """As of ``DeviceState``."""
        tags = tuple(tags)
        with self._changing, ExitStack() as undo:
            leaving = [name for name in self._meant(tags, slot) if not self._adapters[name].suspended]
            moved = []
            for state in (self._base, *(self._adapters[name] for name in leaving)):
                moved.append(state.suspend(tags, slot))
                undo.callback(state.restore)
            undo.pop_all()
            self._taken.update(leaving)
            return _sum(moved)

    def restore(self, tags: Iterable[str] = (), slot: str = "") -> Moved:
        """As of ``DeviceState``; what ``use`` has put away stays there."""
        tags = tuple(tags)
        with self._changing:
            moved = []
            for name in sorted(self._taken.intersection(self._meant(tags, slot))):
                moved.append(self._adapters[name].restore())
                self._taken.remove(name)
            return _sum([*moved, self._base.restore(tags, slot)])

    def probe(self) -> tuple[Residency, int, int, dict[str, int]]:
        """As of ``DeviceState``."""
        with self._changing:
            found = [state.probe() for state in (self._base, *self._adapters.values())]
            on_device, base = sum(each[1] for each in found), found[0][3]
            parts = {**base, "lora": on_device - found[0][1] + base.get("lora", 0)}
            suspended = self._base.suspended or self._taken
            state = Residency.SUSPENDED if suspended else Residency.RESIDENT if on_device else Residency.ABSENT
            return state, on_device, sum(each[2] for each in found), parts

    def _meant(self, tags: tuple[str, ...], slot: str) -> list[str]:
        return [name for name in self._adapters if (not tags or "lora" in tags) and slot in ("", name)]


class _Base(DeviceState):
    """All but these adapters. Those that were made later are no slots, and count as of the base."""

    def __init__(self, adapters: Iterable[str], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._adapters = frozenset(adapters)

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(tag for tag in super().tags if tag != "lora")

    def refuse(self) -> None:
        self._guards.refuse()

    def _pieces(self) -> list[Piece]:
        return [piece for piece in super()._pieces() if piece.tag != "lora" or piece.slot not in self._adapters]


class _Adapter(DeviceState):
    """One adapter. While it is away, the others can be used."""

    def __init__(self, group: str, modules: Iterable[Any], adapter: str, optimizers: Iterable[Any]) -> None:
        parts = (tuple(modules), tuple(optimizers))
        super().__init__(group, lambda: parts)
        self._adapter = adapter
        self._guards = Guards(group, f"adapter {adapter} is in host memory; call use({adapter!r}) inside of a hold")

    def _pieces(self) -> list[Piece]:
        return [piece for piece in super()._pieces() if piece.tag == "lora" and piece.slot == self._adapter]

    def _guard(self) -> None:
        def refuse_if_active(layer: Any, *_: Any) -> None:
            if self._adapter in layer.active_adapters:
                self._guards.refuse()

        modules, optimizers = self._parts()
        own: set[int] = set()
        for layer, name, value in adapter_parts(modules):
            if name == self._adapter:
                self._guards.before_forward(layer, refuse_if_active)
                if isinstance(value, torch.nn.Module):
                    self._guards.put([value], [])
                own.update(map(id, tensors_of(value)))
        self._guards.put([], [each for each in optimizers if _trains(each, own)])


def _trains(optimizer: Any, tensors: set[int]) -> bool:
    return any(id(tensor) in tensors for group in optimizer.param_groups for tensor in group["params"])


def _sum(moved: Iterable[Moved]) -> Moved:
    moved = list(moved)
    return Moved(bytes=sum(each.bytes for each in moved), saved=sum(each.saved for each in moved))
