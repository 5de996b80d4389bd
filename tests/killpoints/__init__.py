"""Each process is killed at each thing it writes, and the rest gets over it without an operator."""

from __future__ import annotations
