"""A password with every awkward character works in every topology, and no log or message ever shows it."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator
from urllib.parse import quote, quote_plus

import pytest

from tests.cli.conftest import TIMESLICE
from tests.locks.faces import AsyncFace
from tests.locks.lab import Lab
from tests.topology.conftest import FleetFactory, SystemFactory
from timeslice import logs
from timeslice.addresses import Address, parse_url, redact_url
from timeslice.errors import ServerUnsuitableError, TimeSliceError, UsageError
from timeslice.locks import scripts
from timeslice.locks.drivers import SyncDriver
from timeslice.settings import find_url

SECRET = 'p@ss/w:rd#%+ "x'
PIECES = (SECRET, quote(SECRET, safe=""), quote(SECRET), quote_plus(SECRET), "p@ss", "w:rd", "w%3Ard")
KINDS = pytest.mark.parametrize(
    "kind", ["standalone", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("cluster", "sentinel"))]
)


def assert_hidden(*texts: str) -> None:
    for text in texts:
        assert [piece for piece in PIECES if piece in text] == [], text


@pytest.fixture
def logged(tmp_path: object) -> Iterator[list[str]]:
    """What all loggers of this process say, at debug level, as the daemons format it."""
    lines: list[str] = []

    class Sink(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    sink, root = Sink(), logging.getLogger()
    level = root.level
    sink.setFormatter(logs._Plain())
    root.addHandler(sink)
    root.setLevel("DEBUG")
    yield lines
    root.removeHandler(sink)
    root.setLevel(level)


def cli(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TIMESLICE, *arguments], capture_output=True, text=True, timeout=60, check=False, env=os.environ | environment
    )


@KINDS
def test_the_whole_system_runs_and_never_tells(
    kind: str, fleet_factory: FleetFactory, system_factory: SystemFactory, logged: list[str]
) -> None:
    """Coordinator, agent, jobs and `doctor`, all at debug level, over a fault of the server too."""
    fleet = fleet_factory(kind, password=SECRET)
    system = system_factory(fleet)
    system.coordinate()
    system.serve("n1", "trainers")
    first = system.enter("trainers", "a")
    second = system.queue("trainers", "b")
    system.fleet.kill(old := system.master_of("trainers"))
    system.fleet.start_one(old)
    system.leave(first)
    system.await_inside(second)
    system.leave(second)
    doctor = cli("--url", fleet.url, "--prefix", "ts", "doctor")
    assert "trainers" in doctor.stdout, doctor.stderr
    assert logged
    assert_hidden("\n".join(logged), doctor.stdout, doctor.stderr)


@KINDS
def test_nobody_has_to_encode(kind: str, fleet_factory: FleetFactory) -> None:
    """TIMESLICE_PASSWORD is taken as it is, by every command; the URL then names none."""
    fleet = fleet_factory(kind, password=SECRET, aof=False)
    bare = fleet.url.replace(f":{quote(SECRET, safe='')}@", "")
    assert bare != fleet.url
    done = cli("groups", TIMESLICE_URL=bare, TIMESLICE_PASSWORD=SECRET)
    assert done.returncode == 0, done.stderr
    wrong = cli("groups", TIMESLICE_URL=bare, TIMESLICE_PASSWORD=SECRET + "no")
    assert wrong.returncode != 0
    assert "credentials" in wrong.stderr
    assert_hidden(wrong.stderr)


@KINDS
@pytest.mark.parametrize("face", [SyncDriver, AsyncFace])
def test_a_refused_password_is_not_shown(
    kind: str, face: type[SyncDriver | AsyncFace], fleet_factory: FleetFactory
) -> None:
    """Not by our error, and not by those of redis-py that lie behind it."""
    fleet = fleet_factory(kind, password="another", aof=False)
    driver = face(fleet.url.replace("another", quote(SECRET, safe="")))
    lab = Lab("redis://127.0.0.1:1")  # never asked: it makes the call
    with pytest.raises(ServerUnsuitableError, match="credentials") as raised:
        driver.run(scripts.acquire(lab.group, lab.request("a1")), deadline_s=60.0)
    driver.close()
    lab.redis.close()
    error: BaseException | None = raised.value
    while error is not None:
        assert_hidden(str(error), repr(error))
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize(
    "form",
    [
        "redis://:{}@h:1",
        "redis://u:{}@h:1/2",
        "unix://:{}@/s.sock",
        "unix:///s.sock?password={}",
        "redis+sentinel://:{}@h:1,i:2/m",
        "redis+sentinel://h:1,i:2/m?sentinel_password={}",
        "redis+cluster://:{}@h:1,i:2",
        "rediss://h:1?ssl_password={}",
    ],
)
def test_an_encoded_password_is_read_and_a_raw_one_is_refused_unseen(form: str) -> None:
    """The error tells how to encode; a host is never guessed from the rest of a password."""
    address = parse_url(form.format(quote(SECRET, safe="")))
    assert SECRET in {address.password, *dict(address.options).values()}
    assert parse_url(address.url) == address
    assert_hidden(redact_url(address.url), address.shown, repr(address))
    assert_hidden(redact_url(form.format(SECRET)))
    for awkward in ("a/b", "a?b", "a#b", "a@b", "100%", "a b", "a&b", "a+b"):
        raw = parsed(form.format(awkward))
        if isinstance(raw, str):
            assert "Percent-encode" in raw
        else:
            assert raw.hosts == address.hosts
            assert awkward in {raw.password, *dict(raw.options).values()}
    told = str(parsed(form.format(SECRET)))
    assert "Percent-encode" in told
    assert_hidden(told)


def parsed(url: str) -> Address | str:
    """The address, or the words of the error."""
    try:
        return parse_url(url)
    except UsageError as error:
        return str(error)


def test_the_url_s_own_credentials_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a user named in the URL gets the password of the environment."""
    monkeypatch.setenv("TIMESLICE_USERNAME", "env")
    monkeypatch.setenv("TIMESLICE_PASSWORD", SECRET)
    own, named, none = (parse_url(find_url(f"redis://{part}h:1")) for part in ("me:pw@", "me@", ""))
    assert (own.username, own.password) == ("me", "pw")
    assert (named.username, named.password) == ("me", SECRET)
    assert (none.username, none.password) == ("env", SECRET)
    with pytest.raises(TimeSliceError) as raised:
        find_url("http://h:1")
    assert_hidden(str(raised.value))
