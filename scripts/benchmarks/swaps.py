"""What a swap costs beside moving bytes: eight agents that move nothing, against the same number of bare messages.

The reference does what no design could leave out: for each node and step one order, the same number of answers, and
the same writes to disk, over the same server, with a process for each node. It decides nothing and checks nothing.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import redis

import timeslice
from benchmarks.tools import Figures, free_port, rounds, tcp_url
from timeslice.agent.journal import write_whole
from timeslice.client.identity import process_start, this_target
from timeslice.embedded import EmbeddedServer
from timeslice.locks import scripts
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import Keys

NODES, SWAPS = 8, 20
GROUP = "swapped"
STEPS = (2, 3)  # answers to prepare: accepted, prepared; to commit: accepted, suspended, done


class _Jobs:
    """Two jobs in two threads of this process that pass the group to and fro."""

    def __init__(self, url: str) -> None:
        self.clients = [timeslice.Client(url, job=name) for name in ("a", "b")]
        self.turn = 0
        self.lease = self.clients[0].acquire(GROUP, timeout=60)

    def swaps(self) -> list[float]:
        times = []
        for _ in range(SWAPS):
            self.turn = 1 - self.turn
            entered: list[Any] = []

            def wait(client: timeslice.Client = self.clients[self.turn], entered: list[Any] = entered) -> None:
                lease = client.acquire(GROUP, timeout=60)
                entered.extend((lease, time.monotonic()))

            thread = threading.Thread(target=wait)
            thread.start()
            until = time.monotonic() + 30
            while not self.clients[0].status(GROUP).queue:
                if time.monotonic() > until:
                    raise TimeoutError("the other job never queued")
            time.sleep(0.003)  # from "queued" to "blocked in the read"; not part of what is measured
            began = time.monotonic()
            self.clients[1 - self.turn].yield_(self.lease)
            thread.join(60)
            self.lease, inside = entered
            times.append(inside - began)
        return times

    def close(self) -> None:
        self.clients[self.turn].yield_(self.lease)
        for client in self.clients:
            client.close()


def _responder(url: str, number: int, folder: str, ready: Event) -> None:
    server = redis.Redis.from_url(url, socket_timeout=300)
    path, last = Path(folder) / f"{number}.json", "$"
    ready.set()
    while True:
        reply: Any = server.execute_command("XREAD", "BLOCK", 200_000, "STREAMS", f"bare:{number}", last)  # type: ignore[no-untyped-call]
        entries = next(iter(reply.values())) if isinstance(reply, dict) else reply[0][1]
        entry_id, fields = entries[-1]
        last = entry_id
        flat = fields if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2], strict=True))
        answers = int(flat[b"answers"])
        server.xadd("bare:inbox", {"kind": "accepted"}, maxlen=1000)
        write_whole(path, b"x" * 800, durable=answers == STEPS[0])  # the agent waits for the disk once a swap, too
        for _ in range(answers - 2):
            server.xadd("bare:inbox", {"kind": "passing"}, maxlen=1000)
        write_whole(path, b"y" * 800, durable=False)
        server.xadd("bare:inbox", {"kind": "outcome"}, maxlen=1000)


class _Bare:
    """The coordinator's side of the reference: orders to all, wait for every outcome, next step, wake the waiter."""

    def __init__(self, url: str, folder: str) -> None:
        self.server = redis.Redis.from_url(url, socket_timeout=60)
        context = mp.get_context("spawn")
        self.processes = []
        for number in range(NODES):
            ready = context.Event()
            process = context.Process(target=_responder, args=(url, number, folder, ready), daemon=True)
            process.start()
            self.processes.append(process)
            if not ready.wait(60):
                raise TimeoutError(f"responder {number} never came up")
        time.sleep(0.3)  # from "ready" to "blocked in the read"
        self.last = b"0-0"

    def exchange(self) -> list[float]:
        times = []
        for _ in range(SWAPS):
            began = time.monotonic()
            for answers in STEPS:
                with self.server.pipeline(transaction=False) as pipeline:
                    for number in range(NODES):
                        pipeline.xadd(f"bare:{number}", {"answers": answers}, maxlen=100)
                    pipeline.execute()
                missing = NODES
                while missing:
                    reply: Any = self.server.execute_command(
                        "XREAD", "BLOCK", 30_000, "STREAMS", "bare:inbox", self.last
                    )  # type: ignore[no-untyped-call]
                    entries = next(iter(reply.values())) if isinstance(reply, dict) else reply[0][1]
                    self.last = entries[-1][0]
                    missing -= sum(b"outcome" in (f.values() if isinstance(f, dict) else f) for _, f in entries)
            times.append(time.monotonic() - began)
        return times

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(10)


def _start(stack: ExitStack, *arguments: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "timeslice", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    stack.callback(process.wait, 60)
    stack.callback(process.terminate)


def _until(what: str, check: Any) -> None:
    until = time.monotonic() + 60
    while not check():
        if time.monotonic() > until:
            raise TimeoutError(f"waited in vain for: {what}")
        time.sleep(0.05)


def measure() -> Figures:
    """swap_control_vs_bare_exchange, and the milliseconds of a swap over eight nodes from yield to inside."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        url = tcp_url(stack.enter_context(EmbeddedServer(port=free_port())))
        driver, keys = SyncDriver(url), Keys().group(GROUP)
        _start(stack, "--url", url, "coordinator", "--log-level", "error")
        for number in range(NODES):
            node, state = f"node{number}", f"{folder}/state{number}"
            _start(stack, "--url", url, "agent", "--group", GROUP, "--node", node, "--state-dir", state,
                   "--backend", "noop", "--log-level", "error")  # fmt: skip
        _until("eight agents", lambda: len(driver.view(keys).nodes) == NODES)
        _until("an owner", lambda: driver.view(keys).state.get("owner"))
        for job in ("a", "b"):  # both have a process on every node: always the same one
            shown = {"TIMESLICE_JOB": job, "TIMESLICE_GROUPS": GROUP}
            process = subprocess.Popen(["sleep", "600"], env={**os.environ, **shown})
            stack.callback(process.wait)
            stack.callback(process.kill)
            for number in range(NODES):
                own = this_target(GROUP, job, f"node{number}")
                target = own.model_copy(update={"pid": process.pid, "start": process_start(process.pid)})
                driver.run(scripts.register(keys, job, target.host, target.pid, target.model_dump_json()))
        jobs, bare = _Jobs(url), _Bare(url, folder)
        stack.callback(bare.close)
        ours, theirs = rounds(jobs.swaps, bare.exchange)
        jobs.close()
        driver.close()
    return Figures(
        ratios={"swap_control_vs_bare_exchange": ours / theirs},
        values={"swap_control_ms_8_nodes": ours * 1e3, "bare_exchange_ms_8_nodes": theirs * 1e3},
        aims={"swap_control_vs_bare_exchange": "<= 3"},
    )
