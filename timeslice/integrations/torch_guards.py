"""What is refused while state is off the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from timeslice.errors import UsageError
from timeslice.integrations.torch_find import inner


class Guards:
    """Hooks that refuse to use modules and optimizers, until ``lift``."""

    def __init__(self, group: str, reason: str = "") -> None:
        self._group = group
        self._reason = reason or (
            "this state is in host memory, and another job may have the device. Use the model and its optimizer inside "
            f"of timeslice.hold({group!r})."
        )
        self._hooks: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def refuse(self, *_: Any) -> None:
        raise UsageError(f"group {self._group}: {self._reason}", group=self._group)

    def put(self, modules: Iterable[Any], optimizers: Iterable[Any]) -> None:
        for module in {each for root in modules for each in root.modules()}:
            self.before_forward(module, self.refuse)
            self._hooks.append(module.register_state_dict_pre_hook(self.refuse))
            self._hooks.append(module._register_load_state_dict_pre_hook(self.refuse))  # noqa: SLF001 - public since 2.5
        for optimizer in map(inner, optimizers):
            self._hooks.append(optimizer.register_step_pre_hook(self.refuse))
            self._hooks.append(optimizer.register_state_dict_pre_hook(self.refuse))
            self._hooks.append(optimizer.register_load_state_dict_pre_hook(self.refuse))

    def before_forward(self, module: Any, hook: Callable[..., None]) -> None:
        # In front of what other hooks do: FSDP gathers parameters in one.
        self._hooks.append(module.register_forward_pre_hook(hook, prepend=True))

    def lift(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
