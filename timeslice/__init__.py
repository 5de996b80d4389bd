"""timeslice: independent RL jobs take turns on the same accelerators.

The public names load when first used, so that importing this costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from timeslice.client.aio import AsyncClient
    from timeslice.client.callbacks import Busy, Moved
    from timeslice.client.compat import (
        OrchestratorConnectionError,
        OrchestratorError,
        OrchestratorInternalError,
        OrchestratorInvalidArgumentError,
        OrchestratorTimeoutError,
        TimeSliceOrchestratorClient,
        on_accelerators,
    )
    from timeslice.client.defaults import hold
    from timeslice.client.lease import AsyncLease, Lease
    from timeslice.client.phases import phase
    from timeslice.client.points import until_ready, until_ready_async
    from timeslice.client.server import register_server
    from timeslice.client.sync import Client
    from timeslice.client.workload import register_arena, register_workload
    from timeslice.errors import (
        AcquireTimeoutError,
        CancelledByOperatorError,
        DeadlockError,
        GangEndedError,
        GroupModeError,
        InvalidNameError,
        LeaseError,
        LeaseLostError,
        LeaseUncertainError,
        RedisUnreachableError,
        TimeSliceError,
        UnknownGroupError,
        UsageError,
    )
    from timeslice.models import Leave

__all__ = [
    "AcquireTimeoutError",
    "AsyncClient",
    "AsyncLease",
    "Busy",
    "CancelledByOperatorError",
    "Client",
    "DeadlockError",
    "GangEndedError",
    "GroupModeError",
    "InvalidNameError",
    "Lease",
    "LeaseError",
    "LeaseLostError",
    "LeaseUncertainError",
    "Leave",
    "Moved",
    "OrchestratorConnectionError",
    "OrchestratorError",
    "OrchestratorInternalError",
    "OrchestratorInvalidArgumentError",
    "OrchestratorTimeoutError",
    "RedisUnreachableError",
    "TimeSliceError",
    "TimeSliceOrchestratorClient",
    "UnknownGroupError",
    "UsageError",
    "__version__",
    "hold",
    "on_accelerators",
    "phase",
    "register_arena",
    "register_server",
    "register_workload",
    "until_ready",
    "until_ready_async",
]

_MODULES = {
    "AsyncClient": "client.aio",
    "AsyncLease": "client.lease",
    "Busy": "client.callbacks",
    "Client": "client.sync",
    "Lease": "client.lease",
    "Leave": "models",
    "Moved": "client.callbacks",
    "OrchestratorConnectionError": "client.compat",
    "OrchestratorError": "client.compat",
    "OrchestratorInternalError": "client.compat",
    "OrchestratorInvalidArgumentError": "client.compat",
    "OrchestratorTimeoutError": "client.compat",
    "TimeSliceOrchestratorClient": "client.compat",
    "hold": "client.defaults",
    "on_accelerators": "client.compat",
    "phase": "client.phases",
    "register_arena": "client.workload",
    "register_server": "client.server",
    "register_workload": "client.workload",
    "until_ready": "client.points",
    "until_ready_async": "client.points",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("timeslice-rl")
    elif name in __all__:
        value = getattr(importlib.import_module(f"timeslice.{_MODULES.get(name, 'errors')}"), name)
    else:
        raise AttributeError(f"module 'timeslice' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
