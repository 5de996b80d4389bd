"""Engines that move their own state, with a stand-in that has the interface of DeepSpeed 0.19.8."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.frameworks.engine import Engine, OffloadStateTypeEnum
from tests.frameworks.test_torch import RIVAL, job
from timeslice.client.callbacks import Moved
from timeslice.errors import UsageError
from timeslice.integrations.torch import register_engine, register_module
from timeslice.integrations.torch_engine import KINDS, EngineState
from timeslice.models import Residency
from timeslice.up import LocalStack

JOB = """
import sys, timeslice
from tests.frameworks.test_torch_engine import made
from timeslice.integrations.torch import register_engine

sys.stdin.readline()
with timeslice.hold("trainers", timeout=60):
    engine = made()
    register_engine("trainers", engine)
print("registered", flush=True)
sys.stdin.readline()
print(sorted(engine.optimizer.offloaded_states) == sorted(engine.optimizer.moves), flush=True)
sys.stdin.readline()
with timeslice.hold("trainers", timeout=60) as lease:
    print(lease.grant.how, len(engine.optimizer.offloaded_states), flush=True)
"""


def made() -> Engine:
    torch.manual_seed(0)
    engine = Engine(nn.Linear(8, 8))
    engine.optimizer.step()
    return engine


@pytest.fixture
def engine() -> Engine:
    return made()


WEIGHTS = 4 * (8 * 8 + 8)
PARTS = {"weights": WEIGHTS, "gradients": WEIGHTS, "optimizer": 3 * WEIGHTS + 4}


def test_the_engine_moves_all_of_it(engine: Engine) -> None:
    """Every kind of state leaves by the engine's own method and comes back by it; byte counts follow."""
    state = EngineState("g", engine)
    whole = sum(PARTS.values())
    weight = engine.module.weight.clone()
    assert state.probe() == (Residency.RESIDENT, whole, 0, PARTS)
    assert state.suspend() == Moved(bytes=whole)
    assert engine.optimizer.offloaded_states == set(OffloadStateTypeEnum)
    assert state.probe() == (Residency.SUSPENDED, 0, whole, dict.fromkeys(PARTS, 0))
    assert state.suspend() == Moved()
    assert state.restore() == Moved(bytes=whole)
    assert not engine.optimizer.offloaded_states
    assert state.probe() == (Residency.RESIDENT, whole, 0, PARTS)
    assert torch.equal(engine.module.weight, weight)


@pytest.mark.parametrize("tag", KINDS)
def test_a_part_leaves_by_its_tag(engine: Engine, tag: str) -> None:
    """DeepSpeed's own names of the kinds are given to it; its members of an enumeration are equal to them."""
    state = EngineState("g", engine)
    assert state.suspend([tag]) == Moved(bytes=PARTS[tag])
    assert engine.optimizer.offloaded_states == set(KINDS[tag])
    assert state.probe()[3] == {**PARTS, tag: 0}
    assert state.restore() == Moved(bytes=PARTS[tag])


def test_use_in_between_is_refused(engine: Engine) -> None:
    """Calling the engine or its module, and stepping, say that a hold is missing."""
    state = EngineState("g", engine)
    state.suspend(["optimizer"])
    for use in (lambda: engine(torch.zeros(8)), lambda: engine.module(torch.zeros(8)), engine.optimizer.step):
        with pytest.raises(UsageError, match=r"inside of timeslice.hold\('g'\)"):
            use()
    state.restore()
    engine(torch.zeros(8))
    engine.optimizer.step()


def test_what_fails_is_taken_back(engine: Engine) -> None:
    """A suspend that fails leaves all on the device, a restore that fails leaves all saved; both can be tried again."""
    state = EngineState("g", engine)
    engine.optimizer.fail_at = OffloadStateTypeEnum.lp_params
    with pytest.raises(RuntimeError, match="out of memory, host"):
        state.suspend()
    assert state.probe()[0] is Residency.RESIDENT
    assert not engine.optimizer.offloaded_states
    engine(torch.zeros(8))
    engine.optimizer.fail_at = None
    state.suspend()
    engine.optimizer.fail_at = OffloadStateTypeEnum.lp_params
    with pytest.raises(torch.OutOfMemoryError):
        state.restore()
    assert engine.optimizer.offloaded_states == set(OffloadStateTypeEnum)
    assert state.probe()[:2] == (Residency.SUSPENDED, 0)
    engine.optimizer.fail_at = None
    state.restore()
    engine(torch.zeros(8))


def test_who_can_not_is_told_what_can(engine: Engine) -> None:
    """An engine without ZeRO, and a plain model, are refused; an engine is no plain model either."""
    del engine.optimizer.offloaded_states
    for other in (engine, nn.Linear(2, 2)):
        with pytest.raises(UsageError, match="can't move its state"):
            register_engine("g", other)
    with pytest.raises(UsageError, match="a Engine moves its own state; use register_engine"):
        register_module("g", engine)


@pytest.fixture
def stack() -> Iterator[LocalStack]:
    local = LocalStack({"trainers": 0})
    try:
        yield local.start()
    finally:
        local.stop()


def test_an_agent_moves_an_engine(stack: LocalStack) -> None:
    """Registered, an engine has offloaded its states when another job is inside, and reloaded them in the next hold."""
    with job("a", JOB, stack.url) as a:
        assert a() == "registered"
        with job("b", RIVAL, stack.url) as b:
            assert b() == "inside"
            assert a() == "True"
        assert a() == "restored 0"
