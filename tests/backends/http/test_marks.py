"""What is noted of servers: only what this user wrote, of just that server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.http.conftest import Lab
from timeslice.backends.base import Context
from timeslice.backends.http import HttpBackend
from timeslice.backends.http_marks import Mark, Marks
from timeslice.errors import BackendError, FaultKind
from timeslice.models import Residency

ONE, OTHER = "http://10.1.2.3:8000", "http://10.1.2.3:8001"


def mark(url: str) -> Mark:
    return Mark(url=url, run="7", out=("weights",), mode="offload")


def test_a_folder_in_which_others_write_is_refused(tmp_path: Path) -> None:
    """A note of theirs would have a server woken, or taken for asleep."""
    folder = tmp_path / "marks"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(BackendError, match="must be yours alone"):
        HttpBackend(Context(group="g", node="n1", options={"allow": ONE, "state": str(folder)}))


def test_a_note_is_of_one_server_and_lasts(tmp_path: Path) -> None:
    """Another folder object, as in an agent that was started again, finds it; nobody else's address does."""
    Marks(tmp_path / "marks").put(mark(ONE))
    marks = Marks(tmp_path / "marks")
    assert marks.get(ONE) == mark(ONE)
    assert marks.get(OTHER) is None
    marks.drop(ONE)
    assert marks.get(ONE) is None


def test_what_is_no_note_of_that_server_counts_as_none(tmp_path: Path) -> None:
    """A file that was cut off or moved is no reason to fail, and none to believe it."""
    marks = Marks(tmp_path / "marks")
    marks.put(mark(ONE))
    (file,) = (tmp_path / "marks").iterdir()
    marks.put(mark(OTHER))
    (other,) = set((tmp_path / "marks").iterdir()) - {file}
    other.write_bytes(file.read_bytes())
    assert marks.get(OTHER) is None
    file.write_text("{")
    assert marks.get(ONE) is None
    assert not file.exists()


async def test_a_folder_that_can_not_be_written_costs_nothing(lab: Lab) -> None:
    """P5: what sleeps could not be noted, as on a full disk: that server is not asked, and the other one is woken."""
    good, other = lab.start(), lab.start(seed=2)
    job, before = lab.job(good, other), good.sample("why")
    Marks(lab.folder / "marks").put(mark(other.url))
    (file,) = (lab.folder / "marks").iterdir()
    file.unlink()
    file.with_suffix(".new").mkdir()
    with pytest.raises(BackendError, match=rf"server {other.url}: .* can't be written to .*; make room") as caught:
        await lab.out(job)
    assert caught.value.kind is FaultKind.TRANSIENT
    assert other.calls("/sleep") == []
    assert await lab.state(job) is Residency.RESIDENT
    assert good.sample("why") == before
