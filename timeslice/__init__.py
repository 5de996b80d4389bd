"""timeslice: independent RL jobs take turns on the same accelerators.

The public names load when first used, so that importing this costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    # The clients need it, and Python loads it no more once the main thread has ended: a thread that outlives that may
    # be the first one to hold.
    import concurrent.futures.thread  # noqa: F401 - loaded for its effect
except RuntimeError as error:
    raise ImportError(
        "timeslice can't be loaded any more: the main thread has ended. Import it where the program begins."
    ) from error

if TYPE_CHECKING:
    from timeslice.client.aio import AsyncClient
    from timeslice.client.callbacks import Busy, Moved
    from timeslice.client.compat import (
        AcquireResult,
        GroupStatus,
        OnAccelerators,
        OrchestratorConnectionError,
        OrchestratorError,
        OrchestratorInternalError,
        OrchestratorInvalidArgumentError,
        OrchestratorTimeoutError,
        TimeSliceOrchestratorClient,
        YieldResult,
        on_accelerators,
    )
    from timeslice.client.defaults import hold
    from timeslice.client.hold import Hold
    from timeslice.client.lease import AsyncLease, Lease
    from timeslice.client.phases import Phase, phase
    from timeslice.client.points import until_ready, until_ready_async
    from timeslice.client.server import Server, register_server
    from timeslice.client.sync import Client
    from timeslice.client.terms import HoldOptions, OnLost
    from timeslice.client.workload import Workload, register_arena, register_workload
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
        RefusedError,
        ServerUnsuitableError,
        TimeSliceError,
        UnknownGroupError,
        UsageError,
    )
    from timeslice.locks.flows import Grant
    from timeslice.locks.scripts import Yielded
    from timeslice.models import Leave, Mode, Residency

    __version__: str

__all__ = [
    "AcquireResult",
    "AcquireTimeoutError",
    "AsyncClient",
    "AsyncLease",
    "Busy",
    "CancelledByOperatorError",
    "Client",
    "DeadlockError",
    "GangEndedError",
    "Grant",
    "GroupModeError",
    "GroupStatus",
    "Hold",
    "HoldOptions",
    "InvalidNameError",
    "Lease",
    "LeaseError",
    "LeaseLostError",
    "LeaseUncertainError",
    "Leave",
    "Mode",
    "Moved",
    "OnAccelerators",
    "OnLost",
    "OrchestratorConnectionError",
    "OrchestratorError",
    "OrchestratorInternalError",
    "OrchestratorInvalidArgumentError",
    "OrchestratorTimeoutError",
    "Phase",
    "RedisUnreachableError",
    "RefusedError",
    "Residency",
    "Server",
    "ServerUnsuitableError",
    "TimeSliceError",
    "TimeSliceOrchestratorClient",
    "UnknownGroupError",
    "UsageError",
    "Workload",
    "YieldResult",
    "Yielded",
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
    "AcquireResult": "client.compat",
    "AsyncClient": "client.aio",
    "AsyncLease": "client.lease",
    "Busy": "client.callbacks",
    "Client": "client.sync",
    "Grant": "locks.flows",
    "GroupStatus": "client.compat",
    "Hold": "client.hold",
    "HoldOptions": "client.terms",
    "Lease": "client.lease",
    "Leave": "models",
    "Mode": "models",
    "Moved": "client.callbacks",
    "OnAccelerators": "client.compat",
    "OnLost": "client.terms",
    "OrchestratorConnectionError": "client.compat",
    "OrchestratorError": "client.compat",
    "OrchestratorInternalError": "client.compat",
    "OrchestratorInvalidArgumentError": "client.compat",
    "OrchestratorTimeoutError": "client.compat",
    "Phase": "client.phases",
    "Residency": "models",
    "Server": "client.server",
    "TimeSliceOrchestratorClient": "client.compat",
    "Workload": "client.workload",
    "YieldResult": "client.compat",
    "Yielded": "locks.scripts",
    "hold": "client.defaults",
    "on_accelerators": "client.compat",
    "phase": "client.phases",
    "register_arena": "client.workload",
    "register_server": "client.server",
    "register_workload": "client.workload",
    "until_ready": "client.points",
    "until_ready_async": "client.points",
}


if not TYPE_CHECKING:  # a checker that saw this would take every name for one of ours

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
