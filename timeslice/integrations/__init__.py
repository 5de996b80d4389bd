"""Ready-made holds for training frameworks. Each module imports its framework only when it is used."""

from __future__ import annotations
