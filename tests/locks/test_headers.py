"""Each Lua verb's header is true: it names the arguments, and the events, that the script really uses."""

from __future__ import annotations

import re
from importlib import resources
from typing import Any

import pytest

from tests.locks.lab import Lab
from timeslice.embedded import EmbeddedServer
from timeslice.locks import loader
from timeslice.locks.keys import Keys

LUA = resources.files("timeslice.locks") / "lua"
VERBS = sorted(path.name.removesuffix(".lua") for path in LUA.iterdir() if path.name.endswith(".lua"))
INCLUDES = sorted(path.name.removesuffix(".lua") for path in (LUA / "include").iterdir())


def source(verb: str) -> str:
    return (LUA / f"{verb}.lua").read_text()


def header(verb: str) -> str:
    match = re.match(r"--\[\[\n(.*?)\n--\]\]\n", source(verb), re.DOTALL)
    assert match, f"{verb}.lua begins with no header"
    return match[1]


def section(verb: str, name: str) -> str:
    """A part of the header: its line and those indented below it."""
    match = re.search(rf"^{name} +(.*(?:\n +.*)*)", header(verb), re.MULTILINE)
    return match[1] if match else ""


def body(verb: str) -> str:
    return source(verb).split("--]]\n", 1)[1]


def test_there_are_verbs() -> None:
    """The tests below look at something."""
    assert {"acquire", "yield", "renew", "promote"} <= set(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_header_says_what_the_verb_is_for(verb: str) -> None:
    """A reader finds a sentence, the arguments and the replies."""
    assert header(verb)[0].isupper()
    assert section(verb, "ARGV")
    assert section(verb, "Reply")


@pytest.mark.parametrize("verb", VERBS)
def test_header_names_the_arguments_that_are_used(verb: str) -> None:
    """ARGV 1 to n are named, no gap, and the script reads exactly those, or a list behind them."""
    named = [int(number) for number in re.findall(r"(?:^|  +|\n +)(\d+) [a-z'(]", section(verb, "ARGV"))]
    assert list(range(1, len(named) + 1)) == named
    used = {int(number) for number in re.findall(r"ARGV\[(\d+)\]", body(verb))} | {1}  # begin() reads the floor
    if "then" in section(verb, "ARGV"):
        first = min(int(number) for number in re.findall(r"(?:for i|local i) = (\d+)", body(verb)))
        assert first == len(named) + 1
    assert set(named) == used


@pytest.mark.parametrize("verb", VERBS)
def test_header_names_the_replies_that_are_given(verb: str) -> None:
    """The first word of each reply is in the header, and each alternative of the header is given."""
    given = set(re.findall(r"(?:return|and) \{\s*'([a-z_ ]+)'", body(verb)))
    said = {line.split()[0] for part in section(verb, "Reply").split("|") for line in part.strip().splitlines()[:1]}
    assert {word for word in given if word not in section(verb, "Reply")} == set()
    whole = loader.load(verb).source
    assert {word for word in said if f"'{word}'" not in whole} == set()


@pytest.mark.parametrize("verb", VERBS)
def test_header_names_the_events_that_are_emitted(verb: str) -> None:
    """What the script itself emits is named, and what is named is emitted by it or by what it includes."""
    events = section(verb, "Events")
    emitted = set(re.findall(r"(?:emit|end_lease|end_unused)\('(\w+)'", body(verb)))
    emitted |= set(re.findall(r"= '(Job[A-Z]\w+)'", body(verb)))
    named = set(re.findall(r"\b(?:[A-Z][a-z]+){2,}\b", events))
    assert emitted - named == set()
    whole = loader.load(verb).source
    assert {event for event in named if f"'{event}'" not in whole} == set()
    for call in ("advance", "reap"):
        if re.search(rf"^\s*{call}\(", body(verb), re.MULTILINE) and verb != "promote":
            assert call in events, f"{verb}.lua calls {call} and does not say so"


@pytest.mark.parametrize("verb", VERBS)
def test_includes_are_put_in_once_and_all_needed(verb: str) -> None:
    """No include twice, none that is unknown, and the group's first."""
    names = [name for line in re.findall(r"^-- @include (.*)$", source(verb), re.MULTILINE) for name in line.split()]
    assert names[0] == "group"
    assert len(set(names)) == len(names)
    assert set(names) <= set(INCLUDES)
    whole = loader.load(verb).source
    for name in names:
        assert whole.count((LUA / "include" / f"{name}.lua").read_text()) == 1


@pytest.mark.parametrize("verb", VERBS)
def test_no_script_declares_an_engine(verb: str) -> None:
    """A ``#!lua`` line would have the server refuse the script when memory is full, whatever it frees."""
    assert "#!" not in loader.load(verb).source


def test_the_keys_named_are_the_keys_passed() -> None:
    """The header of the group include lists the KEYS in the order in which they are passed."""
    text = (LUA / "include" / "group.lua").read_text().split("--]]", 1)[0]
    listed = re.findall(r"(\d+) (\w+(?: prefix)?)", text.split("KEYS", 1)[1].split("ARGV", 1)[0])
    passed = Keys("p").group("g").all
    assert [int(number) for number, _ in listed] == list(range(1, len(passed) + 1))
    for (_, name), key in zip(listed, passed, strict=True):
        assert key == "p:{g}:" + ("grant:" if name == "grant prefix" else name)


def test_no_command_is_newer_than_redis_7_0(server: EmbeddedServer, prefix: str) -> None:
    """The server's own documentation dates every command the scripts call."""
    whole = "\n".join(loader.load(verb).source for verb in VERBS)
    commands = sorted(set(re.findall(r"redis\.call\('(\w+)'", whole)))
    assert "XADD" in commands
    lab = Lab(server.url, prefix)
    for command in commands:
        docs: Any = lab.redis.eval("return redis.call('COMMAND', 'DOCS', ARGV[1])", 0, command)
        since = docs[1][docs[1].index(b"since") + 1]
        assert tuple(int(part) for part in since.split(b".")[:2]) <= (7, 0), command


def test_a_script_is_known_by_its_content() -> None:
    """The SHA-1 is that of the source, so that EVALSHA finds what EVAL taught."""
    script = loader.load("acquire")
    assert loader.load("acquire") is script
    assert len(script.sha) == 40
    assert loader.load("yield").sha != script.sha
