"""PyTorch: models and optimizers that leave the device when their job's turn is over, and come back as they were.

::

    with timeslice.hold("trainers", phase="init"):
        model, optimizer = ...                      # on the device
        timeslice.integrations.torch.register_module("trainers", model, optimizers=[optimizer])

What moves is memory, not tensors: the same Parameter objects point to the same storages before and after, whatever
shares a storage still shares it, and every byte is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from timeslice.client.workload import Workload, register_workload
from timeslice.errors import UsageError
from timeslice.models import Residency

Parts = tuple[Iterable[Any], Iterable[Any]]  # modules, optimizers
Saved = tuple[Any, Any]  # a storage, and the tensor of bytes in host memory that has its content


def register_module(group: str, *modules: Any, optimizers: Iterable[Any] = (), job: str | None = None) -> Workload:
    """Let the agent of this node move these modules and optimizers while another job has ``group``.

    Parameters, gradients, buffers and the optimizers' state are looked up at each move, so what appears later moves
    too. Moves happen on a thread of the workload, only while this process does not hold the group: a step has to be
    over by then, for an autograd graph that lives longer keeps its activations on the device. Until the next hold
    calling a module, stepping an optimizer, and ``state_dict`` and ``load_state_dict`` of both raise UsageError.
    PyTorch has no place to refuse other ways to touch a tensor, such as ``clip_grad_norm_``,
    ``zero_grad(set_to_none=False)``, ``to()`` or reading it: they have an undefined outcome, and may end the process.

    Of a model that is on a device, tensors in host memory stay where they are; a model on the CPU moves as a whole.
    Memory that is a file's, a numpy array's or, by ``share_memory()``, other processes' too is replaced by memory of
    this module's own: what changes there is no longer seen here, nor the other way round.

    Raises UsageError for sparse tensors, and what ``timeslice.register_workload`` raises.
    """
    parts = (modules, tuple(optimizers))
    return register_state(DeviceState(group, lambda: parts), job=job)


def register_state(state: DeviceState, *, job: str | None = None) -> Workload:
    """``register_module`` for modules and optimizers that are not all there yet."""
    state.adopt()
    return register_workload(
        state.group,
        on_suspend=lambda _mode, _tags: state.suspend(),
        on_restore=lambda _tags: state.restore(),
        probe=state.probe,
        job=job,
    )


class DeviceState:
    """The memory of the modules and optimizers that ``find`` gives, on the device or saved. Used by one thread."""

    def __init__(self, group: str, find: Callable[[], Parts]) -> None:
        self.group = group
        self._find = find
        self._saved: list[Saved] = []
        self._guards: list[Any] = []

    def adopt(self) -> None:
        """Give tensors on memory that PyTorch can't free (a mapped file, a numpy array, memory that processes share)
        memory of their own."""
        for storage, tensors in self._found():
            if _can_be_freed(storage):
                continue
            own = torch.UntypedStorage(storage.nbytes(), device=storage.device)
            _bytes(own).copy_(_bytes(storage))
            with torch.inference_mode():  # tensors that were made in it are changed only there
                for tensor in tensors:
                    tensor.set_(own, tensor.storage_offset(), tensor.size(), tensor.stride())

    def suspend(self) -> int:
        """Copy all of it to host memory, and free it on the device. Bytes moved; if it fails, nothing has."""
        if self._saved:
            return 0
        self.adopt()
        storages = [storage for storage in self._storages() if storage.nbytes()]
        synchronize(storages)  # what was launched ends first
        saved = [(storage, _copy(storage)) for storage in storages]
        self._saved = saved
        try:
            self._guard()
            for storage, _ in saved:
                storage.resize_(0)
            _empty_cache(storages)
        except BaseException:
            self.restore()
            raise
        return _size(saved)

    def restore(self) -> int:
        """Fill the memory on the device again. Bytes moved; if it fails, nothing is back and the copy is whole."""
        missing = [(storage, content) for storage, content in self._saved if not storage.nbytes()]
        storages = [storage for storage, _ in missing]
        try:
            for storage, content in missing:
                storage.resize_(content.numel())
                _bytes(storage).copy_(content)
            synchronize(storages)
        except BaseException:
            for storage in storages:
                storage.resize_(0)
            _empty_cache(storages)
            raise
        self._saved = []
        while self._guards:
            self._guards.pop().remove()
        return _size(missing)

    def probe(self) -> tuple[Residency, int, int]:
        """Where it is, the bytes on the device, the bytes in host memory."""
        on_device = sum(storage.nbytes() for storage in self._storages())
        state = Residency.SUSPENDED if self._saved else Residency.RESIDENT if on_device else Residency.ABSENT
        return state, on_device, _size(self._saved)

    def _storages(self) -> list[Any]:
        return [storage for storage, _ in self._found()]

    def _found(self) -> list[tuple[Any, list[Any]]]:
        """Each storage once, with the tensors that share it."""
        modules, optimizers = self._find()
        found: dict[int, tuple[Any, list[Any]]] = {}
        for tensor in _tensors(modules, optimizers):
            for plain in _plain(tensor):
                storage = plain.untyped_storage()
                # PyTorch has no other name for a storage's identity.
                found.setdefault(storage._cdata, (storage, []))[1].append(plain)  # noqa: SLF001
        real = [each for each in found.values() if each[0].device.type != "meta"]
        return [each for each in real if each[0].device.type != "cpu"] or real

    def _guard(self) -> None:
        def refuse(*_: Any) -> None:
            raise UsageError(
                f"group {self.group}: this state is in host memory, and another job may have the device. Use the "
                f"model and its optimizer inside of timeslice.hold({self.group!r}).",
                group=self.group,
            )

        modules, optimizers = self._find()
        for module in {each for root in modules for each in root.modules()}:
            self._guards.append(module.register_forward_pre_hook(refuse))
            self._guards.append(module.register_state_dict_pre_hook(refuse))
            self._guards.append(module._register_load_state_dict_pre_hook(refuse))  # noqa: SLF001 - public since 2.5
        for optimizer in map(_inner, optimizers):
            self._guards.append(optimizer.register_step_pre_hook(refuse))
            self._guards.append(optimizer.register_state_dict_pre_hook(refuse))
            self._guards.append(optimizer.register_load_state_dict_pre_hook(refuse))


def synchronize(on: Iterable[Any]) -> None:
    """Wait until the devices of these storages, or these devices, have done what they were given."""
    for device in _devices(on):
        torch.get_device_module(device).synchronize(device)


def _empty_cache(storages: Iterable[Any]) -> None:
    for device in _devices(storages):
        torch.get_device_module(device).empty_cache()


def _devices(on: Iterable[Any]) -> set[Any]:
    devices = {getattr(each, "device", each) for each in on}
    return {device for device in devices if device.type != "cpu"}


def _tensors(modules: Iterable[Any], optimizers: Iterable[Any]) -> Iterator[Any]:
    for module in modules:
        for parameter in module.parameters():
            yield from _with_gradient(parameter)
        yield from module.buffers()
    for optimizer in map(_inner, optimizers):
        for tensor in _inside(optimizer.param_groups):
            yield from _with_gradient(tensor)
        yield from _inside(optimizer.state)


def _with_gradient(tensor: Any) -> Iterator[Any]:
    yield tensor
    if tensor.grad is not None:
        yield tensor.grad


def _inside(value: Any) -> Iterator[Any]:
    """Tensors anywhere in dictionaries, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in list(value.values()):  # the training thread may add to it in this moment
            yield from _inside(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _inside(each)


def _plain(tensor: Any) -> Iterator[Any]:
    """The tensors with memory inside of a DTensor, a nested or a quantised tensor; else the tensor itself."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _plain(getattr(tensor, name))
    elif tensor.layout == torch.strided:
        yield tensor
    else:
        raise UsageError(f"a tensor of {tensor.layout} can't leave the device; make it dense, or don't register it")


def _can_be_freed(storage: Any) -> bool:
    """PyTorch would resize memory that processes share, and crash; on a device all storages say they are shared."""
    return storage.resizable() and not (storage.device.type == "cpu" and storage.is_shared())


def _inner(optimizer: Any) -> Any:
    """Accelerate wraps optimizers; hooks and state are the inner one's."""
    return getattr(optimizer, "optimizer", optimizer)


def _copy(storage: Any) -> Any:
    content = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
    return content.copy_(_bytes(storage))


def _bytes(storage: Any) -> Any:
    """All of a storage as a tensor of bytes, whatever lies in it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _size(saved: Iterable[Saved]) -> int:
    return sum(content.numel() for _, content in saved)
