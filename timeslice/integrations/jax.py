"""JAX: trees of arrays that leave the device while another job has the group, and come back as they were.

::

    import timeslice
    from timeslice.integrations.jax import Pytrees, register_pytree

    with timeslice.hold("trainers"):
        state = Pytrees("trainers", params=params, opt_state=opt_state)
        register_pytree("trainers", state)
    for batch in batches:
        with timeslice.hold("trainers"):
            state.params, state.opt_state = train_step(state.params, state.opt_state, batch)

Arrays are immutable, so an array that is still the one that came back needs no second copy: what does not change
between two turns, such as frozen weights, is copied to the host once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import jax

from timeslice.client.callbacks import Busy, Mode, Moved
from timeslice.client.workload import Workload, register_workload
from timeslice.errors import UsageError
from timeslice.integrations.jax_copy import Copies, Copy, bytes_on_device, lives
from timeslice.models import Residency

Get: TypeAlias = Callable[[], Any]
Assign: TypeAlias = Callable[[Any], None]


class Pytrees:
    """Trees by name, as attributes. Reading or assigning one that left raises UsageError until the next hold."""

    def __init__(self, group: str, /, **trees: Any) -> None:
        cells = {name: Cell.of(tree) for name, tree in trees.items()}
        vars(self).update(_group=group, _cells=cells)

    def __getattr__(self, name: str) -> Any:
        return self._cell(name).get()

    def __setattr__(self, name: str, value: Any) -> None:
        self._cell(name).assign(value)

    def _cell(self, name: str) -> Cell:
        cells: dict[str, Cell] = vars(self)["_cells"]
        if name not in cells:
            raise AttributeError(f"no tree {name!r} is held here, only {', '.join(cells)}")
        if cells[name].saved is not None:
            group = vars(self)["_group"]
            raise UsageError(
                f"group {group}: {name} is in host memory, and another job may have the device. Use it inside of "
                f"timeslice.hold({group!r}).",
                group=group,
            )
        return cells[name]


def register_pytree(
    group: str, source: Pytrees | Get, assign: Assign | None = None, *, job: str | None = None, url: str | None = None
) -> Workload:
    """Let the agent of this node move these arrays while another job has ``group``.

    ``source`` is a ``Pytrees``, whose names are tags; or a function that returns the tree as it is now, with ``assign``
    to take the one that came back: same structure, dtypes, shardings and bits, other array objects. What is no
    ``jax.Array`` in it stays. Moves happen on a thread of the workload, only while this process does not hold the
    group; any other reference to an array that left finds it deleted.

    Raises UsageError without ``assign``, and what ``timeslice.register_workload`` raises.
    """
    if isinstance(source, Pytrees):
        cells: dict[str, Cell] = vars(source)["_cells"]
        return register_workload(group, Trees(cells), job=job, url=url)
    if assign is None:
        raise UsageError(f"group {group}: a function that returns a tree needs one that takes it back: give both")
    return register_workload(group, Trees({"": Cell(source, assign)}), job=job, url=url)


class Cell:
    """Where one tree is kept. ``saved`` while it is out: its structure, and its leaves with a Copy for each array."""

    def __init__(self, get: Get, assign: Assign) -> None:
        self.get, self.assign = get, assign
        self.saved: tuple[Any, list[Any]] | None = None

    @classmethod
    def of(cls, tree: Any) -> Cell:
        held = [tree]

        def assign(value: Any) -> None:
            held[0] = value

        return cls(lambda: held[0], assign)

    def copies(self) -> list[Copy]:
        return [leaf for leaf in self.saved[1] if isinstance(leaf, Copy)] if self.saved else []


class Trees:
    """What ``register_workload`` asks of an object. An array may be in several places of several trees."""

    def __init__(self, cells: Mapping[str, Cell]) -> None:
        self._cells = cells
        self.tags = tuple(filter(None, cells))
        self._copies = Copies()

    def suspend(self, _mode: Mode, tags: tuple[str, ...]) -> Moved:
        """Copy what has no good copy, then delete. If it fails, nothing has happened."""
        leaving = [cell for cell in self._named(tags) if cell.saved is None]
        flat = [jax.tree.flatten(cell.get()) for cell in leaving]
        arrays = _arrays(leaf for leaves, _ in flat for leaf in leaves)
        if not all(map(lives, arrays.values())):
            raise Busy("an array of the tree was donated or deleted; when a hold ends the tree has to have live ones")
        jax.block_until_ready(list(arrays.values()))
        known = {key: copy for key, (_, copy) in self._copies.by_array().items() if key in arrays}
        made = {key: Copy(array) for key, array in arrays.items() if key not in known}
        copies = known | made
        for cell, (leaves, structure) in zip(leaving, flat, strict=True):
            cell.saved = structure, [copies[id(leaf)] if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
        staying = self._on_device()
        for key, array in arrays.items():
            if key in staying:
                self._copies.add(array, copies[key])
            else:
                array.delete()
        return Moved(bytes=_size(made.values()), saved=_size(known.values()))

    def restore(self, tags: tuple[str, ...]) -> int:
        """Bytes moved. If it fails, the device has nothing of it, and the copies are whole."""
        coming = [cell for cell in self._named(tags) if cell.saved is not None]
        there = {copy: array for array, copy in self._copies.by_array().values()}
        made: dict[Copy, Any] = {}
        try:
            for copy in dict.fromkeys(copy for cell in coming for copy in cell.copies()):
                if copy not in there:
                    made[copy] = copy.restored()
            arrays = there | made
            jax.block_until_ready(list(made.values()))
            for cell in coming:
                assert cell.saved is not None
                structure, leaves = cell.saved
                back = [arrays[leaf] if isinstance(leaf, Copy) else leaf for leaf in leaves]
                cell.assign(jax.tree.unflatten(structure, back))
        except BaseException:
            for array in made.values():
                array.delete()
            raise
        for cell in coming:
            cell.saved = None
        for copy, array in made.items():
            self._copies.add(array, copy)
        return _size(made)

    def probe(self) -> tuple[Residency, int, int, dict[str, int]]:
        parts = {name: sum(map(bytes_on_device, _living(cell))) for name, cell in self._cells.items()}
        total = sum(map(bytes_on_device, self._on_device().values()))
        out = any(cell.saved is not None for cell in self._cells.values())
        state = Residency.SUSPENDED if out else Residency.RESIDENT if total else Residency.ABSENT
        kept = {copy for _, copy in self._copies.by_array().values()}
        kept.update(copy for cell in self._cells.values() for copy in cell.copies())
        return state, total, _size(kept), parts if self.tags else {}

    def _named(self, tags: tuple[str, ...]) -> list[Cell]:
        return [cell for name, cell in self._cells.items() if not tags or name in tags]

    def _on_device(self) -> dict[int, Any]:
        return {id(array): array for cell in self._cells.values() for array in _living(cell)}


def _arrays(leaves: Iterable[Any]) -> dict[int, Any]:
    """Each once, however often it is there."""
    return {id(leaf): leaf for leaf in leaves if isinstance(leaf, jax.Array)}


def _living(cell: Cell) -> list[Any]:
    if cell.saved is not None:
        return []
    return [array for array in _arrays(jax.tree.leaves(cell.get())).values() if lives(array)]


def _size(copies: Iterable[Copy]) -> int:
    return sum(copy.nbytes for copy in copies)
