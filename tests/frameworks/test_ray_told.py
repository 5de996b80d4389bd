"""What Ray jobs are told, and in which order calls go out: what needs no cluster."""

from __future__ import annotations

import asyncio
import logging

import pytest
import ray

from timeslice.errors import InvalidNameError, UsageError
from timeslice.integrations import ray_holder
from timeslice.integrations.ray import runtime_env, share

SAMPLERS, TRAINERS = "samplers", "trainers"
URL = "redis://host:6380"


def test_a_runtime_env_carries_no_password(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It names server, job, prefix and groups; of credentials only the user, and it says where the password goes."""
    monkeypatch.setenv("TIMESLICE_JOB", "mine")
    url = "rediss://me:secret@host:6380?ssl_password=secret"
    with caplog.at_level(logging.WARNING, "timeslice"):
        found = runtime_env(groups=[SAMPLERS, TRAINERS, SAMPLERS], url=url)
    assert found == {
        "env_vars": {
            "TIMESLICE_JOB": "mine",
            "TIMESLICE_PREFIX": "ts",
            "TIMESLICE_URL": "rediss://me@host:6380",
            "TIMESLICE_GROUPS": "samplers,trainers",
        }
    }
    assert "set TIMESLICE_PASSWORD in the environment of the Ray nodes" in caplog.text
    assert "secret" not in caplog.text
    with pytest.raises(InvalidNameError):
        runtime_env(groups=["no good"], url=URL)
    with pytest.raises(UsageError, match=r"groups='samplers': give a list of names, as in groups=\['samplers'\]"):
        runtime_env(groups=SAMPLERS, url=URL)


def test_a_job_without_a_name_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Which job it is, and where its name comes from; nothing where it has one."""
    monkeypatch.setenv("TIMESLICE_JOB", "named")
    with caplog.at_level(logging.INFO, "timeslice"):
        assert runtime_env(url=URL)["env_vars"]["TIMESLICE_JOB"] == "named"
        monkeypatch.delenv("TIMESLICE_JOB")
        assert runtime_env("other", url=URL)["env_vars"]["TIMESLICE_JOB"] == "other"
        assert not caplog.messages
        share(ray.remote(_nothing), SAMPLERS)
        unnamed = runtime_env(url=URL)["env_vars"]["TIMESLICE_JOB"]
    (told,) = caplog.messages
    assert f"is job {unnamed}, " in told
    assert "set TIMESLICE_JOB" in told


def _nothing() -> None:
    pass


async def test_a_shared_call_that_never_comes_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls after one that was cancelled on its way to the holder go out, in their order; it may still turn up."""
    monkeypatch.setattr(ray_holder, "LOST_S", 0.05)
    line, out = ray_holder.Line(), []

    async def call(number: int) -> None:
        line.come(number)
        await line.wait(number)
        out.append(number)
        line.leave(number)

    await asyncio.gather(call(3), call(2), call(1))
    await call(0)
    await call(4)
    assert out == [1, 2, 3, 0, 4]


async def test_a_shared_call_that_is_there_is_waited_for_however_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has to wait for its actor is overtaken by none that was made after it, but one that never comes is."""
    monkeypatch.setattr(ray_holder, "LOST_S", 0.01)
    line, out, answers = ray_holder.Line(), [], asyncio.Event()

    async def call(number: int) -> None:
        line.come(number)
        if number == 1:
            await answers.wait()
        await line.wait(number)
        out.append(number)
        line.leave(number)

    calls = [asyncio.create_task(call(number)) for number in (1, 3, 2)]
    await asyncio.sleep(0.3)
    assert out == []
    answers.set()
    await asyncio.gather(*calls)
    assert out == [1, 2, 3]
