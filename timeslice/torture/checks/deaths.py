"""Nothing ends but what was killed, or was done."""

from __future__ import annotations

import signal
from collections.abc import Iterator

from timeslice.torture.checks.story import Story, Terms, Violation


def unmeant_ends(story: Story, terms: Terms) -> Iterator[Violation]:  # noqa: ARG001 - all rules are called alike
    """No agent, coordinator or job ends by itself.

    One end is right: a job that touches memory which was moved away from under it, as one does that was stopped past
    its lease and did not look whether it is lost, dies of SIGBUS.
    """
    for death in story.died.values():
        if not death.meant and death.code != -signal.SIGBUS:
            yield Violation(
                "ends",
                death.at,
                "",
                f"{death.label} ended with {death.code}, and nobody had killed it{': ' * bool(death.detail)}"
                f"{death.detail}",
            )
