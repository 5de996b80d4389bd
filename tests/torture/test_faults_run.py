"""What a run counts as a fault."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from timeslice.torture import run
from timeslice.torture.faults import Deed, choose
from timeslice.torture.history import Fault, Took, read


@pytest.mark.slow
@pytest.mark.parametrize("done", [True, False])
def test_only_what_came_about_is_counted(done: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose deeds do nothing says so of each, and has no faults; else it has them all."""

    def chosen(*arguments: Any) -> Deed | None:
        deed = choose(*arguments)
        return deed if done or deed is None else replace(deed, do=lambda: None)

    monkeypatch.setattr(run, "choose", chosen)
    monkeypatch.setattr(run, "AFTERWARDS_S", 0.0)
    said: list[str] = []
    options = run.Options(seed=1, seconds=6, kinds=("stop-job", "forget"), jobs=2)
    run.run_torture(options, tmp_path, say=said.append, show=lambda _: None)
    lines = list(read(tmp_path / "parts" / "run.jsonl"))
    tried = [line.id for line in lines if isinstance(line, Fault)]
    assert tried
    assert [line.id for line in lines if isinstance(line, Took)] == (tried if done else [])
    assert sum("did not take" in each for each in said) == (0 if done else len(tried))
