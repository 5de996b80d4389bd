"""Two jobs on an emulated device, asked about at an agent and at a coordinator while they take turns and die."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cli.conftest import Cli, eventually
from tests.cli.operated import GROUP, Operated, StartJob
from tests.cli.stack import Up, cli, ready, stop
from tests.readiness.conftest import ask, readiness, state
from tests.support.ports import free_port


class Both:
    """An agent's port and a coordinator's, which must say the same."""

    def __init__(self, up: Up, start: Any) -> None:
        self.agent, self.coordinator = free_port(), free_port()
        self.up = up("--http-port", str(self.agent))
        self.url = ready(self.up)
        command = ("coordinator", "--name", "c2", "--http-host", "127.0.0.1", "--http-port", str(self.coordinator))
        start(self.url, *command)
        eventually(lambda: self._alive(self.coordinator))

    @staticmethod
    def _alive(port: int) -> bool:
        try:
            return ask(port, "/healthz")[0] == 200
        except ConnectionRefusedError:
            return False

    def state(self, job: str) -> str:
        """What both say, of a situation that lasts."""
        found = readiness(self.agent, job, GROUP)
        assert found == readiness(self.coordinator, job, GROUP)
        return str(found["state"])


@pytest.fixture
def both(up: Up, cli: Cli) -> Both:
    def start(url: str, *command: str) -> None:
        cli.url, cli.prefix = url, "ts"
        cli.start(*command)

    return Both(up, start)


def hands_over(both: Both, out: Operated, into: Operated) -> None:
    """From the yield on, who left is not ready, at whatever moment of the swap one asks."""
    assert out.do("yield", "yielded")
    while not any(line.startswith("inside") for line in into.said):
        found = readiness(both.agent, out.job)
        assert found["state"] in {"idle", "suspended"} or found["reason"] == "server unreachable"
    assert into.until("inside").endswith("same")


def test_who_is_inside_is_ready_and_the_other_sleeps(both: Both, job: StartJob) -> None:
    """The holder gets 200, its rival 503: at first it waits, then it is suspended, and after its death it is absent.
    Agent and coordinator agree, and so does the command."""
    first, second = job("a"), job("b")
    first.do("hold", "inside")
    assert both.state("a") == "ready"
    second.tell("hold")
    eventually(lambda: state(both.agent, "b") == "waiting")
    assert both.state("b") == "waiting"
    hands_over(both, first, second)
    assert (both.state("a"), both.state("b")) == ("suspended", "ready")
    first.tell("hold")
    eventually(lambda: "holds it" in readiness(both.agent, "a")["reason"])
    hands_over(both, second, first)
    assert (both.state("a"), both.state("b")) == ("ready", "suspended")
    (asleep,) = readiness(both.agent, "b", GROUP)["groups"]
    assert (asleep["residency"], asleep["reason"]) == ("suspended", "job a holds it")
    assert cli("ready", "a", "--group", GROUP).returncode == 0
    assert cli("ready", "b").returncode == 1
    for killed in (second, first):  # the one that sleeps, and the one that holds
        killed.end()
        eventually(lambda: state(both.agent, killed.job) == "absent")  # noqa: B023 - called at once
        assert both.state(killed.job) == "absent"
    assert cli("ready", "a").returncode == 3


def test_a_port_ends_with_its_daemon(both: Both) -> None:
    """`up` stops cleanly with a port open; the coordinator that is left says that its server is away."""
    stop(both.up)
    assert both.up.returncode == 0
    with pytest.raises(ConnectionRefusedError):
        ask(both.agent, "/healthz")
    assert ask(both.coordinator, "/healthz")[0] == 200
    found = readiness(both.coordinator, "a", GROUP)
    assert (found["state"], found["reason"]) == ("unknown", "server unreachable")
