"""A process of a torture run: ``python -m timeslice.torture.child ROLE SPEC [--mutant NAME] [--kill-at SPEC]``.

Mutants and kill points patch this process from outside before it begins; the product itself has no switch for them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pydantic import BaseModel

from timeslice import logs


class AgentSpec(BaseModel):
    """An agent with emulated devices, whose backend the run can turn against it."""

    label: str
    node: str
    url: str
    groups: tuple[str, ...]
    device_bytes: int
    room: dict[str, int] = {}  # of the devices of these groups, instead
    ttl_s: float
    state_dir: Path
    knobs: Path
    history: Path
    leave: bool = False  # the groups, when it is told to stop


class CoordinatorSpec(BaseModel):
    """A coordinator."""

    label: str
    name: str
    url: str
    lease_ms: int


def main(arguments: list[str]) -> None:
    """Be what the arguments say, until killed or done."""
    parser = argparse.ArgumentParser(prog="timeslice.torture.child")
    parser.add_argument("role", choices=["agent", "coordinator", "job"])
    parser.add_argument("spec", help="JSON")
    parser.add_argument("--mutant", default="")
    parser.add_argument("--kill-at", default="")
    given = parser.parse_args(arguments)
    logs.set_up(as_json=False, level="info")
    if given.mutant:
        from timeslice.torture import mutants

        mutants.apply(given.mutant)
    if given.kill_at:
        from timeslice.torture import killpoints

        killpoints.arm(given.kill_at)
    {"agent": _agent, "coordinator": _coordinator, "job": _job}[given.role](given.spec)


def _agent(text: str) -> None:
    from timeslice.agent.service import AgentOptions, run_agent
    from timeslice.cli.daemons import run_daemon
    from timeslice.torture.backend import maker
    from timeslice.torture.history import Writer

    spec = AgentSpec.model_validate_json(text)
    options = AgentOptions(
        url=spec.url,
        node=spec.node,
        groups=spec.groups,
        state_dir=spec.state_dir,
        emulate={group: spec.room.get(group, spec.device_bytes) for group in spec.groups},
        backends=dict.fromkeys(spec.groups, ("arena",)),
        ttl_s=spec.ttl_s,
        leave=spec.leave,
    )
    make = maker(spec.label, Writer(spec.history / f"{spec.label}.jsonl"), spec.knobs)
    run_daemon(spec.label, lambda ready, stop: run_agent(options, ready=ready, stop=stop, make_backend=make))


def _coordinator(text: str) -> None:
    from timeslice.cli.daemons import run_daemon
    from timeslice.coordinator.service import CoordinatorOptions, run_coordinator

    spec = CoordinatorSpec.model_validate_json(text)
    options = CoordinatorOptions(url=spec.url, name=spec.name, lease_ms=spec.lease_ms)
    run_daemon(spec.label, lambda ready, stop: run_coordinator(options, ready=ready, stop=stop))


def _job(text: str) -> None:
    from timeslice.torture.job import Spec, run_job

    run_job(Spec.model_validate_json(text))


if __name__ == "__main__":
    main(sys.argv[1:])
