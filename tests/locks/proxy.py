"""A proxy that can also answer in the server's place."""

from __future__ import annotations

from pathlib import Path

from timeslice.torture.proxy import Link, Proxy


class Impostor(Proxy):
    """While ``answer`` is set, every request gets it, raw, and the server hears nothing."""

    def __init__(self, target: Path) -> None:
        self.answer = b""
        self.connections = 0
        super().__init__(target)

    def _deliver(self, link: Link, data: bytes) -> None:
        self.connections += 1
        if data and self.answer:
            link.near.sendall(self.answer)
        else:
            super()._deliver(link, data)
