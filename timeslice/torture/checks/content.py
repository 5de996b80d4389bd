"""Every job finds on its device what it left there."""

from __future__ import annotations

from collections.abc import Iterator

from timeslice.torture.checks.story import Story, Terms, Violation


def wrong_content(story: Story, terms: Terms) -> Iterator[Violation]:  # noqa: ARG001 - all rules are called alike
    """What a body read is what its job wrote last.

    The writer knows what it left; a process that was killed is replaced by one that starts with fresh memory, so there
    is nothing unknown in it.
    """
    for found in story.tries.values():
        for check in found.checked:
            if check.expected != check.found:
                yield Violation(
                    "content",
                    check.at,
                    check.group,
                    f"job {check.job} ({check.who}) left {check.expected} on its device and found {check.found}",
                )
