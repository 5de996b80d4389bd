"""`timeslice hold -- COMMAND`: the command runs inside of its hold, and never without it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import TIMESLICE, Cli, World, eventually
from timeslice.locks import scripts

PYTHON = sys.executable
LOCK = ("hold", "licences", "--lock-only")


def waiting(cli: Cli, group: str) -> list[str]:
    return [each["job"] for each in cli.json("queue", group)["waiters"]]


@pytest.mark.parametrize("options", [(), ("--kill-on-lost",)])
def test_the_command_starts_with_all_leases_or_not_yet(
    cli: Cli, world: World, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """A lease that is lost while the next group is waited for is had anew before the command runs, and nobody is told
    that a command which did not run was terminated."""
    blocker = world.hold_lock_only("samplers", "b")
    mark = tmp_path / "ran"
    both = ("hold", "trainers", "samplers", "--lock-only", "--job", "a", *options)
    process = cli.start(*both, "--", "touch", str(mark))
    eventually(lambda: waiting(cli, "samplers") == ["a"])
    lease = cli.json("queue", "trainers")["holder"]["lease_id"]
    world.acquire("trainers", "c", lock_only=True)
    world.driver.run(scripts.yield_(world.keys.group("trainers"), lease, None))
    world.driver.run(scripts.yield_(world.keys.group("samplers"), "w-b", blocker.token))
    eventually(lambda: waiting(cli, "trainers") == ["a"])
    assert cli.json("queue", "samplers")["holder"] is None
    assert not mark.exists()
    token = int(cli.json("queue", "trainers")["holder"]["token"])
    world.driver.run(scripts.yield_(world.keys.group("trainers"), "w-c", token))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert mark.exists()
    assert "terminated" not in err


def started(process: subprocess.Popen[str]) -> int:
    """The process id that the command says."""
    assert process.stdout is not None
    return int(process.stdout.readline())


def is_running(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_command_does_not_outlive_a_hold_that_is_killed(cli: Cli) -> None:
    """kill -9 can't be passed on, so the kernel ends the command, whatever that does with other signals."""
    code = (
        "import os, signal, time\n"
        "for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(600)"
    )
    process = cli.start(*LOCK, "--", PYTHON, "-c", code)
    pid = started(process)
    assert is_running(pid)
    process.kill()
    eventually(lambda: not is_running(pid))


CHILD = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
GRANDCHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"
APART = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}], env={{}}, start_new_session=True)"
INNER = f"exec {TIMESLICE} hold inner --lock-only -- sh -c"


@pytest.mark.parametrize(
    "command",
    [
        ["sh", "-c", f'{PYTHON} -c "$0"; true', CHILD],
        ["sh", "-c", f'setsid {PYTHON} -c "$0" & wait', CHILD],
        ["sh", "-c", f'{PYTHON} -c "$0"; true', GRANDCHILD],
        ["sh", "-c", f'{PYTHON} -c "$0"; true', APART],
        ["sh", "-c", f"""{INNER} '{PYTHON} -c "$0"; true' "$0" """, CHILD],
    ],
    ids=["of a shell", "in a session of its own", "of a child", "without an environment", "of a hold inside"],
)
def test_nothing_that_the_command_has_started_outlives_it(cli: Cli, command: list[str]) -> None:
    """It would go on outside of the hold, beside whoever is let in next."""
    process = cli.start(*LOCK, "--", *command)
    pid = started(process)
    assert is_running(pid)
    process.kill()
    eventually(lambda: not is_running(pid))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_a_command_has_started_ends_when_it_is_told_to(cli: Cli, world: World, number: signal.Signals) -> None:
    """A shell ends by the signal, and what it waited for would go on outside of the hold."""
    process = cli.start(*LOCK, "--", "sh", "-c", f'{PYTHON} -c "$0"; true', CHILD)
    pid = started(process)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert not is_running(pid)


def test_what_a_command_leaves_in_the_background_stays(cli: Cli) -> None:
    """It has ended by itself, and a service that it was to start goes on."""
    process = cli.start(*LOCK, "--", "sh", "-c", f'{PYTHON} -c "$0" &', CHILD)
    pid = started(process)
    try:
        assert process.wait(60) == 0
        assert is_running(pid)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_the_command_finds_signals_and_descriptors_as_without_a_hold(cli: Cli) -> None:
    """What starts it changes nothing that the command could see: ignored signals, open files, its parent."""
    show = "grep SigIgn /proc/self/status; ls /proc/self/fd; echo $PPID"
    process = cli.start(*LOCK, "--", "sh", "-c", show)
    out, _ = process.communicate(timeout=60)
    plain = subprocess.run(["sh", "-c", show], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    assert out.splitlines()[:-1] == plain.stdout.splitlines()[:-1]
    assert int(out.splitlines()[-1]) == process.pid
    assert int(plain.stdout.splitlines()[-1]) == os.getpid()


def test_a_command_that_the_kernel_refuses_is_told_with_its_reason(cli: Cli, tmp_path: Path) -> None:
    """It is no command of the shell's that failed: nothing was run."""
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    process = cli.start(*LOCK, "--", str(script))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 126
    assert err == f"error: {script}: No such file or directory; nothing was run\n"


def test_a_signal_that_comes_while_the_command_is_being_started_reaches_it(cli: Cli, world: World) -> None:
    """It may not fall between hold's own wait and the command."""
    world.hold_lock_only("licences", "b")
    process = cli.start(*LOCK, "--job", "a", "--", "sleep", "600")
    eventually(lambda: waiting(cli, "licences") == ["a"])
    assert cli("yield", "licences", "--job", "b").exit_code == 0
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert cli.json("queue", "licences")["holder"] is None
