"""Tests of workloads: real threads and streams, with the test at the agent's end."""

from __future__ import annotations
