from __future__ import annotations

import os
import re
import socket
import stat
from pathlib import Path

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from timeslice.addresses import normalise_url, redact_url, socket_path
from timeslice.errors import InvalidNameError, UsageError
from timeslice.settings import (
    Settings,
    _default_runtime_dir,
    default_job,
    default_node,
    find_url,
    publish_url,
    runtime_dir,
    url_file,
    withdraw_url,
)


def test_defaults_without_any_variable() -> None:
    """With nothing set, the prefix is ts, holds work, and everything else is unknown."""
    settings = Settings()
    assert (settings.url, settings.job, settings.node) == (None, None, None)
    assert (settings.prefix, settings.disable) == ("ts", False)


def test_variables_are_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of the environment is seen by the next Settings, for launchers set variables late."""
    assert Settings().prefix == "ts"
    monkeypatch.setenv("TIMESLICE_PREFIX", "other")
    monkeypatch.setenv("TIMESLICE_DISABLE", "1")
    assert (Settings().prefix, Settings().disable) == ("other", True)


@pytest.mark.parametrize(
    ("variable", "value", "error"),
    [
        ("TIMESLICE_PREFIX", "a{b}", InvalidNameError),
        ("TIMESLICE_JOB", "a b", InvalidNameError),
        ("TIMESLICE_JOB_ID", "-a", InvalidNameError),
        ("TIMESLICE_NODE", "a/b", InvalidNameError),
        ("TIMESLICE_DISABLE", "maybe", UsageError),
    ],
)
def test_a_bad_value_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, error: type[UsageError]
) -> None:
    """A value that can't be used raises an error naming the variable and the value."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(error, match=f"^{variable}: .*{re.escape(value)}"):
        Settings()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"TIMESLICE_JOB": "a", "TIMESLICE_JOB_ID": "b", "SLURM_JOB_ID": "7"}, "a"),
        ({"TIMESLICE_JOB": "", "TIMESLICE_JOB_ID": "b", "SLURM_JOB_ID": "7"}, "b"),
        ({"SLURM_JOB_ID": "7"}, "slurm-7"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, "slurm-7.0"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEPID": "12"}, "slurm-7.12"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "4294967291"}, "slurm-7"),  # the batch script
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "interactive"}, "slurm-7"),
        ({"TIMESLICE_NODE": "n1"}, "n1-PID"),
    ],
)
def test_the_job_is_named_by_the_first_that_is_set(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    """TIMESLICE_JOB, TIMESLICE_JOB_ID, Slurm's step or job, then node and process, in this order."""
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert default_job() == expected.replace("PID", str(os.getpid()))  # two test workers must name the test alike


def test_a_long_node_name_leaves_room_for_the_process_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes on a node with the longest allowed name still get different, valid job ids."""
    monkeypatch.setenv("TIMESLICE_NODE", "n" * 63)
    job = default_job()
    assert len(job) == 63
    assert job.endswith(f"n-{os.getpid()}")


@pytest.mark.parametrize(
    ("host", "expected"), [("gpu-1.local", "gpu-1.local"), ("my host!", "my-host"), ("--", "node")]
)
def test_a_node_is_called_as_its_host(monkeypatch: pytest.MonkeyPatch, host: str, expected: str) -> None:
    """The host name, with what the naming rule forbids replaced, names the node."""
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    assert default_node() == expected


def test_the_runtime_folder_is_private(clean_environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing runtime folder is made for this user alone, whatever the umask."""
    monkeypatch.setenv("TIMESLICE_RUNTIME_DIR", str(clean_environment / "new"))
    old = os.umask(0)
    try:
        made = runtime_dir()
    finally:
        os.umask(old)
    assert made == clean_environment / "new"
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_the_session_folder_is_used_when_it_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """XDG_RUNTIME_DIR holds the runtime folder; one that does not exist is passed over."""
    monkeypatch.delenv("TIMESLICE_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_dir() == tmp_path / "timeslice"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    assert _default_runtime_dir() == Path(f"/tmp/timeslice-{os.getuid()}")


def _link(path: Path) -> None:
    (path.parent / "real").mkdir()
    path.symlink_to(path.parent / "real")


def _others_write(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def _another_owner(path: Path) -> None:
    path.mkdir(0o700)
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(path, 12345, 12345)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (_link, "symbolic link"),
        (_others_write, "other users may write"),
        (_another_owner, "belongs to user id 12345"),
        (Path.touch, "File exists"),
    ],
)
def test_a_runtime_folder_that_others_control_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, prepare: object, message: str
) -> None:
    """A folder through which another user could redirect our clients is refused, saying why."""
    assert callable(prepare)
    prepare(tmp_path / "run")
    monkeypatch.setenv("TIMESLICE_RUNTIME_DIR", str(tmp_path / "run"))
    with pytest.raises(UsageError, match=f"{message}.*TIMESLICE_RUNTIME_DIR"):
        runtime_dir()


def test_the_url_comes_from_the_most_specific_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flag over TIMESLICE_URL over a target in code over the file of `timeslice up`."""
    publish_url("unix:///file")
    assert find_url() == "unix:///file"
    assert find_url(target="code:1") == "redis://code:1"
    monkeypatch.setenv("TIMESLICE_URL", "env:2")
    assert find_url(target="code:1") == "redis://env:2"
    assert find_url("flag:3", target="code:1") == "redis://flag:3"


def test_without_any_server_the_error_says_how_to_start_one() -> None:
    """With no URL anywhere the user learns of `timeslice up` and TIMESLICE_URL."""
    with pytest.raises(UsageError, match=r"timeslice up.*TIMESLICE_URL="):
        find_url()


def test_the_url_file_is_private_and_withdrawn_by_its_writer_only() -> None:
    """Only the owner reads the URL file, and a server that stops leaves a newer server's URL alone."""
    publish_url("redis://:secret@old:1")
    assert stat.S_IMODE(url_file().stat().st_mode) == 0o600
    publish_url("redis://new:1")
    withdraw_url("redis://:secret@old:1")
    assert find_url() == "redis://new:1"
    withdraw_url("redis://new:1")
    assert not url_file().exists()
    withdraw_url("redis://new:1")  # a second time is harmless


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("localhost:7379", "redis://localhost:7379"),
        ("db", "redis://db:6379"),
        ("[::1]:7", "redis://[::1]:7"),
        (" h:1 ", "redis://h:1"),
        ("redis://:pw@h/3", "redis://:pw@h:6379/3"),
        ("rediss://u:p@h:1/0?ssl_cert_reqs=none", "rediss://u:p@h:1/0?ssl_cert_reqs=none"),
        ("unix:///run/a.sock?db=2", "unix:///run/a.sock?db=2"),
        ("/run/my dir/a.sock", "unix:///run/my%20dir/a.sock"),
    ],
)
def test_short_forms_become_urls(text: str, expected: str) -> None:
    """host, host:port and a socket's path become URLs that redis-py takes; URLs keep their parts."""
    assert normalise_url(text) == expected
    redis.Redis.from_url(normalise_url(text)).close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http://h:1", "no Redis URL"),
        ("dns:///orchestrator:50051", "no Redis URL"),
        ("h:port", "no usable port"),
        ("h:70000", "no usable port"),
        ("", "no host"),
        ("unix://", "no socket"),
    ],
)
def test_what_can_not_be_a_server_is_refused(text: str, message: str) -> None:
    """A URL of another protocol or without a usable address raises an error with the right form."""
    with pytest.raises(UsageError, match=message):
        normalise_url(text)


def test_a_refused_url_does_not_show_its_password() -> None:
    """The error about a bad URL hides the password in it."""
    with pytest.raises(UsageError) as caught:
        normalise_url("http://user:hunter2@h")
    assert "hunter2" not in str(caught.value)


@given(st.text(st.characters(exclude_characters="@&", codec="ascii"), min_size=9), st.sampled_from("#/?:"))
def test_no_password_survives_redaction(secret: str, awkward: str) -> None:
    """Passwords are hidden in both places a URL may carry them, escaped or not."""
    secret += awkward
    for url in (f"redis://:{secret}@h:1/0", f"redis://u:{secret}@h", f"unix:///s?db=1&password={secret}"):
        assert secret not in redact_url(url)


def test_redaction_keeps_what_is_no_secret() -> None:
    """User, host and path stay readable."""
    assert redact_url("rediss://me:pw@h:1/2?db=3") == "rediss://me:***@h:1/2?db=3"
    assert redact_url("unix:///a/b?db=1") == "unix:///a/b?db=1"


@pytest.mark.parametrize(
    "text",
    [
        "Redis at redis://127.0.0.1:17430 takes no writes (NOREPLICAS script: f1, on @user_script:240). Try again",
        "redis+sentinel://a:26379,[::1]:26379/mine: down, on @user_script:1",
        "(redis://redis:6379/2) mail ops@example.org",
        "redis://u:***@h:6379 takes no writes, on @user_script:240",
    ],
)
def test_redaction_keeps_the_rest_of_a_line(text: str) -> None:
    """An @ far behind an address without a password does not make one of what stands between."""
    assert redact_url(text) == text
    assert redact_url(f"{text} redis://u:6379@h or so") == f"{text} redis://u:***@h or so"


def test_the_path_of_a_socket_is_found() -> None:
    """A socket URL gives back the file's path, a network URL none."""
    assert socket_path(normalise_url("/run/my dir/a.sock")) == "/run/my dir/a.sock"
    assert socket_path("redis://h:1") is None
