"""Workers that a job starts, and of which it tells nobody."""

from __future__ import annotations

import os

from tests.kinds.devices import SIZE, Devices
from timeslice.arena.process import Target
from timeslice.arena.survey import arenas_of

# The job's name is given in the code, so its worker's environment says nothing of it.
_WORKER = f"""
import os, sys
from timeslice.arena import Arena
view = Arena(os.environ["TEST_DEVICES"] + "/g", label="worker").allocate({SIZE})
print("loaded", flush=True)
sys.stdin.read()
"""
_STARTS_IT = f"""
import subprocess
clean = {{name: value for name, value in os.environ.items() if not name.startswith("TIMESLICE_")}}
with timeslice.Client(os.environ["TIMESLICE_URL"], "a", os.environ["TIMESLICE_PREFIX"]) as client:
    with client.hold("g"):
        child = subprocess.Popen([sys.executable, "-c", {_WORKER!r}], stdin=-1, stdout=-1, text=True, env=clean)
        say(child.stdout.readline().strip(), child.pid, client_start(child.pid))
        hear()
    say("out")
    hear()
child.kill()
"""
_START = """
def client_start(pid):
    from timeslice.client.identity import process_start
    return process_start(pid)
"""


def test_a_worker_that_shows_nothing_is_its_parents_jobs(devices: Devices) -> None:
    """It is moved out before another job is let in, though it neither registered nor names a job."""
    devices.start("g")
    parent = devices.job(_START + _STARTS_IT)
    word, pid, start = parent.line().split()
    assert word == "loaded"
    parent.tell()
    assert parent.line() == "out"
    devices.enters("b")
    assert sum(each.bytes_on_device for each in arenas_of(Target(int(pid), int(start)))) == 0
    os.kill(int(pid), 0)  # it lives, and has its state in host memory
