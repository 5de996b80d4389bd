"""Gateways that stop, are killed, and start again: as a command, with real signals."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys

import pytest

from tests.cli.conftest import Cli, cli
from tests.client.world import World
from tests.conftest import ServerFactory
from tests.gateway.conftest import Caller, Code, Gateway, MakeGateway, queued, refused
from timeslice.errors import UsageError
from timeslice.gateway.server import GatewayOptions, run_gateway

__all__ = ["cli"]  # a fixture

pytestmark = pytest.mark.usefixtures("clean_environment")


async def started(cli: Cli, *options: str) -> tuple[subprocess.Popen[str], Caller]:
    """The command, and a caller of it."""
    process = cli.start("gateway", "--listen", "127.0.0.1:0", "--node", "n1", *options)

    def target() -> str:
        assert process.stderr is not None
        seen = []
        for line in process.stderr:
            seen.append(line)
            if found := re.search(r"answering on (127\.0\.0\.1:\d+)", line):
                return found[1]
        pytest.fail("it ended without answering:\n" + "".join(seen))

    return process, Caller(await asyncio.to_thread(target))


@pytest.mark.usefixtures("lock")
async def test_a_stopped_gateway_ends_waits_and_leaves_leases(gateway: Gateway, world: World) -> None:
    """Who waits is told to ask again, and is out of the queue; who holds goes on computing, so it keeps the group."""
    caller = gateway.caller()
    await caller.acquire("a")
    waiting = caller.acquire("b")
    await queued(world, "b")
    await gateway.end()
    code, words = await refused(waiting)
    assert (code, "Ask again" in words) == (Code.UNAVAILABLE, True)
    assert (world.holder(), world.queue()) == ("a", [])
    assert "LeaseYielded" not in world.event_types()


@pytest.mark.usefixtures("lock")
async def test_the_next_gateway_goes_on_with_the_leases(cli: Cli, world: World) -> None:
    """Killed or stopped, it makes no difference to who holds: the next one of its node renews and yields for it."""
    killed, caller = await started(cli)
    await caller.acquire("a")
    killed.kill()
    killed.wait()
    await caller.channel.close()

    stopped, caller = await started(cli)
    assert (await caller.acquire("a")).success
    stopped.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(stopped.wait, 20) == 0
    await caller.channel.close()

    _, caller = await started(cli)
    assert world.holder() == "a"
    assert (await caller.yield_("a")).success
    assert world.event_types().count("LeaseGranted") == 1
    await caller.channel.close()


@pytest.mark.slow  # a call is tried for ten seconds before it fails
async def test_without_redis_it_is_unavailable(
    make_gateway: MakeGateway, server_factory: ServerFactory, prefix: str
) -> None:
    """Callers of llm-d's client see a connection error, a wait goes on until its deadline, and the gateway
    lives on."""
    server = server_factory()
    caller = (await make_gateway(url=server.url)).caller()
    server.kill()
    code, words = await refused(caller.status())
    assert (code, "redis" in words.lower()) == (Code.UNAVAILABLE, True)
    code, _ = await refused(caller.acquire("a", timeout=1.0))
    assert code == Code.DEADLINE_EXCEEDED


async def test_two_gateways_never_share_a_port(gateway: Gateway) -> None:
    """The second one says so; half of the callers would be served by each."""
    options = GatewayOptions(url=gateway.options.url, node="n2", listen=gateway.target)
    with pytest.raises(UsageError, match="can't listen on"):
        await run_gateway(options, stop=asyncio.Event())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--listen", "0.0.0.0:0"), "--insecure"),
        (("--listen", "[::]:0"), "--insecure"),
        (("--listen", "somewhere"), "is no address to listen on"),
        (("--listen", "h:99999"), "is no address to listen on"),
        (("--listen", "::1:50051"), "is no address to listen on"),
        (("--tls-cert", __file__), "both --tls-cert and --tls-key"),
        (("--node", "gateway@n1"), "can't name a node"),
    ],
)
def test_what_can_not_be_served_is_refused(cli: Cli, options: tuple[str, ...], words: str) -> None:
    """Before anything is asked of the server: above all an open door without TLS."""
    result = cli("gateway", *options)
    assert result.exit_code == 2
    assert words in result.stderr


async def test_an_open_door_is_announced(make_gateway: MakeGateway, caplog: pytest.LogCaptureFixture) -> None:
    """--insecure is possible, and told in the log."""
    await make_gateway(listen="0.0.0.0:0", insecure=True)
    assert "whoever reaches this address may take and yield any group" in caplog.text


def test_without_grpc_it_says_what_to_install() -> None:
    """The extra is named, and the rest of the command line works without it."""
    code = "import sys; sys.modules['grpc'] = None; from timeslice.cli.main import main; main()"
    line = [sys.executable, "-c", code, "--url", "redis://h", "gateway"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "pip install 'timeslice-rl[grpc]'" in done.stderr
    assert subprocess.run([*line, "--help"], capture_output=True, check=False, timeout=60).returncode == 0
