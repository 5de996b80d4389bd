"""Inference servers (vLLM, SGLang) of a job, which its node's agent asks over HTTP to sleep and to wake."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from timeslice.client.identity import beside, declared, process_id, process_start, this_target
from timeslice.client.registration import CLOSE_S, REFRESH_S, Registration
from timeslice.errors import TimeSliceError, UsageError
from timeslice.models import Mode, Target, brief
from timeslice.names import check_name
from timeslice.settings import default_job, default_node

log = logging.getLogger("timeslice")

BACKEND = "http"
# What each kind of server can put to sleep, if nothing else is said.
TAGS = {"vllm": ("weights", "kv_cache"), "sglang": ("weights", "kv_cache", "cuda_graph")}


def register_server(
    group: str,
    *urls: str,
    dialect: Literal["vllm", "sglang"],
    job: str | None = None,
    pid: int | None = None,
    modes: Sequence[Mode] = ("offload",),
    tags: Sequence[str] = (),
    mode: Mode | Literal[""] = "",
    url: str | None = None,
) -> Server:
    """Let the agent of this node put these servers of the job to sleep when another job gets ``group``.

    ``urls`` are the servers' addresses as the agent reaches them, such as ``http://127.0.0.1:8000``; it must have been
    started with ``--backend http:allow=...`` that names them. Register them while the group is held and they answer.

    ``modes`` says what they survive: ``offload`` keeps the weights in host memory; ``discard`` drops them, so that the
    job has to push new ones afterwards. ``mode`` is the one to use, by default the first that fits. ``tags`` are the
    parts that they can put to sleep, by default all of their kind.

    ``pid`` is the process of the server on this node. It must have been started with ``TIMESLICE_JOB`` and
    ``TIMESLICE_GROUPS``; with it the agent sees at once when the server ends. Without it this process stands in for
    the servers, wherever they are: if it ends without ``close()``, their state counts as unknown.
    ``job`` and ``url`` as for ``timeslice.hold``.

    Raises InvalidNameError, UnknownGroupError, and UsageError for an address, kind or process that can't be meant.
    """
    if dialect not in TAGS:
        raise UsageError(f"group {group}: dialect {dialect!r} is none of {', '.join(TAGS)}", group=group)
    if not urls:
        raise UsageError(f"group {group}: name at least one server, such as http://127.0.0.1:8000", group=group)
    name = check_name("job", job or default_job())
    check_name("group", group)
    base = this_target(group, name, default_node()) if pid is None else _target_of(group, name, pid)
    if pid is None and (base.channel or base.endpoints):
        raise UsageError(
            f"group {group}: process {base.pid} has a workload of job {name} already; close that one first",
            group=group,
            job=name,
        )
    fields = {
        "backend": BACKEND,
        # A process that only stands in for the servers shows it by a channel, which is nobody's but its own.
        "channel": f"{group}/{process_id(base.host)}" if pid is None else "",
        "endpoints": urls,
        "dialect": dialect,
        "modes": modes,
        "tags": tags or TAGS[dialect],
        "leave": {"mode": mode},
    }
    try:
        target = Target.model_validate(base.model_dump() | fields)
    except ValidationError as error:
        raise UsageError(f"group {group}: these servers can't be registered: {brief(error)}", group=group) from None
    if why := target.unable(target.leave):
        raise UsageError(f"group {group}: the servers can't leave as mode= says: it {why}", group=group, job=name)
    return Server(group, target, url=url)


class Server(Registration):
    """Servers that the agent may ask. A forked child has none."""

    def __init__(self, group: str, target: Target, *, url: str | None) -> None:
        super().__init__(group, target, "the servers")
        self._start(url, f"timeslice-server-{group}")

    def close(self) -> None:
        """End the registration: call it when the servers have ended. Does nothing in a forked child."""
        if not self._is_open():
            return
        self._closed.set()
        # A stand-in that lets its channel go and keeps the backend's name says good-bye, and its agent believes it.
        backend = BACKEND if self.target.channel else ""
        bare = self.target.model_copy(update={"backend": backend, "channel": "", "endpoints": (), "dialect": ""})
        try:
            with self._telling:
                self._forget()
                self._register(bare, CLOSE_S)
        except TimeSliceError as error:
            log.warning("%s closed unseen: %s", self._what, error)
        assert self._thread is not None
        self._thread.join(REFRESH_S)
        self._driver.close()

    def _declare(self) -> None:
        if self.target.channel:
            declared[self.group, self.job] = self.target
        else:
            beside.setdefault((self._pid, self.group, self.job), {})[self.target.pid] = self.target

    def _forget(self) -> None:
        if self.target.channel:
            declared.pop((self.group, self.job), None)
        else:
            beside.get((self._pid, self.group, self.job), {}).pop(self.target.pid, None)

    def _turn(self) -> None:
        if not self._closed.wait(REFRESH_S):
            self._refresh(deadline_s=REFRESH_S)


def _target_of(group: str, job: str, pid: int) -> Target:
    """Another process of this machine, by what /proc shows of it."""
    proc = Path(f"/proc/{pid}")
    try:
        start = process_start.__wrapped__(pid)  # a number that was used before means another process now
        uid = proc.stat().st_uid
        namespace = str((proc / "ns" / "pid").readlink())
    except OSError as error:
        raise UsageError(
            f"group {group}, job {job}: process {pid} can't be looked at ({error.strerror}); give the number of the "
            "server's own process on this machine, or leave pid out",
            group=group,
            job=job,
        ) from None
    return Target(job=job, host=default_node(), pid=pid, start=start, uid=uid, pid_namespace=namespace)
