"""Snapshot backends: the interface in base.py, one file a backend, found through registry.py."""

from __future__ import annotations
