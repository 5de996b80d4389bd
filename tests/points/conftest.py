from __future__ import annotations

from tests.client.conftest import face, proxy, world

__all__ = ["face", "proxy", "world"]
