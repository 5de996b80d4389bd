"""Faults that only a real process of the product can have: each does what it says, and is read back."""

from __future__ import annotations

import json
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from timeslice.arena import Device
from timeslice.embedded import EmbeddedServer
from timeslice.locks import scripts
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import Keys
from timeslice.locks.scripts import Request
from timeslice.torture import forms
from timeslice.torture.faults import Deed, World, choose
from timeslice.torture.fleet import make_fleet
from timeslice.torture.history import Writer
from timeslice.torture.processes import Child, Processes
from timeslice.torture.schedule import Planned
from timeslice.torture.stage import DEVICE_BYTES, GROUPS, NODES, SERVED

DEADLINE_S = 60.0
LASTS_S = 2.0
NODE, GROUP = NODES[0], "trainers"
NAMESPACES = {"host-name": "uts", "pid-namespace": "pid", "time-namespace": "time"}

pytestmark = [pytest.mark.timeout(180)]


class Stage:
    """A server, an agent and a job of one node, under a keeper."""

    def __init__(self, folder: Path, url: str, world: World) -> None:
        self.folder, self.url, self.world = folder, url, world
        self.driver = SyncDriver(url)
        self.device = folder / NODE / "devices" / GROUP

    def add_agent(self) -> Child:
        spec: dict[str, Any] = {
            "node": NODE,
            "url": self.url,
            "groups": [GROUP],
            "device_bytes": DEVICE_BYTES,
            "ttl_s": 4.0,
        }
        spec |= {"state_dir": str(self.folder / NODE / "state"), "knobs": str(self.world.knobs), "leave": True}
        return self._add("agent", f"agent-{NODE}", spec)

    def add_coordinator(self) -> Child:
        """Without one nobody gets in after a job that was killed inside."""
        return self._add("coordinator", "coordinator-c1", {"name": "c1", "url": self.url, "lease_ms": 4000})

    def add_job(self, name: str = f"a-{NODE}", **more: Any) -> Child:
        spec: dict[str, Any] = {
            "job": "a",
            "node": NODE,
            "url": self.url,
            "drain": str(self.folder / "drain"),
            "seed": "1",
        }
        spec |= {"asynchronous": False, "devices": {GROUP: str(self.device)}, "bytes": 4096, "lock_group": ""}
        spec |= {"until": time.monotonic() + 600, "knobs": str(self.world.knobs), "pace": 0.1, **more}
        return self._add("job", name, spec)

    def until(self, condition: Callable[[], object], what: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end, f"{what}; {self._logs()}"
            self.world.processes.keep(time.monotonic())
            time.sleep(0.02)

    def choose(self, kind: str, *, pick: float = 0.0) -> Deed:
        deed = choose(
            self.world, Planned(id=7, kind=kind, at_s=0, lasts_s=LASTS_S, pick=pick, amount=1), time.monotonic()
        )
        assert deed
        return deed

    def lines(self, kind: str) -> list[dict[str, Any]]:
        every = [line for file in self.folder.glob("parts/*.jsonl") for line in file.read_text().splitlines()]
        return [line for line in map(json.loads, every) if line["kind"] == kind]

    def nodes(self) -> set[str]:
        return set(self.driver.view(Keys().group(GROUP)).nodes)

    def _add(self, role: Any, name: str, spec: dict[str, Any]) -> Child:
        def make(label: str) -> dict[str, Any]:
            return {**spec, "label": label, "history": str(self.folder / "parts")}

        mine = {key: value for key, value in os.environ.items() if not key.startswith("TIMESLICE_")}
        environment = {**mine, "TIMESLICE_NODE": NODE, "TIMESLICE_RUNTIME_DIR": str(self.folder / NODE)}
        child = Child(name, role, make, environment, node=NODE, groups=(GROUP,))
        self.world.processes.add(child)
        self.until(lambda: child.running and self.world.processes.works(child), f"{name} works")
        return child

    def _logs(self) -> str:
        return " ".join(file.read_text()[-600:] for file in self.folder.glob("logs/*.log"))


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    for folder in ("logs", "knobs", f"{NODE}/state", f"{NODE}/devices"):
        (tmp_path / folder).mkdir(parents=True, mode=0o700)
    (tmp_path / NODE).chmod(0o700)
    writer = Writer(tmp_path / "parts" / "run.jsonl")
    processes = Processes(tmp_path / "work", tmp_path / "logs", writer)
    with make_fleet("standalone", tmp_path / "servers") as fleet:
        made = Stage(tmp_path, fleet.url, World(processes, fleet, None, tmp_path / "knobs", {}, None))
        device = Device.create(made.device, DEVICE_BYTES)
        yield made
        processes.end()
        processes.clear()
        device.destroy(force=True)
        made.driver.close()
    writer.close()


@pytest.mark.parametrize("form", [*NAMESPACES, "title"])
def test_a_job_comes_again_as_one_that_is_hard_to_know(stage: Stage, form: str) -> None:
    """It is killed, and its next process is in another namespace, or its engine shows no environment; the one after
    that is as it was."""
    if why := forms.missing().get(form):
        pytest.skip(why)
    job = stage.add_job()
    first, deed = job.label, stage.choose(form)
    assert (deed.kills, deed.took()) == ((first,), False)
    deed.do()
    stage.until(lambda: job.label != first and deed.took(), f"it comes as {form}")
    if space := NAMESPACES.get(form):
        assert Path(f"/proc/{job.pid}/ns/{space}").readlink() != Path(f"/proc/self/ns/{space}").readlink()
    else:
        (engine,) = forms.children_of(job.pid)
        assert not Path(f"/proc/{engine}/environ").read_bytes().strip(b"\0")
        assert f"TIMESLICE_GROUPS={GROUP}".encode() not in Path(f"/proc/{job.pid}/environ").read_bytes()
    stage.world.processes.kill(job, again_at=0.0)
    stage.until(lambda: job.label == f"{job.name}.3" and job.running, "it comes again")
    assert (job.form, forms.wears(form, job.pid)) == ("", False)


def test_an_agent_comes_again_where_it_sees_nobody(stage: Stage) -> None:
    """It is killed, and its next process is in a pid namespace of its own; healed, it sees the job's again."""
    if why := forms.missing().get("pid-namespace"):
        pytest.skip(why)
    agent, job = stage.add_agent(), stage.add_job()
    first, deed = agent.label, stage.choose("blind-agent")
    assert (deed.kills, deed.took()) == ((first,), False)
    deed.do()
    stage.until(lambda: agent.label != first and deed.took(), "it comes in a namespace of its own")
    apart, outside = Path(f"/proc/{agent.pid}/ns/pid").readlink(), Path(f"/proc/{job.pid}/ns/pid").readlink()
    assert apart != outside
    assert deed.heal
    blind = agent.label
    deed.heal()
    stage.until(lambda: agent.label != blind and agent.running and stage.world.processes.works(agent), "it comes again")
    assert Path(f"/proc/{agent.pid}/ns/pid").readlink() == outside


def test_a_host_name_that_is_no_nodes(stage: Stage) -> None:
    """The process has the name of a container, and was not told its node."""
    if why := forms.missing().get("host-name"):
        pytest.skip(why)
    job = stage.add_job()
    deed = stage.choose("host-name")
    deed.do()
    stage.until(deed.took, "it comes again")
    stage.until(lambda: socket.gethostname() != forms.HOST_NAME and stage.world.processes.works(job), "it works")
    assert b"TIMESLICE_NODE=" not in Path(f"/proc/{job.pid}/environ").read_bytes()


def test_a_stop_reaches_the_process_and_not_what_started_it(stage: Stage) -> None:
    """Of one in a namespace of its own, which is the child of what was started."""
    if why := forms.missing().get("pid-namespace"):
        pytest.skip(why)
    job = stage.add_job()
    deed = stage.choose("pid-namespace")
    deed.do()
    stage.until(deed.took, "it comes again")
    assert job.process
    assert job.pid != job.process.pid
    stopped = stage.choose("stop-job")
    stopped.do()
    stage.until(stopped.took, "it stands still")
    assert stopped.heal
    stopped.heal()
    stage.until(lambda: not stopped.took(), "it goes on")


def test_a_process_starts_no_threads_until_it_may(stage: Stage) -> None:
    """A hold asks for one and fails; after the healing the same process gets in."""
    stage.add_agent()
    stage.add_coordinator()
    job = stage.add_job()
    deed = stage.choose("threads")
    deed.do()
    stage.until(deed.took, "a thread was refused")
    assert deed.heal
    deed.heal()
    label = job.label

    def entered() -> bool:
        return any(line["who"] == label for line in stage.lines("gave up") + stage.lines("entered"))

    stage.until(entered, "its tries end")
    assert job.label == label


def test_a_live_process_can_open_nothing_until_it_may(stage: Stage) -> None:
    """A job's and an agent's; none that is not loaded yet."""
    stage.add_agent()
    stage.add_job()
    for kind in ("files-job", "files-agent"):
        deed = stage.choose(kind)
        child = next(each for each in stage.world.processes.children if each.label == deed.label)
        before = resource.prlimit(child.pid, resource.RLIMIT_NOFILE)
        assert not deed.took()
        deed.do()
        assert deed.took()
        assert resource.prlimit(child.pid, resource.RLIMIT_NOFILE)[0] < before[0]
        assert deed.heal
        deed.heal()
        assert resource.prlimit(child.pid, resource.RLIMIT_NOFILE) == before


@pytest.mark.parametrize("pick", [0.1, 0.9])
def test_orders_that_came_while_an_agent_was_down_are_lost(stage: Stage, pick: float) -> None:
    """The stream is trimmed, or is gone, before the agent comes again."""
    agent = stage.add_agent()
    first, deed = agent.label, stage.choose("trim", pick=pick)
    deed.do()
    key = Keys().commands(NODE)
    stage.until(lambda: not agent.running, "it is down")
    stage.driver.client.xadd(key, {"body": "{}"})
    stage.until(lambda: agent.label != first and agent.running, "it comes again")
    assert deed.took()
    assert stage.driver.client.xlen(key) == 0


def test_nothing_was_lost_where_no_order_came(stage: Stage) -> None:
    """Then the fault does not count."""
    agent = stage.add_agent()
    first, deed = agent.label, stage.choose("trim")
    deed.do()
    stage.until(lambda: agent.label != first and agent.running, "it comes again")
    assert not deed.took()


def test_an_agent_leaves_and_joins_while_jobs_ask(stage: Stage) -> None:
    """Its node is out of the group when the jobs' next processes begin, and in it again later."""
    agent, job = stage.add_agent(), stage.add_job()
    stage.until(lambda: NODE in stage.nodes(), "it has joined")
    first, deed = agent.label, stage.choose("join")
    assert deed.kills == (job.label,)
    deed.do()
    stage.until(lambda: deed.took() or agent.label != first, "it left")
    assert NODE not in stage.nodes() or agent.label != first
    stage.until(lambda: agent.label != first and deed.took(), "it comes again")
    stage.until(lambda: NODE in stage.nodes(), "it joins again")
    ended = [line for line in stage.lines("died") if line["label"] == first]
    assert [line["meant"] for line in ended] == [True]


def test_an_agent_starts_while_its_server_is_away(stage: Stage) -> None:
    """It is killed together with the server, and started before that."""
    agent = stage.add_agent()
    first, deed = agent.label, stage.choose("outage")
    assert (deed.kills, deed.label) == ((first,), "redis")
    deed.do()
    stage.until(deed.took, "it starts alone")
    assert not stage.world.fleet.servers["redis"].running
    assert deed.heal
    deed.heal()
    assert stage.world.fleet.servers["redis"].running


def test_a_holder_that_waits_for_another_group_loses_the_first() -> None:
    """One that waits for nothing keeps its group."""
    with EmbeddedServer() as own:
        driver, keys = SyncDriver(own.url), Keys()
        held, other = SERVED
        for group in GROUPS:
            driver.run(scripts.configure(keys.group(group), {}, mode="lock"))

        class Only:
            url = own.url

        world: Any = World(None, Only(), None, Path(), {}, None)  # type: ignore[arg-type]
        planned = Planned(id=1, kind="revoke", at_s=0, lasts_s=DEADLINE_S, pick=0, amount=0)

        def ask(group: str, waiter: str, job: str, pid: int) -> None:
            driver.run(scripts.acquire(keys.group(group), Request(waiter, job, "n1", pid, 1, lock_only=True)))

        ask(other, "w-0", "b", 2)
        ask(held, "w-1", "a", 1)
        deed = choose(world, planned, time.monotonic())
        assert deed
        deed.do()
        assert not deed.took()
        assert driver.view(keys.group(held)).state["job"] == "a"
        ask(other, "w-2", "a", 1)
        end = time.monotonic() + DEADLINE_S
        while not deed.took():
            assert time.monotonic() < end
            time.sleep(0.02)
        assert driver.view(keys.group(held)).state.get("job", "") != "a"
        driver.close()
