"""The two interfaces: the .proto files, the code made from them, and what llm-d's clients send, are one."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor

from timeslice.gateway.proto import snapshot_agent_pb2, timeslice_orchestrator_pb2

ROOT = Path(__file__).parent.parent.parent
PROTO = ROOT / "timeslice" / "gateway" / "proto"
SCALARS = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in vars(FieldDescriptor).items()
    if name.startswith("TYPE_")
}

ORCHESTRATOR = """
timeslice_orchestrator.v1alpha1 TimeSliceOrchestratorService
Acquire(AcquireRequest) AcquireResponse
Yield(YieldRequest) YieldResponse
ListGroups(ListGroupsRequest) ListGroupsResponse
GetGroupStatus(GetGroupStatusRequest) GetGroupStatusResponse
AcquireRequest: string job_id 1, string group_id 2
AcquireResponse: bool success 1, int64 waited_ms 2, bool context_restored 3
YieldRequest: string job_id 1, string group_id 2
YieldResponse: bool success 1, int64 pending_waiters 2, bool snapshot_deferred 3
ListGroupsRequest:
ListGroupsResponse: repeated string group_ids 1
GetGroupStatusRequest: string group_id 1
GetGroupStatusResponse: GroupStatus group 1, repeated SnapshotAgentJobState agent_job_states 2
GroupStatus: string group_id 1, GroupStatus.State group_state 2, google.protobuf.Timestamp state_timestamp 3, \
string locking_job 4, string active_job 5, int64 waiter_queue_depth 6, string loaded_job 7
GroupStatus.State: UNSPECIFIED 0, UNKNOWN 1, IDLE 2, IDLE_YIELDED 3, LOCKED 4, SWITCHING 5
SnapshotAgentJobState: string agent 1, SnapshotAgentJobState.State job_state 2, string job_id 3
SnapshotAgentJobState.State: UNSPECIFIED 0, IDLE 1, RUNNING 2, TRANSITIONING 3, SAVED 4, FAULTED 5
"""

SNAPSHOT_AGENT = """
snapshot_agent.v1alpha1 SnapshotAgentService
Snapshot(SnapshotRequest) SnapshotResponse
Restore(RestoreRequest) RestoreResponse
GetOperation(GetOperationRequest) GetOperationResponse
Status(StatusRequest) StatusResponse
WorkloadChannel(stream WorkloadMessage) stream AgentCommand
SnapshotRequest: string job_id 1, string group 2, Backend backend 3, BackendConfig backend_config 4
SnapshotResponse: string operation_id 1
RestoreRequest: string job_id 1, string group 2, Backend backend 3, BackendConfig backend_config 4
RestoreResponse: string operation_id 1
GetOperationRequest: string operation_id 1
GetOperationResponse: OperationStatus status 1, optional int64 storage_bytes 2, \
optional int64 snapshot_device_bytes 3, int64 elapsed_ms 4, optional string error 5
StatusRequest:
StatusResponse: repeated JobStatus job_statuses 1, repeated AcceleratorStatus accelerator_statuses 2
JobStatus: string job_id 1, JobState state 2
AcceleratorStatus: string id 1, int64 memory_used_bytes 2, int64 memory_total_bytes 3
BackendConfig: oneof backend CudaBackendConfig cuda 1, oneof backend AppEndpointConfig app_endpoint 2, \
oneof backend AppChannelConfig app_channel 3, oneof backend DirectMemoryBackendConfig direct_memory 4, \
oneof backend MemoryRegionsBackendConfig memory_regions 5
ProcessTarget: repeated int32 pids 1
CudaBackendConfig: ProcessTarget explicit_target 1
DirectMemoryBackendConfig: ProcessTarget explicit_target 1
AppEndpointConfig: AppEndpointConfig.App app 1, repeated string endpoints 2, SuspendMode mode 3, \
repeated string tags 4
AppEndpointConfig.App: UNSPECIFIED 0, VLLM 1, SGLANG 2
AppChannelConfig: SuspendMode mode 1, repeated string tags 2
MemoryRegion: int32 pid 1, uint64 address 2, uint64 size_bytes 3
MemoryRegionsBackendConfig: repeated MemoryRegion regions 1, string snapshot_name 2
WorkloadMessage: oneof message RegisterWorkload register 1, oneof message CommandResult result 2
RegisterWorkload: string job_id 1, string group 2, WorkloadCapabilities capabilities 3
WorkloadCapabilities: repeated SuspendMode supported_modes 1, SuspendMode default_mode 2, repeated string tags 3
CommandResult: string command_id 1, bool ok 2, string error 3
AgentCommand: string command_id 1, oneof command SnapshotCommand snapshot 2, \
oneof command RestoreCommand restore 3
SnapshotCommand: SuspendMode mode 1, repeated string tags 2
RestoreCommand: repeated string tags 1
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
    """Each with its label, its type, and the oneof that it is in."""
    return [
        f"{label(field)}{kind(field, message.file.package)} {field.name} {field.number}" for field in message.fields
    ]


def label(field: FieldDescriptor) -> str:
    if field.is_repeated:
        return "repeated "
    group = field.containing_oneof
    if group is None:
        return ""
    return "optional " if group.name.startswith("_") else f"oneof {group.name} "


def kind(field: FieldDescriptor, package: str) -> str:
    made = field.message_type or field.enum_type
    return made.full_name.removeprefix(f"{package}.") if made else SCALARS[field.type]


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
def test_names_numbers_and_types_are_those_of_llm_d(module: Any, expected: str) -> None:
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
