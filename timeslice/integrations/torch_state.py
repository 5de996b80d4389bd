"""The memory of modules and optimizers: out of the device, and back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from timeslice.client.callbacks import Moved
from timeslice.client.workload import Workload, register_workload
from timeslice.integrations.torch_find import (
    TAGS,
    Parts,
    Piece,
    Static,
    adapter_parts,
    empty_cache,
    find,
    raw,
    synchronize,
)
from timeslice.integrations.torch_guards import Guards
from timeslice.integrations.torch_host import HostMemory, Saved
from timeslice.models import Residency


class DeviceState:
    """The memory of the modules and optimizers that ``find`` gives, on the device or saved.

    ``static`` and ``verify`` as of ``register_module``.
    """

    def __init__(
        self, group: str, find: Callable[[], Parts], *, static: Static | torch.nn.Module = (), verify: bool = True
    ) -> None:
        self.group = group
        self._find = find
        self._static: Static = (static,) if isinstance(static, torch.nn.Module) else static
        if not callable(self._static):
            self._static = tuple(self._static)
        self._host = HostMemory(verify=verify)
        self._saved: list[Saved] = []
        self._guards = Guards(group)
        self._changing = threading.RLock()

    @property
    def suspended(self) -> bool:
        return bool(self._guards)

    @property
    def tags(self) -> tuple[str, ...]:
        """Those that a part of this state may have, as far as it is there."""
        absent = {tag for tag, there in (("lora", self.slots), ("static", self._static)) if not there}
        return tuple(tag for tag in TAGS if tag not in absent)

    @property
    def slots(self) -> tuple[str, ...]:
        """The adapters."""
        return tuple(sorted({name for _, name, _ in adapter_parts(self._parts()[0])}))

    def adopt(self) -> None:
        """Give tensors on memory that PyTorch can't free (a mapped file, a numpy array, memory that processes share)
        memory of their own."""
        for piece in self._pieces():
            storage = piece.storage
            if _can_be_freed(storage):
                continue
            own = torch.UntypedStorage(storage.nbytes(), device=storage.device)
            raw(own).copy_(raw(storage))
            with torch.inference_mode():  # tensors that were made in it are changed only there
                for tensor in piece.tensors:
                    tensor.set_(own, tensor.storage_offset(), tensor.size(), tensor.stride())

    def suspend(self, tags: Iterable[str] = (), slot: str = "") -> Moved:
        """Copy it to host memory, and free it on the device: all, or what has one of the tags and is the slot's.

        If it fails, nothing has moved.
        """
        tags = tuple(tags)
        with self._changing:
            self.adopt()
            pieces = self._pieces()
            leaving = [piece for piece in pieces if piece.storage.nbytes() and piece.chosen(tags, slot)]
            storages = [piece.storage for piece in leaving]
            synchronize(storages)  # what was launched ends first
            saved = self._host.save(leaving)
            self._saved += saved
            try:
                if pieces and not self._guards:
                    self._guard()
                for storage in storages:
                    storage.resize_(0)
                empty_cache(storages)
            except BaseException:
                self._put_back(saved)
                raise
            if not tags and not slot:
                self._host.trim()
            return Moved(bytes=_size(saved, copied=True), saved=_size(saved, copied=False))

    def restore(self, tags: Iterable[str] = (), slot: str = "") -> Moved:
        """Fill the memory on the device again: all that is out, or what has one of the tags and is the slot's.

        If it fails, nothing is back and the copy is whole.
        """
        tags = tuple(tags)
        with self._changing:
            coming = [each for each in self._saved if each.piece.chosen(tags, slot)]
            return Moved(bytes=self._put_back(coming))

    def probe(self) -> tuple[Residency, int, int, dict[str, int]]:
        """Where it is, the bytes on the device, the bytes in host memory, and those on the device by tag."""
        with self._changing:
            parts: dict[str, int] = {}
            for piece in self._pieces():
                parts[piece.tag] = parts.get(piece.tag, 0) + piece.storage.nbytes()
            on_device = sum(parts.values())
            state = Residency.SUSPENDED if self.suspended else Residency.RESIDENT if on_device else Residency.ABSENT
            return state, on_device, _size(self._saved) + self._host.nbytes, parts

    def _parts(self) -> Parts:
        modules, optimizers = self._find()
        return ((*modules, *(() if callable(self._static) else self._static)), tuple(optimizers))

    def _pieces(self) -> list[Piece]:
        return find(*self._parts(), self._static)

    def _guard(self) -> None:
        self._guards.put(*self._parts())

    def _put_back(self, saved: list[Saved]) -> int:
        missing = [each for each in saved if not each.piece.storage.nbytes()]
        storages = [each.piece.storage for each in missing]
        try:
            for each in missing:
                each.piece.storage.resize_(each.nbytes)
                raw(each.piece.storage).copy_(each.content)
            synchronize(storages)
        except BaseException:
            for storage in storages:
                storage.resize_(0)
            empty_cache(storages)
            raise
        back = set(saved)
        self._saved = [each for each in self._saved if each not in back]
        for each in saved:
            self._host.give(each)
        if not self._saved:
            self._guards.lift()
        return _size(missing)


def register_state(state: DeviceState, *, job: str | None = None) -> Workload:
    """``register_module`` for modules and optimizers that are not all there yet."""
    state.adopt()
    return register_workload(
        state.group,
        on_suspend=lambda _mode, tags, slot="": state.suspend(tags, slot),
        on_restore=lambda tags, slot="": state.restore(tags, slot),
        probe=state.probe,
        job=job,
        tags=state.tags,
        slots=state.slots,
    )


def _can_be_freed(storage: Any) -> bool:
    """PyTorch would resize memory that processes share, and crash; on a device all storages say they are shared."""
    return storage.resizable() and not (storage.device.type == "cpu" and storage.is_shared())


def _size(saved: Iterable[Saved], *, copied: bool | None = None) -> int:
    return sum(each.nbytes for each in saved if copied is None or each.copied is copied)
