"""Finding backends by their entry points."""

from __future__ import annotations

from pathlib import Path

import pytest

from timeslice.backends.base import Context
from timeslice.backends.noop import NoopBackend
from timeslice.backends.registry import get_backend, names
from timeslice.errors import BackendError, FaultKind

CONTEXT = Context(group="g", node="n1")


def install(folder: Path, name: str, value: str, distribution: str = "third-party") -> None:
    """A distribution on the path that provides one backend."""
    info = folder / f"{distribution}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[timeslice.backends]\n{name} = {value}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def refusal(name: str) -> str:
    with pytest.raises(BackendError) as caught:
        get_backend(name, CONTEXT)
    assert caught.value.kind is FaultKind.UNSUPPORTED
    assert (caught.value.group, caught.value.node) == ("g", "n1")
    return str(caught.value)


def test_the_built_in_backends_are_there() -> None:
    """By name, and a name gives its backend."""
    assert {"arena", "channel", "composite", "noop", "process", "quiesce"} <= set(names())
    assert isinstance(get_backend("noop", CONTEXT), NoopBackend)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    """The message lists what is installed."""
    message = refusal("nope")
    assert "'nope'" in message
    assert "arena, channel, composite, cuda" in message


def test_a_third_partys_backend_is_found(site: Path) -> None:
    """An installed distribution adds one without a change here."""
    install(site, "theirs", "their_backend:Theirs")
    (site / "their_backend.py").write_text(
        "from timeslice.backends.noop import NoopBackend\nclass Theirs(NoopBackend):\n    name = 'theirs'\n"
    )
    assert "theirs" in names()
    assert get_backend("theirs", CONTEXT).name == "theirs"


def test_a_third_partys_backend_that_does_not_load_is_refused(site: Path) -> None:
    """With the cause, and it spoils no other one."""
    install(site, "broken", "broken_backend:Broken")
    (site / "broken_backend.py").write_text("import a_library_that_is_not_there\n")
    assert "a_library_that_is_not_there" in refusal("broken")
    assert get_backend("noop", CONTEXT).name == "noop"


def test_what_is_no_backend_is_refused(site: Path) -> None:
    """An entry that points at something else is named for what it is."""
    install(site, "wrong", "os:getpid")
    assert "no class of timeslice.backends.base.Backend" in refusal("wrong")


def test_a_name_that_two_distributions_claim_is_refused(site: Path) -> None:
    """Rather than taking whichever comes first."""
    install(site, "noop", "their_backend:Theirs")
    assert "twice" in refusal("noop")
