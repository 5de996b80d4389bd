"""`timeslice doctor --bundle`: a report for a bug, whole and without secrets."""

from __future__ import annotations

import json
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import TIMESLICE, Cli, World
from tests.conftest import ServerFactory
from timeslice.cli.redaction import HIDDEN, Redactor
from timeslice.locks import scripts
from timeslice.settings import default_node

PASSWORD = 'p@ss/w:rd#%+ "x'
ENCODED = "p%40ss%2Fw%3Ard%23%25%2B%20%22x"
PLANTED = ("sesame-of-env", "sesame-of-label", "sesame-of-url", "sesame-of-agent", "sesame-of-error", "sesame-of-token")


def read(path: Path) -> dict[str, str]:
    """The files of a report, without the folder they are in."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            found = {name: archive.read(name).decode() for name in archive.namelist()}
    else:
        with tarfile.open(path) as archive:
            found = {m.name: archive.extractfile(m).read().decode() for m in archive.getmembers()}  # type: ignore[union-attr]
    (folder,) = {name.partition("/")[0] for name in found}
    return {name.removeprefix(folder + "/"): content for name, content in found.items()}


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the agent of this machine keeps its state, in this test."""
    folder = tmp_path / "state"
    monkeypatch.setattr("timeslice.cli.bundle.default_state_dir", lambda node: folder / node)
    return folder / default_node()


def plant(world: World, state_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group with all that a report shows, and secrets in every corner."""
    monkeypatch.setenv("TIMESLICE_API_TOKEN", "sesame-of-env")
    world.serve("trainers")
    world.hold_lock_only("evals", "b", label="sesame-of-label")
    world.acquire("evals", "c", lock_only=True, label="sesame-of-label")
    keys = world.keys.group("trainers")
    record = {"job": "a", "url": "http://me:sesame-of-url@host/v1", "auth_token": "sesame-of-token"}
    world.driver.run(scripts.register(keys, "a", "node-1", 7, json.dumps(record)))
    client: Any = world.driver.client
    client.hset(
        world.keys.node_state("node-1"),
        mapping={"complaints": '{"trainers": ["login with password=sesame-of-agent failed"]}'},
    )
    client.xadd(keys.events, {"type": "GroupBlocked", "reason": "curl -u token http://x?password=sesame-of-error&y=1"})
    folder = state_home / "groups" / "trainers"
    folder.mkdir(parents=True)
    (folder / "journal.json").write_text(json.dumps({"fence": 5, "password": "sesame-of-agent"}))
    (folder / "targets.json").write_text("{half")
    (folder / "linked.json").symlink_to("/etc/passwd")


@pytest.mark.parametrize("name", ["report.tar.gz", "report.zip"])
def test_a_report_holds_no_secret(
    server_factory: ServerFactory, tmp_path: Path, state_home: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Passwords of the URL (odd ones, plain and encoded), of the environment, of targets, labels, messages, agents'
    files: none is in the report. What explains the bug is."""
    server = server_factory()
    admin = World(server.url, "ts")
    plant(admin, state_home, monkeypatch)
    admin.driver.client.config_set("requirepass", PASSWORD)
    admin.driver.client.xadd(admin.keys.group("trainers").events, {"type": "X", "note": f"AUTH {PASSWORD}, {ENCODED}"})
    url = server.url.replace("unix://", f"unix://:{ENCODED}@")
    result = Cli(url, "ts")("doctor", "--bundle", str(tmp_path / name))
    assert result.exit_code == 0, result.output
    assert str(tmp_path / name) in result.stderr
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    files = read(tmp_path / name)
    everything = "\n".join([*files, *files.values(), result.output])
    for secret in (PASSWORD, json.dumps(PASSWORD)[1:-1], ENCODED, *PLANTED):
        assert secret not in everything, secret
    assert {"findings.json", "versions.json", "server.json", "nodes.json", "groups/trainers.json"} <= files.keys()
    assert json.loads(files["agent/groups/trainers/journal.json"])["fence"] == 5
    assert json.loads(files["environment.json"])["TIMESLICE_API_TOKEN"] == HIDDEN
    group = json.loads(files["groups/trainers.json"])
    assert "NodeJoined" in [event["type"] for event in group["events"]]
    (waiter,) = json.loads(files["groups/evals.json"])["summary"]["waiters"]
    assert (waiter["job"], waiter["job_phase"]) == ("c", HIDDEN)
    assert [info["process_id"] for info in json.loads(files["server.json"])["info"].values()] == [server.pid]
    missing = json.loads(files["missing.json"])
    assert [Path(each).name for each in missing] == ["linked.json", "targets.json"]
    assert "passwords of this command's own settings" in files["README.txt"]
    assert "labels of holds" in files["README.txt"]


def test_a_report_is_written_without_a_server(tmp_path: Path) -> None:
    """What is known without one is in it, and that it did not answer."""
    path = tmp_path / "report.tar.gz"
    result = Cli("redis://:sesame-of-url@127.0.0.1:1", "ts")("doctor", "--bundle", str(path), "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["bundle"] == str(path)
    files = read(path)
    assert "did not answer" in json.loads(files["missing.json"])["server"]
    assert any("does not answer" in each["what"] for each in json.loads(files["findings.json"]))
    assert json.loads(files["versions.json"])["packages"]["redis"]
    assert "sesame-of-url" not in "".join(files.values()) + result.output


def test_nothing_is_overwritten(cli: Cli, tmp_path: Path) -> None:
    """Not a file, nor what a link points at: exit code 6, and the content stays."""
    there, link = tmp_path / "there.zip", tmp_path / "link.zip"
    there.write_text("mine")
    link.symlink_to(tmp_path / "elsewhere.zip")
    for path in (there, link):
        result = cli("doctor", "--bundle", str(path))
        assert result.exit_code == 6
        assert "is there already" in result.stderr
    assert there.read_text() == "mine"
    assert not (tmp_path / "elsewhere.zip").exists()


def test_a_disk_without_room_is_told_and_no_half_report_is_left(cli: Cli, tmp_path: Path) -> None:
    """Exit code 2 and the file's name."""
    path = tmp_path / "report.zip"
    command = [TIMESLICE, "--url", cli.url, "--prefix", cli.prefix, "doctor", "--bundle", str(path)]
    limited = ["prlimit", "--fsize=100", *command]
    done = subprocess.run(limited, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert f"{path} can't be written" in done.stderr
    assert not path.exists()


def test_a_name_that_is_no_archive_s_is_refused_at_once(tmp_path: Path) -> None:
    """Before any server is asked: exit code 2."""
    result = Cli("redis://127.0.0.1:1", "ts")("doctor", "--bundle", str(tmp_path / "report.txt"))
    assert result.exit_code == 2
    assert ".tar.gz or .zip" in result.stderr
    result = Cli("redis://127.0.0.1:1", "ts")("doctor", "--bundle", str(tmp_path / "no" / "report.zip"))
    assert result.exit_code == 2
    assert "can't be written" in result.stderr


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"token": 17, "fencing_token": 3}, {"token": 17, "fencing_token": 3}),
        ({"author": "ann", "password": "x"}, {"author": "ann", "password": HIDDEN}),
        ({"AUTH": "abc", "API_KEY": "k", "a_secret": "s"}, dict.fromkeys(("AUTH", "API_KEY", "a_secret"), HIDDEN)),
        (["redis://u:pw@h/0", "api_key: abc, rest"], ["redis://u:***@h/0", "api_key: ***, rest"]),
        ({"w1/label": "anything", "w1/job": "a"}, {"w1/label": HIDDEN, "w1/job": "a"}),
        ({"hunter2two": b"xhunter2twox"}, {HIDDEN: "x***x"}),
        ({"password": "", "label": "", "n": None}, {"password": "", "label": "", "n": None}),
    ],
)  # fmt: skip
def test_what_is_secret_is_hidden_and_the_rest_kept(given: Any, expected: Any) -> None:
    """By the name of a field, by what a text says, by what is known; numbers and other words stay."""
    assert Redactor(["hunter2two", "x", None]).clean(given) == expected
