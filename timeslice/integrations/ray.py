"""Ray jobs that share accelerators by turns.

::

    ray.init(runtime_env=timeslice.integrations.ray.runtime_env())     # the driver: every worker knows server and job

    @ray.remote
    class Sampler(TimesliceActor): ...                                 # its process is known to the node's agent

    with timeslice.hold("samplers"):                                   # the driver holds, the actors compute
        ray.get([sampler.generate.remote() for sampler in samplers])

    sampler = share(sampler, "samplers")                               # or: each call is held for, the loop unchanged
"""

from __future__ import annotations

import itertools
import logging
import os
import uuid
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

try:
    import ray
    from ray.core.generated.gcs_pb2 import ActorTableData
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "timeslice.integrations.ray needs Ray; run: pip install 'timeslice-rl[ray]'", name=error.name
    ) from error

from timeslice.addresses import parse_url
from timeslice.client import context
from timeslice.errors import UsageError
from timeslice.integrations.ray_actors import GROUPS, checked, join
from timeslice.integrations.ray_holder import Holder, Place, Request
from timeslice.names import check_name
from timeslice.settings import Settings, default_job, find_url, shared_job

__all__ = ["TimesliceActor", "runtime_env", "share"]

log = logging.getLogger("timeslice")

_holders: dict[tuple[str, str], Any] = {}  # (this process among Ray's workers, job) -> actor


def runtime_env(job: str | None = None, *, groups: Sequence[str] = (), url: str | None = None) -> dict[str, Any]:
    """A Ray ``runtime_env`` with what the workers of a job need: for ``ray.init``, ``ray job submit`` or the options
    of an actor. Ray merges the variables of both, so an actor needs only its ``groups`` added.

    ``job``, ``url`` and the prefix default to this process's own. ``groups``: those whose devices the actor uses.

    Ray shows a ``runtime_env`` to whoever may see its dashboard and logs, so no password is in it, even where ``url``
    has one: set TIMESLICE_PASSWORD in the environment of the Ray nodes.
    """
    _refuse_text("groups", groups)
    settings = Settings()
    variables = {
        "TIMESLICE_JOB": _job(job),
        "TIMESLICE_PREFIX": settings.prefix,
    }
    if settings.disable:
        variables["TIMESLICE_DISABLE"] = "1"
    else:
        variables["TIMESLICE_URL"] = _without_secrets(find_url(url))
    if groups:
        variables[GROUPS] = ",".join(checked(groups))
    return {"env_vars": variables}


class TimesliceActor:
    """A base class of Ray actors that use the device of a group: agents know the process, and find its state.

    The groups come from ``runtime_env(groups=...)`` in the actor's options, or are given to ``join_groups``.
    An actor that moves its own state defines ``on_suspend(mode, tags)`` and ``on_restore(tags)``, and if it can tell
    ``on_probe()``, as for ``timeslice.register_workload``; call ``super().__init__()`` when these may be called. Of one
    without them the agent moves the state from outside. Ray runs ``__init__`` again where it restarts an actor, so that
    the new process is known too.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.join_groups()

    def join_groups(self, *groups: str) -> None:
        """Make this process known to its node's agent; by default for the groups in ``TIMESLICE_GROUPS``."""
        join(self, groups or [name.strip() for name in os.environ.get(GROUPS, "").split(",") if name.strip()])


def share(
    target: Any,
    *groups: str,
    phase: str | None = None,
    methods: Collection[str] | None = None,
    job: str | None = None,
) -> Any:
    """Stand in for an actor's handle or a remote function: each call waits for ``groups`` and runs inside a hold.

    ``.remote(...)`` returns at once with a reference like any other. Calls of one job to the same groups that are in
    flight together share one hold, which ends when none is left. An error of the call comes out of ``ray.get``, and
    ``ray.cancel`` takes the call out of the queue. Inside of a hold of the groups, calls go straight to the target.

    ``methods``: the actor's methods that need the device; others are called as before. Default: all.
    ``phase``: for people; by default the method's name. ``job`` as for ``timeslice.hold``.
    """
    if not isinstance(target, (ray.actor.ActorHandle, ray.remote_function.RemoteFunction)):
        raise UsageError(
            f"{target!r} can't be shared: give the handle of an actor, as .remote() returned it, or a function "
            "decorated with @ray.remote; options are set on what share() returns"
        )
    if not groups:
        raise UsageError('share needs the name of a group, as in share(actor, "trainers")')
    _refuse_text("methods", methods)
    place = Place(_job(job), tuple(checked(groups)), phase)
    if Settings().disable:
        return target
    line = _Line(target, place.job)
    if isinstance(target, ray.remote_function.RemoteFunction):
        return _SharedCall(line, place)
    for name in methods or ():
        getattr(target, name)  # a name that the actor does not have is told now
    return _SharedActor(line, place, None if methods is None else frozenset(methods))


class _Line:
    """Numbers the calls of this process to one target, so that they go out in the order they were made in."""

    def __init__(self, target: Any, job: str, holder: Any = None) -> None:
        self.target = target
        self._job = job
        self._to = _Counted(holder)

    def send(self, request: Request, returns: int) -> Any:
        to = self._counted()
        call = to.holder.call.options(num_returns=returns, name=request.name)
        return call.remote(request, to.name, next(to.numbers))

    def _counted(self) -> _Counted:
        # Not before the first call: a function may be shared before ray.init.
        if self._to.holder is None or _is_dead(self._to.holder):
            self._to = _Counted(_holder(self._job))
        return self._to

    def __reduce__(self) -> tuple[Any, ...]:
        return _Line, (self.target, self._job, self._counted().holder)  # the copy counts for itself


class _Counted:
    """What one holder knows a line by: a new holder counts from the start."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder
        self.name = uuid.uuid4().hex
        self.numbers = itertools.count()


class _SharedActor:
    """Answers as the handle does, except that calls are held for."""

    def __init__(self, line: _Line, place: Place, methods: frozenset[str] | None) -> None:
        self._shared = (line, place, methods)

    def __getattr__(self, name: str) -> Any:
        line, place, methods = self._shared
        method = getattr(line.target, name)
        if name.startswith("_") or (methods is not None and name not in methods):
            return method
        return _SharedCall(line, replace(place, phase=place.phase or name), name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _SharedActor, self._shared

    def __repr__(self) -> str:
        return f"<shared {self._shared[0].target!r}>"


class _SharedCall:
    """A method or function with ``remote`` and ``options``, as Ray's have."""

    def __init__(self, line: _Line, place: Place, method: str = "", options: dict[str, Any] | None = None) -> None:
        self._line, self._place, self._method = line, place, method
        self._options = options or {}

    def options(self, **options: Any) -> _SharedCall:
        return _SharedCall(self._line, self._place, self._method, {**self._options, **options})

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        line, place = self._line, self._place
        request = Request(place, line.target, self._method, self._options, args, kwargs)
        if self._is_held():
            return request.submit()
        if not isinstance(returns := self._returns(), int):
            raise UsageError(
                f"{request.name} returns a generator, which works on after the call: hold around the loop that reads "
                f'it, with timeslice.hold("{", ".join(place.groups)}")'
            )
        if returns:
            return line.send(request, returns)
        # Only what is returned tells the holder that the call is over.
        line.send(replace(request, options={**request.options, "num_returns": 1}), 1)
        return None

    def _is_held(self) -> bool:
        """Whether this code holds the groups itself; the call would wait for the caller, and the caller for it."""
        groups, job = set(self._place.groups), self._place.job
        held = {lease.group for lease in context.leases() if lease.state == "held" and lease.job == job} & groups
        if held and held != groups:
            raise UsageError(
                f"this code holds {', '.join(sorted(held))}, and the call needs {', '.join(sorted(groups))}: hold them "
                "all around it, or none"
            )
        return bool(held)

    def _returns(self) -> Any:
        given = self._options.get("num_returns")
        if given is not None:
            return given
        target = self._line.target
        if self._method:
            return getattr(target, self._method)._num_returns  # noqa: SLF001 - Ray tells it nowhere else
        if target._num_returns is not None:  # noqa: SLF001
            return target._num_returns  # noqa: SLF001
        return "streaming" if target._is_generator else 1  # noqa: SLF001


def _holder(job: str) -> Any:
    """The actor that holds for this Ray job's calls. It ends with the process that made it; the next call then makes
    another."""
    here = ray.get_runtime_context()
    key = (here.get_worker_id(), job)
    if key not in _holders or _is_dead(_holders[key]):
        options = {
            "name": f"timeslice-holder-{here.get_job_id()}-{job}",
            "get_if_exists": True,
            "num_cpus": 0,
            "max_restarts": -1,
            "max_concurrency": 10_000,
            "runtime_env": runtime_env(job),
        }
        _holders[key] = ray.remote(Holder).options(**options).remote()
    return _holders[key]


def _is_dead(actor: Any) -> bool:
    """As far as Ray has told this process: what is sent now may still fail with ActorDiedError."""
    return bool(actor._get_local_state() == ActorTableData.ActorState.DEAD)  # noqa: SLF001 - Ray tells it nowhere else


def _job(job: str | None) -> str:
    """``job``, else this process's own."""
    if job:
        return check_name("job", job)
    found = shared_job()
    if not found:
        _tell(found := default_job())
    return found


@cache
def _tell(job: str) -> None:
    log.info("this Ray job is job %s, after node and process: set TIMESLICE_JOB to give it a name of its own", job)


def _refuse_text(name: str, given: object) -> None:
    if isinstance(given, str):
        raise UsageError(f"{name}={given!r}: give a list of names, as in {name}=[{given!r}]")


def _without_secrets(url: str) -> str:
    address = parse_url(url)
    options = tuple((name, value) for name, value in address.options if "password" not in name)
    if (address.password is not None or options != address.options) and not os.environ.get("TIMESLICE_PASSWORD"):
        log.warning(
            "the password of %s is not passed on, for a runtime_env can be read by others: set TIMESLICE_PASSWORD in "
            "the environment of the Ray nodes",
            address.shown,
        )
    return replace(address, password=None, options=options).url
