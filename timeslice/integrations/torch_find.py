"""Which memory modules and optimizers have, and what it is for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from timeslice.errors import UsageError

Parts = tuple[Iterable[Any], Iterable[Any]]  # modules, optimizers
Static = Iterable[Any] | Callable[[str, Any], bool]  # modules, or whether a tensor of this name is meant

# What shares memory counts as the first of these, so that what counts as static is nothing else.
TAGS = ("weights", "lora", "gradients", "optimizer", "static")


@dataclass(eq=False)
class Piece:
    """One storage, with the tensors that share it."""

    storage: Any
    tensors: list[Any] = field(default_factory=list)
    labels: set[tuple[str, str]] = field(default_factory=set)  # tag and slot

    @property
    def tag(self) -> str:
        return min((tag for tag, _ in self.labels), key=TAGS.index)

    @property
    def slot(self) -> str:
        slots = {slot for _, slot in self.labels}
        return slots.pop() if len(slots) == 1 else ""

    def chosen(self, tags: Iterable[str], slot: str) -> bool:
        return (not tags or self.tag in tags) and slot in ("", self.slot)


def frozen(_name: str, tensor: Any) -> bool:
    """For ``static=``: all parameters that take no gradients, and all buffers."""
    return not tensor.requires_grad


def find(modules: Iterable[Any], optimizers: Iterable[Any], static: Static = ()) -> list[Piece]:
    """Each storage once. Where something is on a device, what is in host memory is left out."""
    found: dict[int, Piece] = {}
    for tensor, tag, slot in _labelled(tuple(modules), optimizers, static):
        for plain in _plain(tensor):
            storage = plain.untyped_storage()
            # PyTorch has no other name for a storage's identity.
            piece = found.setdefault(storage._cdata, Piece(storage))  # noqa: SLF001
            piece.tensors.append(plain)
            piece.labels.add((tag, slot))
    real = [piece for piece in found.values() if piece.storage.device.type != "meta"]
    return [piece for piece in real if piece.storage.device.type != "cpu"] or real


def adapter_parts(modules: Iterable[Any]) -> Iterator[tuple[Any, str, Any]]:
    """Of each layer with adapters, as PEFT makes them: the layer, an adapter's name, a module or tensor of it.

    Such a layer says in ``adapter_layer_names`` which of its attributes (``lora_A``) have a value for each adapter.
    """
    for layer in {each for root in modules for each in root.modules()}:
        for attribute in getattr(layer, "adapter_layer_names", ()):
            try:
                values = attrgetter(attribute)(layer)
            except AttributeError:
                continue
            for name, value in values.items():
                yield layer, name, value


def _adapters(modules: Iterable[Any]) -> dict[int, str]:
    found: dict[int, str] = {}
    for _, name, value in adapter_parts(modules):
        found.update((id(tensor), name) for tensor in tensors_of(value))
    return found


def tensors_of(value: Any) -> tuple[Any, ...]:
    """Of a module, or the tensor that it is."""
    return (*value.parameters(), *value.buffers()) if isinstance(value, torch.nn.Module) else (value,)


def _declared(modules: Iterable[Any], static: Static) -> set[int]:
    """Parameters and buffers that are said not to change, if nothing trains them."""
    if not callable(static):
        tensors = (tensor for module in static for tensor in (*module.parameters(), *module.buffers()))
        return {id(tensor) for tensor in tensors if not tensor.requires_grad}
    chosen: dict[int, bool] = {}
    for module in modules:
        named = (module.named_parameters, module.named_buffers)
        for name, tensor in (pair for method in named for pair in method(remove_duplicate=False)):
            means = not tensor.requires_grad and static(name, tensor)
            chosen[id(tensor)] = chosen.get(id(tensor), True) and means  # under each of its names
    return {key for key, means in chosen.items() if means}


def _labelled(modules: tuple[Any, ...], optimizers: Iterable[Any], static: Static) -> Iterator[tuple[Any, str, str]]:
    adapters, unchanging = _adapters(modules), _declared(modules, static)

    def label(owner: Any, tag: str) -> tuple[str, str]:
        name = adapters.get(id(owner))
        return (tag, "") if name is None else ("lora", name)

    def with_gradient(tensor: Any) -> Iterator[tuple[Any, str, str]]:
        yield tensor, *label(tensor, "static" if id(tensor) in unchanging else "weights")
        if tensor.grad is not None:
            yield tensor.grad, *label(tensor, "gradients")

    for module in modules:
        for parameter in module.parameters():
            yield from with_gradient(parameter)
        for buffer in module.buffers():
            yield buffer, *label(buffer, "static" if id(buffer) in unchanging else "weights")
    for optimizer in map(inner, optimizers):
        for group in optimizer.param_groups:
            for name, value in group.items():
                for tensor in inside(value):
                    if name == "params":
                        yield from with_gradient(tensor)
                    else:
                        yield tensor, "optimizer", ""
        for owner, value in list(optimizer.state.items()):  # the training thread may add to it in this moment
            for tensor in inside(value):
                yield tensor, *label(owner, "optimizer")


def inside(value: Any) -> Iterator[Any]:
    """Tensors anywhere in dictionaries, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in list(value.values()):
            yield from inside(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from inside(each)


def _plain(tensor: Any) -> Iterator[Any]:
    """The tensors with memory inside of a DTensor, a nested or a quantised tensor; else the tensor itself."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for part in (getattr(tensor, name) for name in names):
            if isinstance(part, torch.Tensor):  # a DTensor names its mesh, too
                yield from _plain(part)
    elif tensor.layout == torch.strided:
        yield tensor
    else:
        raise UsageError(f"a tensor of {tensor.layout} can't leave the device; make it dense, or don't register it")


def inner(optimizer: Any) -> Any:
    """Accelerate wraps optimizers; hooks and state are the inner one's."""
    return getattr(optimizer, "optimizer", optimizer)


def raw(storage: Any) -> Any:
    """All of a storage as a tensor of bytes, whatever lies in it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def synchronize(on: Iterable[Any]) -> None:
    """Wait until the devices of these storages, or these devices, have done what they were given."""
    for device in _devices(on):
        torch.get_device_module(device).synchronize(device)


def empty_cache(storages: Iterable[Any]) -> None:
    """Give back what PyTorch keeps for later. That waits for nothing."""
    for device in _devices(storages):
        torch.get_device_module(device).empty_cache()


def _devices(on: Iterable[Any]) -> set[Any]:
    devices = {getattr(each, "device", each) for each in on}
    return {device for device in devices if device.type != "cpu"}
