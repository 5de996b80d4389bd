"""A proxy between a client and a server that cuts, heals, stalls and loses replies."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path


class _Link:
    """One connection through the proxy."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.near, self.far = near, far
        self.swallow = False

    def close(self) -> None:
        for end in (self.near, self.far):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # closed by its peer already
            end.close()


_Forward = Callable[[_Link], bool]


class Proxy:
    """Forwards from a loopback port to the unix socket of a server."""

    def __init__(self, server_socket: Path) -> None:
        self._server_socket = str(server_socket)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._links: set[_Link] = set()
        self._lock = threading.Lock()
        self._flowing = threading.Event()
        self._flowing.set()
        self._cut = False
        self._lose: bytes | None = None
        self.lost_replies = 0
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Close all connections and refuse new ones."""
        with self._lock:
            self._cut = True
            links, self._links = self._links, set()
        for link in links:
            link.close()

    def heal(self) -> None:
        self._cut = False
        self._flowing.set()

    def stall(self) -> None:
        """Keep connections open and let nothing through."""
        self._flowing.clear()

    def lose_reply_to(self, marker: str) -> None:
        """Deliver the next request that holds ``marker``, and close the connection instead of giving its reply."""
        self._lose = marker.encode()

    def close(self) -> None:
        self._listener.close()
        self.cut()
        self._flowing.set()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._cut:
                near.close()
                continue
            far = socket.socket(socket.AF_UNIX)
            try:
                far.connect(self._server_socket)
            except OSError:
                near.close()
                far.close()
                continue
            link = _Link(near, far)
            with self._lock:
                self._links.add(link)
            for pump in (self._requests, self._replies):
                threading.Thread(target=self._pump, args=(pump, link), daemon=True).start()

    def _pump(self, forward: _Forward, link: _Link) -> None:
        try:
            while forward(link):
                pass
        except OSError:
            pass  # cut
        with self._lock:
            self._links.discard(link)
        link.close()

    def _requests(self, link: _Link) -> bool:
        data = link.near.recv(1 << 16)
        self._flowing.wait()
        if self._lose and self._lose in data:
            self._lose = None
            link.swallow = True
        link.far.sendall(data)
        return bool(data)

    def _replies(self, link: _Link) -> bool:
        data = link.far.recv(1 << 16)
        self._flowing.wait()
        if link.swallow:
            self.lost_replies += 1
            return False
        link.near.sendall(data)
        return bool(data)
