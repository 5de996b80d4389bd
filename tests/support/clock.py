"""A server whose wall clock a test sets: libfaketime, which leaves the monotonic clock alone."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import valkey_binary

_PLACES = ("/usr/lib/*/faketime/libfaketime.so.1", "/usr/lib*/faketime/libfaketime.so.1")


@dataclass(frozen=True)
class FakeClock:
    """``binary`` starts a server that goes by this clock."""

    binary: str
    _shift: Path

    def set(self, seconds: int) -> None:
        """Move the server's clock to so many seconds beside the real one; negative is behind."""
        draft = self._shift.with_suffix(".new")
        draft.write_text(f"{seconds:+d}s\n")
        draft.replace(self._shift)


def fake_clock(folder: Path) -> FakeClock:
    """Without libfaketime the test is skipped; in CI it fails. The server is Valkey: libfaketime and the allocator of
    Debian's Redis do not get along."""
    library = next(_found(_PLACES), None)
    if library is None:
        message = "libfaketime is not installed; .ci/run shows how to get it"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    folder.mkdir(exist_ok=True)
    script, shift = folder / "valkey-server", folder / "shift"
    settings = {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(shift),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",  # its name in older versions
    }
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in settings.items())
    script.write_text(f'#!/bin/sh\n{exports}exec {shlex.quote(valkey_binary())} "$@"\n')
    script.chmod(0o700)
    clock = FakeClock(str(script), shift)
    clock.set(0)
    return clock


def _found(patterns: Sequence[str]) -> Iterator[Path]:
    for pattern in patterns:
        yield from sorted(Path("/").glob(pattern.lstrip("/")))
