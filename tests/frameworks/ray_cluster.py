"""One Ray cluster for the tests of a module, and what they drive it with."""

from __future__ import annotations

import logging
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.frameworks.ray_workers import STATE_BYTES, Known
from timeslice.client.sync import Client
from timeslice.integrations.ray import runtime_env
from timeslice.up import LocalStack

SAMPLERS, TRAINERS = GROUPS = ("samplers", "trainers")

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    """Server, coordinator and agent with two emulated devices, and a Ray cluster that this process is a driver of."""
    with tempfile.TemporaryDirectory(prefix="tr-") as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        patch.setenv("TIMESLICE_RUNTIME_DIR", str(folder / "run"))
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("RAY_AUTH_MODE", "")  # put back afterwards; Ray sets it
        patch.delenv("RAY_AUTH_MODE")
        logging.getLogger("ray").setLevel(logging.ERROR)
        local = LocalStack(dict.fromkeys(GROUPS, STATE_BYTES * 5 // 2))
        try:
            local.start()
            patch.setenv("TIMESLICE_URL", local.url)  # for workers without a runtime_env, which start faster
            ray.init(
                num_cpus=2,
                include_dashboard=False,
                object_store_memory=80 << 20,
                configure_logging=False,
                log_to_driver=False,
                _temp_dir=str(folder / "ray"),
            )
            yield local
        finally:
            ray.shutdown()
            local.stop()


@pytest.fixture
def job(stack: LocalStack, monkeypatch: pytest.MonkeyPatch) -> str:
    """The job that this process is the driver of."""
    monkeypatch.setenv("TIMESLICE_JOB", "mine")
    monkeypatch.setenv("TIMESLICE_URL", stack.url)
    return "mine"


@pytest.fixture
def rival(stack: LocalStack) -> Iterator[Client]:
    """Another job."""
    with Client(stack.url, job=f"r{secrets.token_hex(4)}") as client:
        yield client


@pytest.fixture
def make(stack: LocalStack, job: str) -> Iterator[Make]:
    """Actors that end with the test."""
    made = []

    def actor(kind: type, *groups: str, arguments: Sequence[Any] = (), **options: Any) -> Any:
        environment = {"runtime_env": runtime_env(groups=groups)} if groups else {}
        given = {"num_cpus": 0, **environment, **options}
        if issubclass(kind, Known):
            arguments = [str(stack.server.folder.parent / "devices" / groups[0])]
        made.append(ray.remote(kind).options(**given).remote(*arguments))
        return made[-1]

    yield actor
    for each in made:
        ray.kill(each)
