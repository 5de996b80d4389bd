"""The command ``timeslice``: main.py names the commands, one file holds a family of them."""

from __future__ import annotations
