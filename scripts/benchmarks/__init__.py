"""Benchmarks by subject. Each returns figures; ratios compare with a reference measured in the same rounds."""

from __future__ import annotations
