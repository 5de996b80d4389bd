"""What models and optimizers may be made of, and what is refused while their memory is out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.frameworks.test_torch import Tied, digest, state_of, train
from timeslice.errors import UsageError
from timeslice.integrations import torch_find, torch_state
from timeslice.integrations.torch import register_module
from timeslice.models import Residency


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return Tied()


def moved(*modules: Any, optimizers: tuple[Any, ...] = ()) -> int:
    """Out and in again; the bytes."""
    state = state_of(*modules, optimizers=optimizers)
    size = state.suspend().bytes
    assert state.restore().bytes == size
    return size


def test_use_in_between_is_an_error_that_says_what_to_do(model: Any) -> None:
    """Calling the model or a part of it, saving or loading it, and stepping, saving or loading its optimizer say that a
    hold is missing; after the restore all of that works again."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, 1)
    state = state_of(model, optimizers=(optimizer,))
    weights, moments = model.state_dict(), optimizer.state_dict()
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    uses: list[Callable[[], object]] = [
        lambda: model(torch.arange(3)),
        lambda: model.middle(torch.zeros(16)),
        model.state_dict,
        lambda: model.load_state_dict(weights),
        lambda: model.middle.load_state_dict({"weight": torch.zeros(16, 16), "bias": torch.zeros(16)}),
        optimizer.step,
        optimizer.state_dict,
        lambda: optimizer.load_state_dict(moments),
    ]
    state.suspend()
    for use in uses:
        with pytest.raises(UsageError, match=r"inside of timeslice.hold\('g'\)"):
            use()
    state.restore()
    for use in uses:
        use()


def test_memory_that_pytorch_can_not_free_is_replaced(model: Any, tmp_path: Path) -> None:
    """Weights on a mapped file, as checkpoints are loaded, and weights seen by a numpy array move like all others; the
    same objects stay, tied ones stay tied."""
    torch.save(model.state_dict(), tmp_path / "weights")
    model.load_state_dict(torch.load(tmp_path / "weights", mmap=True), assign=True)
    model.head.weight = model.embedding.weight
    seen = model.middle.weight.detach().numpy()
    before, ids = digest(model), [id(parameter) for parameter in model.parameters()]
    assert moved(model) > 0
    assert seen.shape == (16, 16)
    assert digest(model) == before
    assert [id(parameter) for parameter in model.parameters()] == ids
    assert model.head.weight.untyped_storage()._cdata == model.embedding.weight.untyped_storage()._cdata
    model(torch.arange(3)).sum().backward()


def test_memory_that_processes_share_is_replaced(model: Any) -> None:
    """A module after `share_memory()` moves like all others, and is then on memory of its own."""
    model.share_memory()
    before = digest(model)
    assert moved(model) > 0
    assert digest(model) == before
    assert not model.middle.weight.is_shared()
    assert model.head.weight.untyped_storage()._cdata == model.embedding.weight.untyped_storage()._cdata
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)


def test_tensors_of_inference_mode_move_too() -> None:
    """Buffers made there, on memory of numpy or of PyTorch, move and stay what they are."""
    holder = nn.Module()
    with torch.inference_mode():
        holder.register_buffer("of_numpy", torch.from_numpy(np.arange(8, dtype=np.float32)))
        holder.register_buffer("own", torch.arange(4))
    assert moved(holder) == 8 * 4 + 4 * 8
    assert holder.of_numpy.tolist() == list(range(8))
    assert holder.own.tolist() == list(range(4))
    assert holder.of_numpy.is_inference()


def test_what_has_no_memory_is_passed_over(model: Any) -> None:
    """Of a model that is partly on the meta device the rest moves."""
    size = moved(model)
    model.register_buffer("later", torch.empty(1000, device="meta"))
    assert moved(model) == size


def test_what_only_the_optimizer_has_moves_too() -> None:
    """A tensor that is trained but belongs to no registered module moves with its gradient and state, and so does a
    learning rate that is a tensor."""
    loose = torch.ones(100, requires_grad=True)
    optimizer = torch.optim.SGD([loose], lr=torch.tensor(0.5), momentum=0.9)
    loose.sum().backward()
    optimizer.step()
    assert moved(optimizers=(optimizer,)) == 3 * loose.nbytes + 4
    assert loose.tolist() == [0.5] * 100


class OnDevice:
    """Stands in for a tensor on a GPU, and its storage."""

    layout, device, _cdata = torch.strided, torch.device("cuda"), -1
    grad = None

    def untyped_storage(self) -> OnDevice:
        return self

    def nbytes(self) -> int:
        return 1000


def test_host_memory_of_a_model_on_a_device_stays(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where something is on a device, only that moves: what is in host memory, such as the step counters of an
    optimizer, is where it would be moved to."""
    state = state_of(model)
    labelled = torch_find._labelled
    here = (OnDevice(), "weights", "")
    monkeypatch.setattr(torch_find, "_labelled", lambda *parts: [here, *labelled(*parts)])
    assert state.probe() == (Residency.RESIDENT, 1000, 0, {"weights": 1000})


def test_a_suspend_that_fails_half_way_leaves_the_state(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the device fails when memory was given back already, all of it is there again and can be used."""
    before, state = digest(model), state_of(model)

    def broken(storages: list[Any]) -> None:
        assert {storage.nbytes() for storage in storages} == {0}
        monkeypatch.undo()
        raise RuntimeError("device-side assert triggered")

    monkeypatch.setattr(torch_state, "empty_cache", broken)
    with pytest.raises(RuntimeError, match="device-side assert"):
        state.suspend()
    assert state.probe()[0] is Residency.RESIDENT
    assert digest(model) == before
    model(torch.arange(3))
    assert state.suspend().bytes > 0


def test_what_can_not_be_moved_is_refused_at_once() -> None:
    """A layout without one memory is refused before anything is registered."""
    holder = nn.Module()
    holder.register_buffer("tensor", torch.eye(3).to_sparse())
    with pytest.raises(UsageError, match=r"sparse_coo can't leave the device; make it dense"):
        register_module("trainers", holder)


def test_the_refusal_comes_before_all_other_hooks(model: Any) -> None:
    """FSDP gathers parameters in a hook of its own; it must not get that far, for other ranks would wait."""
    called = []
    model.register_forward_pre_hook(lambda *_: called.append("hook"), prepend=True)
    state = state_of(model)
    state.suspend()
    with pytest.raises(UsageError, match="another job may have the device"):
        model(torch.arange(3))
    assert not called
    state.restore()
    model(torch.arange(3))
    assert called
