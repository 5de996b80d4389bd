"""Which backend configurations of a Snapshot or Restore are taken.

Agents act only on processes that show themselves that they are the job's, with the backends that they were given. So
what names a backend is taken as a wish, and what names a target is refused, for it would not be acted on.
"""

from __future__ import annotations

from collections.abc import Collection

from timeslice.errors import UsageError
from timeslice.gateway.proto import snapshot_agent_pb2 as pb
from timeslice.models import Mode

_INSTEAD = (
    "agents find a job's processes by what these show of themselves (they registered, or run with TIMESLICE_JOB and "
    "TIMESLICE_GROUPS); leave backend_config out"
)


def check_backend(config: pb.BackendConfig) -> None:
    """UsageError for what would not be done as it was asked."""
    chosen = config.WhichOneof("backend")
    if chosen == "cuda" and config.cuda.HasField("explicit_target"):
        raise UsageError(f"backend_config.cuda.explicit_target can't be followed: {_INSTEAD}")
    if chosen == "direct_memory" and config.direct_memory.HasField("explicit_target"):
        raise UsageError(f"backend_config.direct_memory.explicit_target can't be followed: {_INSTEAD}")
    if chosen in {"app_endpoint", "memory_regions"}:
        raise UsageError(f"backend_config.{chosen} can't be followed: {_INSTEAD}")
    if chosen == "app_channel":
        if config.app_channel.mode == pb.SUSPEND_MODE_DISCARD:
            raise UsageError(
                "backend_config.app_channel.mode DISCARD can't be followed: agents keep all of a job's state; "
                "use SUSPEND_MODE_OFFLOAD"
            )
        if config.app_channel.tags:
            raise UsageError(
                "backend_config.app_channel.tags can't be followed: agents move all of a job's state; leave them out"
            )


def modes_of(capabilities: pb.WorkloadCapabilities) -> tuple[Mode, ...]:
    """The modes of a workload, in our words; offload if it names none. UsageError if it can't offload."""
    names: dict[int, Mode] = {pb.SUSPEND_MODE_OFFLOAD: "offload", pb.SUSPEND_MODE_DISCARD: "discard"}
    given: Collection[int] = set(capabilities.supported_modes) - {pb.SUSPEND_MODE_UNSPECIFIED}
    if unknown := set(given) - names.keys():
        raise UsageError(f"capabilities.supported_modes: {min(unknown)} is no SuspendMode")
    modes: tuple[Mode, ...] = tuple(name for number, name in names.items() if number in given) or ("offload",)
    default = names.get(capabilities.default_mode, "")
    if capabilities.default_mode != pb.SUSPEND_MODE_UNSPECIFIED and default not in modes:
        raise UsageError(f"capabilities.default_mode is none of supported_modes ({', '.join(modes)}); add it there")
    if "offload" not in modes:
        raise UsageError(
            "capabilities.supported_modes lacks SUSPEND_MODE_OFFLOAD: agents keep a job's state in host memory, and a "
            "workload that can only discard would come back without it"
        )
    return modes
