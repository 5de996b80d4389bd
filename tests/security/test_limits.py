"""Everything that comes over the wire has a bound: a walk through the models, so that no new field is forgotten."""

from __future__ import annotations

import enum
import inspect
import json
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import annotated_types as bounds
import pytest
from pydantic import BaseModel, Field, ValidationError

from timeslice import events, models
from timeslice.models import BODY_MAX, RECORD_MAX, Command, Plan, Target, brief, read_wire

WIRE = [
    found
    for module in (models, events)
    for _, found in inspect.getmembers(module, inspect.isclass)
    if issubclass(found, BaseModel) and found is not BaseModel
]


def unbounded(annotation: Any, metadata: tuple[Any, ...], where: str) -> Iterator[str]:
    """What of a field's type has no bound."""
    kinds = {type(each) for each in metadata if isinstance(each, bounds.BaseMetadata)}
    if hasattr(annotation, "__metadata__"):
        yield from unbounded(annotation.__origin__, metadata + _flat(annotation.__metadata__), where)
    elif annotation is bool or annotation is None or annotation is type(None) or get_origin(annotation) is Literal:
        return
    elif annotation is str:
        if bounds.MaxLen not in kinds:
            yield f"{where}: a text of any length"
    elif annotation in {int, float}:
        if not (kinds & {bounds.Ge, bounds.Gt} and kinds & {bounds.Le, bounds.Lt}):
            yield f"{where}: a number of any size"
    elif get_origin(annotation) in {tuple, dict}:
        if bounds.MaxLen not in kinds:
            yield f"{where}: any number of entries"
        for part in get_args(annotation):
            if part is not ...:
                yield from unbounded(part, (), f"{where}[]")
    elif annotation in WIRE or (inspect.isclass(annotation) and issubclass(annotation, enum.Enum)):
        return  # a model in a model is walked through by itself
    elif get_args(annotation):  # a union
        for part in get_args(annotation):
            yield from unbounded(part, metadata, where)
    else:
        yield f"{where}: {annotation} is not known to this test"


def _flat(metadata: tuple[Any, ...]) -> tuple[Any, ...]:
    """pydantic's own FieldInfo inside of an Annotated carries bounds of its own."""
    return tuple(part for each in metadata for part in (each, *getattr(each, "metadata", ())))


@pytest.mark.parametrize("model", WIRE, ids=lambda model: model.__name__)
def test_every_field_of_every_wire_model_has_a_bound(model: type[BaseModel]) -> None:
    """Each text a length, each number both ends, each list a length, and so on inward."""
    found = [
        problem
        for name, info in model.model_fields.items()
        for problem in unbounded(info.annotation, tuple(info.metadata), name)
    ]
    assert found == []


def test_the_walk_finds_what_has_none() -> None:
    """Each kind of forgotten bound is seen."""

    class Careless(BaseModel):
        text: str
        number: int
        half: float = Field(ge=0)
        many: tuple[models.Word, ...]
        inner: tuple[str, ...] = Field(max_length=3)
        maybe: str | None = None

    found = [
        problem.partition(":")[0]
        for name, info in Careless.model_fields.items()
        for problem in unbounded(info.annotation, tuple(info.metadata), name)
    ]
    assert found == ["text", "number", "half", "many", "inner[]", "maybe"]


def test_the_largest_honest_messages_fit() -> None:
    """The bounds are no trap: a swap of as many jobs and nodes as a plan may name, a record with every tag."""
    names = [f"{'n' * 59}{number:04}" for number in range(1024)]
    order = Command(
        id="x" * 300, group="g", node="n", swap=2**53 - 1, epoch=1, step="prepare", out=tuple(names), into=names[0],
        suspend_timeout_ms=3_600_000, restore_timeout_ms=3_600_000,
    )  # fmt: skip
    assert read_wire(Command, order.model_dump_json()) == order
    plan = Plan(out=tuple(names), into=None, nodes=tuple(names))
    assert read_wire(Plan, plan.model_dump_json()) == plan
    target = Target(
        job="j" * 63, host="h" * 63, pid=2**22, start=2**53 - 1, uid=2**32 - 1, pid_namespace="pid:[4026531836]",
        backend="b" * 63, channel="c" * 200, modes=("offload", "discard"), tags=tuple("t" * 63 for _ in range(64)),
    )  # fmt: skip
    assert read_wire(Target, target.model_dump_json(), limit=RECORD_MAX) == target


def test_what_is_wrong_is_told_without_quoting_it() -> None:
    """An error fits a log: short, and not one character of what was sent."""
    secret = "s3cret\x1b[2J"
    for record in (json.dumps({"job": secret * 1000}), json.dumps({secret: 1}), secret, "[" * 10_000, '"' + secret):
        with pytest.raises(ValueError, match=r".") as refused:
            read_wire(Target, record)
        assert len(str(refused.value)) < 400
        assert str(refused.value).isprintable()
    with pytest.raises(ValueError, match="more than"):
        read_wire(Command, "x" * (BODY_MAX + 1))
    with pytest.raises(ValidationError) as error:
        Target.model_validate({"pid": secret * 1000})
    assert "s3cret" not in brief(error.value)
