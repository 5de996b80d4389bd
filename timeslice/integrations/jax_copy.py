"""One JAX array in host memory, and back on the device as it was: bits, dtype, sharding, weak type, key type."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

Index: TypeAlias = tuple[tuple[int | None, int | None, int | None], ...]


class Copy:
    """An array's content in host memory, and what it takes to make the same array again."""

    def __init__(self, array: Any) -> None:
        self._impl = jax.random.key_impl(array) if _is_key(array) else None
        plain = _plain(array)
        self._shape, self._dtype, self._sharding = plain.shape, plain.dtype, plain.sharding
        self._committed, self._weak = plain.committed, plain.weak_type
        self._on_cpu = next(iter(plain.devices())).platform == "cpu"
        self._shards: dict[Index, Any] = {}  # replicas once
        for shard in plain.addressable_shards:
            if (index := _index(shard.index)) not in self._shards:
                self._shards[index] = self._apart(jax.device_get(shard.data))
        self.nbytes = sum(content.nbytes for content in self._shards.values())

    def restored(self) -> Any:
        """The array again, on the device."""
        # Whether there are 64 bits, of a complex number 2 * 64, is a setting of each thread.
        with jax.enable_x64(True) if self._dtype.itemsize >= 8 else nullcontext():
            array = self._array()
            if self._weak:
                array = self._weakened(array)
        return array if self._impl is None else jax.random.wrap_key_data(array, impl=self._impl)

    def _array(self) -> Any:
        if self._committed:
            kind = self._sharding.memory_kind
            shards = [
                jax.device_put(
                    self._content(_index(index)), jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
                )
                for device, index in self._sharding.addressable_devices_indices_map(self._shape).items()
            ]
            return jax.make_array_from_single_device_arrays(self._shape, self._sharding, shards)
        (device,) = self._sharding.device_set
        with jax.default_device(device):  # free to go where others are, as it was
            return jax.device_put(self._content(next(iter(self._shards))))

    def _content(self, index: Index) -> Any:
        return self._apart(self._shards[index])

    def _apart(self, content: Any) -> Any:
        """On a CPU an array may lie on the very memory of its copy."""
        return content.copy() if self._on_cpu else content

    def _weakened(self, array: Any) -> Any:
        weak = _weak(array, np.zeros((), self._dtype).item())
        if weak.dtype != self._dtype:
            return array
        # Where it lies now was the compiler's choice.
        return jax.device_put(weak, self._sharding) if self._committed else weak


class Copies:
    """Copies of arrays that are on the device. One is good as long as its array lives: arrays are immutable."""

    def __init__(self) -> None:
        self._good: dict[int, tuple[weakref.ref[Any], Copy]] = {}  # by the array's id

    def add(self, array: Any, copy: Copy) -> None:
        key, good = id(array), self._good

        def forget(reference: Any) -> None:  # at once, in whatever thread it dies: this may be much memory
            if key in good and good[key][0] is reference:
                good.pop(key, None)

        good[key] = weakref.ref(array, forget), copy

    def by_array(self) -> dict[int, tuple[Any, Copy]]:
        """Id -> array and copy. Those of arrays that were donated, of which somebody keeps the shell, are dropped."""
        found = {key: (reference(), copy) for key, (reference, copy) in list(self._good.items())}
        for key, (array, _) in found.items():
            if not lives(array):
                self._good.pop(key, None)
        return {key: (array, copy) for key, (array, copy) in found.items() if lives(array)}


def lives(array: Any) -> bool:
    return array is not None and not array.is_deleted()


def bytes_on_device(array: Any) -> int:
    """Of this process's shards, replicas included."""
    return int(sum(shard.data.nbytes for shard in _plain(array).addressable_shards))


def _is_key(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jax.dtypes.prng_key))


def _plain(array: Any) -> Any:
    """What random keys are made of."""
    return jax.random.key_data(array) if _is_key(array) else array


def _index(slices: tuple[slice, ...]) -> Index:
    return tuple((each.start, each.stop, each.step) for each in slices)


def _write_into_weak(content: Any, zero: Any) -> Any:
    """JAX lets nobody ask for a weak type; but what is written into a weak array stays weak."""
    return jnp.full(content.shape, zero).at[...].set(content)


_weak = jax.jit(_write_into_weak)
