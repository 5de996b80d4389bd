"""Tests with the real torch, TRL and Ray. They run where those are installed: `scripts/frameworks`, part of `--all`."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") and find_spec("ray") else ["test_*.py"]
