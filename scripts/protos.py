"""Writes the messages and services of timeslice/gateway/proto from its .proto files, with their types.

``--check`` only says what is stale.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import grpc_tools
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet, ServiceDescriptorProto
from grpc_tools import protoc

ROOT = Path(__file__).parent.parent
FOLDER = Path("timeslice/gateway/proto")
KINDS = {False: "unary", True: "stream"}


def generate(out: Path) -> None:
    """Write all generated files below ``out``. Imports are absolute: the files are named from the root."""
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / FOLDER).glob("*.proto"))
    described = out / "described"
    includes = [f"-I{ROOT}", f"-I{Path(grpc_tools.__file__).parent / '_proto'}"]
    outputs = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", *includes, *outputs, f"--descriptor_set_out={described}", *sources]) != 0:
        sys.exit("protoc failed, see above")
    for file in FileDescriptorSet.FromString(described.read_bytes()).file:
        (out / file.name).with_name(f"{Path(file.name).stem}_pb2_grpc.pyi").write_text(service_types(file))
    described.unlink()


def service_types(file: FileDescriptorProto) -> str:
    """The types of a file's services: protoc writes none."""
    module = f"{Path(file.name).stem}_pb2"
    lines = [
        "from collections.abc import AsyncIterator as _AsyncIterator",
        "",
        "import grpc.aio as _aio",
        "",
        f"from {'.'.join(FOLDER.parts)} import {module} as _m",
    ]
    for service in file.service:
        lines += _class(service)
    return "\n".join(lines) + "\n"


def _class(service: ServiceDescriptorProto) -> list[str]:
    stub = ["", f"class {service.name}Stub:", "    def __init__(self, channel: _aio.Channel) -> None: ..."]
    servicer = ["", f"class {service.name}Servicer:"]
    for method in service.method:
        asked, told = (f"_m.{name.rpartition('.')[2]}" for name in (method.input_type, method.output_type))
        kinds = "".join(KINDS[flag].title() for flag in (method.client_streaming, method.server_streaming))
        stub.append(f"    {method.name}: _aio.{kinds}MultiCallable[{asked}, {told}]")
        taken = f"_AsyncIterator[{asked}]" if method.client_streaming else asked
        keyword, given = ("def", f"_AsyncIterator[{told}]") if method.server_streaming else ("async def", told)
        context = f"_aio.ServicerContext[{asked}, {told}]"
        parameter = "request_iterator" if method.client_streaming else "request"
        servicer.append(f"    {keyword} {method.name}(self, {parameter}: {taken}, context: {context}) -> {given}: ...")
    add = (
        f"def add_{service.name}Servicer_to_server(servicer: {service.name}Servicer, server: _aio.Server) -> None: ..."
    )
    return [*stub, *servicer, "", add]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        generate(out)
        written = {path.relative_to(out): path.read_text() for path in out.rglob("*_pb2*")}
    stale = [path for path, text in written.items() if not _same(ROOT / path, text)]
    there = {path.relative_to(ROOT) for path in (ROOT / FOLDER).glob("*_pb2*")}
    stale += sorted(there - written.keys())
    if "--check" in sys.argv:
        if stale:
            sys.exit(f"stale, run scripts/protos: {', '.join(map(str, sorted(stale)))}")
        return
    for path in there - written.keys():
        (ROOT / path).unlink()
    for path, text in written.items():
        (ROOT / path).write_text(text)


def _same(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    main()
