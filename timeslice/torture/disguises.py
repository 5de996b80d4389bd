"""A job's process comes again in a form that makes it hard to know, or an agent where it sees none; or a process can't
open anything for a moment."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

from timeslice.torture.backend import met_file
from timeslice.torture.deeds import Deed, World
from timeslice.torture.forms import wears
from timeslice.torture.processes import Child
from timeslice.torture.scarce import threads_file
from timeslice.torture.schedule import Planned

_AGAIN_S = 0.3
_APART = "pid-namespace"


def disguised(world: World, planned: Planned, child: Child, now: float) -> Deed:
    """The process is killed, and comes again in the form that the fault is named after."""
    label, form = child.label, planned.kind
    file = threads_file(world.knobs, child.name)

    def change() -> None:
        child.next_form = form
        if form == "threads":
            file.touch()
        world.processes.kill(child, again_at=now + _AGAIN_S, fault=planned.id)

    def shows() -> bool:
        if form == "threads":
            return met_file(file).exists()
        return child.form == form and child.running and wears(form, child.pid)

    def heal() -> None:
        file.unlink(missing_ok=True)
        met_file(file).unlink(missing_ok=True)

    return Deed(
        harm=form,
        label=label,
        groups=child.groups,
        kills=(label,),
        do=change,
        took=shows,
        heal=heal if form == "threads" else None,
        late=True,
    )


def blinded(world: World, agent: Child, now: float) -> Deed:
    """An agent is killed, and comes again in a pid namespace of its own, where it sees no job's process."""
    label = agent.label

    def change() -> None:
        agent.next_form = _APART
        world.processes.kill(agent, again_at=now + _AGAIN_S)

    def shows() -> bool:
        return agent.form == _APART and agent.running and world.processes.works(agent) and wears(_APART, agent.pid)

    def heal() -> None:
        agent.next_form = ""
        if agent.running and agent.form == _APART:  # else another fault has brought it back as it was
            world.processes.kill(agent, again_at=0.0)

    return Deed(
        harm="blind",
        label=label,
        groups=agent.groups,
        kills=(label,),
        do=change,
        took=shows,
        heal=heal,
        late=True,
    )


def without_files(world: World, child: Child) -> Deed | None:
    """A live process can open nothing more, until the limit is what it was. None for one that has not begun to work:
    whoever can't load its program can't be expected to run it."""
    if not world.processes.works(child):
        return None
    label, pid = child.label, child.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)

    def limit() -> None:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (_lowest_free(pid), before[1]))

    def full() -> bool:
        return resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] <= _lowest_free(pid)

    def heal() -> None:
        with suppress(ProcessLookupError):  # it has ended
            if child.label == label and child.running:
                resource.prlimit(pid, resource.RLIMIT_NOFILE, before)

    return Deed(harm="files", label=label, groups=child.groups, do=limit, took=full, heal=heal)


def _lowest_free(pid: int) -> int:
    taken = {int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()}
    return next(number for number in range(len(taken) + 1) if number not in taken)
