"""The code of docs/recipes.md, as a reader copies it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.test_docs import blocks_of

PAGE = Path(__file__).parent.parent.parent / "docs" / "recipes.md"


def recipe() -> dict[str, Any]:
    """The router and the gate, by the names that the page gives them."""
    found: dict[str, Any] = {"__name__": "recipes"}
    for block in blocks_of(PAGE.read_text()):
        if "class Router" in block.code or "class Gate" in block.code:
            exec(compile("\n" * block.line + block.code, PAGE.name, "exec"), found)
    return found
