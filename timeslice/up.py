"""Server, coordinator and node agent of one machine and one user, in one process: what ``timeslice up`` runs.

Coordinator and agent each have a thread and an event loop of their own: when one hangs, the others go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from timeslice.agent.service import AgentOptions, run_agent
from timeslice.arena.device import MARKER, Device, whole_pages
from timeslice.arena.errors import DeviceInUseError, EmulatedDeviceError
from timeslice.arena.survey import arenas_of
from timeslice.coordinator.service import CoordinatorOptions, run_coordinator
from timeslice.embedded import EmbeddedServer
from timeslice.errors import RefusedError, TimeSliceError
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import Keys
from timeslice.settings import default_node, publish_url, runtime_dir, withdraw_url

logger = logging.getLogger("timeslice.up")

READY_S = 60.0  # for coordinator and agent to come up; the agent looks at all processes of the machine first
GRACE_S = 35.0  # for each of them to end; the agent lets a move of state arrive
_LOCK_S = 3.0  # a server whose `up` was killed is stopped by its guard within this time

Main = Callable[[Callable[[], None], asyncio.Event], Coroutine[Any, Any, None]]


class Worker:
    """A daemon's event loop in a thread."""

    def __init__(self, name: str, main: Main) -> None:
        self.name = name
        self.ready = threading.Event()
        self.failure: BaseException | None = None
        self._main = main
        self._stop = asyncio.Event()
        self._asked = False  # to stop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            with asyncio.Runner() as runner:
                self._loop = runner.get_loop()
                if self._asked:  # before there was a loop to tell
                    self._stop.set()
                runner.run(self._main(self.ready.set, self._stop))
        except BaseException as error:
            self.failure = error
            logger.debug("%s failed", self.name, exc_info=True)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def ask(self) -> None:
        """Ask it to end."""
        self._asked = True
        if self._loop is not None and self.running:
            with contextlib.suppress(RuntimeError):  # its loop closed in this moment: it has ended
                self._loop.call_soon_threadsafe(self._stop.set)

    def stop(self) -> None:
        """Ask it to end and wait for it, at most GRACE_S seconds."""
        self.ask()
        if self._thread.ident is not None:
            self._thread.join(GRACE_S)
        if self.running:
            logger.warning("%s did not stop within %g s; going on without it", self.name, GRACE_S)


class LocalStack:
    """All of timeslice for this user on this machine. ``groups`` maps names to sizes of emulated devices in bytes,
    ``backends`` to what moves state there, as `AgentOptions` takes it."""

    def __init__(
        self,
        groups: Mapping[str, int],
        *,
        prefix: str = "ts",
        data: Path | None = None,
        port: int | None = None,
        http_port: int | None = None,
        backends: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.groups = dict(groups)
        self._backends = dict(backends or {})
        self.prefix = prefix
        self.node = default_node()
        self.data = data
        self._http_port = http_port
        self._folder = runtime_dir()
        self._devices = self._folder / "devices"
        self._state = (data or self._folder) / "agent"
        self.server = EmbeddedServer(self._folder / "server", data=data and data / "redis", port=port)
        self._lock: int | None = None
        self._inherited: set[Path] = set()  # devices of one that was killed, with the memory of living processes
        self._workers: list[Worker] = []

    @property
    def url(self) -> str:
        return self.server.url

    def start(self) -> Self:
        """Bring everything up. RefusedError if another one of this user runs, or if a device has another size than
        asked for and is in use; then nothing was touched."""
        self._lock = _claim(self._folder / "up.lock")
        try:
            self._take_over()
            self._start_server()
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()} {self.url}\n".encode(), 0)
            coordinator = CoordinatorOptions(url=self.url, prefix=self.prefix, name=f"up-{os.getpid()}")
            agent = AgentOptions(
                url=self.url,
                prefix=self.prefix,
                node=self.node,
                groups=tuple(self.groups),
                state_dir=self._state,
                emulate=self.groups,
                backends=self._backends,
                http_host="127.0.0.1",
                http_port=self._http_port,
                leave=True,
            )
            self._workers = [
                Worker("coordinator", lambda ready, stop: run_coordinator(coordinator, ready=ready, stop=stop)),
                Worker("agent", lambda ready, stop: run_agent(agent, ready=ready, stop=stop)),
            ]
            for worker in self._workers:
                worker.start()
            self._await_ready()
            self._await_owners()
            publish_url(self.url)
        except BaseException:
            self._take_down(keep=self._inherited)
            raise
        self._inherited = set()
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _take_over(self) -> None:
        """Go on with what one that was killed left, where living processes have memory; remove it elsewhere."""
        folders = self._device_folders()
        found = _tenants() if folders else {}
        tenants = {folder: pids for folder in folders if (pids := found.get(os.path.realpath(folder)))}
        self._inherited = set(folders)  # until all were looked at: a refusal touches nothing
        for folder, pids in tenants.items():
            self._check_size(folder, pids)
        self._remove_devices(keep=set(tenants), force=False)
        self._inherited = set(self._device_folders())
        # Tokens of nobody would tell the new, empty server that it lost data. Of those who live the agent has to know.
        if self.data is None and not tenants:
            shutil.rmtree(self._state, ignore_errors=True)

    def _check_size(self, folder: Path, pids: set[int]) -> None:
        wanted = self.groups.get(folder.name)
        if wanted is not None and (found := Device.open(folder).capacity) != whole_pages(wanted):
            raise RefusedError(
                f"the emulated device of group {folder.name} has {found} bytes and not {wanted}, and can't be made "
                f"anew: an earlier `timeslice up` was killed, and processes {', '.join(map(str, sorted(pids)))} still "
                f"have memory on it. End them, or give the group its old size: --group {folder.name}={found}"
            )

    def _start_server(self) -> None:
        until = time.monotonic() + _LOCK_S
        while True:
            try:
                self.server.start()
                return
            except RefusedError:
                if time.monotonic() > until:
                    raise
            time.sleep(0.05)

    def _await_ready(self) -> None:
        until = time.monotonic() + READY_S
        for worker in self._workers:
            while not worker.ready.wait(0.05):
                self.check()
                if time.monotonic() > until:
                    raise TimeSliceError(
                        f"the {worker.name} was not ready within {READY_S:g} s; see the messages above"
                    )

    def _await_owners(self) -> None:
        """Swaps can be ordered as soon as we say that all is ready: the coordinator has found every group."""
        until = time.monotonic() + READY_S
        driver, keys = SyncDriver(self.url), Keys(self.prefix)
        try:
            while waiting := [name for name in self.groups if not driver.view(keys.group(name)).state.get("owner")]:
                self.check()
                if time.monotonic() > until:
                    raise TimeSliceError(f"no coordinator drives {', '.join(waiting)}; see the messages above")
                time.sleep(0.02)
        finally:
            driver.close()

    def check(self) -> None:
        """Raise what ended a part that should still run."""
        for worker in self._workers:
            if worker.running:
                continue
            if isinstance(worker.failure, TimeSliceError):
                raise worker.failure
            cause = f": {worker.failure!r}" if worker.failure else ""
            raise TimeSliceError(f"the {worker.name} ended unexpectedly{cause}") from worker.failure
        if not self.server.running:
            raise TimeSliceError(f"the server ended unexpectedly; its log is {self.server.log}")

    def stop(self) -> None:
        """Take everything down and leave nothing behind but ``data``. May be called in any state."""
        self._take_down(keep=set())

    def _take_down(self, *, keep: set[Path]) -> None:
        if self._lock is None:
            return  # never started, or refused: what runs here is another one's
        withdraw_url(self.url)
        if not self.server.running:  # nobody hears how they leave: each tries for a moment, all at once
            for worker in self._workers:
                worker.ask()
        for worker in reversed(self._workers):  # the agent leaves its groups while somebody still listens
            worker.stop()
        self._remove_devices(keep=keep)
        self.server.stop()
        self._remove_files(keep_state=bool(keep))

    def kill(self) -> None:
        """End at once: what is under way is not waited for."""
        if self._lock is None:
            return
        withdraw_url(self.url)
        self.server.kill()
        self._remove_devices()
        self._remove_files()

    def _device_folders(self) -> list[Path]:
        return sorted(self._devices.glob("*")) if self._devices.is_dir() else []

    def _remove_devices(self, *, keep: set[Path] | None = None, force: bool = True) -> None:
        """All but those to keep. Forced, processes that have memory there keep it, and nobody gets new memory there;
        else a device in use stays as it is."""
        for folder in self._device_folders():
            if keep and folder in keep:
                continue
            try:
                if os.path.lexists(folder / MARKER):
                    Device.open(folder).destroy(force=force)
                folder.rmdir()
            except DeviceInUseError as error:
                logger.warning("%s; it is used as it is", error)
            except (OSError, TimeSliceError) as error:
                logger.warning("emulated device %s was not removed: %s", folder, error)
        with contextlib.suppress(OSError):  # not there, or not empty: said above
            self._devices.rmdir()

    def _remove_files(self, *, keep_state: bool = False) -> None:
        assert self._lock is not None
        shutil.rmtree(self._folder / "server", ignore_errors=True)
        if self.data is None and not keep_state:
            shutil.rmtree(self._state, ignore_errors=True)
        (self._folder / "up.lock").unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = None


@contextlib.contextmanager
def private_environment(folder: Path) -> Iterator[None]:
    """Within it a ``LocalStack`` is in ``folder``, whatever runs and is set up for this user otherwise."""
    before = {name: value for name, value in os.environ.items() if name.startswith("TIMESLICE_")}
    _set({**dict.fromkeys(before, ""), "TIMESLICE_RUNTIME_DIR": str(folder / "run")})
    try:
        yield
    finally:
        _set({"TIMESLICE_RUNTIME_DIR": "", **before})


def _set(variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        if value:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)


def _tenants() -> dict[str, set[int]]:
    """Path of an emulated device -> living processes with an arena there, be its memory on the device or saved."""
    found: dict[str, set[int]] = {}
    for pid in [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]:
        try:
            arenas = arenas_of(pid)
        except (EmulatedDeviceError, OSError):
            continue  # it ended meanwhile, or is another user's
        for arena in arenas:
            found.setdefault(arena.device, set()).add(pid)
    return found


def _claim(path: Path) -> int:
    """The lock that one ``up`` of a user holds while it runs."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid, _, url = os.pread(lock, 4096, 0).decode().strip().partition(" ")
            os.close(lock)
            where = f" at {url}" if url else ""
            raise RefusedError(
                f"`timeslice up` runs already as process {pid or '?'}{where}. Use that one, or stop it: "
                f"kill {pid or 'PID'}. For a second one set TIMESLICE_RUNTIME_DIR to another folder."
            ) from None
        # The one before us removes the file at its end; a lock on a removed file would keep nobody out.
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(lock).st_ino == path.stat().st_ino:
                return lock
        os.close(lock)
