from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeslice.errors import InvalidNameError, UsageError
from timeslice.names import check_name, check_prefix, sanitise_name

# The rule as Kubernetes writes it, not as our module does.
LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])")


@pytest.mark.parametrize("name", ["a", "7", "trainers", "a.b_c-d", "A" * 63, "0-0"])
def test_valid_names_come_back_unchanged(name: str) -> None:
    """A name within the rule is returned as it is."""
    assert check_name("group", name) == name


@pytest.mark.parametrize(
    "name", ["", "-a", "a-", ".a", "a_", "a b", "a{b}", "a/b", "a:b", "a\n", "é", "\u0661", "A" * 64]
)
def test_invalid_names_are_refused(name: str) -> None:
    """A name outside the rule raises InvalidNameError that shows the value and the rule."""
    with pytest.raises(InvalidNameError) as caught:
        check_name("group", name)
    assert repr(name) in str(caught.value)
    assert "1 to 63" in str(caught.value)
    assert caught.value.group == name
    assert isinstance(caught.value, UsageError)


@pytest.mark.parametrize("kind", ["group", "job", "node"])
def test_the_error_says_what_the_name_was_for(kind: str) -> None:
    """The message and the error's fields tell a bad job name from a bad group name."""
    with pytest.raises(InvalidNameError, match=f"name a {kind}") as caught:
        check_name(kind, "a b")
    fields = {"group": caught.value.group, "job": caught.value.job, "node": caught.value.node}
    assert fields == {"group": None, "job": None, "node": None} | {kind: "a b"}


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=66))
def test_the_rule_is_that_of_kubernetes_label_values(text: str) -> None:
    """Any text is accepted exactly when it would be a Kubernetes label value."""
    expected = LABEL_VALUE.fullmatch(text) is not None and len(text) <= 63
    try:
        accepted = check_name("job", text) == text
    except InvalidNameError:
        accepted = False
    assert accepted == expected


@given(st.text(), st.integers(min_value=1, max_value=63))
def test_sanitised_text_is_always_a_valid_name_that_fits(text: str, room: int) -> None:
    """Whatever a machine is called, a valid name of at most the given length comes out."""
    name = sanitise_name(text, fallback="n", room=room)
    assert check_name("node", name) == name
    assert len(name) <= room


def test_sanitising_keeps_a_valid_name() -> None:
    """A host name that already fits is not changed."""
    assert sanitise_name("gpu-07.cluster_a", fallback="n") == "gpu-07.cluster_a"


@pytest.mark.parametrize("prefix", ["ts", "prod:rl", "a.b-c_d/e"])
def test_valid_prefixes_come_back_unchanged(prefix: str) -> None:
    """A prefix without spaces and braces is returned as it is."""
    assert check_prefix(prefix) == prefix


@pytest.mark.parametrize("prefix", ["", "a{b}", "{", "}", "a b", "a\n", "é", "x" * 64])
def test_prefixes_that_would_move_keys_are_refused(prefix: str) -> None:
    """A brace in the prefix would move the group's hash tag, so it is refused, as is what can't be typed."""
    with pytest.raises(InvalidNameError, match="prefix"):
        check_prefix(prefix)
