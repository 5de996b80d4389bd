"""slime: ``--phase-callback-path timeslice.integrations.slime.PhaseCallback``.

slime imports what the path names and calls it without arguments, once, in the driver. So a function that returns a
CompositeCallback will do too, where several callbacks share the one place. See docs/researchers/slime.md.
"""

from __future__ import annotations

from timeslice.integrations.phases import CompositeCallback, PhaseCallback

__all__ = ["CompositeCallback", "PhaseCallback"]
