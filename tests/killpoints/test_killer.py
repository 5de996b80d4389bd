"""The kill points themselves, in processes of their own; and that every verb has its cases."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from tests.killpoints.test_circles import IN_A_CIRCLE
from tests.killpoints.test_gangs import IN_A_GANG, TOLD
from tests.killpoints.test_kill_points import AT_ITS_STOP, POINTS
from tests.killpoints.test_operators import COMMANDS
from tests.security.sources import VERBS
from timeslice.embedded import EmbeddedServer
from timeslice.errors import UsageError
from timeslice.torture.killpoints import arm

CODE = """
import sys
from pathlib import Path
from timeslice.torture import killpoints
spec, url, key, gate = sys.argv[1:]
killpoints.arm(spec)
import redis
with redis.Redis.from_url(url) as client:
    client.rpush(key + ":list", 1)
    Path(gate).touch()
    client.rpush(key + ":list", 2)
"""
# Verbs without a case of their own, each with the reason.
WITHOUT = {
    "look": "writes nothing",
    "alone/clock": "writes nothing",
    "forget": "one call of an operator's command, like drain; tests/locks/test_operator_nodes.py sends it twice",
    "revoke": "one call of an operator's command, like drain and pause",
    "evict": "one call of an operator's command, like drain and pause",
}


@pytest.mark.parametrize(
    ("when", "number", "gated", "left"),
    [
        ("before", 1, False, 0),
        ("after", 1, False, 1),
        ("before", 2, False, 1),
        ("after", 2, False, 2),
        ("before", 1, True, 1),
        ("after", 1, True, 2),
    ],
)
def test_a_process_dies_where_it_is_told_to(
    server: EmbeddedServer, prefix: str, tmp_path: Path, when: str, number: int, gated: bool, left: int
) -> None:
    """Before a write the server has not got it, after it it has; the N-th time, and not before the file is there."""
    gate = tmp_path / "gate"
    spec = f"client:rpush list:{when}:{number}" + (f":{gate}" if gated else "")
    done = subprocess.run([sys.executable, "-c", CODE, spec, server.url, prefix, str(gate)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    with redis.Redis.from_url(server.url) as client:
        until = time.monotonic() + 5
        while client.llen(f"{prefix}:list") != left and time.monotonic() < until:
            time.sleep(0.02)
        assert client.llen(f"{prefix}:list") == left
        client.delete(f"{prefix}:list")


@pytest.mark.parametrize("spec", ["agent:ack:later:1", "agent:ack:before:x", "agent:ack"])
def test_a_point_that_can_not_be_is_refused(spec: str) -> None:
    """Nothing is armed by a word that means nothing."""
    with pytest.raises(UsageError, match="a kill point is"):
        arm(spec)


def test_every_verb_has_its_cases() -> None:
    """A new script shows up here: it is killed at in a test, or stands above with the reason."""
    killed = {point for points in POINTS.values() for point in points} | {point for _, point in AT_ITS_STOP}
    killed |= {*COMMANDS, *IN_A_CIRCLE, *IN_A_GANG, TOLD}
    assert set(VERBS) - killed == set(WITHOUT)
