"""`timeslice hold GROUP -- COMMAND`: real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import NODE, TIMESLICE, Cli, World, eventually
from tests.conftest import ServerFactory
from timeslice.agent.proof import examine
from timeslice.cli.hold import _register
from timeslice.client.lease import Lease
from timeslice.client.sync import Client
from timeslice.locks import scripts
from timeslice.models import Leave, Target

PYTHON = sys.executable
LOCK = ("hold", "licences", "--lock-only")


def run(cli: Cli, *args: str) -> subprocess.CompletedProcess[str]:
    process = cli.start(*args)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(args, process.returncode, out, err)


@pytest.fixture
def sleeper(cli: Cli) -> subprocess.Popen[str]:
    """A command that holds `licences` for job a, and ends with 7 on SIGTERM, 9 on SIGUSR1."""
    code = (
        "import signal, sys, time\n"
        "for number, code in ((signal.SIGTERM, 7), (signal.SIGUSR1, 9)):\n"
        "    signal.signal(number, lambda *_, code=code: sys.exit(code))\n"
        "print('inside', flush=True)\n"
        "time.sleep(600)"
    )
    process = cli.start(*LOCK, "--job", "a", "--phase", "build", "--lease", "9", "--", PYTHON, "-c", code)
    assert process.stdout is not None
    assert process.stdout.readline() == "inside\n"
    return process


@pytest.mark.parametrize("code", [0, 1, 3, 42])
def test_the_exit_code_is_the_commands_own(cli: Cli, code: int) -> None:
    """Also when it is one that the CLI uses itself."""
    assert run(cli, *LOCK, "--", PYTHON, "-c", f"raise SystemExit({code})").returncode == code


def test_a_command_that_a_signal_ended_gives_128_and_the_signal(cli: Cli) -> None:
    """As shells have it."""
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert run(cli, *LOCK, "--", PYTHON, "-c", kill).returncode == 128 + signal.SIGKILL


def test_output_of_the_command_is_its_own(cli: Cli) -> None:
    """hold adds nothing to stdout and passes the arguments behind -- untouched, options included."""
    done = run(cli, *LOCK, "--", PYTHON, "-c", "import sys; print(sys.argv[1:])", "--help", "--", "x y")
    assert done.stdout == "['--help', '--', 'x y']\n"
    assert done.stderr == ""


def test_the_command_finds_its_job_token_and_server(cli: Cli) -> None:
    """TIMESLICE_JOB, _FENCING_TOKEN, _URL and _PREFIX are set, so that it can use timeslice itself; and _GROUPS, by
    which agents know it."""
    names = ("JOB", "GROUPS", "FENCING_TOKEN", "FENCING_TOKENS", "URL", "PREFIX")
    code = f"import os; print(*(os.environ['TIMESLICE_' + name] for name in {names!r}))"
    done = run(cli, *LOCK, "--job", "a", "--", PYTHON, "-c", code)
    job, groups, token, tokens, url, prefix = done.stdout.split()
    assert (job, groups, url, prefix) == ("a", "licences", cli.url, cli.prefix)
    assert int(token) > 0
    assert tokens == f"licences={token}"


def test_several_groups_are_held_together(cli: Cli, world: World) -> None:
    """Each has its own token; all are free again afterwards."""
    code = "import os; print(os.environ['TIMESLICE_FENCING_TOKENS'], os.environ.get('TIMESLICE_FENCING_TOKEN'))"
    done = run(cli, "hold", "samplers", "trainers", "--lock-only", "--job", "a", "--", PYTHON, "-c", code)
    tokens, single = done.stdout.split()
    assert [each.partition("=")[0] for each in tokens.split(",")] == ["samplers", "trainers"]
    assert single == "None"
    assert [group["phase"] for group in cli.json("groups")["groups"]] == ["idle", "idle"]


def test_two_shells_see_each_other(cli: Cli, sleeper: subprocess.Popen[str]) -> None:
    """While one shell holds, another sees who and in which phase; when the command ends, the group is free."""
    held = cli.json("queue", "licences")["holder"]
    assert (held["job"], held["job_phase"], held["pid"]) == ("a", "build", sleeper.pid)
    sleeper.send_signal(signal.SIGTERM)
    assert sleeper.wait(60) == 7
    assert cli.json("queue", "licences")["holder"] is None


def test_signals_reach_the_command(sleeper: subprocess.Popen[str]) -> None:
    """What is sent to hold is passed on, and hold waits for what the command makes of it."""
    sleeper.send_signal(signal.SIGUSR1)
    assert sleeper.wait(60) == 9


def test_a_wait_limit_that_passes_is_exit_code_4_and_nothing_runs(
    cli: Cli, sleeper: subprocess.Popen[str], tmp_path: Path
) -> None:
    """L06: the command never starts, the message names the holder, the queue is empty again."""
    mark = tmp_path / "ran"
    done = run(cli, *LOCK, "--job", "b", "--timeout", "0.2", "--", "touch", str(mark))
    assert done.returncode == 4
    assert not mark.exists()
    assert "error: group licences: job b was not granted within 0.2 s: job a holds it" in done.stderr
    assert cli.json("queue", "licences")["waiters"] == []


def test_the_wait_limit_of_several_groups_is_told_as_it_was_given(cli: Cli, sleeper: subprocess.Popen[str]) -> None:
    """Not what was left of it when the last group's turn came."""
    done = run(cli, "hold", "a", "licences", "--lock-only", "--job", "b", "--timeout", "0.2", "--", "true")
    assert done.returncode == 4
    assert "job b was not granted within 0.2 s: job a holds it" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_waiting_leaves_the_queue(
    cli: Cli, sleeper: subprocess.Popen[str], number: signal.Signals
) -> None:
    """Interrupted before its turn, hold withdraws its request and exits with 128 + signal."""
    waiting = cli.start(*LOCK, "--job", "b", "--", "true")
    eventually(lambda: [each["job"] for each in cli.json("queue", "licences")["waiters"]] == ["b"])
    waiting.send_signal(number)
    _, err = waiting.communicate(timeout=60)
    assert waiting.returncode == 128 + number
    assert "Traceback" not in err
    assert cli.json("queue", "licences")["waiters"] == []


def test_a_cancelled_wait_is_refused_by_name(cli: Cli, sleeper: subprocess.Popen[str]) -> None:
    """Exit code 6 when an operator takes the request out of the queue."""
    waiting = cli.start(*LOCK, "--job", "b", "--", "true")
    eventually(lambda: cli.json("queue", "licences")["waiters"])
    assert cli("cancel", "licences", "--job", "b").exit_code == 0
    _, err = waiting.communicate(timeout=60)
    assert waiting.returncode == 6
    assert "cancelled the wait of job b" in err


def lose(cli: Cli, world: World, process: subprocess.Popen[str]) -> None:
    """End the lease of the running command behind its back, by an operator's yield, and have another job hold."""
    lease = cli.json("queue", "licences")["holder"]["lease_id"]
    world.acquire("licences", "b", lock_only=True)
    world.driver.run(scripts.yield_(world.keys.group("licences"), lease, None))


@pytest.mark.timing
def test_a_lost_lease_warns_and_the_command_goes_on(cli: Cli, world: World, sleeper: subprocess.Popen[str]) -> None:
    """Without --kill-on-lost the command decides itself; the warning names job and group."""
    lose(cli, world, sleeper)
    assert sleeper.stderr is not None
    told = ""
    while "warning: job a lost licences" not in told:
        line = sleeper.stderr.readline()
        assert line, "it ended without a warning"
        told += line
    assert sleeper.poll() is None
    sleeper.send_signal(signal.SIGUSR1)
    assert sleeper.wait(60) == 9


@pytest.mark.timing
def test_a_lost_lease_ends_the_command_when_asked_to(cli: Cli, world: World) -> None:
    """With --kill-on-lost it gets SIGTERM at the next renewal."""
    code = (
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "print(1, flush=True)\ntime.sleep(600)"
    )
    process = cli.start(*LOCK, "--job", "a", "--kill-on-lost", "--lease", "9", "--", PYTHON, "-c", code)
    assert process.stdout is not None
    process.stdout.readline()
    lose(cli, world, process)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 7
    assert "it is being terminated" in err


def test_wrong_command_lines_are_told_before_anything_is_held(cli: Cli) -> None:
    """No command, no such command, a wrong priority: told at once, and no group comes into being."""
    assert run(cli, *LOCK).returncode == 2
    assert run(cli, *LOCK, "--").returncode == 2
    assert run(cli, "hold", "--lock-only", "--", "true").returncode == 2
    assert run(cli, *LOCK, "--priority", "101", "--", "true").returncode == 2
    missing = run(cli, *LOCK, "--", "no-such-command-here")
    assert (missing.returncode, missing.stderr.count("no such command")) == (127, 1)
    for there in ("/etc/passwd", "/etc"):
        known = run(cli, *LOCK, "--", there)
        assert (known.returncode, known.stderr.count("not executable")) == (126, 1)
    assert cli.json("groups")["groups"] == []


def test_a_group_that_nobody_serves_while_others_are_served_is_unknown(cli: Cli, world: World) -> None:
    """A mistyped group is exit code 3 with the nearest names, at once, and leaves no request behind."""
    world.serve("trainers")
    done = run(cli, "hold", "trainer", "--job", "a", "--", "true")
    assert done.returncode == 3
    assert "trainers" in done.stderr
    assert "use --lock-only" in done.stderr
    assert "lock_only" not in done.stderr
    assert [group["group"] for group in cli.json("groups")["groups"]] == ["trainers"]


def test_without_a_server_nothing_runs(tmp_path: Path) -> None:
    """It is waited for as the group is, and said at once; at the end of the time exit code 5, and the command did not
    start."""
    mark = tmp_path / "ran"
    command = [TIMESLICE, "--url", "redis://127.0.0.1:1", *LOCK, "--timeout", "2", "--", "touch", str(mark)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 5
    assert "waiting for Redis: Redis at redis://127.0.0.1:1 does not answer" in done.stderr
    assert not mark.exists()


def test_timeslice_disable_runs_the_command_without_any_server(tmp_path: Path) -> None:
    """TIMESLICE_DISABLE=1: the command runs at once, and it is said once that nothing is held."""
    command = [TIMESLICE, *LOCK, "--", PYTHON, "-c", "raise SystemExit(11)"]
    environment = {**os.environ, "TIMESLICE_DISABLE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
    assert done.returncode == 11
    assert done.stderr.count("TIMESLICE_DISABLE=1") == 1


def test_the_agents_of_the_node_learn_of_the_command(cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a served group the command's process is a target of the job: its state is what has to be moved."""
    monkeypatch.setenv("TIMESLICE_NODE", NODE)
    world.serve("trainers")
    done = run(cli, "hold", "trainers", "--job", "a", "--", PYTHON, "-c", "import os; print(os.getpid())")
    assert done.returncode == 0, done.stderr
    targets = world.driver.view(world.keys.group("trainers")).targets
    assert f"a/{NODE}/{done.stdout.strip()}" in targets


def test_what_leaves_is_registered_for_the_command_and_what_it_starts(
    cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--mode, --tag and --slot say it of the command's process, and a workload inside of it says the same of itself."""
    monkeypatch.setenv("TIMESLICE_NODE", NODE)
    world.serve("trainers")
    code = (
        "import os\n"
        "from timeslice.client.identity import this_target\n"
        "print(os.getpid(), this_target('trainers', 'a', 'n1').leave.model_dump_json())"
    )
    asked = ("--mode", "discard", "--tag", "kv_cache", "--tag", "lora", "--slot", "x")
    done = run(cli, "hold", "trainers", "--job", "a", *asked, "--", PYTHON, "-c", code)
    assert done.returncode == 0, done.stderr
    pid, _, inside = done.stdout.partition(" ")
    record = world.driver.view(world.keys.group("trainers")).targets[f"a/{NODE}/{pid}"]
    expected = Leave(mode="discard", tags=("kv_cache", "lora"), slot="x")
    assert (Target.model_validate_json(record).leave, Leave.model_validate_json(inside)) == (expected, expected)


def test_agents_take_any_program_that_hold_runs_for_the_jobs(
    cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It need not know of timeslice: hold lets it show the job and the groups, and no other group."""
    monkeypatch.setenv("TIMESLICE_NODE", NODE)
    world.serve("trainers")
    cli.start("hold", "trainers", "--job", "a", "--", "sleep", "600")

    def registered() -> str:  # hold registers itself as well, before
        records = world.driver.view(world.keys.group("trainers")).targets.values()
        return next((each for each in records if names_sleep(Target.model_validate_json(each).pid)), "")

    def names_sleep(pid: int) -> bool:
        return Path(f"/proc/{pid}/comm").read_text() == "sleep\n"

    target = Target.model_validate_json(eventually(registered))
    evidence = examine(target.pid, target.start)
    assert evidence.refusal("trainers", target) is None
    assert "does not show" in (evidence.refusal("samplers", target) or "")


@pytest.mark.parametrize(
    "code",
    [
        "import time; time.sleep(600)",
        pytest.param(
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)",
            marks=pytest.mark.slow,  # it is killed after a while
        ),
    ],
)
def test_a_command_that_the_agents_can_not_be_told_of_is_ended_before_the_group_is_given_up(
    cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """Else it would go on without the right to the device, and nobody could move its state."""
    monkeypatch.setenv("TIMESLICE_NODE", NODE)
    world.serve("trainers")
    targets = world.keys.group("trainers").targets
    world.driver.client.hset(
        targets, mapping={f"b/{NODE}/{pid}": "{}" for pid in range(1, 10_000)}
    )  # one is left: hold's
    done = run(cli, "hold", "trainers", "--job", "a", "--", PYTHON, "-c", code)
    assert done.returncode == 6
    assert f"{PYTHON} is ended: the agents of this node could not be told of it" in done.stderr
    assert not world.driver.view(world.keys.group("trainers")).state.get("lease_id")


@pytest.mark.slow
def test_the_agents_are_told_of_the_command_when_the_server_answers_again(
    server_factory: ServerFactory, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is silent for longer than a call waits ends no command; it hears of it afterwards."""
    monkeypatch.setenv("TIMESLICE_NODE", NODE)
    url = server_factory().url
    world = World(url, prefix)
    world.serve("trainers")
    with Client(url, "a", prefix) as client, client.hold("trainers", timeout=20) as lease:
        world.driver.client.client_pause(12_000, all=True)
        assert isinstance(lease, Lease)
        _register(client, [lease], os.getppid())
        name = f"a/{NODE}/{os.getppid()}"
        eventually(lambda: name in world.driver.view(world.keys.group("trainers")).targets)
    world.driver.close()
