from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ServerFactory
from tests.faults.stack import Stack
from tests.support.disk import small_disk

MakeStack = Callable[..., Stack]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB. Name it before ``make_stack``, whose agents write to it to the end."""
    with small_disk(tmp_path / "disk") as folder:
        yield folder


@pytest.fixture
def make_stack(server_factory: ServerFactory, tmp_path: Path) -> Iterator[MakeStack]:
    """The whole system on a server of the test's own; takes EmbeddedServer's arguments."""
    made: list[Stack] = []

    def make(**arguments: Any) -> Stack:
        made.append(Stack(server_factory(**arguments), tmp_path))
        return made[-1]

    yield make
    for each in made:
        each.close()
