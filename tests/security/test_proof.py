"""Agents act only on processes that show that they are the job's, whatever stands in Redis.

The processes here are real, the registrations hostile: written as anybody may write them who can reach the server.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.agent.rig import Rig, until
from tests.security.registry import SLEEP, Known, Start
from tests.support.jobs import process_state, shows
from timeslice.agent import procfs
from timeslice.backends.registry import get_backend
from timeslice.client.identity import show_membership
from timeslice.errors import BackendError, FaultKind

NOBODY = 65534


def named(job: str = "", groups: str = "g", **more: str) -> dict[str, str]:
    """The environment that shows a job of groups."""
    return {"TIMESLICE_JOB": job, "TIMESLICE_GROUPS": groups, **more}


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs another user's process")


async def test_a_process_that_shows_nothing_is_not_touched(known: Known, start: Start) -> None:
    """What a registration says of pid, start time and user may all be true: it is a claim all the same."""
    why = await known.claim(start())
    assert "does not show that it takes part in job a" in why
    assert known.registry.jobs() == ()
    assert known.registry.ended == set()


@pytest.mark.parametrize(
    "options",
    [{"pass_fds": True}, {"env": named("a")}, {"env": named(TIMESLICE_JOB_ID="a")}, {"env": named("a", "f, g")}],
    ids=["memory-file", "environment", "alias", "two-groups"],
)
async def test_each_proof_is_enough(known: Known, start: Start, options: dict[str, Any]) -> None:
    """A memory file that names group and job, or both in the environment that the process was started with."""
    if options.get("pass_fds"):
        options = {"pass_fds": shows("a")}
    pid = start(**options)
    assert await known.claim(pid) == ""
    assert [target.pid for target in known.registry.alive("a")] == [pid]


@pytest.mark.parametrize(
    "options",
    [{"pass_fds": True}, {"env": named("b", TIMESLICE_JOB_ID="a")}, {"env": named("aa")}],
    ids=["memory-file", "environment", "prefix"],
)
async def test_another_jobs_process_is_not_this_jobs(known: Known, start: Start, options: dict[str, Any]) -> None:
    """Nobody who may write to Redis can have another job's process stopped by calling it his."""
    if options.get("pass_fds"):
        options = {"pass_fds": shows("b", "a.b", "xa")}
    assert "does not show" in await known.claim(start(**options))


def in_slurm(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """As if Slurm had put every process into this step of its job 42."""
    cgroup = f"0::/system.slice/slurmstepd.scope/job_42/step_{step}/user/task_0\n"
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, **kw: cgroup if path.name == "cgroup" else read(path, **kw))


async def test_slurms_control_group_is_a_proof(known: Known, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm put the process there; the job that the numbers name is that job alone, and each step is one of its own."""
    in_slurm(monkeypatch, "0")
    pid = start(env=named())
    for other in ("slurm-4", "job_42", "slurm-42", "slurm-42.1"):
        assert "does not show" in await known.claim(pid, other)
    assert await known.claim(pid, "slurm-42.0") == ""
    assert "does not show" in await known.claim(start(), "slurm-42.0")  # which group of this agent, it must say


async def test_a_batch_script_is_the_allocations_own_program(
    known: Known, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it runs without srun is in a step that has a name and no number."""
    in_slurm(monkeypatch, "batch")
    pid = start(env=named())
    assert "does not show" in await known.claim(pid, "slurm-42.0")
    assert await known.claim(pid, "slurm-42") == ""


async def test_a_name_that_was_given_counts_before_slurms(
    known: Known, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that TIMESLICE_JOB makes one job are that job's, and no second one's by their control groups."""
    in_slurm(monkeypatch, "0")
    pid = start(env=named("a"))
    assert "does not show" in await known.claim(pid, "slurm-42.0")
    assert await known.claim(pid) == ""


FORKS = """
import os, time
from timeslice.backends.registry import get_backend
from timeslice.client.identity import show_membership
show_membership("g", "a")
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
show_membership("g", "a")
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
    return [int(number) for number, link in links.items() if link == f"/memfd:timeslice:g/{job} (deleted)"]


def test_the_clients_own_proof_survives_a_program_that_closes_its_files() -> None:
    """Registering once more shows it again, and only once."""
    show_membership("g", "closing")
    show_membership("g", "closing")
    (first,) = shown_files("closing")
    os.close(first)
    show_membership("g", "closing")
    assert len(shown_files("closing")) == 1


@needs_root
async def test_a_file_that_another_user_sent_proves_nothing(known: Known, start: Start) -> None:
    """Whoever can hand a descriptor to a daemon could else have it stopped: its own user must have made the file."""
    assert "does not show" in await known.claim(start(user=NOBODY, group=NOBODY, pass_fds=shows("a")))


@needs_root
async def test_another_users_process_is_not_what_was_registered(known: Known, start: Start) -> None:
    """Neither with its real user nor with a made-up one."""
    pid = start(user=NOBODY, group=NOBODY, env=named("a"))
    assert "runs as user id 65534, registered was 1000" in await known.claim(pid, uid=1000)
    assert await known.claim(pid) == ""  # it shows it, and its user is told truly: a job of that user's


@needs_root
async def test_a_setuid_program_is_not_touched(known: Known, start: Start) -> None:
    """Its environment is its caller's, its rights are not."""
    drop = "import os, time\nos.setresuid(65534, 0, 0)\nprint('up', flush=True)\ntime.sleep(600)"
    pid = start([sys.executable, "-c", drop], env=named("a"))
    assert "several users at once" in await known.claim(pid)


def kernel_threads() -> list[int]:
    numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in numbers if (found := procfs.look_at(pid)) and found.kernel]


async def test_nobody_can_have_the_agent_stop_itself_or_the_system(known: Known) -> None:
    """The first process, the agent, whoever started it, and the kernel's own are never taken, whatever they show."""
    show_membership("g", "a")
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


@needs_root
async def test_a_process_that_becomes_another_users_is_not_touched_any_more(known: Known, start: Start) -> None:
    """It was the job's when it registered; the look right before each step says that it is not now."""
    change = "import os, sys, time\nprint('up', flush=True)\nsys.stdin.read()\nos.setuid(65534)\ntime.sleep(600)"
    reading, writing = os.pipe()
    pid = start([sys.executable, "-c", change], env=named("a"), stdin=reading)
    os.close(reading)
    assert await known.claim(pid) == ""
    targets = known.registry.alive("a")
    known.registry.verify(targets)
    os.close(writing)
    await until(lambda: (found := procfs.look_at(pid)) is not None and found.uid == NOBODY, "it is another user's")
    with pytest.raises(BackendError, match="runs as user id 65534 now") as refused:
        known.registry.verify(targets)
    assert refused.value.kind is FaultKind.POISONED


async def test_no_order_reaches_a_stranger(rig: Rig, start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """The whole way: a stranger is registered in Redis, its job holds, a swap orders it out: it is never stopped, the
    order fails, for where the job is nobody can see, and the node's record says why."""
    stranger = start()
    async with rig.agent(get_backend, backends={rig.name: ["process"]}):
        target = rig.target("a", stranger)
        await rig.driver.client.hset(rig.group.targets, f"a/{rig.node}/{stranger}", target.model_dump_json())
        await rig.job("b")
        swap = await rig.begin_swap("a", into="b")
        done = await rig.order(rig.command(swap, "prepare", "a", into="b"))
        assert done["step"] == "failed"
        assert "job a may still be on the devices of node n1" in done["error"]
        assert process_state(stranger) not in "tT"

        async def told() -> bool:
            stored = await rig.driver.client.hget(rig.keys.node_state(rig.node), "complaints")
            return b"does not show" in (stored or b"")

        await until(told, "the complaint is in the node's record")
    assert caplog.text.count("is ignored: it does not show that it takes part") == 1
