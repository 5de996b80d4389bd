"""``timeslice agent --check``: what of this machine's devices and backends would work, without a server."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from timeslice.agent.accelerators import chosen, described
from timeslice.arena.device import Device
from timeslice.backends.base import Context
from timeslice.backends.nvml import Accelerator, Nvml
from timeslice.backends.registry import get_backend, names
from timeslice.backends.spec import parse_spec
from timeslice.cli.exits import DONE, FAILED
from timeslice.cli.output import note, print_json, print_table
from timeslice.errors import BackendError, FaultKind, TimeSliceError
from timeslice.models import ChannelAnswer, ChannelCommand

HEALTH_S = 30.0
_SIZE = 1 << 20  # of the emulated device that is made for the check


@dataclass(frozen=True, kw_only=True)
class Health:
    """What a backend says of itself here."""

    backend: str
    problems: tuple[str, ...]
    emulated: bool  # it works on an emulated device, not on a real one
    asked: bool  # named by --backend
    stage: bool  # no more than a stage of composite

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True, kw_only=True)
class Real:
    """The real devices of this machine, or why there are none."""

    devices: tuple[Accelerator, ...] = ()
    driver: str = ""
    problem: str = ""


class _NoServer:
    """Stands where an agent has its channel: health is looked at without a workload."""

    async def ask(self, job: str, process: str, command: ChannelCommand, *, deadline_s: float) -> ChannelAnswer:
        raise BackendError(
            f"job {job}, process {process}: no answer to {command.action} within {deadline_s} s, for --check has no "
            "server",
            kind=FaultKind.UNSUPPORTED,
        )


def check(node: str, asked_devices: Mapping[str, Sequence[str]], specs: Sequence[str], *, as_json: bool) -> int:
    """Print the health of every installed backend; the exit code says whether those of ``specs`` can work, and whether
    the devices asked for are there."""
    real = _real(asked_devices)
    accelerators = tuple(device.uuid for device in real.devices)
    context = Context(group="check", node=node, accelerators=accelerators, channel=_NoServer())
    with _emulated_device() as path:
        found = asyncio.run(_all(context, path, specs))
    if as_json:
        print_json({"node": node, **_document(real, found)})
    else:
        _show(real, found)
    missing = bool(asked_devices and real.problem)
    return FAILED if missing or any(each.asked and not each.ok for each in found) else DONE


def _real(asked: Mapping[str, Sequence[str]]) -> Real:
    try:
        nvml = Nvml()
        devices, driver = nvml.devices(), nvml.driver_version()
        uuids = {uuid for each in chosen(asked, devices).values() for uuid in each}
    except TimeSliceError as error:
        return Real(problem=str(error))
    kept = tuple(device for device in devices if not asked or device.uuid in uuids)
    return Real(devices=kept, driver=driver, problem="" if kept else "the driver shows no GPU here; try nvidia-smi")


@contextmanager
def _emulated_device() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="timeslice-check-") as folder:
        device = Device.create(Path(folder) / "device", _SIZE)
        try:
            yield Path(device.path)
        finally:
            device.destroy(force=True)


async def _all(context: Context, emulated: Path, specs: Sequence[str]) -> list[Health]:
    asked = dict(parse_spec(spec) for spec in specs)
    return [
        await _one(name, replace(context, options=asked.get(name, {})), emulated, asked=name in asked)
        for name in sorted({*names(), *asked})
    ]


async def _one(name: str, context: Context, emulated: Path, *, asked: bool) -> Health:
    """As on a node with the devices that are there; and where that does not go, with an emulated one."""
    problems, stage = await _look(name, context)
    on_emulated = bool(problems) and not (await _look(name, replace(context, accelerators=(), devices=(emulated,))))[0]
    if on_emulated:
        problems = ()
    if stage and asked:
        problems = (f"it moves nothing by itself; write for example composite:stages={name}+cuda", *problems)
    return Health(backend=name, problems=problems, emulated=on_emulated, asked=asked, stage=stage)


async def _look(name: str, context: Context) -> tuple[tuple[str, ...], bool]:
    """What is wrong with it here, and whether it is no more than a stage of others."""
    try:
        async with asyncio.timeout(HEALTH_S):
            backend = get_backend(name, context)
            return tuple(await backend.health()), not backend.capabilities().modes
    except BackendError as error:
        problem = str(error).removeprefix(f"group {context.group}, node {context.node}: ")
    except TimeoutError:
        problem = f"it did not say how it is within {HEALTH_S:g} s"
    except Exception as error:  # whatever somebody else's backend raises
        problem = f"it failed in an unexpected way: {type(error).__name__}: {error}"
    return (problem,), False


def _document(real: Real, found: Sequence[Health]) -> dict[str, object]:
    fields = ("uuid", "name", "index", "parent", "total_bytes", "free_bytes")
    return {
        "driver": real.driver,
        "devices": [{field: getattr(device, field) for field in fields} for device in real.devices],
        "devices_problem": real.problem,
        "backends": [
            {
                "backend": each.backend,
                "ok": each.ok,
                "emulated": each.emulated,
                "asked": each.asked,
                "stage": each.stage,
                "problems": list(each.problems),
            }
            for each in found
        ],
    }


def _show(real: Real, found: Sequence[Health]) -> None:
    there = "; ".join(map(described, real.devices))
    note(f"real devices: {there or real.problem}" + (f"; driver {real.driver}" if real.driver else ""))
    rows = [
        (
            each.backend,
            "ok" if each.ok else "no",
            "; ".join(each.problems)
            or ("on an emulated device" if each.emulated else "as a stage of composite" if each.stage else ""),
        )
        for each in found
    ]
    print_table(("backend", "works here", "what is missing, and what to do"), rows, empty="no backend is installed")
