"""Conclusions from the memory of real devices, which differ from emulated ones: a little of it nobody explains, and
drivers need not tell how much a process holds. Pure; no device is involved."""

from __future__ import annotations

import pytest

from timeslice.agent.accelerators import chosen
from timeslice.agent.devices import left_behind, shortage, unexplained
from timeslice.backends.base import DeviceMemory
from timeslice.backends.nvml import Accelerator
from timeslice.errors import UsageError


def device(free: int, *holders: tuple[int, int]) -> DeviceMemory:
    return DeviceMemory(device="d0", total_bytes=100, free_bytes=free, holders=holders)


def gpu(uuid: str, index: int, parent: str = "") -> Accelerator:
    return Accelerator(uuid=uuid, name="X", index=index, total_bytes=100, free_bytes=100, parent=parent)


def test_a_little_that_nobody_explains_is_not_a_job_s_state() -> None:
    """Only where there is room for what the job has could it be there: over all devices together."""
    assert unexplained([device(90)], {7}) == 10
    assert unexplained([device(90), device(90)], {7}) == 20
    assert unexplained([device(80, (8, 15))], {7}) == 5
    assert unexplained([device(80, (7, 15))], {7}) == 20
    assert unexplained([device(100)], {7}) == 0


def test_a_holder_without_a_figure_is_named() -> None:
    """G07: the driver lists it and does not tell its bytes."""
    assert shortage([device(10, (7, 0))], {}, 50, ()) == "device d0: 50 bytes needed, 10 free; process 7 holds some"


def test_memory_of_the_dead_is_not_hidden_by_holders_without_figures() -> None:
    """F02: as long as the driver does not tell all figures, what the living do not explain may be the dead one's."""
    assert left_behind([device(40, (8, 0))], frozenset({7}), 0, 60) == 60
    assert left_behind([device(40, (8, 0))], frozenset({7}), 60, 60) == 0
    assert left_behind([device(40, (8, 60))], frozenset({7}), 0, 60) == 0


FOUND = (gpu("MIG-a", 0, "GPU-0"), gpu("MIG-b", 0, "GPU-0"), gpu("GPU-1", 1))


@pytest.mark.parametrize(
    ("word", "uuids"),
    [
        ("all", ("MIG-a", "MIG-b", "GPU-1")),
        ("0", ("MIG-a", "MIG-b")),
        ("gpu-0", ("MIG-a", "MIG-b")),
        ("MIG-b", ("MIG-b",)),
        ("1", ("GPU-1",)),
    ],
)
def test_devices_are_named_in_several_ways(word: str, uuids: tuple[str, ...]) -> None:
    """A GPU that is divided stands for its instances; a UUID is one in any case of its letters."""
    assert chosen({"g": [word]}, FOUND) == {"g": uuids}


def test_a_device_named_twice_for_one_group_is_one_device() -> None:
    """By its number and its UUID."""
    assert chosen({"g": ["1", "GPU-1", "MIG-a"]}, FOUND) == {"g": ("GPU-1", "MIG-a")}


def test_a_gpu_and_an_instance_of_it_can_not_be_two_groups() -> None:
    """The GPU stands for all its instances, so the instance would be both's."""
    with pytest.raises(UsageError, match="device MIG-a can't be both a's and b's"):
        chosen({"a": ["0"], "b": ["MIG-a"]}, FOUND)
    assert chosen({"a": ["MIG-b"], "b": ["MIG-a"]}, FOUND) == {"a": ("MIG-b",), "b": ("MIG-a",)}
