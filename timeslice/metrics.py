"""The metrics of agent and coordinator, each name defined once; ``web.py`` shows them.

Labels are groups (as many as the daemon serves), backends and kinds of faults: nothing that grows with jobs.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)

# Coordinator
SWAPS = Counter("timeslice_swaps", "Swaps that ended, by outcome (done, deferred).", ["group", "outcome"])
SWAP_SECONDS = Histogram(
    "timeslice_swap_seconds", "From the start of a swap to its grant.", ["group"], buckets=_SECONDS
)
BLOCKED = Gauge("timeslice_group_blocked", "1 while the group is blocked.", ["group"])
WAITERS = Gauge("timeslice_waiters", "Requests in the queue.", ["group"])
RECLAIMS = Counter("timeslice_reclaims", "Leases of served groups that ended without a yield.", ["group"])
GROUPS_OWNED = Gauge("timeslice_groups_owned", "Groups that this coordinator drives.")

# Agent
COMMANDS = Counter("timeslice_agent_commands", "Orders carried out, by step and outcome.", ["group", "step", "outcome"])
STALE_COMMANDS = Counter("timeslice_agent_stale_commands", "Orders refused as stale; nothing was touched.", ["group"])
SUSPEND_SECONDS = Histogram(
    "timeslice_suspend_seconds", "One job's suspend on this node.", ["group", "backend"], buckets=_SECONDS
)
RESTORE_SECONDS = Histogram(
    "timeslice_restore_seconds", "One job's restore on this node.", ["group", "backend"], buckets=_SECONDS
)
SUSPENDED_BYTES = Counter("timeslice_suspended_bytes", "Bytes moved from the device.", ["group"])
SAVED_BYTES = Counter(
    "timeslice_saved_bytes", "Bytes not copied, since host memory had a valid copy already.", ["group"]
)
RESTORED_BYTES = Counter("timeslice_restored_bytes", "Bytes moved back to the device.", ["group"])
FAULTS = Counter("timeslice_backend_faults", "Faults of backends, by kind.", ["group", "kind"])
UNHELD_JOBS = Gauge("timeslice_unheld_jobs", "Jobs on the device without a hold.", ["group"])
UNKNOWN_JOBS = Gauge(
    "timeslice_unknown_jobs", "Jobs that may be on the node's devices and that its agent can't see.", ["group"]
)
STRANGERS = Gauge(
    "timeslice_strangers", "Processes with memory on the group's devices that belong to no job of the group.", ["group"]
)
STRANGER_BYTES = Gauge("timeslice_stranger_bytes", "Device memory of these processes.", ["group"])
DOUBTFUL = Gauge(
    "timeslice_doubtful_processes", "Processes on the group's devices of which can't be told whose they are.", ["group"]
)
STUCK_ENDED = Counter(
    "timeslice_agent_stuck_processes_ended", "Processes killed for a group with on_stuck=kill.", ["group"]
)
IDLE_HOLDERS = Gauge("timeslice_idle_holder", "1 while the holder has been on none of the devices for long.", ["group"])
HOST_BYTES_HELD = Gauge("timeslice_host_bytes_held", "Host memory that holds suspended state.", ["group"])
OVERDUE = Gauge("timeslice_agent_overdue", "1 while a backend operation is past its deadline.", ["group"])


def forget(group: str) -> None:
    """Say nothing more of how a group stands: another coordinator knows, or nobody."""
    BLOCKED.remove(group)
    WAITERS.remove(group)
