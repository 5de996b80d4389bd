"""What the ``http`` backend has to know of a kind of server. One file each: http_vllm.py, http_sglang.py."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from timeslice.backends.base import Selection
from timeslice.backends.checks import is_alive, is_foreign
from timeslice.backends.http_client import Answer, HttpClient, PassingError, patiently
from timeslice.backends.http_marks import Mark
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Target


@dataclass(frozen=True)
class Server:
    """One server of a job, and how to talk to it. ``target`` is its process, or one that stands in for it."""

    url: str
    target: Target
    client: HttpClient
    patient: bool = True  # asks again after what passes

    @property
    def process(self) -> str:
        """Its own; empty where only one that stands in for it is known."""
        return "" if self.target.channel else f"{self.target.pid}-{self.target.start}"

    @property
    def who(self) -> str:
        return f"job {self.target.job}, server {self.url}"

    async def question(
        self, path: str, until: float, *, method: Literal["GET", "POST"] = "GET", accept: tuple[int, ...] = ()
    ) -> Answer:
        """Asked again until it is answered, by who has patience: nothing changes by it."""
        answers: list[Answer] = []

        async def attempt() -> None:
            soon = min(until, time.monotonic() + self.client.timeout_s)
            answers.append(await self._ask(method, path, soon, accept=accept))

        async def not_yet(_: PassingError) -> bool:
            return False

        if self.patient:
            await patiently(attempt, until, who=self.who, after=not_yet)
        else:
            await attempt()
        return answers[0]

    async def order(
        self, path: str, until: float, *, params: dict[str, str] | None = None, body: dict[str, Any] | None = None
    ) -> None:
        """One attempt."""
        await self._ask("POST", path, until, params=params, body=body)

    async def _ask(self, method: Literal["GET", "POST"], path: str, until: float, **more: Any) -> Answer:
        try:
            return await self.client.ask(method, self.url, path, until=until, **more)
        except PassingError as error:
            # The end of one that only stands in for the server says nothing of the server.
            if self.target.channel or is_foreign(self.target) or is_alive(self.target):
                raise
            message = f"process {self.target.pid} has ended ({error})"
            raise BackendError(message, kind=FaultKind.GONE) from None


class Dialect(ABC):
    tags: ClassVar[tuple[str, ...]]  # in the order in which they must wake
    apart: ClassVar[bool]  # a part can sleep by itself
    tells: ClassVar[bool]  # whether it sleeps; what is told overrules what was noted

    @abstractmethod
    async def run_of(self, server: Server, until: float) -> str:
        """What the server tells that another one with the same address would tell differently, if anything."""

    @abstractmethod
    async def asleep(self, server: Server, mark: Mark | None, until: float) -> tuple[str, ...] | None:
        """The tags that sleep. None: it can't be told, because nobody knows what became of the last order."""

    @abstractmethod
    async def objection(self, server: Server, selection: Selection, until: float) -> str:
        """Why it can't do that, with the remedy; '' if it can. Nothing is touched."""

    async def dropped(self, server: Server, until: float) -> int:  # noqa: ARG002 - the interface has these arguments
        """Bytes on each of its devices that any sleep drops, at least. 0: it does not tell."""
        return 0

    @abstractmethod
    async def work(self, server: Server, until: float) -> str:
        """What it computes now; '' when it is idle."""

    @abstractmethod
    async def sleep(self, server: Server, selection: Selection, tags: Sequence[str], until: float) -> None:
        """One order to put these tags to sleep."""

    @abstractmethod
    async def wake(self, server: Server, tag: str, until: float) -> None:
        """One order to wake a tag that sleeps."""

    async def refill(self, server: Server, until: float) -> None:  # noqa: B027 - most can't
        """Load dropped weights again from where the server had them first, if it can; they are awake then."""

    @abstractmethod
    async def dead(self, server: Server, until: float) -> str:
        """Why its engine can't be used any more; '' when it is well. A server may say 200 while its engine dies.

        It is asked while parts of the server sleep, so by a route that computes nothing on the device.
        """
