"""A proxy between clients and a server that does to their traffic what networks do."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from timeslice.torture.resp import end_of_message, messages_in

_CHUNK = 1 << 16


class Link:
    """One connection through the proxy."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.near, self.far = near, far
        self.dead = False  # open, but nothing that the client says arrives
        self.swallow = False  # close it instead of giving the next reply
        self.double = False  # give the next reply twice
        self.drop = 0  # so many replies to come are not the client's

    def close(self) -> None:
        for end in (self.near, self.far):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # closed by its peer already
            end.close()


class Proxy:
    """Forwards from a loopback port to a server: a unix socket, or host and port."""

    def __init__(self, target: Path | tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._links: set[Link] = set()
        self._lock = threading.Lock()
        self._flowing = threading.Event()
        self._flowing.set()
        self._cut = self._half_open = False
        self._delay_s = 0.0
        self._lose: bytes | None = None
        self._repeat: bytes | None = None
        self._double: bytes | None = None
        self.lost_replies = 0
        self.repeated_requests = 0
        self.port: int = self._listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True, name=f"proxy-{self.port}").start()

    def cut(self) -> None:
        """Close all connections and refuse new ones."""
        with self._lock:
            self._cut = True
            links, self._links = self._links, set()
        for link in links:
            link.close()

    def stall(self) -> None:
        """Keep connections open and let nothing through; what was sent arrives after ``heal()``."""
        self._flowing.clear()

    def half_open(self) -> None:
        """Keep connections open, accept new ones, and let no request arrive: the far end is gone and did not say so.

        These connections stay dead after ``heal()``, as after a firewall forgot them; new ones work then.
        """
        with self._lock:
            self._half_open = True
            for link in self._links:
                link.dead = True

    def delay(self, seconds: float) -> None:
        """Let every request and every reply come so much later."""
        self._delay_s = seconds

    def heal(self) -> None:
        """End cut, stall, half-open and delay."""
        self._cut = self._half_open = False
        self._delay_s = 0.0
        self._flowing.set()

    def lose_reply_to(self, marker: str) -> None:
        """Deliver the next request that holds ``marker``, and close the connection instead of giving its reply."""
        self._lose = marker.encode()

    @property
    def armed(self) -> bool:
        """Whether a reply to lose has not been asked for yet."""
        return self._lose is not None

    def repeat_request_to(self, marker: str) -> None:
        """Deliver the next request that holds ``marker`` twice; the client gets the second reply only."""
        self._repeat = marker.encode()

    def double_reply_to(self, marker: str) -> None:
        """Deliver the next request that holds ``marker`` once, and give the client its reply twice."""
        self._double = marker.encode()

    def close(self) -> None:
        """End the proxy and its connections."""
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # closing alone would not wake accept()
        except OSError:
            pass  # not on every system
        self._listener.close()
        self.cut()
        self._flowing.set()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = self._connect()
            except OSError:
                near.close()
                continue
            link = Link(near, far)
            with self._lock:
                link.dead = self._half_open
                refused = self._cut
                if not refused:
                    self._links.add(link)
            if refused:
                link.close()
                continue
            for pump in (self._requests, self._replies):
                threading.Thread(target=self._pump, args=(pump, link), daemon=True).start()

    def _connect(self) -> socket.socket:
        if isinstance(self._target, tuple):
            return socket.create_connection(self._target)
        far = socket.socket(socket.AF_UNIX)
        try:
            far.connect(str(self._target))
        except OSError:
            far.close()
            raise
        return far

    def _pump(self, forward: Callable[[Link], bool], link: Link) -> None:
        try:
            while forward(link):
                pass
        except OSError:
            pass  # cut
        with self._lock:
            self._links.discard(link)
        link.close()

    def _hold_up(self) -> None:
        self._flowing.wait()
        if delay_s := self._delay_s:
            time.sleep(delay_s)

    def _requests(self, link: Link) -> bool:
        data = link.near.recv(_CHUNK)
        self._hold_up()
        if not link.dead:
            self._deliver(link, data)
        return bool(data)

    def _deliver(self, link: Link, data: bytes) -> None:
        """Give the server a request."""
        if self._lose and self._lose in data:
            self._lose = None
            link.swallow = True
        if self._double and self._double in data:
            self._double = None
            link.double = True
        if self._repeat and self._repeat in data:
            self._repeat = None
            while (count := messages_in(data)) is None:
                data += _more(link.near)
            link.drop += count
            self.repeated_requests += 1
            data += data
        link.far.sendall(data)

    def _replies(self, link: Link) -> bool:
        data = link.far.recv(_CHUNK)
        while data and link.drop:
            end = end_of_message(data)
            if end is None:
                data += _more(link.far)
                continue
            link.drop, data = link.drop - 1, data[end:]
            if not data:
                return True
        self._hold_up()
        if link.swallow:
            self.lost_replies += 1
            return False
        if link.double:
            link.double = False
            data += data
        link.near.sendall(data)
        return bool(data)


def _more(end: socket.socket) -> bytes:
    data = end.recv(_CHUNK)
    if not data:
        raise ConnectionResetError
    return data
