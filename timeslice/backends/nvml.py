"""What NVIDIA's management library says of real devices: who is there, what is free, who has the rest.

Calls take milliseconds and block, and with a driver that hangs they never end: asynchronous code goes by `ask`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import pynvml

from timeslice.backends.base import DeviceMemory
from timeslice.errors import BackendError, FaultKind

log = logging.getLogger("timeslice.backends")

T = TypeVar("T")

ASK_S = 5.0
_NOT_THERE = "is the NVIDIA driver installed here? In a container: does it get the driver's libraries and /dev/nvidia*?"
# NVML's error -> what it means here, and what to do.
_REMEDIES = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: f"libnvidia-ml.so.1 was not found; {_NOT_THERE}",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded; load it (modprobe nvidia), try nvidia-smi",
    pynvml.NVML_ERROR_NO_PERMISSION: "no permission to ask the driver; run the agent as root, with /dev/nvidia* open",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the driver was replaced while the old one runs; reload it, or reboot",
    pynvml.NVML_ERROR_GPU_IS_LOST: "the GPU has fallen off the bus (see Xid in dmesg); reset it, or reboot",
    pynvml.NVML_ERROR_RESET_REQUIRED: "the GPU needs a reset (nvidia-smi --gpu-reset), or a reboot",
}
_POISONED = {pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED}
_PASSING = {pynvml.NVML_ERROR_TIMEOUT, pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_IN_USE}


class NvmlError(BackendError):
    """NVML could not be asked, or not about this device. ``code`` is NVML's own, 0 without one."""

    def __init__(self, message: str, *, code: int = 0) -> None:
        kind = FaultKind.UNSUPPORTED
        if code in _POISONED:
            kind = FaultKind.POISONED
        elif code in _PASSING:
            kind = FaultKind.TRANSIENT
        super().__init__(message, kind=kind)
        self.code = code


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """A GPU, or an instance of one that is divided by MIG. ``index`` is the GPU's number, as nvidia-smi has it."""

    uuid: str
    name: str
    index: int
    total_bytes: int  # without what the driver keeps for itself
    free_bytes: int
    parent: str = ""  # of a MIG instance: the UUID of its GPU


class _Asker:
    """One thread of its own: a driver that hangs keeps this one, and not all of those that the agent has for other
    things. While it hangs, every further question fails at once."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nvml")
        self._overdue: Future[Any] | None = None

    async def ask(self, question: Callable[[], T], within_s: float) -> T:
        if self._overdue is None or self._overdue.done():
            asked = self._thread.submit(question)
            answer = asyncio.wrap_future(asked)
            try:
                await asyncio.wait([answer], timeout=within_s)
                if answer.done():
                    return answer.result()
                if asked.running():
                    self._overdue = asked
            finally:
                answer.cancel()
        raise NvmlError(
            "the NVIDIA driver does not answer; see whether nvidia-smi hangs as well, and dmesg (Xid)",
            code=pynvml.NVML_ERROR_TIMEOUT,
        )


_asker = _Asker()


async def ask(question: Callable[[], T], *, within_s: float = ASK_S) -> T:
    """The answer to a question that asks `Nvml`. NvmlError (transient) if it is not there in time."""
    return await _asker.ask(question, within_s)


class Nvml:
    """The library, which is initialised at the first question, once for the process. Any thread may ask."""

    _lock = threading.Lock()
    _ready = False

    def devices(self) -> tuple[Accelerator, ...]:
        """All GPUs that can be asked; where MIG is on, a GPU's instances instead of it."""
        self._start()
        with _told("listing GPUs"):
            count = pynvml.nvmlDeviceGetCount()
        found: list[Accelerator] = []
        for index in range(count):
            try:
                found += self._listed(index)
            except NvmlError as error:
                log.warning("GPU %d is left out: %s", index, error)
        return tuple(found)

    def processes(self, uuid: str) -> tuple[tuple[int, int | None], ...]:
        """Who has something on a device, by the numbers that the driver gives, and how many bytes where it tells."""
        handle = self._handle(uuid)
        found: dict[int, int | None] = {}
        for ask in (
            pynvml.nvmlDeviceGetComputeRunningProcesses_v3,
            pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3,
        ):
            with _told(f"listing the processes on {uuid}"), suppress(pynvml.NVMLError_NotSupported):
                for each in ask(handle):  # one that computes and draws is in both lists
                    found[each.pid] = max((each.usedGpuMemory, found.get(each.pid)), key=lambda size: size or 0)
        return tuple(sorted(found.items()))

    def persistence(self, uuid: str) -> bool:
        """Whether the driver keeps the GPU ready while nobody uses it."""
        handle = self._handle(uuid)
        with _told(f"asking for the persistence mode of {uuid}"):
            with suppress(pynvml.NVMLError):  # of a MIG instance the GPU is asked
                handle = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            return bool(pynvml.nvmlDeviceGetPersistenceMode(handle))

    def driver_version(self) -> str:
        """Such as 570.86.10."""
        self._start()
        with _told("asking for the driver's version"):
            return str(pynvml.nvmlSystemGetDriverVersion())

    def utilization(self, uuid: str) -> int | None:
        """Per cent of the last sample in which something computed there; None where the driver can't tell (MIG)."""
        handle = self._handle(uuid)
        with _told(f"asking how busy {uuid} is"), suppress(pynvml.NVMLError_NotSupported):
            return int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        return None

    def measure(self, uuids: Sequence[str]) -> list[DeviceMemory]:
        """What is free on each, and who has the rest: 0 bytes for a process of which the driver tells no figure."""
        return [self._measured(uuid) for uuid in uuids]

    def _measured(self, uuid: str) -> DeviceMemory:
        total, free = _memory(self._handle(uuid), uuid)
        holders = tuple((pid, size or 0) for pid, size in self.processes(uuid))
        return DeviceMemory(device=uuid, total_bytes=total, free_bytes=free, holders=holders)

    def _listed(self, index: int) -> list[Accelerator]:
        with _told(f"asking GPU {index}"):
            gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
            instances = _instances(gpu)
            if instances is None:
                return [_accelerator(gpu, index)]
            uuid = str(pynvml.nvmlDeviceGetUUID(gpu))
            return [_accelerator(each, index, uuid) for each in instances]

    def _handle(self, uuid: str) -> Any:
        self._start()
        with _told(f"finding device {uuid}"):
            return pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def _start(self) -> None:
        with self._lock:
            if not Nvml._ready:
                with _told("asking for GPUs"):
                    pynvml.nvmlInit()
                Nvml._ready = True


@contextmanager
def _told(what: str) -> Iterator[None]:
    """NVML's errors with what to do about them."""
    try:
        yield
    except pynvml.NVMLError as error:
        why = _REMEDIES.get(error.value) or f"{error} (see nvidia-smi)"
        raise NvmlError(f"{what} failed: {why}", code=error.value) from error


def _instances(gpu: Any) -> list[Any] | None:
    """The MIG instances of a GPU; None where MIG is off or not known."""
    try:
        if pynvml.nvmlDeviceGetMigMode(gpu)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return None
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        return None
    found = []
    for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        with suppress(pynvml.NVMLError_NotFound):  # numbers need not be consecutive
            found.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number))
    return found


def _accelerator(handle: Any, index: int, parent: str = "") -> Accelerator:
    uuid, name = str(pynvml.nvmlDeviceGetUUID(handle)), str(pynvml.nvmlDeviceGetName(handle))
    total, free = _memory(handle, uuid)
    return Accelerator(uuid=uuid, name=name, index=index, total_bytes=total, free_bytes=free, parent=parent)


def _memory(handle: Any, uuid: str) -> tuple[int, int]:
    """Total without what the driver keeps for itself, and free."""
    with _told(f"measuring {uuid}"):
        told = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)  # since r510
        return int(told.total - told.reserved), int(told.free)
