"""Real devices of groups: which agent takes which, and what it says of them. The GPUs are stand-ins."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, eventually
from tests.cli.devices import Served
from tests.gpu.fixtures import Start, gpu_node, sleeper
from tests.gpu.node import GIB, Node, uuid

__all__ = ["gpu_node", "sleeper"]

MIB = 1 << 20


@pytest.fixture
def served(cli: Cli, tmp_path: Path, gpu_node: Node, clean_environment: Path) -> Served:
    """Nothing is started yet."""
    return Served(cli, tmp_path, gpu_node)


def test_the_only_group_of_an_agent_gets_all_devices(served: Served, sleeper: Start) -> None:
    """Without --device: all that there are. What is used there, and who uses it, is in `nodes`, for people too."""
    served.node.add_device(uuid(1), GIB)
    intruder = sleeper()
    served.node.write(intruder.pid, "state running", f"alloc {uuid(1)} {256 * MIB}")
    log = "".join(served.ready("--group", "trainers"))
    assert f"group trainers: devices: {uuid(0)}, {uuid(1)}; state is moved by: channel" in log
    node = served.shown()
    assert node["accelerators"] == {"trainers": [uuid(0), uuid(1)]}
    first, second = node["memory"]["devices"]["trainers"]
    assert (first["device"], first["total_bytes"], first["free_bytes"], first["holders"]) == (uuid(0), GIB, GIB, [])
    assert second["free_bytes"] == GIB - 256 * MIB
    assert second["holders"] == [{"pid": intruder.pid, "bytes": 256 * MIB}]
    assert "trainers: 2, 256 MiB of 2 GiB used" in served.cli("nodes").stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="cuda works only for root")
def test_cuda_is_used_behind_the_channel_where_it_works(served: Served) -> None:
    """Nobody named a backend: jobs without a workload are moved by `cuda`, if it finds nothing to complain of; else it
    is left out, with the reason in the log."""
    served.node.set("persistence", 0)
    log = "".join(served.ready("--group", "trainers"))
    assert "state is moved by: channel\n" in log
    assert "the backend cuda can't be used here: persistence mode is off" in log
    served.stop()
    served.node.clear("persistence")
    assert "state is moved by: channel, cuda" in "".join(served.ready("--group", "trainers"))
    assert "persistence" not in str(served.shown()["complaints"])


def test_each_group_has_its_own_devices(served: Served) -> None:
    """By number, by UUID or by instance; several groups on one node, and instances of one GPU in different groups."""
    for name in ("MIG-a", "MIG-b"):
        served.node.add_device(name, 100 * MIB, parent=uuid(0))
    served.node.add_device(uuid(1), GIB)
    served.ready("--device", "trainers=MIG-a", "--device", "samplers=MIG-b,1")
    assert served.shown()["accelerators"] == {"trainers": ["MIG-a"], "samplers": ["MIG-b", uuid(1)]}
    devices = served.shown()["memory"]["devices"]
    assert [each["total_bytes"] for each in devices["samplers"]] == [100 * MIB, GIB]


def test_all_takes_all_and_a_divided_gpu_stands_for_its_instances(served: Served) -> None:
    """``all``, and the number of a GPU with MIG."""
    for name in ("MIG-a", "MIG-b"):
        served.node.add_device(name, 100 * MIB, parent=uuid(0))
    served.ready("--device", "trainers=0")
    assert served.shown()["accelerators"] == {"trainers": ["MIG-a", "MIG-b"]}


def test_several_groups_share_nothing_unasked(served: Served) -> None:
    """Whose the devices are is not guessed."""
    served.ready("--group", "trainers", "--group", "samplers")
    assert served.shown()["accelerators"] == {}


WRONG: list[tuple[tuple[str, ...], Callable[[], str]]] = [
    (("--device", "trainers=7"), lambda: f"no device '7' on this node; there are: {uuid(0)} (GPU 0, Stub-GPU"),
    (("--device", "a=0", "--device", f"b={uuid(0)}"), lambda: f"device {uuid(0)} can't be both a's and b's"),
    (("--device", "a=0", "--emulate", "a=8M"), lambda: "group a has an emulated device, so it gets no real one"),
    (("--device", "trainers"), lambda: "names no device; write for example trainers=0,1"),
]


@pytest.mark.parametrize(("args", "message"), WRONG, ids=[" ".join(args) for args, _ in WRONG])
def test_what_can_not_be_is_refused_at_the_start(
    served: Served, args: tuple[str, ...], message: Callable[[], str]
) -> None:
    """With exit code 2, naming what there is; nothing is served."""
    assert message() in served.refused(*args)
    assert served.cli.json("nodes")["nodes"] == []


def test_devices_that_were_asked_for_need_a_driver(served: Served) -> None:
    """Asked for and not to be had is an error; nobody asked, and the agent serves without."""
    served.node.set("nvml", "not_loaded")
    _, said = (process := served.agent("--device", "trainers=0")).communicate(timeout=60)
    assert process.returncode == 1
    assert "the NVIDIA driver is not loaded" in said
    log = "".join(served.ready("--group", "trainers"))
    assert "no real devices: asking for GPUs failed: the NVIDIA driver is not loaded" in log
    assert "group trainers: devices: none known" in log


def test_two_jobs_take_turns_on_a_device_and_what_they_leave_there_is_told(served: Served) -> None:
    """G33: a suspended job's context stays on the device: `jobs` and `nodes` tell it, beside its host memory."""
    served.coordinator()
    served.ready("--group", "trainers")
    first, second = served.job("a", 600 * MIB, 20 * MIB), served.job("b", 600 * MIB, 30 * MIB)
    assert first.turn() == "first load True"
    second.go()
    assert second.says() == "first load True"
    node = eventually(lambda: (n := served.shown())["suspended"] and n)
    assert node["suspended"] == [{"group": "trainers", "job": "a", "host_bytes": 600 * MIB, "device_bytes": 20 * MIB}]
    (job,) = [each for each in served.cli.json("jobs")["jobs"] if each["job"] == "a"]
    assert (job["residency"], job["host_bytes"], job["device_bytes"]) == ("suspended", 600 * MIB, 20 * MIB)
    eventually(lambda: served.shown()["memory"]["held_bytes"] == {"trainers": {"a": 600 * MIB}})
    table = served.cli("nodes").stdout
    assert "600 MiB for a (20 MiB stayed on devices)" in table
    second.go()
    assert second.says() == "yielded"
    assert first.turn() == "restored True"


@pytest.mark.slow
def test_what_is_not_freed_on_the_device_is_no_suspend(served: Served) -> None:
    """G06: the workload says that it is out, the driver says that nothing was freed: the waiter is told the bytes."""
    served.coordinator()
    served.ready("--group", "trainers")
    keeper, waiter = served.job("a", 600 * MIB, kind="keeps"), served.job("b", 100 * MIB)
    assert keeper.turn() == "first load True"
    waiter.go()
    eventually(lambda: f"only 0 of its {600 * MIB} bytes were measured free" in served.why("b"), within=60)
    (job,) = [each for each in served.cli.json("jobs")["jobs"] if each["job"] == "a"]
    assert (job["residency"], job["device_bytes"]) == ("resident", 600 * MIB)


def test_a_job_whose_state_is_not_on_the_device_takes_turns(served: Served) -> None:
    """A GPU is never quite empty, and so a CPU's tensors might be there: the job's own word of them counts then."""
    served.coordinator()
    served.ready("--group", "trainers")
    first, second = served.job("a", 600 * MIB, 20 * MIB, kind="elsewhere"), served.job("b", 100 * MIB)
    assert first.turn() == "first load True"
    assert second.turn() == "first load True"
    assert first.turn() == "restored True"


def test_a_squatter_is_named_and_when_it_goes_the_job_is_restored(served: Served, sleeper: Start) -> None:
    """G07: somebody who is no job at all has the memory that a job needs to come back."""
    served.coordinator()
    served.ready("--group", "trainers")
    first, second = served.job("a", 600 * MIB), served.job("b", 100 * MIB)
    assert first.turn() == "first load True"
    second.go()
    assert second.says() == "first load True"
    squatter = sleeper()
    served.node.write(squatter.pid, "state running", f"alloc {uuid(0)} {700 * MIB}")
    second.go()
    assert second.says() == "yielded"
    first.go()
    eventually(lambda: f"process {squatter.pid} holds {700 * MIB}" in served.why("a"), within=60)
    squatter.kill()
    assert first.says() == "restored True"
