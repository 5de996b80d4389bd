"""The channel to in-process workloads, with a workload that speaks the stream by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.agent.rig import Rig, until
from timeslice.agent.channels import StreamChannel
from timeslice.locks.scripts import text
from timeslice.models import ChannelAnswer, ChannelCommand, Residency

PROCESS = "n1.7.9"
COMMAND = ChannelCommand(id="c1", action="probe")
ANSWER = ChannelAnswer(id="c1", ok=True, state=Residency.SUSPENDED, host_bytes=5)


class Side:
    """Both ends: the agent's channel, and what a workload reads and writes."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.gone = asyncio.Event()
        self.key = rig.keys.channel("a", PROCESS)
        self.channel = StreamChannel(rig.driver, rig.keys, self._event)

    def _event(self, job: str, pid: int, start: int) -> asyncio.Event | None:
        return self.gone if (job, pid, start) == ("a", 7, 9) else None

    def ask(self, deadline_s: float = 20.0) -> asyncio.Task[ChannelAnswer]:
        return asyncio.create_task(self.channel.ask("a", PROCESS, COMMAND, deadline_s=deadline_s))

    async def commands(self) -> list[ChannelCommand]:
        found: Any = await self.rig.driver.client.xrange(self.key)
        entries = [{text(k): text(v) for k, v in fields.items()} for _, fields in found]
        return [ChannelCommand.model_validate_json(e["body"]) for e in entries if e["kind"] == "command"]

    async def answer(self, body: str, kind: str = "answer") -> None:
        await self.rig.driver.client.xadd(self.key, {"kind": kind, "body": body})


@pytest.fixture
async def side(rig: Rig) -> Side:
    return Side(rig)


async def test_a_command_gets_its_answer(side: Side) -> None:
    """The workload reads the command from the stream and answers on it; the stream expires."""
    asking = side.ask()
    await until(side.commands, "the command is on the stream")
    assert await side.commands() == [COMMAND]
    await side.answer(ANSWER.model_dump_json())
    assert await asking == ANSWER
    assert await side.rig.driver.client.ttl(side.key) > 0


async def test_other_answers_and_garbage_are_passed_over(side: Side) -> None:
    """Only the answer with the command's id counts."""
    asking = side.ask()
    await until(side.commands, "the command is on the stream")
    await side.answer("{")
    await side.answer(ANSWER.model_copy(update={"id": "c0"}).model_dump_json())
    await side.answer(ANSWER.model_dump_json(), kind="other")
    await side.answer(ANSWER.model_dump_json())
    assert await asking == ANSWER


async def test_an_old_answer_of_the_same_id_is_not_taken_unasked(side: Side) -> None:
    """The workload repeats its answer when it is asked again; what lay there before is no answer."""
    await side.answer(ANSWER.model_copy(update={"host_bytes": 1}).model_dump_json())
    asking = side.ask()
    await until(side.commands, "the command is on the stream")
    await side.answer(ANSWER.model_dump_json())
    assert (await asking).host_bytes == 5


@pytest.mark.timing
async def test_a_workload_that_did_not_hear_is_asked_again(side: Side) -> None:
    """The same command under the same id, until the deadline."""
    asking = side.ask()

    async def twice() -> bool:
        return len(await side.commands()) >= 2

    await until(twice, "the command was sent again")
    assert {command.id for command in await side.commands()} == {"c1"}
    await side.answer(ANSWER.model_dump_json())
    assert await asking == ANSWER


async def test_a_workload_that_never_answers_costs_the_deadline_only(side: Side) -> None:
    """TimeoutError, which names the job and the process."""
    with pytest.raises(TimeoutError, match=r"job a: process n1\.7\.9 did not answer probe within 0\.2 s"):
        await side.ask(deadline_s=0.2)


async def test_a_process_that_ends_is_not_waited_for(side: Side) -> None:
    """The wait of ten minutes ends with the process."""
    asking = side.ask(deadline_s=600)
    await until(side.commands, "the command is on the stream")
    side.gone.set()
    with pytest.raises(TimeoutError, match="ended before it answered"):
        await asking
