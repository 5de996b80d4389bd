"""Gangs under the real torchrun: two ranks, gloo, one hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from timeslice.client.sync import Client

pytestmark = pytest.mark.timeout(240)  # the import of PyTorch alone takes long on a busy machine
EXAMPLE = Path(__file__).parents[2] / "examples" / "torchrun_gang.py"

# In its first life rank 1 dies inside of the hold, without a word. (Without torch.distributed: the ranks of the second
# life would try to reach those of the first, in PyTorch 2.13.)
RESTARTED = """
import os, signal, sys, time
import timeslice

rank, life = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
with timeslice.hold("trainers", lock_only=True, lease=3, timeout=60) as lease:
    if life == "0":
        if rank == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    with open(f"{sys.argv[1]}/{life}-{rank}", "w") as file:
        file.write(str(lease.fencing_token))
"""

# Rank 1 takes another branch and never asks.
ABSENT = """
import os, sys, time
import timeslice

if os.environ["RANK"] == "0":
    try:
        with timeslice.hold("trainers", lock_only=True, timeout=2):
            pass
    except timeslice.AcquireTimeoutError as error:
        with open(f"{sys.argv[1]}/said", "w") as file:
            file.write(str(error))
"""


def torchrun(script: Path, folder: Path, url: str, prefix: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options),
        *(str(script), str(folder)),
    ]
    environment = {
        **os.environ,
        "TIMESLICE_URL": url,
        "TIMESLICE_PREFIX": prefix,
        "TIMESLICE_JOB": "spmd",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=220, check=False)


def test_two_jobs_of_two_ranks_take_turns(tmp_path: Path) -> None:
    """Both ranks of a job are inside together, no two jobs are, and each rank's state comes back whole."""
    report = tmp_path / "gang.json"
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--rounds", "4", "--json", str(report)],
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert (found["overlaps"], found["gangs_whole"], found["tokens_rise"], found["sums_right"]) == (0, True, True, True)
    assert found["restored"] > 0
    assert "overlaps 0" in done.stdout
    assert {turn["job"] for turn in found["turns"]} == {"a", "b"}


def test_an_elastic_restart_is_another_gang(tmp_path: Path, redis_url: str, prefix: str) -> None:
    """A rank is killed inside: torchrun starts both anew, the new ranks get in together with a higher token, though the
    gang before never yielded."""
    script = tmp_path / "script.py"
    script.write_text(RESTARTED)
    with Client(redis_url, prefix=prefix) as client:
        with client.hold("trainers", job="before", lock_only=True) as lease:
            first = lease.fencing_token
        done = torchrun(script, tmp_path, redis_url, prefix, "--max-restarts", "1")
        assert done.returncode == 0, done.stderr
        said = [(tmp_path / f"1-{rank}").read_text() for rank in range(2)]
        assert said[0] == said[1]
        assert int(said[0]) > first
        assert not (tmp_path / "0-0").exists()
        view = client.status("trainers")
        assert (view.holder, view.queue) == ("", ())


def test_a_rank_that_never_asks_is_named(tmp_path: Path, redis_url: str, prefix: str) -> None:
    """The error of the rank that waits says which one did not arrive, and nothing is left in the queue."""
    script = tmp_path / "script.py"
    script.write_text(ABSENT)
    done = torchrun(script, tmp_path, redis_url, prefix)
    assert done.returncode == 0, done.stderr
    assert "rank 1 of 2 has not arrived" in (tmp_path / "said").read_text()
    with Client(redis_url, prefix=prefix) as client:
        assert client.status("trainers").queue == ()


@pytest.mark.parametrize("job", ["", "own"])
def test_ranks_need_one_job_id(tmp_path: Path, redis_url: str, prefix: str, job: str) -> None:
    """Without TIMESLICE_JOB the id of the torchrun run serves; all ranks have the same."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, timeslice\n"
        "os.environ['TIMESLICE_JOB'] = os.environ['WANTED']\n"
        "with timeslice.hold('trainers', lock_only=True, timeout=30) as lease:\n"
        "    open(f'{sys.argv[1]}/job-' + os.environ['RANK'], 'w').write(lease.job)\n"
    )
    os.environ["WANTED"] = job
    try:
        done = torchrun(script, tmp_path, redis_url, prefix)
    finally:
        del os.environ["WANTED"]
    assert done.returncode == 0, done.stderr
    names = {(tmp_path / f"job-{rank}").read_text() for rank in range(2)}
    assert len(names) == 1
    assert not job or names == {job}
