"""A disk that is full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str = "64k") -> Iterator[Path]:
    """``folder`` as a disk of its own; mounting needs root, else the test is skipped."""
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path) -> Path:
    """Take all the room that is left. The file that has it, to be removed."""
    path = disk / "filler"
    with path.open("wb", buffering=0) as out, suppress(OSError):
        while out.write(b"x" * 4096):
            pass
    return path
