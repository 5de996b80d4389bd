"""A stand-in for DeepSpeed's engine: deepspeed/runtime/engine.py of version 0.19.8, as far as it moves states.

The same names and the same order of effects as `DeepSpeedEngine` with ZeRO stage 1 or 2 and as stage 3 has them: flat
buffers that are pointed to host memory by `.data`, and a set of what is out. DeepSpeed itself is not run here.
"""

from __future__ import annotations

from collections.abc import Container
from enum import Enum
from typing import Any

import torch
from torch import nn


class OffloadStateTypeEnum(str, Enum):  # noqa: UP042 - as DeepSpeed has it
    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ZeroOptimizer:
    """Has the states, around a plain optimizer."""

    def __init__(self, parameters: list[Any]) -> None:
        self.bit16_groups_flat = [torch.cat([each.detach().flatten() for each in parameters])]
        offset = 0
        for each in parameters:
            each.data = self.bit16_groups_flat[0][offset : offset + each.numel()].view_as(each)
            offset += each.numel()
        self.single_partition_of_fp32_groups = [nn.Parameter(self.bit16_groups_flat[0].float())]
        self.averaged_gradients: dict[int, Any] = {0: [torch.ones(offset)]}
        self.optimizer = torch.optim.Adam(self.single_partition_of_fp32_groups, lr=0.1)
        self.offloaded_states: set[OffloadStateTypeEnum] = set()
        self.fail_at: OffloadStateTypeEnum | None = None
        self.moves: list[str] = []
        self._parameters = parameters

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self) -> None:
        self.single_partition_of_fp32_groups[0].grad = self.averaged_gradients[0][0]
        self.optimizer.step()
        self.bit16_groups_flat[0].copy_(self.single_partition_of_fp32_groups[0].detach())

    def offload_states(self, include: Container[OffloadStateTypeEnum]) -> None:
        for kind in OffloadStateTypeEnum:
            if kind in include and kind not in self.offloaded_states:
                if kind is self.fail_at:
                    raise RuntimeError("CUDA error: out of memory, host")
                self._move(kind)
                self.offloaded_states.add(kind)

    def reload_states(self) -> None:
        for kind in sorted(self.offloaded_states):
            if kind is self.fail_at:
                raise torch.OutOfMemoryError("CUDA out of memory")
            self._move(kind)
            self.offloaded_states.remove(kind)

    def _move(self, kind: OffloadStateTypeEnum) -> None:
        """To other memory, by .data; views of it are made anew."""
        self.moves.append(kind.value)
        flat = {"hp_params": self.single_partition_of_fp32_groups, "lp_params": self.bit16_groups_flat}
        for buffer in flat.get(kind.value, []):
            buffer.data = buffer.data.clone()
        if kind is OffloadStateTypeEnum.lp_params:
            offset = 0
            for each in self._parameters:
                each.data = self.bit16_groups_flat[0][offset : offset + each.numel()].view_as(each)
                offset += each.numel()


class Engine(nn.Module):  # type: ignore[misc]  # untyped
    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self.device = torch.device("cpu")
        self.optimizer = ZeroOptimizer(list(module.parameters()))

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        assert (device, pin_memory, non_blocking) == ("cpu", True, False)
        self.optimizer.offload_states(list(OffloadStateTypeEnum) if include is None else include)

    def reload_states(self, non_blocking: bool = False) -> None:
        assert not non_blocking
        self.optimizer.reload_states()
