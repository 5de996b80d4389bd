"""Jobs whose processes are hard to know take turns with another: moved, refused or waited for, never beside it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.killpoints.duel import JOB_BYTES, JOBS, Duel
from timeslice.torture import forms
from timeslice.torture.history import Entered

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
LOOK_S = 8.0  # a blocked group lets nobody in, and that is right
START_S = 30.0  # one that is refused never gets in, and that is right, too


@pytest.fixture(scope="module")
def duel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Duel]:
    with ExitStack() as stack:
        # With room for both: else the kernel keeps them apart, whatever the product thinks.
        running = Duel(tmp_path_factory.mktemp("hidden"), stack, device_bytes=4 * JOB_BYTES)
        running.both_take_turns()
        yield running


@pytest.mark.parametrize("form", [form for form in forms.FORMS if form != "threads"])
def test_nobody_is_in_beside_it(duel: Duel, form: str) -> None:
    """Both jobs are let in, or one that asks is not: what the devices show never has two jobs."""
    if why := forms.missing().get(form):
        pytest.skip(why)
    hidden = duel.disguise(JOBS[0], form)
    since = time.monotonic_ns()

    def tried() -> bool:
        entered = [line for line in duel.lines("job-*") if isinstance(line, Entered) and line.at > since]
        own = [line.at for line in entered if line.who == hidden]
        others = [line for line in entered if line.job == JOBS[1] and own and line.at > own[0]]
        over = own[0] + LOOK_S * 1e9 if own else since + START_S * 1e9
        return len(others) > 1 or time.monotonic_ns() > over

    duel.until(tried, "they try")
    assert [each.message for each in duel.report().violations] == []
    duel.disguise(JOBS[0], "")
    duel.both_take_turns()
