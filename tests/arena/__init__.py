"""Tests of the emulated device: real processes, real signals, a real ENOSPC."""

from __future__ import annotations
