"""The router and the gate of docs/recipes.md, before two real samplers that take turns on an emulated device."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.cli.stack import Up, ready
from tests.readiness.conftest import DEADLINE_S
from tests.readiness.recipe import recipe
from tests.readiness.sampler import Sampler
from tests.support.jobs import wait_until
from tests.support.ports import free_port

Route = Callable[[], str]

REQUESTS = 100


@pytest.fixture
def samplers(up: Up, folder: Path) -> Iterator[tuple[Sampler, Sampler, Route]]:
    """Two of them, and a request to the router before them: which job served it, or '' for a 503 of the router's."""
    port = free_port()
    ready(up("--http-port", str(port)))
    first, second = (Sampler(job, folder) for job in ("a", "b"))
    page = recipe()
    settings = {
        "samplers": {each.job: each.address for each in (first, second)},
        "ready": f"http://127.0.0.1:{port}/jobs/{{job}}/ready?group=samplers",
        "log_message": lambda *_: None,
    }
    router = ThreadingHTTPServer(("127.0.0.1", 0), type("Router", (page["Router"],), settings))
    serving = threading.Thread(target=router.serve_forever)
    serving.start()

    def route() -> str:
        url = f"http://127.0.0.1:{router.server_address[1]}/generate"
        try:
            answer = urllib.request.urlopen(url, b"prompt", timeout=DEADLINE_S)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            status, body = answer.status, answer.read()
        if status == 503:
            assert body == b"no sampler is awake\n"
            return ""
        told = json.loads(body)
        assert (status, told["sum"]) == (200, "70")  # its state was on the device, as it had left it
        return str(told["job"])

    yield first, second, route
    router.shutdown()
    serving.join()
    router.server_close()
    for each in (first, second):
        each.end()


def test_no_request_is_sent_to_a_sleeping_sampler(samplers: tuple[Sampler, Sampler, Route]) -> None:
    """A hundred requests over several turns: each is served by the job that is inside, or the router itself says that
    nobody is awake; neither sampler ever sees one while it sleeps."""
    awake, other, route = samplers
    assert route() == ""
    awake.do("hold", "inside")
    sent = 0
    while sent < REQUESTS:
        other.tell("hold")
        for _ in range(10):
            assert route() == awake.job
        assert awake.do("yield", "yielded") == "yielded 0"
        sent += 10
        while "inside" not in other.said:  # their state is changing places
            assert route() in {"", other.job}
            sent += 1
        other.until("inside")
        awake, other = other, awake
    assert route() == awake.job
    assert awake.do("yield", "yielded") == "yielded 0"
    assert route() == ""


def test_the_gate_lets_requests_end_before_the_hold_does() -> None:
    """Who closes it waits for who is inside; who comes later is told that nobody is awake."""
    page = recipe()
    gate, began, may_end = page["Gate"](0.0), threading.Event(), threading.Event()
    told: list[str] = []

    def request() -> None:
        with gate.request():
            began.set()
            assert may_end.wait(DEADLINE_S)
            told.append("served")

    def hold() -> None:
        with gate.opened():
            assert began.wait(DEADLINE_S)
        told.append("left")

    holding, serving = threading.Thread(target=hold), threading.Thread(target=request)
    gate.patience = DEADLINE_S
    serving.start()
    holding.start()
    assert began.wait(DEADLINE_S)
    wait_until(lambda: not gate._open, "it is closed")
    gate.patience = 0.0
    with pytest.raises(page["Asleep"]), gate.request():
        pass
    may_end.set()
    holding.join(DEADLINE_S)
    serving.join(DEADLINE_S)
    assert told == ["served", "left"]
