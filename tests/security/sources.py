"""What the product sends to Redis, read from its source: the commands of each Lua verb and of each Python package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import redis

from timeslice.locks.loader import load

ROOT = Path(__file__).parent.parent.parent / "timeslice"
LUA = resources.files("timeslice.locks") / "lua"
ALONE = ("alone/clock", "alone/take_node", "alone/leave_node")  # of no group
VERBS = (*sorted(each.name.removesuffix(".lua") for each in LUA.iterdir() if each.name.endswith("lua")), *ALONE)

_CALL = re.compile(r"redis\.p?call\(\s*'(\w+)'")
_WORDS = re.compile(r"[A-Z]{3,}( [A-Z]+)?")
_FUNCTION = re.compile(r"^local function (\w+)\(.*?^end$", re.MULTILINE | re.DOTALL)
# Methods of redis-py whose command is written otherwise.
_NAMES = {"delete": "del", "acl_whoami": "acl|whoami", "cluster_info": "cluster|info"}
_NO_COMMAND = {"pipeline", "execute", "aclose", "close", "execute_command", "connection_pool", "keys", "initialize",
               "get_primaries", "get_node_from_key", "get_connection_kwargs"}  # fmt: skip


def commands_of_verb(name: str) -> set[str]:
    """Commands that a verb's script can reach: an included function counts when the verb calls it, however far."""
    source = re.sub(r"--\[\[.*?--\]\]", "", load(name).source, flags=re.DOTALL)
    source = re.sub(r"--.*", "", source)
    functions = {match[1]: match[0] for match in _FUNCTION.finditer(source)}
    body, reached = _FUNCTION.sub("", source), set[str]()
    while True:
        new = {name for name in functions.keys() - reached if re.search(rf"\b{name}\b", body)}
        if not new:
            break
        reached |= new
        body += "".join(functions[name] for name in new)
    assert len(re.findall(r"redis\.p?call\(", body)) == len(_CALL.findall(body)), f"{name}: a command is not a literal"
    return {command.lower() for command in _CALL.findall(body)}


def plain_commands(*places: str) -> set[str]:
    """Commands that Python files (or folders) of the product send themselves, without a script."""
    return {command for place in places for path in _files(ROOT / place) for command in _sent(path)}


def _files(place: Path) -> list[Path]:
    return sorted(place.rglob("*.py")) if place.is_dir() else [place]


def _sent(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and _is_client(node.value) and node.attr not in _NO_COMMAND:
            if hasattr(redis.Redis, node.attr) or node.attr in _NAMES:
                yield _NAMES.get(node.attr, node.attr)
        elif isinstance(node, ast.Tuple | ast.List) and node.elts and isinstance(node.elts[0], ast.Constant):
            word = node.elts[0].value
            if isinstance(word, str) and _WORDS.fullmatch(word) and hasattr(redis.Redis, word.split()[0].lower()):
                yield word.lower().replace(" ", "|")  # a command as a list of words


def _is_client(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in {"client", "pipeline", "pipe", "_client"}
