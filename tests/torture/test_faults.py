"""Each kind of fault does what it says, and what a run reads back of it is the effect, not the intention."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from timeslice.arena import syscalls
from timeslice.backends.base import Context, Job, Outcome, Selection
from timeslice.errors import BackendError
from timeslice.torture import backend as torture_backend
from timeslice.torture.backend import TortureBackend, knob_file
from timeslice.torture.clock import prepare_server
from timeslice.torture.faults import Deed, World, choose
from timeslice.torture.fleet import make_fleet
from timeslice.torture.history import Died, Writer, read_so_far
from timeslice.torture.processes import Child, Processes, Role
from timeslice.torture.proxy import Proxy
from timeslice.torture.schedule import KINDS, Planned
from timeslice.torture.stage import NODES

DEADLINE_S = 15.0
ROLES: tuple[Role, ...] = ("job", "agent", "coordinator")
LASTS_S = 3.0  # long enough to be seen on a machine that is busy
BACKENDS = [kind for kind, how in KINDS.items() if how.victim == "backend"]
OF_LIVING = {"title", "host-name", "pid-namespace", "time-namespace", "threads", "files-job", "files-agent", "trim"}
OF_LIVING |= {"join", "outage", "revoke", "late-agents", "blind-agent"}
OTHERS = [kind for kind in KINDS if kind not in {*BACKENDS, *OF_LIVING}]
KEY = "torture-test"
_ids = count(1)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A server, a proxy before it, a process of each role, a small disk."""
    folder = tmp_path_factory.mktemp("world")
    binary, clock = prepare_server(folder)
    (folder / "logs").mkdir()
    (folder / "knobs").mkdir()
    disks = {}
    for node in NODES:
        (folder / node / "state").mkdir(parents=True)
        if syscalls.mount_tmpfs(str(folder / node / "state"), "size=64k,mode=700") == 0:
            disks[node] = folder / node / "state"
    writer = Writer(folder / "run.jsonl")
    processes = Processes(folder, folder / "logs", writer)
    with make_fleet("standalone", folder / "servers", binary=binary) as fleet:
        proxy = Proxy(("127.0.0.1", fleet.ports["redis"]))
        yield World(processes, fleet, proxy, folder / "knobs", disks, clock)
        proxy.close()
    processes.end()
    processes.clear()
    writer.close()


@pytest.fixture(autouse=True)
def _processes(world: World) -> None:
    """One that lives, of each role."""
    for child in world.processes.children:
        if child.process is not None:
            child.process.kill()
            child.process.wait()
    world.processes.children.clear()
    for role in ROLES:
        child = Child(f"{role}-{NODES[0]}", role, lambda _: {}, {}, node=NODES[0])
        child.process = subprocess.Popen(["sleep", "600"])
        world.processes.add(child)


def planned(kind: str) -> Planned:
    amount = {"delay": 0.25}.get(kind, 3600.0 if kind == "clock" else 1.0)
    return Planned(id=next(_ids), kind=kind, at_s=0.0, lasts_s=LASTS_S, pick=0.0, amount=amount)


def chosen(world: World, kind: str) -> Deed:
    if world.lacks(kind):
        pytest.skip(f"this machine can't do {kind}")
    deed = choose(world, planned(kind), time.monotonic())
    assert deed is not None
    return deed


def until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class Witness:
    """Sees each effect by itself, from before the deed on."""

    def __init__(self, world: World, kind: str) -> None:
        self._world, self._kind = world, kind
        role = kind.partition("-")[2]
        self._child = next((each for each in world.processes.children if each.role == role), None)
        self._server = world.fleet.servers["redis"]
        self._idle: Any = self._client()
        self._idle.set(KEY, 1)
        self._sha = self._idle.script_load("return 'mine'")
        self._id = self._idle.client_id()
        self._through: Any = self._client(port=world.proxy.port if world.proxy else 0)
        self._through.ping()

    def sees(self) -> bool:
        """Whether the effect is there now."""
        if self._child is None:
            return self._server_sees()
        return self._ended() if self._kind.startswith("kill") else self._state() == "T"

    def _ended(self) -> bool:
        assert self._child
        assert self._child.process
        return self._child.process.poll() == -signal.SIGKILL

    def _state(self) -> str:
        assert self._child
        assert self._child.process
        return state_of(self._child.process.pid)

    def _server_sees(self) -> bool:
        match self._kind:
            case "kill-server":
                return not self._server.running
            case "stop-server":
                return state_of(self._server.pid) == "T"
            case "sleep" | "pause":
                return self._answer(self._client(timeout=0.1)) == math.inf
            case "drop":
                return self._id not in {int(each["id"]) for each in self._client().client_list()}
            case "forget":
                return not any(self._client().script_exists(self._sha))
            case "full":
                return int(self._client().config_get("maxmemory")["maxmemory"]) == 1
            case "password":
                return not self._is_let_in()
            case "flush":
                return not self._client().exists(KEY)
            case "wipe":
                if self._server.running:
                    return not self._client().exists(KEY)
                return True
            case "clock":
                return bool(abs(self._client().time()[0] - time.time()) > 3000)
            case "disk":
                return any(os.statvfs(folder).f_bavail == 0 for folder in self._world.disks.values())
        return self._link_sees()

    def _is_let_in(self) -> bool:
        try:
            self._client().ping()
        except redis.AuthenticationError:
            return False
        return True

    def _link_sees(self) -> bool:
        proxy = self._world.proxy
        assert proxy
        match self._kind:
            case "cut":
                return self._answer(self._client(port=proxy.port)) is None
            case "stall" | "half-open":
                return self._answer(self._client(port=proxy.port, timeout=0.3)) == math.inf
            case "delay":
                return (self._answer(self._client(port=proxy.port)) or 0) >= 0.25
        return False

    def _answer(self, client: Any) -> float | None:
        began = time.monotonic()
        try:
            client.set(KEY, 1)
        except redis.TimeoutError:
            return math.inf
        except redis.ConnectionError:
            return None
        return time.monotonic() - began

    def _client(self, *, port: int = 0, timeout: float = 5.0) -> Any:
        if port == 0:
            return self._world.fleet.client("redis", timeout_s=timeout)
        return redis.Redis(port=port, socket_timeout=timeout, retry=Retry(NoBackoff(), 0), protocol=2)


ENDS = {kind for kind in OTHERS if kind not in {"drop", "forget", "flush", "wipe", "lose", "repeat"}}
ENDS -= {kind for kind in OTHERS if kind.startswith("kill-") and kind != "kill-server"}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", [kind for kind in OTHERS if kind not in {"lose", "repeat"}])
def test_a_fault_happens_is_read_back_and_ends(world: World, kind: str) -> None:
    """Who looks by himself sees it, and so does the run; what lasts is over after the healing."""
    witness, deed = Witness(world, kind), chosen(world, kind)
    until(lambda: not witness.sees(), f"{kind} has not happened yet")
    deed.do()
    until(witness.sees, f"{kind} happens")
    until(deed.took, f"{kind} is read back")
    if deed.heal:
        deed.heal()
    if kind in ENDS:
        until(lambda: not witness.sees(), f"{kind} ends")
    until(lambda: world.fleet.client("redis").ping(), "the server serves")


# The first is done before anything begins; the others only to programs that open files.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in {"late-agents", "files-job", "files-agent"}])
def test_a_fault_that_is_not_done_is_not_read_back(world: World, kind: str) -> None:
    """Without the deed nothing shows, and it does not count."""
    deed = chosen(world, kind)
    until(lambda: not deed.took(), f"{kind} was not done")  # a slow answer may look like none, now and then


@pytest.mark.parametrize(("kind", "grown"), [("lose", 1), ("repeat", 2)])
def test_a_reply_is_lost_and_a_request_arrives_twice(world: World, kind: str, grown: int) -> None:
    """Whoever comes next runs into it, once, and until then it has not happened."""
    deed = chosen(world, kind)
    assert world.proxy
    client: Any = redis.Redis(port=world.proxy.port, socket_timeout=5.0, retry=Retry(NoBackoff(), 0))
    straight: Any = world.fleet.client("redis")
    sha = straight.script_load("return redis.call('INCR', KEYS[1])")
    straight.delete(KEY)
    deed.do()
    assert not deed.took()
    if kind == "lose":
        with pytest.raises(redis.ConnectionError):
            client.evalsha(sha, 1, KEY)
    else:
        assert client.evalsha(sha, 1, KEY) == 2
    assert deed.took()
    assert int(straight.get(KEY)) == grown
    assert client.evalsha(sha, 1, KEY) == grown + 1


class Inner:
    """A backend that does everything at once, and counts."""

    name = "arena"

    def __init__(self, _: Context) -> None:
        self.done: list[str] = []

    async def suspend(self, job: Job, _: Selection, *, deadline_s: float) -> Outcome:
        self.done.append(f"{job.job} in {deadline_s:g} s")
        return Outcome(freed_bytes=1)


@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_backend_misbehaves_and_says_that_it_did(
    world: World, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step does the harm; until then it has not happened; after the healing the backend behaves."""
    monkeypatch.setattr(torture_backend, "ArenaBackend", Inner)
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda _, sign: killed.append(sign))
    group, writer = "trainers", Writer(tmp_path / "agent.jsonl")
    context = Context(group=group, node=NODES[0], devices=())
    made = TortureBackend(context, "agent-n1.1", writer, knob_file(world.knobs, NODES[0], group))
    job = Job(group=group, node=NODES[0], job="a", targets=())
    deed = chosen(world, kind)
    deed.do()
    assert not deed.took()
    raised = False
    try:
        running = asyncio.ensure_future(made.suspend(job, Selection(), deadline_s=1.0))
        lasts = kind in {"hang", "slow"}
        await asyncio.wait({running}, timeout=0.3 if lasts else DEADLINE_S)
        assert running.done() is not lasts
        assert deed.took()
        assert deed.heal
        deed.heal()
        await running
    except BackendError:
        raised = True
    assert raised is (kind in {"fail", "fail-on"})
    inner: Any = made._inner
    assert len(inner.done) == (0 if raised or kind == "lie" else 2 if kind == "die" else 1)
    assert killed == [signal.SIGKILL] * (kind == "die")
    before = len(inner.done)
    await made.suspend(job, Selection(), deadline_s=1.0)
    assert len(inner.done) == before + 1
    writer.close()


def test_an_end_is_told_with_when_the_process_was_last_seen_to_run(world: World) -> None:
    """Whoever judges knows between which two looks it came, however far they lie apart."""
    child, processes = world.processes.having("agent")[0], world.processes
    assert child.process is not None
    child.doomed = True
    before = time.monotonic_ns()
    processes.keep(0.0)
    seen = time.monotonic_ns()
    child.process.kill()
    child.process.wait()
    ended = time.monotonic_ns()
    processes.keep(0.0)
    lines = read_so_far(world.knobs.parent / "run.jsonl")
    (died,) = [line for line in lines if isinstance(line, Died) and line.at > before]
    assert before <= died.ran <= seen < ended <= died.at
