"""Whom the backend asks: nobody but those on its list, and nobody learns its token but them."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from tests.backends.http.conftest import ALL, DEADLINE_S, Lab, of_job
from timeslice.backends.base import Context
from timeslice.backends.http import HttpBackend
from timeslice.backends.http_access import AccessError, AllowList
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Residency

TOKEN = "s3cret-of-the-proxy"


@pytest.mark.parametrize(
    ("allow", "address"),
    [
        ("http://10.1.2.3:8000", "http://10.1.2.3:8000"),
        ("http://10.1.2.3:8000", "http://10.1.2.3:8000/"),
        ("http://10.1.2.3", "http://10.1.2.3:80"),
        ("https://serve.example", "https://SERVE.example:443"),
        ("http://10.1.*:8000", "http://10.1.200.7:8000"),
        ("http://a:1; http://10.1.2.3:*", "http://10.1.2.3:65535"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("http://[0:0::1]:8000", "http://[::1]:8000"),
    ],
)
def test_what_is_on_the_list_may_be_asked(allow: str, address: str) -> None:
    """Scheme, host and port match; a star stands for the rest of a numeric address, or for any port."""
    assert AllowList(allow).check(address).host


@pytest.mark.parametrize(
    "address",
    [
        "http://10.1.2.4:8000",
        "http://10.1.2.3:8001",
        "https://10.1.2.3:8000",
        "http://10.1.2.3.evil.example:8000",
        "http://10.2.evil.example:8000",
        "http://127.0.0.1:8000",
        "http://localhost:8000",
        "http://10.1.2.3:8000@evil.example",
        "http://evil.example@10.1.2.3:8000",
        "http://10.1.2.3:8000/admin",
        "http://10.1.2.3:8000?x=1",
        "http://",
        "ftp://10.1.2.3:8000",
        "http://[::1",
        "http://10.2.3.4.5:8000",
        "http://10.2.3.4.:8000",
        "http://10.2.3:8000",
        "http://10.2..3:8000",
        "http://10.2.3.04:8000",
        "http://10.1.2.3.:8000",
        "http://10.1.2.3:0",
    ],
)
def test_what_is_not_is_refused(address: str) -> None:
    """This machine neither, and nothing that only begins or ends like an allowed one."""
    with pytest.raises(AccessError):
        AllowList("http://10.1.2.3:8000;http://10.2.*:8000;http://10.1.2.3").check(address)


@pytest.mark.parametrize(
    "allow",
    [
        "",
        ";",
        "10.1.2.3:8000",
        "http://*",
        "http://serve.*",
        "http://10.*.3",
        "ftp://a",
        "http://.*",
        "http://a:0",
        "http://a:99999",
    ],
)
def test_a_list_that_says_nothing_or_too_much_is_refused(allow: str) -> None:
    """Nothing is allowed by itself: without a list the backend is not made."""
    with pytest.raises(BackendError, match="allow") as caught:
        HttpBackend(Context(group="g", node="n1", options={"allow": allow}))
    assert caught.value.kind is FaultKind.UNSUPPORTED


@pytest.mark.parametrize(
    ("name", "value"), [("timeout", "0"), ("timeout", "soon"), ("drain", "keep"), ("reload", "yes")]
)
def test_an_option_that_means_nothing_is_refused(lab: Lab, name: str, value: str) -> None:
    """At the start of the agent, and the text names it."""
    with pytest.raises(BackendError, match=name):
        lab.make(**{name: value})


async def test_not_a_byte_goes_to_an_address_that_is_not_listed(lab: Lab) -> None:
    """A registration with a stranger's address: refused with the option to set, and nobody even connects to it."""
    job = lab.job(lab.start())
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.setblocking(False)
        url = f"http://127.0.0.1:{stranger.getsockname()[1]}"
        backend = lab.make(allow="http://10.1.2.3:8000")
        job = of_job(job, endpoints=(url,))
        for step in (backend.prepare, backend.suspend, backend.restore):
            with pytest.raises(BackendError, match=f"--backend http:allow={url}") as caught:
                await step(job, ALL, deadline_s=DEADLINE_S)
            assert caught.value.kind is FaultKind.UNSUPPORTED
        with pytest.raises(BackendError, match="allow"):
            await backend.probe(job)
        with pytest.raises(BlockingIOError):
            stranger.accept()


async def test_a_redirect_is_not_followed(lab: Lab) -> None:
    """It could point anywhere: a fault instead, and the target of it is never asked."""
    server = lab.start(faults=("redirect /sleep",))
    with pytest.raises(BackendError, match="redirects are not followed"):
        await lab.out(lab.job(server))
    assert len(server.calls("/sleep")) == 1


async def test_no_proxy_of_the_environment_is_asked(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not on the list, and would see the token."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.setblocking(False)
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{stranger.getsockname()[1]}")
        assert await lab.state(lab.job(lab.start())) is Residency.RESIDENT
        with pytest.raises(BlockingIOError):
            stranger.accept()


async def test_an_answer_that_dribbles_is_over_at_the_deadline(lab: Lab) -> None:
    """A byte every now and then is no answer: the time is for all of it."""
    server = lab.start()
    over = asyncio.Event()

    async def dribble(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        while not over.is_set():
            writer.write(b" ")
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), 0.02)
        writer.close()

    lab.backend = lab.make(timeout="0.5")
    async with await asyncio.start_server(dribble, "127.0.0.1", 0) as slow:
        job = of_job(lab.job(server), endpoints=(f"http://127.0.0.1:{slow.sockets[0].getsockname()[1]}",))
        try:
            with pytest.raises(BackendError, match="no answer within") as caught:
                await asyncio.wait_for(lab.backend.probe(job), 20)
        finally:
            over.set()
    assert caught.value.kind is FaultKind.TRANSIENT


async def test_an_endless_answer_is_cut_off(lab: Lab) -> None:
    """More than a few megabytes are no answer."""
    server = lab.start(faults=("huge /is_sleeping",))
    with pytest.raises(BackendError, match="more than") as caught:
        await lab.backend.probe(lab.job(server))
    assert caught.value.kind is FaultKind.UNSUPPORTED


async def test_a_token_is_sent_and_never_shown(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From a variable or a file, read anew each time; no log line and no error has it, also where it is wrong."""
    caplog.set_level(logging.DEBUG)
    server = lab.start("vllm", "--proxy-token", TOKEN, faults=("502 /is_sleeping=1",))
    job = lab.job(server)
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    monkeypatch.setenv("PROXY_TOKEN", TOKEN)
    for options in ({"token_env": "PROXY_TOKEN"}, {"token_file": str(file)}):
        lab.backend = lab.make(**options)
        await lab.out(job)
        await lab.back(job)
        assert list(await lab.backend.health()) == []
    texts = [caplog.text]
    file.write_text("wrong-" + TOKEN)
    with pytest.raises(BackendError, match=r"401.*token_env") as caught:
        await lab.backend.probe(job)
    texts.append(str(caught.value))
    file.write_text(f"{TOKEN}\nX-Other: {TOKEN}")
    with pytest.raises(BackendError, match="holds no token") as caught:
        await lab.backend.probe(job)
    texts += [str(caught.value), *await lab.backend.health()]
    file.unlink()
    with pytest.raises(BackendError, match="can't be read"):
        await lab.backend.probe(job)
    assert not [text for text in texts if TOKEN in text]


async def test_a_proxy_that_repeats_the_token_does_not_make_it_known(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is quoted in the fault, which goes to logs and events; the token in it is not."""
    monkeypatch.setenv("PROXY_TOKEN", TOKEN)
    server = lab.start("vllm", "--proxy-token", "another", faults=("repeats token",))
    lab.backend = lab.make(token_env="PROXY_TOKEN")
    with pytest.raises(BackendError, match=r"not Bearer \[token\]") as caught:
        await lab.backend.probe(lab.job(server))
    assert TOKEN not in str(caught.value)


async def test_without_a_token_the_fault_says_what_to_set(lab: Lab) -> None:
    """A proxy that wants one answers 401: never tried again."""
    server = lab.start("vllm", "--proxy-token", TOKEN)
    with pytest.raises(BackendError, match=r"401.*token_file") as caught:
        await lab.backend.prepare(lab.job(server), ALL, deadline_s=DEADLINE_S)
    assert caught.value.kind is FaultKind.UNSUPPORTED
    assert len(server.ask("/stand-in")[1]["log"]) == 1
    assert await lab.state(lab.job()) is Residency.ABSENT
