"""Stand-ins for a node with NVIDIA GPUs: its driver's libraries, the checkpoint tool, and the state that they share."""

from __future__ import annotations
