"""How backends are written down for an agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from timeslice.agent.choice import BackendSet
from timeslice.backends.base import Context
from timeslice.backends.registry import get_backend
from timeslice.backends.spec import parse_spec, parse_specs
from timeslice.errors import BackendError, FaultKind, UsageError

CONTEXT = Context(group="g", node="n1")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("noop", ("noop", {})),
        ("process:state=/tmp/x", ("process", {"state": "/tmp/x"})),
        (
            "composite:stages=quiesce+cuda,quiesce.before=/bin/x -a b=c",
            ("composite", {"stages": "quiesce+cuda", "quiesce.before": "/bin/x -a b=c"}),
        ),
        ("x:empty=", ("x", {"empty": ""})),
    ],
)
def test_name_and_options(spec: str, expected: tuple[str, dict[str, str]]) -> None:
    """Options follow a colon, with commas between; a value may hold = and blanks."""
    assert parse_spec(spec) == expected


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("", "no name"),
        (":a=b", "no name"),
        ("a b", "no name"),
        ("process:", "'' is no option"),
        ("process:state", "'state' is no option"),
        ("process:state=/x,", "'' is no option"),
        ("process:state=/x,,y=1", "'' is no option"),
        ("process:=x", "'=x' is no option"),
        ("quiesce:before=echo a, b", "can't hold a comma"),
        ("x:a=1,a=2", "option a is given twice"),
    ],
)
def test_nothing_is_passed_over(spec: str, why: str) -> None:
    """A slip of the pen is an error, not an option that silently does not count."""
    with pytest.raises(UsageError, match=why):
        parse_spec(spec)


def test_one_name_twice() -> None:
    """The same again is harmless; with other options nobody could tell them apart."""
    assert parse_specs("g", ["noop", "process:state=/x", "noop"]) == {"noop": {}, "process": {"state": "/x"}}
    with pytest.raises(UsageError, match="backend process is given twice"):
        parse_specs("g", ["process:state=/x", "process"])


def test_an_unknown_option_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    """Before anything is made."""
    with pytest.raises(BackendError, match="backend process has no option stat; its options: state") as caught:
        BackendSet.make(CONTEXT, [f"process:stat={tmp_path}"], get_backend)
    assert caught.value.kind is FaultKind.UNSUPPORTED
    with pytest.raises(BackendError, match="backend noop has no option a; its options: none"):
        BackendSet.make(CONTEXT, ["noop:a=b"], get_backend)


def test_a_backend_that_moves_nothing_is_refused_alone(tmp_path: Path) -> None:
    """A job would count as out with all its memory on the device."""
    with pytest.raises(BackendError, match=r"quiesce moves nothing by itself.*composite:stages=quiesce\+"):
        BackendSet.make(CONTEXT, [f"quiesce:state={tmp_path / 'marks'}"], get_backend)
