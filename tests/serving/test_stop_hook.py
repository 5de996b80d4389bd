"""The stop hook of the example with servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.client.world import World
from tests.serving.conftest import Daemons, device
from timeslice.arena import Device

EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm_sampler"

# Says what the server is when it is told to end: whether it sleeps, and its bytes on the device.
CODE = """
    import httpx
    sys.path.insert(0, {example!r})
    import sampler
    from timeslice.arena import Device
    sampler.GROUP = "g"
    with timeslice.hold("g", timeout=60):
        made = sampler.Sampler({device!r}, 1)
    url, end = str(made._client.base_url), made._process.send_signal
    def ends(number):
        asleep = httpx.get(url + "/is_sleeping", trust_env=False).json()["is_sleeping"]
        say(asleep, Device.open({device!r}).used_bytes())
        end(number)
    made._process.send_signal = ends
    made.stop(sleep_first={first})
    say("ended", made._process.returncode is not None)
"""


@pytest.mark.parametrize("first", [True, False])
def test_a_server_has_nothing_on_the_device_when_it_is_ended(world: World, daemons: Daemons, first: bool) -> None:
    """G24: on some drivers the end of a process that was restored hung the host, so it goes to sleep for good before.
    Who does not want that says so, and then it ends as it is."""
    daemons()
    job = world.job(CODE.format(example=str(EXAMPLE), device=str(device()), first=first), job="a")
    asleep, used = job.line().split()
    assert asleep == str(first)
    assert (int(used) == 0) is first
    assert job.line() == "ended True"
    assert Device.open(device()).used_bytes() == 0
