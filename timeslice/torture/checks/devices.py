"""What is on the devices while a body is in, as the jobs' own processes show it: the product is not asked."""

from __future__ import annotations

from collections.abc import Iterator

from timeslice.torture.checks.bodies import Stretch, stretches
from timeslice.torture.checks.story import READ_S, SECOND, Story, Terms, Try, Violation
from timeslice.torture.history import Surveyed


def beside_a_body(story: Story, terms: Terms) -> Iterator[Violation]:
    """While a body runs, no device of its group has bytes of another job.

    A look takes a moment, so the body has to run all the time from its beginning to its end; and to hold the newest
    lease, for a stale one may run beside its successor until it hears of that. A node counts while it is one of the
    group: what is loaded on another nobody could move, nor what was there when it joined while the body ran. For its
    lies an agent is no excuse: what it freed is measured.
    """
    if not terms.exclusive:
        return
    inside = {group: _Inside(story, terms, group) for group in story.groups}
    told: set[tuple[str, str, str, str]] = set()
    for look in story.surveys:
        if look.group not in inside or not story.serves(look.group, look.node, look.since, look.at):
            continue
        for stretch in inside[look.group].throughout(look):
            body = stretch.body
            for job, size in look.found.items():
                key = (body.who, body.request, look.node, job)
                began = body.entered.at if body.entered else look.at
                if job == body.job or story.found_at_join(look.group, look.node, job, began, look.at):
                    continue
                if key not in told:
                    told.add(key)
                    yield Violation(
                        "beside",
                        look.at,
                        look.group,
                        f"job {body.job} ({body.who}, token {body.token}) was in while job {job} had {size} bytes on "
                        f"the device of node {look.node}",
                    )


def not_there(story: Story, terms: Terms) -> Iterator[Violation]:
    """When a body begins, what its process left on its device is there: all of it, before it is read.

    A backend that was told to lie says that it brought back what it did not. And there is room for a body's memory,
    whose lease stands, on a device that its agent watches.
    """
    inside = {group: _Inside(story, terms, group) for group in story.groups}
    for look in story.surveys:
        job = story.born[look.who].job if look.who in story.born else ""
        if look.found.get(job, 0) >= look.own or look.group not in inside or _lied(story, terms, look.group, look.at):
            continue
        for stretch in inside[look.group].throughout(look):
            if stretch.body.who == look.who:
                yield Violation(
                    "content",
                    look.at,
                    look.group,
                    f"job {job} ({look.who}) entered, and of the {look.own} bytes that it had left on the device of "
                    f"node {look.node} there were {look.found.get(job, 0)}",
                )
    for body in story.bodies:
        line = body.cramped
        if line is None or _lied(story, terms, body.group, line.at) or _is_stale(story, body, line.at):
            continue
        if story.serves(body.group, body.node, line.at, line.at):
            yield Violation(
                "content",
                line.at,
                body.group,
                f"job {body.job} ({body.who}) was in on node {body.node} and had no room on its device: {line.error}",
            )


class _Inside:
    """The stretches of a group's bodies, by token."""

    def __init__(self, story: Story, terms: Terms, group: str) -> None:
        self._story, self._group = story, group
        self._found: dict[int, list[Stretch]] = {}
        for body in story.bodies_of(group):
            if not body.lock_only:
                self._found.setdefault(body.token, []).extend(stretches(story, body, terms))

    def throughout(self, look: Surveyed) -> Iterator[Stretch]:
        """Those that lasted from the look's beginning to its end, of the bodies with the newest lease."""
        for stretch in self._found.get(self._story.newest_token(self._group, look.at), ()):
            meant = not look.request or (stretch.body.who, stretch.body.request) == (look.who, look.request)
            if meant and stretch.start <= look.since and look.at <= stretch.end:
                yield stretch


def _lied(story: Story, terms: Terms, group: str, at: int) -> bool:
    return any(
        harm.fault.harm in {"lie", "late"} and harm.at <= at and harm.until >= at - terms.recovery_s * SECOND
        for harm in story.harms_to(group)
    )


def _is_stale(story: Story, body: Try, at: int) -> bool:
    """Whether its lease may be over, and it had not heard so."""
    return story.newest_token(body.group, at + READ_S * SECOND) > body.token or body.lost is not None
