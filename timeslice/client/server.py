"""Inference servers (vLLM, SGLang) of a job, which its node's agent asks over HTTP to sleep and to wake."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from timeslice.client.identity import as_asked, beside, declared, process_id, process_start, this_target
from timeslice.errors import RedisUnreachableError, TimeSliceError, UsageError
from timeslice.locks import scripts
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import Keys
from timeslice.models import Mode, Target, brief
from timeslice.names import check_name
from timeslice.settings import Settings, default_job, default_node, find_url

log = logging.getLogger("timeslice")

BACKEND = "http"
REFRESH_S = 5.0  # the registration is repeated that often, in case the server forgot it
_CLOSE_S = 2.0
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

    Raises InvalidNameError, and UsageError for an address, kind or process that can't be meant.
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


class Server:
    """A registration of servers, alive until ``close`` or the end of the process. A forked child has none."""

    def __init__(self, group: str, target: Target, *, url: str | None) -> None:
        self.group, self.job, self.target = group, target.job, target
        self._keys = Keys(Settings().prefix).group(group)
        self._closed = threading.Event()
        self._telling = threading.Lock()  # what is repeated must not arrive behind the good-bye
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        if Settings().disable:
            return
        self._driver = SyncDriver(find_url(url))
        if target.channel:
            declared[group, target.job] = target
        else:
            beside.setdefault((os.getpid(), group, target.job), {})[target.pid] = target
        try:
            self._register(target, 1.0)
        except RedisUnreachableError as error:
            log.warning("group %s: the servers of job %s register later: %s", group, self.job, error)
        self._thread = threading.Thread(target=self._run, name=f"timeslice-server-{group}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the registration: call it when the servers have ended. Does nothing in a forked child."""
        if self._closed.is_set() or self._thread is None or self._pid != os.getpid():
            return
        self._closed.set()
        self._thread.join(REFRESH_S)
        if self.target.channel:
            declared.pop((self.group, self.job), None)
        else:
            beside.get((self._pid, self.group, self.job), {}).pop(self.target.pid, None)
        # A stand-in that lets its channel go and keeps the backend's name says good-bye, and its agent believes it.
        backend = BACKEND if self.target.channel else ""
        bare = self.target.model_copy(update={"backend": backend, "channel": "", "endpoints": (), "dialect": ""})
        try:
            with self._telling:
                self._register(bare, _CLOSE_S)
        except TimeSliceError as error:
            log.warning("group %s: the servers of job %s closed unseen: %s", self.group, self.job, error)
        self._driver.close()

    def _run(self) -> None:
        lost = False
        while not self._closed.wait(REFRESH_S):
            try:
                self._repeat()
                lost = False
            except Exception as error:
                if not lost:
                    log.warning("group %s: the servers of job %s register later: %s", self.group, self.job, error)
                lost = True

    def _repeat(self) -> None:
        told = None
        while (now := as_asked(self.group, self.target)) != told:  # a hold may change it meanwhile
            told = now
            with self._telling:
                if self._closed.is_set():
                    return
                self._register(told, REFRESH_S)

    def _register(self, target: Target, deadline_s: float) -> None:
        call = scripts.register(self._keys, target.job, target.host, target.pid, target.model_dump_json())
        self._driver.run(call, deadline_s=deadline_s)


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
