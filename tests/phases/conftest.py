from __future__ import annotations

from tests.cli.conftest import cli
from tests.client.conftest import face, proxy, world

__all__ = ["cli", "face", "proxy", "world"]
