"""Faults of the server, each met by every situation at once: all goes on without an operator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.conftest import MakeStack
from tests.faults.situations import Situations
from tests.support import server_faults as faults
from timeslice.embedded import EmbeddedServer

Fault = Callable[[EmbeddedServer], None]


@pytest.mark.parametrize(
    "fault",
    [
        faults.crash,
        faults.restart,
        faults.kill_clients,
        faults.pause_clients,
        faults.flush_scripts,
        faults.become_replica_and_return,
        faults.fill_and_make_room,
        faults.sleep,
    ],
)
def test_a_fault_of_the_server_is_survived(make_stack: MakeStack, tmp_path: Path, fault: Fault) -> None:
    """R01, R02, R03, R06: with an append-only file nothing is lost, whatever the server does."""
    stack = make_stack(data=tmp_path / "data", args=["--enable-debug-command", "yes"])
    situations = Situations(stack)
    situations.arrange()
    fault(stack.server)
    situations.release()
    situations.converge()
