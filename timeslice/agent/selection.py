"""What of a job's state leaves the device when another job gets the group. Pure.

What the job's newest hold said comes first, then what its workload registered, then the group's settings; who says
nothing offloads everything. The processes of a job leave alike: where they say different things, so much leaves that
each of them is content, and nothing is dropped that one of them wants kept.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from timeslice.backends.base import Selection
from timeslice.models import GroupConfig, Leave, Mode, Target

WEIGHTS = "weights"


def resolve(targets: Sequence[Target], config: GroupConfig, modes: Collection[str]) -> Selection:
    """What these processes ask for together. ``modes`` are the backend's."""
    keeps = _kept_mode(targets, modes)
    asked = {_completed(target.leave, config, keeps) for target in _voters(targets)}
    if len(asked) == 1:
        return asked.pop()
    tags = {tag for each in asked for tag in each.tags}
    known = all(tags <= set(target.tags) for target in targets if _declares(target))
    if not known or not all(each.tags for each in asked):
        return Selection(mode=keeps)
    slots = {each.slot for each in asked}
    return Selection(mode=keeps, tags=tuple(sorted(tags)), slot=slots.pop() if len(slots) == 1 else "")


def whole(targets: Sequence[Target], asked: Selection | None, modes: Collection[str]) -> Selection:
    """Everything instead of a part, and then kept if that can be: only of the part it was said that it may go. Also
    where the backend can't do what was asked for, as one that works from outside."""
    fits = asked is not None and not is_part(asked) and asked.mode in modes
    return asked if asked and fits else Selection(mode=_kept_mode(targets, modes))


def refusal(targets: Sequence[Target], selection: Selection) -> str:
    """Why these processes can't leave like that, by what they declared; '' if they can, or declared nothing."""
    for target in filter(_declares, targets):
        if why := target.unable(selection.as_leave()):
            return f"process {target.pid} {why}"
    return ""


def is_part(selection: Selection) -> bool:
    return bool(selection.tags or selection.slot)


def loses_weights(selection: Selection) -> bool:
    """Whether a weight sync is due before the job computes again: all of it was dropped, or what is tagged so."""
    return selection.mode == "discard" and (not is_part(selection) or WEIGHTS in selection.tags)


def as_selection(leave: Leave) -> Selection:
    return Selection(mode=leave.mode or "offload", tags=leave.tags, slot=leave.slot)


def _kept_mode(targets: Sequence[Target], modes: Collection[str]) -> Mode:
    """Content is dropped unasked only where that is all that the job's workloads can do."""
    declared = {target.modes for target in targets if target.modes}
    return "discard" if declared == {("discard",)} and "discard" in modes else "offload"


def _completed(leave: Leave, config: GroupConfig, keeps: Mode) -> Selection:
    tags = leave.tags or config.tags
    return Selection(mode=leave.mode or config.mode or keeps, tags=tags, slot=leave.slot)


def _voters(targets: Sequence[Target]) -> Sequence[Target]:
    """A process without a workload that says nothing, such as a launcher, has no say."""
    return [each for each in targets if _declares(each) or each.endpoints or each.leave != Leave()] or targets


def _declares(target: Target) -> bool:
    return bool(target.channel or target.modes or target.tags)
