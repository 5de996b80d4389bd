"""Models and optimizers whose memory leaves the device and comes back."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from timeslice.client.callbacks import Moved
from timeslice.integrations import torch_find, torch_state
from timeslice.integrations.torch import DeviceState
from timeslice.models import Residency
from timeslice.up import LocalStack

# A job with a model, and without one. Each line of input lets it go on.
JOB = """
import sys, torch, timeslice
from tests.frameworks.test_torch import Tied, digest
from timeslice.integrations.torch import register_module

sys.stdin.readline()
with timeslice.hold("trainers", timeout=60):
    model = Tied()
    register_module("trainers", model)
    before = digest(model)
print("registered", flush=True)
sys.stdin.readline()
try:
    model(torch.arange(3))
except timeslice.UsageError as error:
    print(error, flush=True)
sys.stdin.readline()
with timeslice.hold("trainers", timeout=60) as lease:
    print(lease.grant.how, digest(model) == before, flush=True)
"""
RIVAL = """
import sys, timeslice
sys.stdin.readline()
with timeslice.hold("trainers", timeout=60):
    print("inside", flush=True)
    sys.stdin.readline()
"""


class Tied(nn.Module):  # type: ignore[misc]  # untyped
    """Input and output share their weights; buffers of many types."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.tensor(7))

    def forward(self, tokens: Any) -> Any:
        return self.head(torch.relu(self.middle(self.embedding(tokens))))


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return Tied()


def state_of(*modules: Any, optimizers: tuple[Any, ...] = ()) -> DeviceState:
    return DeviceState("g", lambda: (modules, optimizers))


def train(model: Any, optimizer: Any, steps: int) -> None:
    """Steps whose gradients are left where they are."""
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.arange(20) + step).logsumexp(-1).mean().backward()
        optimizer.step()


def digest(model: Any, optimizer: Any = None) -> str:
    """Of every byte, gradients and optimizer state included."""
    whole = hashlib.sha256()
    for piece in torch_find.find([model], [optimizer] if optimizer else []):
        whole.update(torch_find.raw(piece.storage).clone().numpy())  # a storage that numpy saw is replaced
    return whole.hexdigest()


def test_a_training_run_does_not_notice(model: Any) -> None:
    """Suspended and restored in the middle, a run has the same bytes and ends at the same bytes as one left alone."""
    other = Tied()
    other.load_state_dict(model.state_dict())
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, other)]
    state = state_of(model, optimizers=(optimizers[0],))
    for each, optimizer in zip((model, other), optimizers, strict=True):
        train(each, optimizer, 2)
    before = digest(model, optimizers[0])
    assert state.suspend() == state.restore()
    assert digest(model, optimizers[0]) == before
    for each, optimizer in zip((model, other), optimizers, strict=True):
        train(each, optimizer, 2)
    assert digest(model, optimizers[0]) == digest(other, optimizers[1])


def test_the_memory_is_given_back(model: Any) -> None:
    """While it is out no parameter, gradient, buffer or optimizer state has memory, and the byte counts say so. The
    host memory stays afterwards, for the next time."""
    optimizer = torch.optim.Adam(model.parameters())
    state = state_of(model, optimizers=(optimizer,))
    train(model, optimizer, 1)
    before, on_device, saved, _ = state.probe()
    assert (before, saved) == (Residency.RESIDENT, 0)
    assert state.suspend() == Moved(bytes=on_device)
    assert {piece.storage.nbytes() for piece in torch_find.find([model], [optimizer])} == {0}
    assert state.probe()[:3] == (Residency.SUSPENDED, 0, on_device)
    assert state.restore() == Moved(bytes=on_device)
    assert state.probe()[:3] == (Residency.RESIDENT, on_device, on_device)


def test_objects_and_sharing_stay(model: Any) -> None:
    """The same Parameters are there afterwards; tied weights were moved once and are still tied."""
    ids = [id(parameter) for parameter in model.parameters()]
    state = state_of(model)
    expected = sum(parameter.nbytes for parameter in model.parameters()) + model.steps.nbytes
    assert state.suspend().bytes == expected
    state.restore()
    assert [id(parameter) for parameter in model.parameters()] == ids
    with torch.no_grad():
        model.head.weight[3, 3] = 42
    assert model.embedding.weight[3, 3] == 42


def test_every_dtype_comes_back_to_the_bit() -> None:
    """Bytes are moved, not numbers: half types, integers, booleans, complex numbers and odd NaNs are as they were."""
    holder = nn.Module()
    raw = torch.arange(4096, dtype=torch.int32).mul(2654435761 % 2**31).view(torch.uint8)
    dtypes = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.complex64, torch.float64)
    for dtype in dtypes:
        holder.register_buffer(f"as_{dtype}".replace("torch.", ""), raw.clone().view(dtype))
    holder.register_buffer("flags", torch.tensor([True, False, True]))
    holder.register_buffer("view", torch.arange(100)[10:20])  # its storage is larger than it
    before = digest(holder)
    state = state_of(holder)
    assert state.suspend().bytes == 16384 * len(dtypes) + 3 + 800
    state.restore()
    assert digest(holder) == before


def test_tensors_inside_of_tensors_move_too() -> None:
    """Of a tensor that is made of others, such as a nested one, the inner memory moves."""
    holder = nn.Module()
    parts = [torch.randn(3, 4), torch.randn(5, 4)]
    holder.register_buffer("nested", torch.nested.nested_tensor(parts, layout=torch.jagged))
    state = state_of(holder)
    assert state.suspend().bytes >= 8 * 4 * 4
    state.restore()
    assert all(torch.equal(one, other) for one, other in zip(holder.nested.unbind(), parts, strict=True))


def test_a_repeated_order_changes_nothing(model: Any) -> None:
    """A second suspend moves nothing and keeps the copy; a second restore keeps the state."""
    before, state = digest(model), state_of(model)
    assert state.restore() == Moved()
    assert state.suspend().bytes > 0
    assert state.suspend() == Moved()
    state.restore()
    assert state.restore() == Moved()
    assert digest(model) == before


def test_without_host_memory_nothing_is_touched(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a copy can't be allocated in the middle of a suspend, the state is where it was and can be used."""
    before, state, calls = digest(model), state_of(model), iter(range(100))

    def scarce(*arguments: Any, **options: Any) -> Any:
        if "pin_memory" in options and next(calls) == 2:
            raise RuntimeError("not enough memory: you tried to allocate 4096 bytes")
        return empty(*arguments, **options)

    empty = torch.empty
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", scarce)
        with pytest.raises(RuntimeError, match="not enough memory"):
            state.suspend()
    assert state.probe()[0] is Residency.RESIDENT
    assert digest(model) == before
    model(torch.arange(3))


def test_a_restore_that_does_not_fit_can_be_tried_again(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the device is full in the middle of a restore, it has nothing of this job again, and the copy is whole."""
    before, state = digest(model), state_of(model)
    size = state.suspend().bytes
    filled = []

    def full(storage: Any) -> Any:
        filled.append(storage)
        if len(filled) == 3:
            raise torch.OutOfMemoryError("out of memory")
        return view(storage)

    view = torch_find.raw
    with monkeypatch.context() as patch:
        patch.setattr(torch_state, "raw", full)
        with pytest.raises(torch.OutOfMemoryError):
            state.restore()
    assert state.probe()[:3] == (Residency.SUSPENDED, 0, size)
    state.restore()
    assert digest(model) == before


def test_what_appears_later_moves_too(model: Any) -> None:
    """Gradients and optimizer state that did not exist when the model was registered are found when it is suspended."""
    optimizer = torch.optim.Adam(model.parameters())
    state = state_of(model, optimizers=(optimizer,))
    weights = state.suspend().bytes
    state.restore()
    train(model, optimizer, 1)
    steps = 4 * len(optimizer.state)  # one number a parameter
    parameters = weights - model.steps.nbytes
    assert state.suspend().bytes == weights + 3 * parameters + steps  # gradients and two moments


@pytest.fixture
def stack() -> Iterator[LocalStack]:
    """Server, coordinator and agent, without an emulated device: the state moves itself."""
    local = LocalStack({"trainers": 0})
    try:
        yield local.start()
    finally:
        local.stop()


@contextmanager
def job(name: str, script: str, url: str) -> Iterator[Callable[[], str]]:
    """A process of a job; each call lets it go on and gives the next line that it prints."""
    environment = {**os.environ, "TIMESLICE_URL": url, "TIMESLICE_JOB": name}
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env=environment,
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        lines, send = process.stdout, process.stdin

        def go_on() -> str:
            send.write("\n")
            return lines.readline().strip()

        try:
            yield go_on
        finally:
            process.kill()


def test_an_agent_moves_it_for_a_rival(stack: LocalStack) -> None:
    """Registered, a model leaves when another job gets the group, and is back in the next hold with equal content."""
    with job("a", JOB, stack.url) as a:
        assert a() == "registered"
        with job("b", RIVAL, stack.url) as b:
            assert b() == "inside"
            assert "this state is in host memory" in a()
        assert a() == "restored True"
