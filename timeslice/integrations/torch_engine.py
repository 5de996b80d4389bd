"""DeepSpeed: engines that move their own state, as ``deepspeed.DeepSpeedEngine`` does.

Known: DeepSpeed 0.19.8, ZeRO stages 1, 2 and 3. Nothing here imports it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from timeslice.client.callbacks import Moved
from timeslice.client.workload import Workload, register_workload
from timeslice.errors import UsageError
from timeslice.integrations.torch_find import inside, synchronize
from timeslice.integrations.torch_guards import Guards
from timeslice.models import Residency

# What DeepSpeed calls the kinds of state: its OffloadStateTypeEnum, whose members equal these.
KINDS: Mapping[str, tuple[str, ...]] = {
    "weights": ("lp_params",),
    "gradients": ("lp_grads", "contiguous_grad_buffer"),
    "optimizer": ("hp_params", "optim_states"),
}
# Where its optimizers have them, each stage elsewhere.
_PLACES: Mapping[str, tuple[str, ...]] = {
    "weights": ("bit16_groups_flat", "lp_param_buffer"),
    "gradients": ("averaged_gradients", "grad_partitions_flat_buffer"),
    "optimizer": ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "state"),
}


def register_engine(group: str, engine: Any, *, job: str | None = None) -> Workload:
    """Let the agent of this node have this DeepSpeed engine move its state while another job has ``group``.

    The engine does it, by ``offload_states()`` and ``reload_states()``; stage 3 only with DeepSpeed's FusedAdam. What
    these leave on the device stays there. A part can be chosen by the tags ``weights``, ``gradients`` and ``optimizer``
    when it leaves; all comes back at once, for an engine knows no parts then.

    Raises UsageError for an engine that can't, and what ``timeslice.register_workload`` raises.
    """
    state = EngineState(group, engine)
    return register_workload(
        group,
        on_suspend=lambda _mode, tags: state.suspend(tags),
        on_restore=lambda _tags: state.restore(),
        probe=state.probe,
        job=job,
        tags=tuple(KINDS),
    )


class EngineState:
    """The state of an engine, as far as that can move it."""

    def __init__(self, group: str, engine: Any) -> None:
        methods = (getattr(engine, name, None) for name in ("offload_states", "reload_states"))
        if not all(map(callable, methods)) or not hasattr(getattr(engine, "optimizer", None), "offloaded_states"):
            raise UsageError(
                f"group {group}: {type(engine).__name__} can't move its state. DeepSpeed's can, with ZeRO "
                "and an optimizer; for a model of another kind use register_module.",
                group=group,
            )
        self._engine = engine
        self._guards = Guards(group)
        self._changing = threading.RLock()

    def suspend(self, tags: Iterable[str] = ()) -> Moved:
        """Move what has one of the tags, or all. If that fails, what had moved is brought back."""
        with self._changing:
            before = self._on_device()
            kinds = [kind for tag in tags for kind in KINDS[tag]]
            synchronize([self._engine.device])  # what was launched ends first
            try:
                if not self._guards:
                    self._guards.put([self._engine], [self._engine.optimizer])
                self._engine.offload_states(include=kinds or None)
                synchronize([self._engine.device])
            except BaseException:
                self._reload()
                raise
            return Moved(bytes=before - self._on_device())

    def restore(self) -> Moved:
        """Bring all back. If that fails, what was back leaves again."""
        with self._changing:
            before = self._on_device()
            try:
                self._reload()
            except BaseException:
                self._engine.offload_states()
                raise
            return Moved(bytes=self._on_device() - before)

    def probe(self) -> tuple[Residency, int, int, dict[str, int]]:
        """Where it is, the bytes on the device, the bytes in host memory, and those on the device by tag."""
        with self._changing:
            out, sizes = self._out(), self._sizes()
            parts = {tag: 0 if tag in out else size for tag, size in sizes.items()}
            on_device = sum(parts.values())
            state = Residency.SUSPENDED if self._guards else Residency.RESIDENT if on_device else Residency.ABSENT
            return state, on_device, sum(sizes.values()) - on_device, parts

    def _reload(self) -> None:
        self._engine.reload_states()
        synchronize([self._engine.device])
        self._guards.lift()

    def _out(self) -> set[str]:
        moved = self._engine.optimizer.offloaded_states
        return {tag for tag, kinds in KINDS.items() if moved.intersection(kinds)}

    def _on_device(self) -> int:
        out = self._out()
        return sum(size for tag, size in self._sizes().items() if tag not in out)

    def _sizes(self) -> dict[str, int]:
        return {tag: sum(map(self._size, places)) for tag, places in _PLACES.items()}

    def _size(self, place: str) -> int:
        storages = {}
        for tensor in inside(getattr(self._engine.optimizer, place, ())):
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()  # noqa: SLF001 - as in torch_find
        return sum(storages.values())
