"""The process that stands in for a workload behind a WorkloadChannel: ``python -m timeslice.gateway.standin``.

To its node's agent it is the workload: a process of exactly one job of one group, with callbacks that pass each order
on over the pipe to the gateway and wait for the answer. Nothing of the gateway itself is ever registered, so nothing
that an agent does to a registered process (stop, copy) can meet it.

On both pipes is one JSON line a message. The first that it reads is ``Setup``, then ``Done`` and ``End``; it writes
``Ready`` or ``Failed``, then ``Order``. When the gateway ends, it stays for ``linger_s``, so that the next one can
take over. Only after ``End`` it lets its channel go before it ends itself. However else it ends, the workload may live
and be on the device, and its agent takes its state for unknown.
"""

from __future__ import annotations

import logging
import secrets
import sys
import threading
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from timeslice.client.callbacks import Busy, Mode
from timeslice.client.identity import declared, this_target
from timeslice.client.workload import Workload, register_workload
from timeslice.errors import TimeSliceError
from timeslice.locks import scripts
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import Keys
from timeslice.models import GroupName, Id, JobName, Residency, Text, Wire, Word, brief
from timeslice.settings import Settings, default_node

END_S = 20.0  # a good-bye that could not be told by then is none


class Registration(Wire):
    """What a workload said of itself."""

    group: GroupName
    job: JobName
    modes: tuple[Mode, ...] = Field(default=("offload",), max_length=8)
    tags: tuple[Word, ...] = Field(default=(), max_length=64)


class Setup(Wire):
    kind: Literal["setup"] = "setup"
    url: str = Field(max_length=4096, repr=False)
    workload: Registration
    suspended: bool | None  # what the group believes of it; None: it can't tell
    linger_s: float = Field(ge=0, le=3600)


class Done(Wire):
    """What became of an order."""

    kind: Literal["done"] = "done"
    id: Id
    ok: bool
    error: Text = ""


class End(Wire):
    """The workload said that it has ended."""

    kind: Literal["end"] = "end"


class Ready(Wire):
    kind: Literal["ready"] = "ready"


class Failed(Wire):
    kind: Literal["failed"] = "failed"
    error: Text


class Order(Wire):
    kind: Literal["order"] = "order"
    id: Id
    action: Literal["snapshot", "restore"]
    mode: Mode = "offload"
    tags: tuple[Word, ...] = Field(default=(), max_length=64)


ToStandIn: TypeAlias = Annotated[Setup | Done | End, Field(discriminator="kind")]
FromStandIn: TypeAlias = Annotated[Ready | Failed | Order, Field(discriminator="kind")]
_HEARD: TypeAdapter[Setup | Done | End] = TypeAdapter(ToStandIn)


class StandIn:
    """The callbacks. They run on the workload's thread, ``hear`` and ``leave_alone`` on the main one."""

    def __init__(self, suspended: bool | None) -> None:
        self._suspended, self._alone = suspended, False
        self._token, self._orders = secrets.token_hex(8), 0
        self._answer: Done | None = None
        self._news = threading.Condition()

    def suspend(self, mode: Mode, tags: tuple[str, ...]) -> None:
        self._pass_on("snapshot", mode, tags)
        self._suspended = True

    def restore(self, tags: tuple[str, ...]) -> None:
        self._pass_on("restore", "offload", tags)
        self._suspended = False

    def probe(self) -> tuple[Residency, int, int]:
        if self._alone:
            raise Busy("its gateway is away")
        if self._suspended is None:  # what it was told last may be done or not; once it has saved all, it is known
            self.suspend("offload", ())
        return Residency.SUSPENDED if self._suspended else Residency.RESIDENT, 0, 0

    def hear(self, answer: Done) -> None:
        with self._news:
            self._answer = answer
            self._news.notify_all()

    def leave_alone(self) -> None:
        """The gateway is gone. What becomes of an order under way nobody will tell."""
        with self._news:
            self._alone = True
            self._news.notify_all()

    def _pass_on(self, action: Literal["snapshot", "restore"], mode: Mode, tags: tuple[str, ...]) -> None:
        self._orders += 1
        order = Order(id=f"{self._token}.{self._orders}", action=action, mode=mode, tags=tags)
        with self._news:
            if not self._alone:
                say(order)
            # Without a deadline of its own: the agent has one, and then asks to take it back. What a workload did
            # late has to be known for that.
            self._news.wait_for(lambda: self._alone or (self._answer and self._answer.id == order.id))
            if self._answer is None or self._answer.id != order.id:
                raise Busy("its gateway is away")
            answer = self._answer
        if not answer.ok:
            raise TimeSliceError(answer.error or "the workload gave no reason")


def say(message: FromStandIn) -> None:
    """Never two threads at once: the main one only before the first order."""
    try:
        print(message.model_dump_json(), flush=True)  # noqa: T201 - the pipe to the gateway
    except BrokenPipeError:
        pass  # the main thread sees the same end


def register(setup: Setup, stand_in: StandIn) -> Workload:
    asked = setup.workload
    # An order by force prefers to move processes from outside; of this one that would move nothing.
    target = this_target(asked.group, asked.job, default_node())
    declared[asked.group, asked.job] = target.model_copy(update={"backend": "channel"})
    return register_workload(
        asked.group,
        on_suspend=stand_in.suspend,
        on_restore=stand_in.restore,
        probe=stand_in.probe,
        job=asked.job,
        modes=asked.modes,
        tags=asked.tags,
        url=setup.url,
    )


def say_good_bye(setup: Setup, workload: Workload) -> None:
    """Have the agent know that this process's end is the workload's."""
    workload.close()
    driver, target = SyncDriver(setup.url), workload.target.model_copy(update={"channel": "", "modes": (), "tags": ()})
    keys = Keys(Settings().prefix).group(workload.group)
    driver.run(scripts.register(keys, target.job, target.host, target.pid, target.model_dump_json()), deadline_s=END_S)
    driver.close()


def main() -> int:
    """Stand in until the gateway says ``End``, or is gone. Exit code 2: it can't."""
    logging.basicConfig(level=logging.WARNING, format="stand-in: %(levelname)s %(message)s")
    setup = _HEARD.validate_json(sys.stdin.readline())
    assert isinstance(setup, Setup)
    stand_in = StandIn(setup.suspended)
    try:
        workload = register(setup, stand_in)
    except TimeSliceError as error:
        say(Failed(error=str(error)[:2000]))
        return 2
    say(Ready())
    for line in sys.stdin:
        try:
            message = _HEARD.validate_json(line)
        except ValidationError as error:
            logging.getLogger("timeslice").warning("a message of the gateway is invalid and ignored: %s", brief(error))
            continue
        if isinstance(message, End):
            stand_in.leave_alone()  # no order has to be finished first
            say_good_bye(setup, workload)
            return 0
        if isinstance(message, Done):
            stand_in.hear(message)
    stand_in.leave_alone()
    threading.Event().wait(setup.linger_s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
