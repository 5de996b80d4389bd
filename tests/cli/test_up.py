"""`timeslice up`: real processes, from start to a clean end."""

from __future__ import annotations

import json
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cli.conftest import TIMESLICE
from tests.cli.stack import Up, cli, family, mounts, ready, server_of, shown, stop
from tests.support.ports import free_port
from timeslice.cli.output import parse_device_size
from timeslice.embedded import EmbeddedServer

PYTHON = sys.executable


def test_everything_runs_when_the_line_is_there(up: Up, folder: Path) -> None:
    """After the export line both groups are served by a living agent with emulated devices, and driven."""
    url = ready(up())
    assert url.startswith("unix://")
    groups = {group["group"]: group for group in shown("status")["groups"]}
    assert set(groups) == {"samplers", "trainers"}
    for group in groups.values():
        assert group["mode"] == "served"
        assert group["emulated"] is True
        assert [node["alive"] for node in group["nodes"]] == [True]
    assert all(group["coordinator"] for group in groups.values())
    assert cli("doctor").returncode == 0


def test_others_are_kept_out(up: Up, folder: Path) -> None:
    """Socket and URL file are this user's alone."""
    url = ready(up())
    for path in (Path(url.removeprefix("unix://")), folder / "url"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_two_shells_without_any_configuration(up: Up) -> None:
    """One shell holds by `hold`, another sees it by `queue`; a program finds the server by itself too."""
    ready(up())
    with subprocess.Popen(
        [TIMESLICE, "hold", "trainers", "--job", "a", "--", PYTHON, "-c", "print(1, flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "1\n"
        assert shown("queue", "trainers")["holder"]["job"] == "a"
        holder.stdin.write("\n")
        holder.stdin.close()
        assert holder.wait(30) == 0
    code = "import timeslice\nwith timeslice.hold('trainers', job='b') as lease: print(lease.grant.how)"
    program = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert program.stdout.strip() in {"first load", "no-op"}, program.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_leaves_nothing_behind(up: Up, folder: Path, number: signal.Signals) -> None:
    """Exit code 0; no process, no mount, no file is left, and the next start works."""
    process = up()
    ready(process)
    children = family(process)
    assert children
    err = stop(process, number)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert psutil.wait_procs(children, timeout=20)[1] == []
    assert mounts(folder) == []
    assert list(folder.rglob("*")) == []
    ready(up())


def test_while_a_job_holds_it_stops_too(up: Up, folder: Path) -> None:
    """A holder does not keep `up` from stopping cleanly."""
    process = up()
    ready(process)
    with subprocess.Popen(
        [TIMESLICE, "hold", "trainers", "--job", "a", "--", PYTHON, "-c", "print(1, flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        stop(process)
        assert process.returncode == 0
        assert list(folder.rglob("*")) == []
        holder.kill()  # its command reads from a pipe that is closed now, and ends by itself


def test_a_second_one_says_that_one_runs_and_where(up: Up, folder: Path) -> None:
    """Exit code 6 with process and URL; the first goes on undisturbed, devices included."""
    process = up()
    url = ready(process)
    before = mounts(folder)
    second = cli("up")
    assert second.returncode == 6
    assert f"runs already as process {process.pid} at {url}" in second.stderr
    assert process.poll() is None
    assert mounts(folder) == before
    assert cli("status").returncode == 0


def test_a_second_signal_forces_the_end(up: Up, folder: Path) -> None:
    """While the clean end hangs (here: the server is stopped), one more signal ends all at once."""
    process = up()
    ready(process)
    children = family(process)
    server_of(process).suspend()
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "once more to force it" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 128 + signal.SIGINT
    assert psutil.wait_procs(children, timeout=20)[1] == []
    assert not (folder / "url").exists()
    assert mounts(folder) == []


def test_json_is_one_line_when_ready(up: Up) -> None:
    """--json replaces the export line by a document with all addresses."""
    process = up("--json", "--group", "critics=4M", "--group", "samplers")
    assert process.stdout is not None
    told = json.loads(process.stdout.readline())
    assert told["schema"] == 1
    assert told["pid"] == process.pid
    assert told["device"] == "emulated"
    sizes = {group["group"]: group["device_bytes"] for group in told["groups"]}
    assert sizes == {"samplers": 8 << 20, "trainers": 8 << 20, "critics": 4 << 20}
    assert cli("--url", told["url"], "group", "show", "critics").returncode == 0


def test_a_port_is_on_loopback_only(up: Up) -> None:
    """--port adds TCP on 127.0.0.1; the CLI reaches it there."""
    port = free_port()
    ready(up("--port", str(port)))
    assert cli("--url", f"localhost:{port}", "groups").returncode == 0
    listening = [each.laddr for each in psutil.net_connections("tcp") if each.status == "LISTEN" and each.laddr]
    assert {each.ip for each in listening if each.port == port} == {"127.0.0.1"}


def test_data_survives_a_restart(up: Up, tmp_path: Path) -> None:
    """With --data settings and the order of tokens are there again after a stop."""
    first = up("--data", str(tmp_path / "data"))
    ready(first)
    assert cli("group", "set", "trainers", "--order", "7").returncode == 0
    assert cli("hold", "trainers", "--job", "a", "--", "true").returncode == 0
    told = cli("events", "trainers", "--json").stdout.splitlines()
    before = max(json.loads(line).get("token", 0) for line in told)
    assert before > 0
    stop(first)
    assert first.returncode == 0
    ready(up("--data", str(tmp_path / "data")))
    assert shown("group", "show", "trainers")["config"]["order"] == 7
    code = "import os; print(os.environ['TIMESLICE_FENCING_TOKEN'])"
    done = cli("hold", "trainers", "--job", "a", "--timeout", "20", "--", PYTHON, "-c", code)
    assert int(done.stdout) > before


def test_the_status_line_without_a_terminal_is_one_line_a_change(up: Up) -> None:
    """Piped stderr gets a line when something changed and none otherwise; stdout stays as it was."""
    process = up()
    ready(process)
    assert process.stderr is not None
    lines = [process.stderr.readline() for _ in range(2)]
    assert lines[0].startswith("ready at unix://")
    assert "emulated devices: samplers 8 MiB, trainers 8 MiB" in lines[0]
    assert lines[1] == "samplers: idle | trainers: idle\n"
    hold = [TIMESLICE, "hold", "trainers", "--job", "a", "--phase", "train", "--", "cat"]
    with subprocess.Popen(hold, stdin=subprocess.PIPE) as holder:
        assert process.stderr.readline() == "samplers: idle | trainers: a (train)\n"
        assert holder.stdin is not None
        holder.stdin.close()  # cat ends
    assert process.stderr.readline() == "samplers: idle | trainers: idle\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == ""


def test_a_server_that_dies_ends_it_with_a_message(up: Up, folder: Path) -> None:
    """It does not sit there with nothing behind it: exit code 1, the cause, and nothing left."""
    process = up()
    ready(process)
    server_of(process).kill()
    _, err = process.communicate(timeout=90)
    assert process.returncode == 1
    assert "error: the server ended unexpectedly" in err
    assert mounts(folder) == []


def test_url_and_up_do_not_go_together(server: EmbeddedServer) -> None:
    """A server named by flag is not what `up` would start: a usage error that names the daemons."""
    done = cli("--url", server.url, "up")
    assert done.returncode == 2
    assert "timeslice coordinator" in done.stderr


@pytest.mark.parametrize("arguments", [("--group", "x=0"), ("--device-size", "0")])
def test_a_device_of_no_size_is_a_usage_error(folder: Path, arguments: tuple[str, ...]) -> None:
    """It does not become one of the default size, and nothing starts."""
    done = cli("up", *arguments)
    assert done.returncode == 2
    assert "a device needs some memory" in done.stderr
    assert list(folder.rglob("*")) == []


def test_a_device_larger_than_the_memory_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    """It may be had, for pages count only when they are used; but it can't be filled."""
    assert parse_device_size("4096T") == 4096 << 40
    assert "warning: an emulated device of 4096 TiB can't be filled" in capsys.readouterr().err


def test_a_port_in_use_is_refused(up: Up) -> None:
    """Exit code 6 and one sentence."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        process = up("--port", str(port))
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (6, f"error: port {port} is in use; choose another --port\n")


def test_another_server_in_the_environment_is_pointed_out(up: Up) -> None:
    """TIMESLICE_URL wins over what `up` publishes, which would surprise: it is said."""
    process = up(TIMESLICE_URL="redis://elsewhere:6379")
    ready(process)
    assert process.stderr is not None
    process.stderr.readline()
    assert "TIMESLICE_URL is set" in process.stderr.readline()
