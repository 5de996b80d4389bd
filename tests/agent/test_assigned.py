"""Which real devices an agent takes that was told of none."""

from __future__ import annotations

import pytest

from tests.gpu.fixtures import gpu_node
from tests.gpu.inprocess import nvml_of
from tests.gpu.node import Node, uuid
from timeslice.agent.accelerators import assign

__all__ = ["gpu_node"]


async def test_only_an_agent_with_one_group_and_no_emulated_device_takes_all(
    gpu_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that emulates its device takes no real one, and of several groups nobody can tell whose they are."""
    for name, value in gpu_node.environment.items():
        monkeypatch.setenv(name, value)
    with nvml_of(gpu_node):
        assert await assign({}, ["g"], []) == {"g": (uuid(0),)}
        assert await assign({}, ["g"], ["g"]) == {}
        assert await assign({}, ["g", "h"], []) == {}
