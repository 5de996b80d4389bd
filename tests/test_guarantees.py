"""docs/guarantees.md names the test of each promise; a name that no test has is an empty promise."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py::\w+)`", PAGE)))


@pytest.mark.parametrize("named", NAMED)
def test_every_test_that_the_page_names_exists(named: str) -> None:
    """A reader who looks the proof of a promise up finds it."""
    path, _, name = named.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert name in found


def test_every_promise_names_its_tests() -> None:
    """No promise of the page goes without a test."""
    promises = re.split(r"^## (?=\d)", PAGE, flags=re.MULTILINE)[1:]
    assert len(promises) == 8
    assert [
        promise.splitlines()[0] for promise in promises if "**Tests.**" not in promise or "`tests/" not in promise
    ] == []
