"""A proxy that can also answer in the server's place."""

from __future__ import annotations

from pathlib import Path

from tests.support.proxy import Proxy, _Link


class Impostor(Proxy):
    """While ``answer`` is set, every request gets it, raw, and the server hears nothing."""

    def __init__(self, server_socket: Path) -> None:
        self.answer = b""
        self.connections = 0
        super().__init__(server_socket)

    def _requests(self, link: _Link) -> bool:
        data = link.near.recv(1 << 16)
        self.connections += 1
        if data and self.answer:
            link.near.sendall(self.answer)
            return True
        if self._lose and self._lose in data:
            self._lose, link.swallow = None, True
        link.far.sendall(data)
        return bool(data)
