"""State that did not change is not copied again, and a change is seen however it was made; moves of a part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.frameworks.test_torch import Tied, digest, train
from timeslice.client.callbacks import Moved
from timeslice.errors import UsageError
from timeslice.integrations import torch_host
from timeslice.integrations.torch import DeviceState, frozen
from timeslice.models import Residency


@pytest.fixture
def model() -> Any:
    """Trained in its middle only."""
    torch.manual_seed(0)
    made = Tied()
    made.embedding.requires_grad_(requires_grad=False)
    return made


def state_of(*modules: Any, optimizers: tuple[Any, ...] = (), **options: Any) -> DeviceState:
    return DeviceState("g", lambda: (modules, optimizers), **options)


def round_trip(state: DeviceState) -> Moved:
    """Out and in again; what the way out took."""
    moved = state.suspend()
    assert state.restore().bytes == moved.bytes + moved.saved
    return moved


def test_what_did_not_change_is_copied_once(model: Any) -> None:
    """Frozen weights go once; afterwards they are only dropped, and come back from the copy, to the bit. What is
    trained goes each time. The copy counts as host memory all the while."""
    optimizer = torch.optim.AdamW(model.middle.parameters(), lr=0.1)
    state = state_of(model, optimizers=(optimizer,), static=frozen)
    frozen_bytes = model.embedding.weight.nbytes + model.steps.nbytes
    train(model, optimizer, 1)
    first = round_trip(state)
    for _ in range(2):
        train(model, optimizer, 1)
        before = digest(model, optimizer)
        assert state.suspend() == Moved(bytes=first.bytes - frozen_bytes, saved=frozen_bytes)
        assert state.probe()[:3] == (Residency.SUSPENDED, 0, first.bytes)
        assert state.restore() == Moved(bytes=first.bytes)
        assert state.probe()[:3] == (Residency.RESIDENT, first.bytes, first.bytes)
        assert digest(model, optimizer) == before


def put_other_storage(weight: Any) -> None:
    weight.data = weight.data.flip(0).clone()


def exchange_rows(weight: Any) -> None:
    weight.data[[0, 1]] = weight.data[[1, 0]]


def write_to_inference_view(weight: Any) -> None:
    with torch.inference_mode():
        weight.data.add_(1)


WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda weight: weight.add_(1),
    "by .data, as PEFT merges and TRL follows a policy": lambda weight: weight.data.mul_(0.5),
    "signs only": lambda weight: weight.data.neg_(),
    "one bit": lambda weight: weight.view(torch.int32).data[3, 3].bitwise_xor_(-(2**31)),
    "rows exchanged": exchange_rows,
    "through numpy": lambda weight: weight.numpy().fill(3),
    "through dlpack": lambda weight: torch.from_dlpack(weight.detach()).fill_(3),
    "through the storage": lambda weight: weight.untyped_storage().fill_(3),
    "by another storage": put_other_storage,
    "by a foreach function": lambda weight: torch._foreach_add_([weight.data], 1.0),
    "in inference mode": write_to_inference_view,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_change_is_seen_however_it_was_made(model: Any, write: Callable[[Any], Any]) -> None:
    """PyTorch's version counters miss half of these ways to write. G21: none of them is lost."""
    state = state_of(model, static=frozen)
    round_trip(state)
    assert round_trip(state).saved > 0
    write(model.embedding.weight)
    before = digest(model)
    assert round_trip(state).bytes > model.embedding.weight.nbytes
    assert digest(model) == before
    assert round_trip(state).saved > model.embedding.weight.nbytes


@pytest.mark.parametrize(
    ("before", "after"), [([1], [256]), ([0, 0, 0, 9], [0, 9, 0, 0]), ([3, 0, 0, 0], [0, 0, 1, 0])]
)
def test_a_change_of_few_bits_is_seen(before: list[int], after: list[int]) -> None:
    """G21: counters and masks, whose values are small, and differ little from one place to another."""
    model = nn.Module()
    model.register_buffer("seen", torch.tensor(before, dtype=torch.int32))
    state = state_of(model, static=frozen)
    round_trip(state)
    assert round_trip(state).saved == 4 * len(before)
    model.seen.data.copy_(torch.tensor(after))
    assert round_trip(state).saved == 0
    assert model.seen.tolist() == after


def _one_hot(size: int, place: int, value: float, dtype: torch.dtype) -> Any:
    made = torch.zeros(size, dtype=dtype)
    made[place] = value
    return made


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        *((dtype, value) for dtype in (torch.float64, torch.float32, torch.bfloat16) for value in (1.0, 2.0, -0.0)),
        (torch.float16, 1.0),
        (torch.int64, -(2**63)),
        (torch.int8, 1),
        (torch.bool, True),
    ],
)
def test_the_same_value_elsewhere_is_something_else(dtype: torch.dtype, value: float) -> None:
    """G21: the fingerprint tells rows of an identity from one another, whatever bits a one has; also in the last few
    bytes, and where one part of it looks like another part."""
    rows = [_one_hot(1501, place, value, dtype) for place in range(1501)]
    part = torch_host._WORDS["cpu"] * 8 // dtype.itemsize
    rows += [_one_hot(3 * part, place * part + 5, value, dtype) for place in range(3)]
    assert len({torch_host.fingerprint(row.untyped_storage()) for row in rows}) == len(rows)


def test_small_numbers_are_all_different() -> None:
    """G21: the fingerprint of one word, and of two, is never that of others."""
    contents = [torch.tensor([number], dtype=torch.int32) for number in range(1000)]
    contents += [torch.tensor([one, other]) for one in range(40) for other in range(40)]
    assert len({torch_host.fingerprint(content.untyped_storage()) for content in contents}) == len(contents)


@pytest.mark.parametrize("declared", ["by module", "by name"])
def test_what_is_trained_is_copied_whatever_was_declared(model: Any, declared: str) -> None:
    """A fused optimizer raises no version. Its parameters go each time, though they were declared static, and though
    the content is not looked at."""
    optimizer = torch.optim.AdamW(model.middle.parameters(), lr=0.1, fused=True)
    static = [model] if declared == "by module" else lambda *_: True
    state = state_of(model, optimizers=(optimizer,), static=static, verify=False)
    train(model, optimizer, 1)
    round_trip(state)
    versions = [parameter._version for parameter in model.middle.parameters()]
    train(model, optimizer, 1)
    assert [parameter._version for parameter in model.middle.parameters()] == versions
    before = digest(model, optimizer)
    assert round_trip(state).saved == model.embedding.weight.nbytes + model.steps.nbytes
    assert digest(model, optimizer) == before


def test_one_use_as_something_else_is_enough_to_be_copied(model: Any) -> None:
    """Memory that static and other tensors share, and a parameter that only one of its names declares, always go."""
    model.register_buffer("seen", model.middle.weight.detach()[0])
    state = state_of(model, static=lambda name, _: name in ("seen", "embedding.weight"))
    size = round_trip(state).bytes
    assert round_trip(state) == Moved(bytes=size)
    last = state_of(model, static=lambda name, _: name == "head.weight")
    assert round_trip(last) == round_trip(last) == Moved(bytes=size)
    both = state_of(model, static=lambda name, _: name in ("head.weight", "embedding.weight"))
    round_trip(both)
    assert round_trip(both).saved == model.embedding.weight.nbytes


def test_a_view_that_came_later_makes_no_difference_to_the_rest(model: Any) -> None:
    """More tensors share static memory than when it was copied: it is copied again, and once."""
    state = state_of(model, static=frozen)
    whole = round_trip(state).bytes
    model.register_buffer("seen", model.embedding.weight.detach()[0])
    before = digest(model)
    assert round_trip(state) == Moved(bytes=whole - model.steps.nbytes, saved=model.steps.nbytes)
    assert round_trip(state).saved == model.embedding.weight.nbytes + model.steps.nbytes
    assert digest(model) == before


def test_without_a_look_at_the_content_versions_decide(model: Any) -> None:
    """With `verify=False` a change that raised the version, a new object or a tensor without versions is copied."""
    with torch.inference_mode():
        model.register_buffer("unversioned", torch.arange(4))
    state = state_of(model, static=frozen, verify=False)
    round_trip(state)
    weight = model.embedding.weight
    assert round_trip(state).saved == weight.nbytes + model.steps.nbytes
    weight.add_(1)
    assert round_trip(state).saved == model.steps.nbytes
    model.embedding.weight = model.head.weight = nn.Parameter(weight.data, requires_grad=False)
    assert round_trip(state).saved == model.steps.nbytes


def test_a_reference_model_is_static_beside_the_one_that_is_trained(model: Any) -> None:
    """Modules that are given as static move as well; a single one need not be in a list."""
    reference = Tied().requires_grad_(requires_grad=False)
    size = digest_size(reference)
    state = state_of(model, static=reference)
    assert round_trip(state).bytes == size + digest_size(model)
    assert round_trip(state) == Moved(bytes=digest_size(model), saved=size)


def digest_size(model: Any) -> int:
    return int(sum(parameter.nbytes for parameter in model.parameters()) + model.steps.nbytes)


def test_without_room_for_a_fingerprint_all_is_copied(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is full to the last MiB makes moves longer, and none fail."""

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    state = state_of(model, static=frozen)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "arange", full)
        assert round_trip(state).saved == round_trip(state).saved == 0
    assert round_trip(state).saved == 0  # the copy before has none
    assert round_trip(state).saved > 0


def test_copies_are_in_host_memory_whatever_device_is_the_default(model: Any) -> None:
    """Where new tensors go is a setting of the caller's; nothing of it is lost on a device that keeps no content."""
    state = state_of(model, static=frozen)
    before = digest(model)
    with torch.device("meta"):
        round_trip(state)
    assert digest(model) == before


def test_host_memory_is_used_again(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second move makes no host memory, for static state that changed neither; what has no use any more is given
    back by it."""
    optimizer = torch.optim.AdamW(model.middle.parameters(), lr=0.1)
    state = state_of(model, optimizers=(optimizer,), static=frozen)
    train(model, optimizer, 1)
    size = round_trip(state).bytes
    made = []

    def count(*arguments: Any, **options: Any) -> Any:
        made.extend([arguments] if "pin_memory" in options else [])
        return empty(*arguments, **options)

    empty = torch.empty
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", count)
        model.embedding.weight.data.neg_()
        model.steps.add_(1)
        assert round_trip(state).bytes == size
        optimizer.zero_grad()
        moved = round_trip(state)
    less = moved.bytes + moved.saved
    assert not made
    assert less < size
    assert state.probe()[1:3] == (less, less)


def test_nothing_is_kept_alive_on_the_device(model: Any) -> None:
    """Gradients that are dropped and static modules that are replaced are freed: only host memory is kept."""
    optimizer = torch.optim.SGD(model.middle.parameters(), lr=0.1)
    state = state_of(model, optimizers=(optimizer,), static=frozen)
    train(model, optimizer, 1)
    round_trip(state)
    gradient = StorageWeakRef(model.middle.weight.grad.untyped_storage())
    weight = StorageWeakRef(model.embedding.weight.untyped_storage())
    optimizer.zero_grad()
    model.embedding.weight = model.head.weight = nn.Parameter(torch.ones(50, 16), requires_grad=False)
    assert gradient.expired()
    assert weight.expired()
    before = digest(model)
    assert round_trip(state).saved == model.steps.nbytes
    assert digest(model) == before
    assert state.probe()[1] == state.probe()[2]  # nor is host memory, for what is gone


def test_a_suspend_that_fails_leaves_the_copies_that_were_there(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that is still good is used the next time, whatever failed behind it."""
    state = state_of(model, static=frozen)
    round_trip(state)

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("cudaErrorIllegalAddress")

    with monkeypatch.context() as patch:
        patch.setattr(torch_host.HostMemory, "_take", broken)
        with pytest.raises(RuntimeError, match="cudaErrorIllegalAddress"):
            state.suspend()
    assert state.probe()[0] is Residency.RESIDENT
    model(torch.arange(3))
    assert round_trip(state).saved == model.embedding.weight.nbytes + model.steps.nbytes


def test_parts_leave_and_come_back_by_tag(model: Any) -> None:
    """A suspend of tags moves what has one of them; the rest stays, and the job counts as suspended and may not run. A
    restore brings back what it names, or all that is out."""
    optimizer = torch.optim.Adam(model.middle.parameters())
    state = state_of(model, optimizers=(optimizer,), static=frozen)
    train(model, optimizer, 1)
    assert set(state.tags) == {"weights", "gradients", "optimizer", "static"}
    _, on_device, _, parts = state.probe()
    middle = sum(parameter.nbytes for parameter in model.middle.parameters())
    steps = 4 * len(optimizer.state)
    static = model.embedding.weight.nbytes + model.steps.nbytes
    assert parts == {"weights": middle, "gradients": middle, "optimizer": 2 * middle + steps, "static": static}
    before = digest(model, optimizer)
    assert state.suspend(["optimizer"]) == Moved(bytes=parts["optimizer"])
    assert state.suspend(["optimizer", "gradients"]) == Moved(bytes=middle)
    assert state.probe() == (
        Residency.SUSPENDED,
        on_device - 3 * middle - steps,
        3 * middle + steps,
        parts | {"optimizer": 0, "gradients": 0},
    )
    with pytest.raises(UsageError, match=r"inside of timeslice.hold\('g'\)"):
        model(torch.arange(3))
    assert state.restore(["gradients"]) == Moved(bytes=middle)
    assert state.probe()[0] is Residency.SUSPENDED
    assert state.suspend() == Moved(bytes=2 * middle + static)
    assert state.restore() == Moved(bytes=on_device)
    assert digest(model, optimizer) == before
    train(model, optimizer, 1)


def test_a_part_that_is_not_there_yet_suspends_all_the_same(model: Any) -> None:
    """Before the first step an optimizer has no state. Its job has had its turn nevertheless, and may not run."""
    state = state_of(model, optimizers=(torch.optim.Adam(model.parameters()),))
    assert state.suspend(["optimizer"]) == Moved()
    assert state.probe()[0] is Residency.SUSPENDED
    with pytest.raises(UsageError, match="another job may have the device"):
        model(torch.arange(3))
    state.restore()
    assert state.probe()[0] is Residency.RESIDENT
    model(torch.arange(3))
