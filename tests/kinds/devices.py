"""Groups with real emulated devices: agent and coordinator as processes, jobs whose bytes are on the device."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from tests.client.world import ROOT, Job, World
from timeslice.arena.device import FAULTS_FILE, Device
from timeslice.locks import scripts

MIB = 1 << 20
SIZE = 640 << 10  # of a job's state; a device of one MiB has room for one
TTL_S = 2.4  # a node that is silent for so long blocks its group, which some tests say must not happen
TIMEOUT_MS = 15_000

# Words heard outside a hold: register, load, hold; inside: yield, exit (at once, without a yield of its own), look (for
# the loss of its lease). It says what it found in its memory whenever it gets in.
_JOB = f"""
from timeslice.arena import Arena
group, size = "@GROUP@", {SIZE}
arena = Arena(os.environ["TEST_DEVICES"] + "/" + group, label=os.environ["TIMESLICE_JOB"])
me = os.environ["TIMESLICE_JOB"].encode() * 100
state = None
def load():
    global state
    if state is None:
        state = arena.allocate(size)
        state[: len(me)] = me
def turn():
    say("asks")
    with timeslice.hold(group, lease=@LEASE@) as lease:
        load()
        say("in", "same" if bytes(state[: len(me)]) == me else "different", lease.grant.how)
        word = hear().strip()
        if word == "look":
            lease.lost.wait(20)
            say("lost", lease.lost.is_set())
            hear()
    if word == "exit":
        sys.exit()
    say("out")
say("up")
while word := hear().strip():
    if word == "register":
        timeslice.register_arena(group, arena)
        say("registered")
    if word == "load":
        load()
        say("loaded")
    if word == "hold":
        turn()
"""


class Devices(World):
    """``start`` it with its groups. One node, ``n1``."""

    def __init__(self, url: str, prefix: str, folder: Path, runtime: Path) -> None:
        super().__init__(url, prefix)
        self.state_dir = folder / "state"
        self._devices = runtime / "devices"
        self._daemons: list[subprocess.Popen[str]] = []
        self._groups: tuple[str, ...] = ()

    def start(self, *groups: str, http_port: int | None = None, http_of: str = "agent") -> None:
        self._groups = groups
        ports = {http_of: http_port}
        self.start_agent(http_port=ports.get("agent"))
        for group in groups:
            settings = dict.fromkeys(
                ("prepare_timeout_ms", "suspend_timeout_ms", "restore_timeout_ms"), str(TIMEOUT_MS)
            )
            self.run(scripts.configure(self.group(group), settings))
        self._daemon("coordinator", {"name": "c1", "lease_ms": 3000, "http_port": ports.get("coordinator")})

    def start_agent(self, **changes: Any) -> subprocess.Popen[str]:
        """Returns when it serves."""
        given = {
            "node": "n1",
            "groups": self._groups,
            "state_dir": str(self.state_dir),
            "emulate": dict.fromkeys(self._groups, MIB),
            "backends": {group: ["arena"] for group in self._groups},
            "ttl_s": TTL_S,
        }
        self.agent = self._daemon("agent", {**given, **changes})
        return self.agent

    def _daemon(self, role: str, options: dict[str, Any]) -> subprocess.Popen[str]:
        line = [sys.executable, "-m", "tests.kinds.daemon", role]
        options = {"url": self.url, "prefix": self.keys.prefix, **options}
        process = subprocess.Popen([*line, json.dumps(options)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self._daemons.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def path(self, group: str) -> Path:
        return self._devices / group

    def device(self, group: str) -> Device:
        return Device.open(self.path(group))

    def misbehave(self, group: str, faults: str) -> None:
        """What the operator of the device does from now on: see ``timeslice.arena.faults``. Empty: it behaves."""
        (self._devices / group / FAULTS_FILE).write_text(faults)

    def new(self, job: str, group: str = "g", lease_s: float = 30.0) -> Job:
        """A process of the job that has not asked for anything yet."""
        made = self.job(_JOB.replace("@GROUP@", group).replace("@LEASE@", str(lease_s)), job=job)
        assert made.line() == "up"
        return made

    def asks(self, job: str, group: str = "g", lease_s: float = 30.0) -> Job:
        """A new process of the job that waits for the group, or has it already."""
        made = self.new(job, group, lease_s)
        tell(made, "hold")
        assert made.line() == "asks"
        return made

    def enters(self, job: str, group: str = "g", lease_s: float = 30.0) -> Job:
        made = self.asks(job, group, lease_s)
        assert inside(made) == "first load"
        return made

    def residency(self, job: str, group: str = "g") -> str:
        found = self.view(group).jobs.get(job)
        return found.residency if found else ""

    def close(self) -> None:
        for process in self._daemons:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        super().close()
        for group in self._groups:
            if (self._devices / group).exists():
                self.device(group).destroy(force=True)


def tell(job: Job, word: str) -> None:
    assert job.process.stdin is not None
    job.process.stdin.write(f"{word}\n")


def inside(job: Job) -> str:
    """Wait until it is in; how it got in. Its content must be what it left."""
    said, content, how = job.line().split(maxsplit=2)
    assert (said, content) == ("in", "same")
    return how


def leaves(job: Job) -> None:
    """It yields and lives on."""
    tell(job, "yield")
    assert job.line() == "out"


def comes_back(job: Job) -> str:
    """It asks again and gets in; how."""
    tell(job, "hold")
    assert job.line() == "asks"
    return inside(job)


def metric(port: int, name: str) -> float:
    """A value that a daemon shows."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def ended(job: Job) -> None:
    """Kill it, and wait until it is dead."""
    job.process.kill()
    job.process.wait()
