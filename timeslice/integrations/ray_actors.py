"""Processes of Ray actors, as agents get to know them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from timeslice.client.defaults import default_client
from timeslice.client.identity import declared, registration
from timeslice.client.known import ensure_known
from timeslice.client.steps import run
from timeslice.client.workload import register_workload
from timeslice.errors import RedisUnreachableError, UsageError
from timeslice.names import check_name
from timeslice.settings import Settings

log = logging.getLogger("timeslice")

GROUPS = "TIMESLICE_GROUPS"  # names with commas between; agents look for it in the environment of a process too
_CALLBACKS = ("on_suspend", "on_restore")

_joined: set[tuple[str, str]] = set()  # (group, job) that this process has registered for; Ray's workers don't fork


def join(actor: Any, groups: Sequence[str], job: str | None = None) -> None:
    """Make the process of an actor known to its node's agent, and its callbacks if it has some. May be repeated."""
    settings = Settings()
    if settings.disable:
        return
    kind = type(actor).__name__
    job = job or settings.job
    if not job:
        raise UsageError(
            f"actor {kind} does not know which job it belongs to: give its runtime_env the variables of "
            "timeslice.integrations.ray.runtime_env(), in ray.init or in the actor's options"
        )
    if not groups:
        raise UsageError(
            f"actor {kind} of job {job} names no group: add runtime_env(groups=[...]) to its options, or call "
            'join_groups("samplers")',
            job=job,
        )
    found = [name for name in _CALLBACKS if callable(getattr(actor, name, None))]
    if len(found) == 1:
        raise UsageError(f"actor {kind} of job {job} has {found[0]} only; it needs {' and '.join(_CALLBACKS)}", job=job)
    if found and len(groups) > 1:
        raise UsageError(
            f"actor {kind} of job {job} can't tell for which of {', '.join(groups)} its callbacks are called: call "
            "timeslice.register_workload for each group instead",
            job=job,
        )
    for group in checked(groups):
        if (group, job) in _joined or (group, job) in declared:
            continue
        if found:
            probe = getattr(actor, "on_probe", None)
            register_workload(group, on_suspend=actor.on_suspend, on_restore=actor.on_restore, probe=probe, job=job)
        else:
            _register_plain(group, job)
        _joined.add((group, job))


def checked(groups: Iterable[str]) -> list[str]:
    """Names of groups, each once. InvalidNameError."""
    return list(dict.fromkeys(check_name("group", group) for group in groups))


def _register_plain(group: str, job: str) -> None:
    client = default_client()
    keys = client.group_keys(group)
    client.renewer.remember(keys, job, client.host, client.floors)  # repeated from now on
    try:
        if not client.driver.run(registration(keys, job, client.host, 0)):
            run(ensure_known(client.driver.pipe, client.keys, group))
    except RedisUnreachableError as error:
        log.warning("group %s: the actor of job %s registers later: %s", group, job, error)
