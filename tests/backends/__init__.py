"""Tests of the snapshot backends: real processes with real state, moved by the backends as an agent would."""

from __future__ import annotations
