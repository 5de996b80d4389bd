"""Jobs as processes: each runs its holds in threads, as told through a pipe. They come from a fork server, so that one
costs a few milliseconds."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.agent.knobs import Fake
from timeslice import Client

SIZE = 300  # bytes of a job's state on the fake device
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__, "timeslice.client.sync"])


@dataclass
class Hold:
    """One hold as the test sees it. Times are monotonic, which all processes share."""

    group: str
    job: str
    token: int = 0
    error: str = ""
    entered: float = 0.0
    left: float = 0.0
    lost: bool = False
    inside: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)

    def __str__(self) -> str:
        state = "over" if self.over.is_set() else "inside" if self.inside.is_set() else "waiting"
        return f"{self.job} in {self.group}: {state}{' lost' * self.lost} {self.error}"


class JobProcess:
    """One job. ``ways``: group -> (URL, node)."""

    def __init__(self, job: str, ways: Callable[[str], tuple[str, str]], fake: Path) -> None:
        self.job, self._ways = job, ways
        self._pipe, far = _FORKS.Pipe()
        self.process = _FORKS.Process(target=_main, args=(job, far, str(fake)), daemon=True)
        self.process.start()
        far.close()
        self._holds: list[Hold] = []
        self._listener = threading.Thread(target=self._listen, name=f"job {job}", daemon=True)
        self._listener.start()

    def hold(self, group: str, **options: Any) -> Hold:
        made = Hold(group, self.job)
        self._holds.append(made)
        self.tell("hold", len(self._holds) - 1, group, *self._ways(group), options)
        return made

    def let_go(self, hold: Hold) -> None:
        """Let the body end; the hold is over when ``over`` is set."""
        self.tell("leave", self._holds.index(hold))

    def tell(self, *words: Any) -> None:
        self._pipe.send_bytes(json.dumps(words).encode())

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, news = json.loads(self._pipe.recv_bytes())
                hold = self._holds[number]
                for name, value in news.items():
                    setattr(hold, name, value)
                (hold.over if news.keys() & {"left", "error"} else hold.inside).set()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self._listener.join()
        self._pipe.close()
        self.process.close()


class _Job:
    """Inside the process."""

    def __init__(self, job: str, pipe: Connection, fake: Path) -> None:
        self._job, self._pipe, self._fake = job, pipe, fake
        self._saying = threading.Lock()
        self._clients: dict[str, Client] = {}
        self._may_leave: dict[int, threading.Event] = {}

    def run(self) -> None:
        while True:
            verb, *words = json.loads(self._pipe.recv_bytes())
            if verb == "hold":
                self._may_leave[words[0]] = threading.Event()
                threading.Thread(target=self._hold, args=words, daemon=True).start()
            elif verb == "leave":
                self._may_leave[words[0]].set()
            elif verb == "clock":
                _step_clock(*words)

    def _say(self, number: int, **news: Any) -> None:
        with self._saying:
            self._pipe.send_bytes(json.dumps([number, news]).encode())

    def _hold(self, number: int, group: str, url: str, node: str, options: dict[str, Any]) -> None:
        try:
            client = self._client(url, node)
            lease = client.acquire(group, **options)
            entered = time.monotonic()
            fake = Fake(self._fake / group)
            if not fake.read(self._job):
                fake.load(self._job, SIZE)
                fake.write(self._job, {**fake.read(self._job), "pid": os.getpid()})
            self._say(number, token=lease.fencing_token, entered=entered)
            self._may_leave[number].wait()
            left = time.monotonic()
            client.yield_(lease)
            self._say(number, left=left, lost=lease.lost.is_set())
        except Exception as error:
            self._say(number, error=repr(error))

    def _client(self, url: str, node: str) -> Client:
        os.environ["TIMESLICE_NODE"] = node
        if url not in self._clients:
            self._clients[url] = Client(url, self._job, "ts")
        return self._clients[url]


def _step_clock(seconds: float) -> None:
    real = time.time
    time.time = lambda: real() + seconds


def _main(job: str, pipe: Connection, fake: str) -> None:
    with suppress(EOFError):
        _Job(job, pipe, Path(fake)).run()
