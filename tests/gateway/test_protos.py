"""The two interfaces: the .proto files, the code made from them, and what llm-d's clients send, are one."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FileDescriptor

from timeslice.gateway.proto import snapshot_agent_pb2, timeslice_orchestrator_pb2

ROOT = Path(__file__).parent.parent.parent
PROTO = ROOT / "timeslice" / "gateway" / "proto"

ORCHESTRATOR = """
timeslice_orchestrator.v1alpha1 TimeSliceOrchestratorService
Acquire(AcquireRequest) AcquireResponse
Yield(YieldRequest) YieldResponse
ListGroups(ListGroupsRequest) ListGroupsResponse
GetGroupStatus(GetGroupStatusRequest) GetGroupStatusResponse
AcquireRequest: job_id 1, group_id 2
AcquireResponse: success 1, waited_ms 2, context_restored 3
YieldRequest: job_id 1, group_id 2
YieldResponse: success 1, pending_waiters 2, snapshot_deferred 3
ListGroupsRequest:
ListGroupsResponse: group_ids 1
GetGroupStatusRequest: group_id 1
GetGroupStatusResponse: group 1, agent_job_states 2
GroupStatus: group_id 1, group_state 2, state_timestamp 3, locking_job 4, active_job 5, \
waiter_queue_depth 6, loaded_job 7
GroupStatus.State: UNSPECIFIED 0, UNKNOWN 1, IDLE 2, IDLE_YIELDED 3, LOCKED 4, SWITCHING 5
SnapshotAgentJobState: agent 1, job_state 2, job_id 3
SnapshotAgentJobState.State: UNSPECIFIED 0, IDLE 1, RUNNING 2, TRANSITIONING 3, SAVED 4, FAULTED 5
"""

SNAPSHOT_AGENT = """
snapshot_agent.v1alpha1 SnapshotAgentService
Snapshot(SnapshotRequest) SnapshotResponse
Restore(RestoreRequest) RestoreResponse
GetOperation(GetOperationRequest) GetOperationResponse
Status(StatusRequest) StatusResponse
WorkloadChannel(stream WorkloadMessage) stream AgentCommand
SnapshotRequest: job_id 1, group 2, backend 3, backend_config 4
SnapshotResponse: operation_id 1
RestoreRequest: job_id 1, group 2, backend 3, backend_config 4
RestoreResponse: operation_id 1
GetOperationRequest: operation_id 1
GetOperationResponse: status 1, storage_bytes? 2, snapshot_device_bytes? 3, elapsed_ms 4, error? 5
StatusRequest:
StatusResponse: job_statuses 1, accelerator_statuses 2
JobStatus: job_id 1, state 2
AcceleratorStatus: id 1, memory_used_bytes 2, memory_total_bytes 3
BackendConfig: cuda 1, app_endpoint 2, app_channel 3, direct_memory 4, memory_regions 5
ProcessTarget: pids 1
CudaBackendConfig: explicit_target 1
DirectMemoryBackendConfig: explicit_target 1
AppEndpointConfig: app 1, endpoints 2, mode 3, tags 4
AppEndpointConfig.App: UNSPECIFIED 0, VLLM 1, SGLANG 2
AppChannelConfig: mode 1, tags 2
MemoryRegion: pid 1, address 2, size_bytes 3
MemoryRegionsBackendConfig: regions 1, snapshot_name 2
WorkloadMessage: register 1, result 2
RegisterWorkload: job_id 1, group 2, capabilities 3
WorkloadCapabilities: supported_modes 1, default_mode 2, tags 3
CommandResult: command_id 1, ok 2, error 3
AgentCommand: command_id 1, snapshot 2, restore 3
SnapshotCommand: mode 1, tags 2
RestoreCommand: tags 1
Backend: UNSPECIFIED 0, CUDA 1
SuspendMode: UNSPECIFIED 0, OFFLOAD 1, DISCARD 2
OperationStatus: UNSPECIFIED 0, PENDING 1, COMPLETE 2, FAILED 3
JobState: UNSPECIFIED 0, IDLE 1, RUNNING 2, TRANSITIONING 3, SAVED 4, FAULTED 5
"""


def shown(file: FileDescriptor) -> str:
    """A file in the form of the tables above."""
    (service,) = file.services_by_name.values()
    lines = [f"{file.package} {service.name}"]
    for method in service.methods:
        asked, told = method.input_type.name, method.output_type.name
        lines.append(
            f"{method.name}({'stream ' * method.client_streaming}{asked}) {'stream ' * method.server_streaming}{told}"
        )
    for message in file.message_types_by_name.values():
        lines.append(f"{message.name}: {', '.join(fields(message))}".strip())
        lines += [f"{message.name}.{enum.name}: {values(enum)}" for enum in message.enum_types]
    lines += [f"{name}: {values(enum)}" for name, enum in file.enum_types_by_name.items()]
    return "\n" + "\n".join(lines) + "\n"


def fields(message: Descriptor) -> list[str]:
    chosen = {each.name for group in message.oneofs if group.name.startswith("_") for each in group.fields}
    return [f"{field.name}{'?' * (field.name in chosen)} {field.number}" for field in message.fields]


def values(enum: Any) -> str:
    """Without the prefix that all of them share: the enum's name in capitals."""
    prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum.name).upper() + "_"
    assert all(value.name.startswith(prefix) for value in enum.values)
    return ", ".join(f"{value.name.removeprefix(prefix)} {value.number}" for value in enum.values)


@pytest.mark.parametrize(
    ("module", "expected"),
    [(timeslice_orchestrator_pb2, ORCHESTRATOR), (snapshot_agent_pb2, SNAPSHOT_AGENT)],
    ids=["orchestrator", "snapshot_agent"],
)
def test_names_and_numbers_are_those_of_llm_d(module: Any, expected: str) -> None:
    """A client made from llm-d's own files is understood, and understands."""
    assert sorted(shown(module.DESCRIPTOR).splitlines()) == sorted(expected.splitlines())


def test_the_generated_code_is_current() -> None:
    """Nobody changed a .proto file, or the code, without scripts/protos."""
    line = [sys.executable, str(ROOT / "scripts" / "protos.py"), "--check"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_extra_asks_for_what_the_code_was_made_with() -> None:
    """Generated code refuses to be loaded by an older grpcio or protobuf: pip must not install one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = dict(each.split(">=") for each in project["optional-dependencies"]["grpc"])
    (made_with,) = {
        version
        for path in PROTO.glob("*_pb2_grpc.py")
        for version in re.findall(r"GRPC_GENERATED_VERSION = '(.*)'", path.read_text())
    }
    (runtime,) = {
        version
        for path in PROTO.glob("*_pb2.py")
        for version in re.findall(r"Protobuf Python Version: (.*)", path.read_text())
    }
    assert wanted == {"grpcio": made_with, "protobuf": runtime}
