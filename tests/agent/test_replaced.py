"""A step that a job's processes leave in the middle, while others of the job come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.agent.knobs import make
from tests.agent.rig import Rig
from timeslice.agent.calling import Caller, Deadline
from timeslice.agent.channels import StreamChannel
from timeslice.agent.choice import BackendSet
from timeslice.agent.journal import Journal
from timeslice.agent.presence import Presence, Presences
from timeslice.agent.state import Seen
from timeslice.agent.targets import TargetRegistry
from timeslice.backends.base import Context


async def test_the_answer_of_those_who_left_is_not_that_of_those_who_came(
    redis_url: str, prefix: str, tmp_path: Path
) -> None:
    """Who ended before the step was over tells nothing of who registered meanwhile: that one is asked itself."""
    rig = Rig(redis_url, prefix, tmp_path)
    registry = TargetRegistry("g", rig.node, tmp_path / "targets.json", lambda: None)
    channel = StreamChannel(rig.driver, rig.keys, registry.exit_event)
    specs = [f"knobs:folder={tmp_path / 'fake'}"]
    backends = BackendSet.make(Context(group="g", node=rig.node, channel=channel), specs, make)
    journal = Journal(tmp_path / "journal.json")
    presences = Presences("g", rig.node, registry, backends, journal, Caller("g"))
    asked: list[list[int]] = []

    async def refresh(*processes: Any) -> None:
        targets = [rig.target("a", process.pid) for process in processes]
        await registry.refresh({f"a/{t.host}/{t.pid}": t.model_dump_json() for t in targets})

    try:
        first, second = rig.spawn(job="a"), rig.spawn(job="a")
        await refresh(first)

        async def leave(found: Presence) -> Seen:
            asked.append([target.pid for target in found.job.targets])
            if len(asked) == 1:
                await refresh(first, second)
                first.kill()
                first.wait()
                return Seen(job="a", state="absent")
            return Seen(job="a", state="suspended")

        assert (await presences.act("a", leave, Deadline(10))).state == "suspended"
        assert asked == [[first.pid], [second.pid]]
    finally:
        registry.close()
        await rig.close()
