"""With FAILED_TESTS=FILE, tests that fail are noted in FILE and do not fail their run: `.ci/run` runs them once more.

A line a test: the interpreter and the test's id, as JSON. Everything else fails the run as it always does: a file that
can't be collected, a worker that crashed, no test at all.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest


class Failures:
    """Notes what failed in this run."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.tests: dict[str, None] = {}  # in their order, each once
        self.excusable = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.tests[_plain(report.nodeid)] = None
            # xdist has no phase for the test at which a worker crashed.
            self.excusable &= report.when in {"setup", "call", "teardown"}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.excusable &= not report.failed

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.TESTS_FAILED and self.tests and self.excusable:
            with self.file.open("a") as file:
                file.writelines(f"{json.dumps([sys.executable, test])}\n" for test in self.tests)
            session.exitstatus = pytest.ExitCode.OK


def _plain(nodeid: str) -> str:
    """The id as pytest takes it: `--dist loadgroup` adds the group of a test to it."""
    return nodeid.rpartition("@")[0] if nodeid.rfind("@") > nodeid.rfind("]") else nodeid


def pytest_configure(config: pytest.Config) -> None:
    # Taken away, so that neither workers nor a pytest that a test starts note anything.
    if file := os.environ.pop("FAILED_TESTS", ""):
        config.pluginmanager.register(Failures(Path(file)))
