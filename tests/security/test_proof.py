"""Agents act only on processes that show that they are the job's, whatever stands in Redis.

The processes here are real, the registrations hostile: written as anybody may write them who can reach the server.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.rig import Rig, until
from tests.support.jobs import process_state, shows
from timeslice.agent import procfs
from timeslice.agent.targets import MAX_TARGETS, TargetRegistry
from timeslice.backends.registry import get_backend
from timeslice.client.identity import show_membership

SLEEP = ["/bin/sh", "-c", "echo up; exec sleep 600"]
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs another user's process")


class Known:
    """A registry of group g on node n1, fed as a heartbeat feeds it."""

    def __init__(self, folder: Path) -> None:
        self.registry = TargetRegistry("g", "n1", folder / "targets.json", lambda: None)

    async def claim(self, pid: int, job: str = "a", **changes: Any) -> str:
        """Register a process for a job; why it was refused, or ''."""
        found = procfs.look_at(pid)
        fields = {
            "job": job,
            "host": "n1",
            "pid": pid,
            "start": found.start if found else 1,
            "uid": found.uid if found else 0,
            "pid_namespace": procfs.pid_namespace(),
        } | changes
        name = f"{job}/n1/{pid}"
        await self.registry.refresh({name: json.dumps(fields)})
        return self.registry.refused.get(name, "")


@pytest.fixture
async def known(tmp_path: Path) -> AsyncIterator[Known]:
    made = Known(tmp_path)
    yield made
    made.registry.close()


Start = Callable[..., int]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes; they end with the test."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(line: list[str] = SLEEP, **options: Any) -> int:
        bare = {name: value for name, value in os.environ.items() if not name.startswith("TIMESLICE_")}
        options["env"] = bare | options.get("env", {})
        process = subprocess.Popen(line, stdout=subprocess.PIPE, **options)
        running.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid

    yield begin
    for process in running:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


async def test_a_process_that_shows_nothing_is_not_touched(known: Known, start: Start) -> None:
    """What a registration says of pid, start time and user may all be true: it is a claim all the same."""
    why = await known.claim(start())
    assert "does not show that it takes part in job a" in why
    assert known.registry.jobs() == ()
    assert known.registry.ended == set()


@pytest.mark.parametrize(
    "options",
    [{"pass_fds": True}, {"env": {"TIMESLICE_JOB": "a"}}, {"env": {"TIMESLICE_JOB_ID": "a"}}],
    ids=["memory-file", "environment", "alias"],
)
async def test_each_proof_is_enough(known: Known, start: Start, options: dict[str, Any]) -> None:
    """A memory file of the job's name, or the job in the environment that the process was started with."""
    if options.get("pass_fds"):
        options = {"pass_fds": shows("a")}
    pid = start(**options)
    assert await known.claim(pid) == ""
    assert [target.pid for target in known.registry.alive("a")] == [pid]


@pytest.mark.parametrize(
    "options",
    [{"pass_fds": True}, {"env": {"TIMESLICE_JOB": "b", "TIMESLICE_JOB_ID": "a"}}, {"env": {"TIMESLICE_JOB": "aa"}}],
    ids=["memory-file", "environment", "prefix"],
)
async def test_another_jobs_process_is_not_this_jobs(known: Known, start: Start, options: dict[str, Any]) -> None:
    """Nobody who may write to Redis can have another job's process stopped by calling it his."""
    if options.get("pass_fds"):
        options = {"pass_fds": shows("b", "a.b", "xa")}
    assert "does not show" in await known.claim(start(**options))


async def test_slurms_control_group_is_a_proof(known: Known, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm put the process there; the job that a number names is that job alone."""
    cgroup = "0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0\n"
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, **kw: cgroup if path.name == "cgroup" else read(path, **kw))
    pid = start()
    assert "does not show" in await known.claim(pid, "slurm-4")
    assert "does not show" in await known.claim(pid, "job_42")
    assert await known.claim(pid, "slurm-42") == ""


FORKS = """
import os, time
from timeslice.backends.registry import get_backend
from timeslice.client.identity import show_membership
show_membership("a")
pid = os.fork()
if pid:
    print(pid, flush=True)
    os.waitpid(pid, 0)
else:
    os.close(1)
    time.sleep(600)
"""
STARTS = f"""
import subprocess
from timeslice.backends.registry import get_backend
from timeslice.client.identity import show_membership
show_membership("a")
subprocess.run({SLEEP!r})
"""


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def test_a_fork_is_the_jobs_too_and_an_unrelated_program_is_not(known: Known, start: Start) -> None:
    """Forks hold what their parent showed. A program that a job starts has to show it for itself."""
    parent = start([sys.executable, "-c", FORKS])
    (fork,) = children(parent)
    assert await known.claim(fork) == ""
    os.kill(fork, signal.SIGKILL)
    parent = start([sys.executable, "-c", STARTS])
    (program,) = children(parent)
    assert "does not show" in await known.claim(program)
    assert await known.claim(parent) == ""
    os.kill(program, signal.SIGKILL)


def shown_files(job: str) -> list[int]:
    """Descriptors of this process that show the job."""
    links = {fd.name: str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}
    return [int(number) for number, link in links.items() if link == f"/memfd:timeslice:{job} (deleted)"]


def test_the_clients_own_proof_survives_a_program_that_closes_its_files() -> None:
    """Registering once more shows it again, and only once."""
    show_membership("closing")
    show_membership("closing")
    (first,) = shown_files("closing")
    os.close(first)
    show_membership("closing")
    assert len(shown_files("closing")) == 1


@needs_root
async def test_a_file_that_another_user_sent_proves_nothing(known: Known, start: Start) -> None:
    """Whoever can hand a descriptor to a daemon could else have it stopped: its own user must have made the file."""
    assert "does not show" in await known.claim(start(user=NOBODY, group=NOBODY, pass_fds=shows("a")))


@needs_root
async def test_another_users_process_is_not_what_was_registered(known: Known, start: Start) -> None:
    """Neither with its real user nor with a made-up one."""
    pid = start(user=NOBODY, group=NOBODY, env={"TIMESLICE_JOB": "a"})
    assert "runs as user id 65534, registered was 1000" in await known.claim(pid, uid=1000)
    assert await known.claim(pid) == ""  # it shows it, and its user is told truly: a job of that user's


@needs_root
async def test_a_setuid_program_is_not_touched(known: Known, start: Start) -> None:
    """Its environment is its caller's, its rights are not."""
    drop = "import os, time\nos.setresuid(65534, 0, 0)\nprint('up', flush=True)\ntime.sleep(600)"
    pid = start([sys.executable, "-c", drop], env={"TIMESLICE_JOB": "a"})
    assert "several users at once" in await known.claim(pid)


def kernel_threads() -> list[int]:
    numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in numbers if (found := procfs.look_at(pid)) and found.kernel]


async def test_nobody_can_have_the_agent_stop_itself_or_the_system(known: Known) -> None:
    """The first process, the agent, whoever started it, and the kernel's own are never taken, whatever they show."""
    show_membership("a")
    for pid in (1, os.getpid(), os.getppid(), *kernel_threads()[:1]):
        assert "the agent itself" in await known.claim(pid), pid


async def test_the_number_of_a_thread_is_no_process(known: Known) -> None:
    """It has a folder in /proc like any process, and must not bring the agent down."""
    going = threading.Event()
    thread = threading.Thread(target=going.wait, daemon=True)
    thread.start()
    assert thread.native_id is not None
    assert "a thread" in await known.claim(thread.native_id)
    going.set()
    thread.join()


async def test_one_process_is_one_jobs(known: Known, start: Start) -> None:
    """The first that was proven keeps it, even if the process shows two names."""
    pid = start(pass_fds=shows("a", "b"))
    assert await known.claim(pid, "a") == ""
    assert "a process of job a already" in await known.claim(pid, "b")
    assert known.registry.jobs() == ("a",)


async def test_a_registration_can_not_change_whose_process_it_is(known: Known, start: Start) -> None:
    """A later record of a known process may tell of its channel, not of another user."""
    pid = start(pass_fds=shows("a"))
    assert await known.claim(pid) == ""
    assert "registered was 7" in await known.claim(pid, uid=7)
    (target,) = known.registry.alive("a")
    assert target.uid == os.getuid()
    assert await known.claim(pid, channel="g/n1.1.1") == ""
    assert known.registry.alive("a")[0].channel == "g/n1.1.1"


async def test_a_reused_number_is_another_process(known: Known) -> None:
    """Real reuse: the kernel gives the same number to a later process, and the old registration is not about it."""
    counter = Path("/proc/sys/kernel/ns_last_pid")
    if not os.access(counter, os.W_OK):
        pytest.skip("the kernel does not let us choose the next number")
    first = started()
    found = procfs.look_at(first.pid)
    assert found is not None
    assert await known.claim(first.pid) == ""
    end(first)
    second = started_as(first.pid, counter)
    if second is None:
        pytest.skip("somebody else got the number")
    try:
        await until(lambda: known.registry.jobs() == (), "the end was noticed")
        assert await known.claim(second.pid, start=found.start) == ""  # it has ended: nothing to refuse
        assert known.registry.alive("a") == ()
        assert process_state(second.pid) != "T"
    finally:
        end(second)


def started() -> subprocess.Popen[bytes]:
    return subprocess.Popen(SLEEP, stdout=subprocess.PIPE, pass_fds=shows("a"))


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def started_as(pid: int, counter: Path) -> subprocess.Popen[bytes] | None:
    """A process of just that number, or None when others kept taking it."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        counter.write_text(str(pid - 1))
        process = started()
        if process.pid == pid:
            return process
        end(process)
    return None


HOSTILE = {
    "giant": json.dumps({"job": "a", "tags": ["x" * 10_000_000]}),
    "deep": "[" * 100_000,
    "no object": "[]",
    "wrong types": json.dumps({"job": 1, "host": [], "pid": "x", "start": {}, "uid": -1, "pid_namespace": None}),
    "endless number": '{"pid": ' + "9" * 100_000 + "}",
    "path": json.dumps({"job": "a", "host": "n1", "pid": 77, "start": 1, "uid": 0, "pid_namespace": "pid:[1]",
                        "channel": "../../{x}:\n\x1b[2J"}),
    "unknown field": json.dumps({"job": "a", "host": "n1", "pid": 77, "start": 1, "uid": 0, "pid_namespace": "",
                                 "\x1b]0;owned\x07": "x"}),
    "half a character": '{"job": "\ud83d',
}  # fmt: skip


@pytest.mark.parametrize("record", HOSTILE.values(), ids=HOSTILE)
async def test_hostile_records_are_refused_in_one_clean_line(
    known: Known, record: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of them is believed, and nothing of them is repeated to the log's reader."""
    name = "a\x1b[31m\n/n1/77"
    with caplog.at_level(logging.WARNING):
        await known.registry.refresh({"a/n1/77": record, name: record, "/n1/": record, "a/n1/" + "7" * 5000: record})
        await known.registry.refresh({"a/n1/77": record, name: record})
    assert known.registry.jobs() == ()
    assert len(caplog.records) == 4  # each once
    for message in caplog.messages:
        assert message.isprintable()
        assert len(message) < 800
    assert all(line.isprintable() for line in known.registry.complaints())


async def test_ten_thousand_registrations_cost_little_and_hide_no_honest_one(
    known: Known, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """What is looked at, remembered and logged is capped; who was known before stays known."""
    honest = start(pass_fds=shows("a"))
    assert await known.claim(honest) == ""
    (target,) = known.registry.alive("a")
    flood = {
        f"x{number}/n1/{honest}": target.model_copy(update={"job": f"x{number}"}).model_dump_json()
        for number in range(10_000)
    }
    with caplog.at_level(logging.WARNING):
        await known.registry.refresh(flood | {f"a/n1/{honest}": target.model_dump_json()})
    assert known.registry.jobs() == ("a",)
    assert len(known.registry.refused) < MAX_TARGETS
    assert len(caplog.records) < 20
    assert len(known.registry.complaints()) < 20


async def test_no_order_reaches_a_stranger(rig: Rig, start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """The whole way: a stranger is registered in Redis, its job holds, a swap orders it out: it is never stopped, and
    the node's record says why."""
    stranger = start()
    async with rig.agent(get_backend, backends={rig.name: ["process"]}):
        target = rig.target("a", stranger)
        await rig.driver.client.hset(rig.group.targets, f"a/{rig.node}/{stranger}", target.model_dump_json())
        await rig.job("b")
        swap = await rig.begin_swap("a", into="b")
        done = await rig.order(rig.command(swap, "prepare", "a", into="b"))
        assert done["step"] == "prepared"  # of job a there is nothing here
        await rig.step("prepare", "commit")
        await rig.order(rig.command(swap, "commit", "a", into="b"))
        assert process_state(stranger) not in "tT"

        async def told() -> bool:
            stored = await rig.driver.client.hget(rig.keys.node_state(rig.node), "complaints")
            return b"does not show" in (stored or b"")

        await until(told, "the complaint is in the node's record")
    assert caplog.text.count("does not show that it takes part") == 1
