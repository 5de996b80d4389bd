"""``python -m timeslice`` is the command ``timeslice``."""

from __future__ import annotations

from timeslice.cli.main import main

main()
