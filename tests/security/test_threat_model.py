"""docs/threat-model.md says what is so."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = (HERE.parent.parent / "docs" / "threat-model.md").read_text()


def test_every_test_that_the_page_names_is_there() -> None:
    """A renamed test would leave an attack without its proof."""
    named = re.findall(r"`((?:\.\./)?[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 15
    for file, name in named:
        assert re.search(rf"def {name}\(", (HERE / file).read_text()), f"{file}::{name}"


def test_every_row_of_the_attacks_names_one() -> None:
    """What is claimed is shown."""
    table = PAGE.partition("## Attacks")[2].partition("\n\nRequirement")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| attack")]
    assert rows
    assert [row for row in rows if "::test_" not in row] == []
