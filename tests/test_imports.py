"""The shape of the package: which part may import which, what loads when, how long a file may get."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import timeslice

ROOT = Path(timeslice.__file__).parent
MAX_LINES = 400

BASE = {"errors", "names", "models", "events", "settings", "addresses"}
# Part of the package -> parts it may import, besides itself. What is not listed here may import anything.
ALLOWED = {
    **dict.fromkeys(BASE, BASE),
    "embedded": BASE,
    "locks": BASE,
    "client": BASE | {"locks"},
    "agent": BASE | {"locks", "backends", "arena", "metrics", "web"},
    "coordinator": BASE | {"locks", "metrics", "web"},
    "gateway": BASE | {"locks", "client"},
    "metrics": set(),
    "readiness": BASE | {"locks"},
    "web": BASE | {"locks", "readiness"},
    "backends": {"errors", "names", "models", "arena"},
    "arena": {"errors", "names", "models"},
}


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports_of(tree: ast.AST, package: str) -> set[str]:
    """Parts of timeslice that a module imports anywhere in it, absolutely or relatively."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("timeslice.")}
    return found


def sources() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    """A module imports only the parts that lie below its own."""
    part = part_of(path)
    package = ".".join(["timeslice", *path.relative_to(ROOT).parts[:-1]])
    found = imports_of(ast.parse(path.read_text()), package) - {part}
    assert found <= ALLOWED.get(part, found), f"{path} may not import {sorted(found - ALLOWED[part])}"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import timeslice.agent.service", {"agent"}),
        ("from timeslice import agent", {"agent"}),
        ("from timeslice.agent.state import x", {"agent"}),
        ("from ..agent import state", {"agent"}),
        ("from .. import agent", {"agent"}),
        ("def f():\n    from timeslice.agent import x", {"agent"}),
        ("if TYPE_CHECKING:\n    import timeslice.agent", {"agent"}),
        ("from . import sync", {"client"}),
        ("import redis.client, os", set()),
    ],
)
def test_every_form_of_import_is_seen(code: str, expected: set[str]) -> None:
    """The check above is not fooled by relative, lazy or type-only imports."""
    assert imports_of(ast.parse(code), "timeslice.client") == expected


def test_importing_timeslice_loads_nothing_heavy() -> None:
    """`import timeslice` stays instant: Redis, pydantic and numpy load when first used."""
    code = "import sys, timeslice; print(*sorted(m.split('.')[0] for m in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(loaded.stdout.split())
    assert "timeslice" in modules
    assert modules.isdisjoint({"redis", "pydantic", "pydantic_settings", "numpy", "click", "rich", "asyncio"})


def test_the_public_names_are_all_there() -> None:
    """Every name in `timeslice.__all__` can be had, although they load lazily."""
    missing = [name for name in timeslice.__all__ if getattr(timeslice, name, None) is None]
    assert timeslice.__all__
    assert missing == []


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_readable(path: Path) -> None:
    """No file is longer than a reader takes in at one sitting."""
    assert len(path.read_text().splitlines()) <= MAX_LINES


def test_no_test_file_is_too_long_either() -> None:
    """The limit counts for tests too."""
    lengths = {path: len(path.read_text().splitlines()) for path in Path(__file__).parent.rglob("*.py")}
    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}
