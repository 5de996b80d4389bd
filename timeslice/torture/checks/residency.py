"""Where jobs' device state was, as agents' moves and measured bytes tell it, and who was inside meanwhile."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from timeslice.torture.checks.bodies import touches
from timeslice.torture.checks.certain import Certain, Sign
from timeslice.torture.checks.grants import ENDS
from timeslice.torture.checks.story import READ_S, SECOND, Story, Terms, Try, Violation
from timeslice.torture.history import Moved, OnDevice


def not_restored(story: Story, terms: Terms) -> Iterator[Violation]:
    """Nobody is in before his own state is.

    The last thing certain of the job on its node must not be that it was moved out, or brought back and not released.
    A process that was started since has nothing to restore, and a step without an end may have been done.
    """
    certain = Certain(story)
    for body in _served(story, terms):
        assert body.entered is not None
        sign = certain.at(body.entered.at).of(body.group, body.node, body.job)
        if sign in {Sign.OUT, Sign.LOCKED}:
            yield Violation(
                "restored",
                body.entered.at,
                body.group,
                f"job {body.job} ({body.who}) entered on node {body.node} although its state was {sign.value}",
            )


def not_out(story: Story, terms: Terms) -> Iterator[Violation]:
    """Nobody is in before what does not fit is out.

    Another job is on the device if that is certain: it was restored, or its memory was read or measured there, and no
    suspend has touched it since. What is loaded on a node that is none of the group nobody can move.
    """
    if not terms.exclusive:
        return
    certain = Certain(story)
    for body in _served(story, terms):
        assert body.entered is not None
        if story.has_left(body.group, body.node, body.entered.at):
            continue
        for job in certain.at(body.entered.at).residents(body.group, body.node):
            if job != body.job:
                yield Violation(
                    "resident",
                    body.entered.at,
                    body.group,
                    f"job {body.job} ({body.who}) entered on node {body.node} before job {job} was out",
                )


def two_on_device(story: Story, terms: Terms) -> Iterator[Violation]:
    """No two jobs' bytes are measured on one device. The agent measures between its own steps, so it is proof.

    One that is just being moved out may be there while the next is brought in, where both fit: neither runs meanwhile.
    Nor is it proof against anybody that two had come before their node joined.
    """
    for line in story.devices:
        staying = sorted({job for job in line.jobs if not _is_leaving(story, line, job)})
        if len(staying) < 2 or not terms.exclusive:
            continue
        if set(staying) - story.there_at_join(line.group, line.node, line.at):
            yield Violation("device", line.at, line.group, f"on node {line.node} were measured {' and '.join(staying)}")


def _is_leaving(story: Story, line: OnDevice, job: str) -> bool:
    """Whether the last that was begun with the job there is to move it out."""
    moves = story.moves.get((line.group, line.node, job), [])
    before = bisect_right(moves, line.at, key=lambda move: move.at)
    if before == 0:
        return False
    last = moves[before - 1]  # an agent that dies moves nothing more
    return (last.step, last.stage) == ("suspend", "begin") and story.end_of(last.who) > line.at


def moved_holders(story: Story, terms: Terms) -> Iterator[Violation]:
    """No agent touches a job that is in.

    It may do so only once the lease has ended, and the scripts tell that before the swap begins: the word of it is read
    within a moment. Whatever hinders the reading, or loses what was told, explains the touch.
    """
    for body in _served(story, terms):
        assert body.entered is not None
        end = min([story.end_of(body.who), *(line.at for line in (body.left, body.lost) if line)])
        for move in (touch.first for touch in touches(story, body, terms) if body.entered.at < touch.start < end):
            if not _is_over(story, terms, body, move):
                yield Violation(
                    "touched",
                    move.at,
                    body.group,
                    f"node {move.node} began to {move.step} job {body.job} while {body.who} was in with token "
                    f"{body.token}",
                )


def _served(story: Story, terms: Terms) -> Iterator[Try]:
    """Bodies of served groups, in the order of their entries. One that heard of its loss as soon as it was in is none:
    several groups at once are entered when the last was had, and the first may be lost by then."""
    for body in story.bodies:
        if not body.lock_only and not body.heard_at_once(terms):
            yield body


def _is_over(story: Story, terms: Terms, body: Try, move: Moved) -> bool:
    """Whether the stream tells that the lease ended before it was yielded, or can't be expected to."""
    by = move.at + READ_S * SECOND
    over = False
    for event in story.told_of(body.group, body.token):
        if event.at > by:
            break
        if event.type == "StateLost":
            over = True
        elif event.type == "LeaseYielded":
            return False  # by itself, and after it had left
        elif event.type in ENDS:
            over = True
        elif event.type == "LeaseReinstalled" and event.at <= move.at:
            over = False
    return over or any(
        story.hinders(harm, "") and harm.at <= by and harm.until >= move.at - terms.lease_s * SECOND
        for harm in story.harms_to(body.group)
    )
