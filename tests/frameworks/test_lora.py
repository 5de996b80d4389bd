"""Adapters of one base model as slots, with the real PEFT."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.frameworks.test_torch import job
from tests.frameworks.test_torch_less import round_trip, state_of
from timeslice.client.callbacks import Moved
from timeslice.errors import UsageError
from timeslice.integrations.torch import frozen
from timeslice.integrations.torch_find import find
from timeslice.integrations.torch_lora import LoraSlots
from timeslice.models import Residency
from timeslice.up import LocalStack

ADAPTERS = ("math", "code")

# A job that trains its adapters in turn. What is printed has to be the same with and without turns of others.
JOB = """
import sys, timeslice
from tests.frameworks.test_lora import ADAPTERS, adapted, digest, optimizer_of, train
from timeslice.integrations.torch import LoraSlots, frozen

with timeslice.hold("trainers", timeout=60):
    model = adapted()
    optimizers = {name: optimizer_of(model, name) for name in ADAPTERS}
    slots = LoraSlots("trainers", model, optimizers=optimizers.values(), static=frozen)
    slots.register()
for step in range(3):
    for name in ADAPTERS:
        sys.stdin.readline()
        with timeslice.hold("trainers", timeout=60) as lease:
            slots.use(name)
            model.set_adapter(name)
            train(model, optimizers[name])
        print("trained", name, lease.grant.how, flush=True)
sys.stdin.readline()
with timeslice.hold("trainers", timeout=60):
    slots.use(*ADAPTERS)
    print("end", [digest(model, optimizers[name], name) for name in ADAPTERS], flush=True)
"""
RIVAL = """
import sys, timeslice
from torch import nn
from timeslice.integrations.torch import register_module

sys.stdin.readline()
with timeslice.hold("trainers", timeout=60):
    model = nn.Linear(4, 4)
    register_module("trainers", model)
print("was inside", flush=True)
for _ in sys.stdin:
    with timeslice.hold("trainers", timeout=60):
        pass
    print("was inside", flush=True)
"""
# A job that says which part of it may leave.
CHOOSES = """
import sys, timeslice
from tests.frameworks.test_lora import ADAPTERS, adapted, digest, optimizer_of, train
from timeslice.integrations.torch import register_module

sys.stdin.readline()
with timeslice.hold("trainers", timeout=60, tags=("lora",), slot="math"):
    model = adapted()
    optimizers = [optimizer_of(model, name) for name in ADAPTERS]
    register_module("trainers", model, optimizers=optimizers)
    train(model, optimizers[0])
    before = digest(model, optimizers[0], "math")
print("ready", flush=True)
sys.stdin.readline()
out = {name for name, each in model.named_parameters() if not each.untyped_storage().nbytes()}
print(len(out), {name for name in out if ".math" not in name}, flush=True)
sys.stdin.readline()
with timeslice.hold("trainers", timeout=60) as lease:
    print(lease.grant.how, digest(model, optimizers[0], "math") == before, flush=True)
"""


class Base(nn.Module):  # type: ignore[misc]  # untyped
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, 50)

    def forward(self, tokens: Any) -> Any:
        return self.head(torch.relu(self.middle(self.embedding(tokens))))


def adapted() -> Any:
    """Two adapters, of an embedding, a linear layer and a head that is trained as a whole."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["embedding", "middle"], modules_to_save=["head"])
    model = get_peft_model(Base(), config, adapter_name=ADAPTERS[0])
    for name in ADAPTERS[1:]:
        model.add_adapter(name, config)
    return model


def parameters(model: Any, adapter: str) -> list[Any]:
    return [parameter for name, parameter in model.named_parameters() if f".{adapter}" in name]


def optimizer_of(model: Any, adapter: str) -> Any:
    return torch.optim.AdamW(parameters(model, adapter), lr=0.1)


def train(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.arange(20)).logsumexp(-1).mean().backward()
    optimizer.step()


def digest(model: Any, optimizer: Any, adapter: str) -> float:
    """Of the adapter's parameters and its optimizer's moments."""
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return float(sum(tensor.detach().double().abs().sum() for tensor in (*parameters(model, adapter), *moments)))


def size(model: Any, adapter: str) -> int:
    return sum(parameter.nbytes for parameter in parameters(model, adapter))


@pytest.fixture
def model() -> Any:
    return adapted()


def test_only_the_adapter_of_the_slot_moves(model: Any) -> None:
    """Parameters, gradients and optimizer state of one adapter go; those of the other and the base stay in place."""
    optimizers = tuple(optimizer_of(model, name) for name in ADAPTERS)
    for name, optimizer in zip(ADAPTERS, optimizers, strict=True):
        model.set_adapter(name)
        train(model, optimizer)
    state = state_of(model, optimizers=optimizers, static=frozen)
    assert state.slots == ("code", "math")
    assert "lora" in state.tags
    steps = 4 * len(parameters(model, "math"))
    of_one = 4 * size(model, "math") + steps
    assert state.probe()[3]["lora"] == 2 * of_one
    before = digest(model, optimizers[0], "math")
    assert state.suspend(["lora"], "math") == Moved(bytes=of_one)
    assert {piece.slot for piece in find([model], optimizers) if not piece.storage.nbytes()} == {"math"}
    assert state.probe()[0] is Residency.SUSPENDED
    assert state.suspend(["lora"]) == Moved(bytes=of_one)
    assert state.restore(["lora"], "code") == Moved(bytes=of_one)
    assert state.restore() == Moved(bytes=of_one)
    assert digest(model, optimizers[0], "math") == before


def test_the_base_goes_once(model: Any) -> None:
    """All of a job with a frozen base: the base is copied the first time, adapters each time. An adapter that is not
    active takes no gradients either, and is no part of what is static."""
    state = state_of(model, static=frozen)
    whole = round_trip(state).bytes
    adapters = size(model, "math") + size(model, "code")
    assert round_trip(state) == Moved(bytes=adapters, saved=whole - adapters)


def test_merging_an_adapter_changes_the_base(model: Any) -> None:
    """PEFT merges by `.data`, which no version shows: the base is copied again. G21"""
    state = state_of(model, static=frozen)
    nn.init.normal_(model.base_model.model.middle.lora_B["math"].weight)
    round_trip(state)
    weight = model.base_model.model.middle.base_layer.weight
    version, before = weight._version, weight.clone()
    model.merge_adapter()
    merged = weight.clone()
    assert not torch.equal(before, merged)
    if weight._version == version:  # it is up to PEFT
        assert weight.untyped_storage()._cdata
    adapters = size(model, "math") + size(model, "code")
    assert round_trip(state).bytes >= adapters + weight.nbytes
    assert torch.equal(weight, merged)


def test_layers_that_peft_did_not_make() -> None:
    """Whatever says `adapter_layer_names` as PEFT's layers do has slots; what it names and has not is passed over."""
    layer = nn.Module()
    layer.adapter_layer_names = ("lora_A", "lora_magnitude_vector")
    layer.lora_A = nn.ModuleDict({"one": nn.Linear(2, 2, bias=False), "two": nn.Linear(2, 2, bias=False)})
    layer.base_layer = nn.Linear(2, 2)
    state = state_of(nn.Sequential(layer))
    assert state.slots == ("one", "two")
    assert state.suspend(slot="two") == Moved(bytes=16)


def test_adapters_come_and_go_by_themselves(model: Any) -> None:
    """`use` has the adapters on the device that it names: layers refuse to run with, to save and to step another one.
    Adapters end as if all had stayed."""
    other = adapted()
    trained = {id(each): [optimizer_of(each, name) for name in ADAPTERS] for each in (model, other)}
    slots = LoraSlots("g", model, optimizers=trained[id(model)])
    for name, mine, theirs in [*zip(ADAPTERS, trained[id(model)], trained[id(other)], strict=True)] * 2:
        slots.use(name)
        for each, optimizer in ((model, mine), (other, theirs)):
            each.set_adapter(name)
            train(each, optimizer)
    assert slots.use("code") == Moved()
    model.set_adapter("math")
    for use in (lambda: model(torch.arange(3)), trained[id(model)][0].step, model.state_dict):
        with pytest.raises(UsageError, match=r"adapter math is in host memory; call use\('math'\) inside of a hold"):
            use()
    of_one = 4 * size(model, "math") + 4 * len(parameters(model, "math"))
    assert slots.use("math") == Moved(bytes=2 * of_one)
    slots.use(*ADAPTERS)
    for name, mine, theirs in zip(ADAPTERS, trained[id(model)], trained[id(other)], strict=True):
        assert digest(model, mine, name) == digest(other, theirs, name)


def test_an_adapter_that_was_away_stays_away(model: Any) -> None:
    """A suspend and a restore of the job move the base and the adapter that is there; in between none can be used."""
    slots = LoraSlots("g", model, static=frozen)
    whole = slots.probe()[1]
    slots.use("math")
    state, on_device, on_host, parts = slots.probe()
    assert (state, on_device, on_host) == (Residency.RESIDENT, whole - size(model, "code"), size(model, "code"))
    assert parts["lora"] == size(model, "math")
    assert slots.suspend() == Moved(bytes=on_device)
    assert slots.probe()[:2] == (Residency.SUSPENDED, 0)
    with pytest.raises(UsageError, match=r"inside of timeslice.hold\('g'\)"):
        slots.use("code")
    assert slots.restore() == Moved(bytes=on_device)
    assert slots.probe()[:2] == (Residency.RESIDENT, on_device)
    assert slots.suspend(["lora"], "math") == Moved(bytes=size(model, "math"))
    with pytest.raises(UsageError, match=r"inside of timeslice.hold\('g'\)"):
        model(torch.arange(3))
    assert slots.restore() == Moved(bytes=size(model, "math"))
    model(torch.arange(3))


def test_an_adapter_that_was_made_later_leaves_with_the_base(model: Any) -> None:
    """It is no slot that `use` knows, and stays on the device with the base; nothing of it stays behind."""
    slots = LoraSlots("g", model)
    slots.use("math")
    model.add_adapter("later", LoraConfig(r=4, target_modules=["embedding", "middle"]))
    there = size(model, "math") + size(model, "later")
    assert slots.probe()[3]["lora"] == there
    slots.suspend()
    assert slots.probe()[:2] == (Residency.SUSPENDED, 0)
    slots.restore()
    assert slots.suspend(["lora"], "math") == Moved(bytes=size(model, "math"))
    assert slots.suspend(["lora"]) == Moved(bytes=size(model, "later"))
    assert slots.restore() == Moved(bytes=there)


def test_a_failed_suspend_leaves_all_where_it_was(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an adapter can't be copied, the base is there again."""
    slots = LoraSlots("g", model)
    before = slots.probe()[:2]

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(slots._adapters["math"], "suspend", broken)
    with pytest.raises(RuntimeError, match="not enough memory"):
        slots.suspend()
    assert slots.probe()[:2] == before
    model(torch.arange(3))


def test_an_adapter_that_is_not_there(model: Any) -> None:
    """It is refused with the names of those that are; a model without any is refused at once."""
    with pytest.raises(UsageError, match=r"no adapter maths; the model has code, math"):
        LoraSlots("g", model).use("maths")
    with pytest.raises(UsageError, match="the model has no adapters; make them before"):
        LoraSlots("g", Base())


@pytest.fixture
def stack() -> Iterator[LocalStack]:
    local = LocalStack({"trainers": 0})
    try:
        yield local.start()
    finally:
        local.stop()


def test_a_job_with_adapters_takes_turns(stack: LocalStack) -> None:
    """Adapters are used in turn, and another job has the device in between, moved by a real agent; the end is the same
    as for a job that is alone."""
    ends = []
    for alone, name in ((True, "a"), (False, "b")):
        with job(name, JOB, stack.url) as go_on, job("rival", RIVAL, stack.url) as rival:
            for step in range(6):
                said = go_on().split(maxsplit=2)
                assert said[:2] == ["trained", ADAPTERS[step % 2]]
                if step:
                    assert said[2] == ("no-op" if alone else "restored")
                if not alone:
                    assert rival() == "was inside"
            ends.append(go_on())
    assert ends[0].startswith("end [")
    assert ends[0] == ends[1]


def test_a_hold_says_which_adapter_may_leave(stack: LocalStack) -> None:
    """hold(tags=("lora",), slot="math"): when another job gets the group, that adapter leaves and nothing else."""
    with job("a", CHOOSES, stack.url) as go_on, job("rival", RIVAL, stack.url) as rival:
        assert rival() == "was inside"  # a job that loads for the first time gets an empty device
        assert go_on() == "ready"
        assert rival() == "was inside"
        assert go_on() == f"{len(parameters(adapted(), 'math'))} set()"
        assert go_on() == "restored True"
