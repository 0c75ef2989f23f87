"""Validates the JSON of an operator tuple from a database, a file or a message, with bounds on
every size. Nothing of it is evaluated or imported."""

from __future__ import annotations

import functools
import math
import re
from typing import Annotated, Any, Literal

from farm.errors import TupleRejected
from farm.subjects.base import NEXT_STEP, Kind, reject
from farm.subjects.registry import KINDS
from farm.types.distribution import MOST_NUMBERS, Distribution
from farm.types.tuple import (
    BITS,
    DTYPES,
    LAYOUTS,
    MEMORY_FORMATS,
    MOST_INTEGERS,
    NAMED_TUPLES,
    ROLES,
    SCHEMA,
    OperatorTuple,
    TensorSpec,
    tensor_references,
)

# The bounds are far above what models need, and far below sizes that harm a worker.
_MAX_TEXT = 200
# an optimizer updates all parameters in one call: five lists of 897 of efficientnet_v2_l
_MAX_TENSORS = 8192
_MAX_DIMENSIONS = 16
_MAX_SIZE = 2**40
_MAX_INTEGER = 2**63 - 1
_MAX_DEPTH = 12
_MAX_NODES = 20_000


def parse(data: Any) -> OperatorTuple:
    """Validate ``data`` (the result of ``json.loads``) and return the tuple that it describes.
    Raises only `TupleRejected`, with the name of the wrong key."""
    try:
        return _parse(data)
    except TupleRejected:
        raise
    except ValueError as error:
        first = error.errors()[0]  # type: ignore[attr-defined]  # Pydantic's ValidationError
        raise reject(
            ".".join(map(str, first["loc"])) or "it", f"is wrong: {first['msg']}"
        ) from error
    except Exception as error:  # an unforeseen error must not end the worker
        raise TupleRejected(f"Not an operator tuple: {type(error).__name__}.", NEXT_STEP) from error


@functools.cache
def _json_type(kinds: tuple[str, ...]) -> Any:
    """Return the Pydantic model of a tuple's JSON with one of these kinds. `_check_tree` checks the
    trees of values.
    """
    from pydantic import ConfigDict, Field, create_model  # late: creating a tuple does not need it

    create: Any = create_model
    strict = ConfigDict(extra="forbid", strict=True)
    name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.]*$", max_length=_MAX_TEXT)]
    size = Annotated[int, Field(ge=0, le=_MAX_SIZE)]
    sizes = Annotated[list[size], Field(max_length=_MAX_DIMENSIONS)]  # type: ignore[valid-type]
    share = Annotated[float, Field(ge=0, le=1)]
    numbers = Annotated[list[size], Field(max_length=MOST_NUMBERS)]  # type: ignore[valid-type]
    values = create("values", __config__=strict, form=(name, ...), numbers=(numbers, ...))
    tensor = create(
        "tensor",
        __config__=strict,
        role=(Literal[ROLES], ...),
        name=(name, ""),
        shape=(sizes, ...),
        dtype=(Literal[tuple(DTYPES)], ...),
        stride=(sizes, None),
        storage=(size, ...),
        offset=(size, 0),
        zeros=(share, 0.0),
        bits=(Annotated[list[Literal[BITS]], Field(max_length=len(BITS))], []),  # type: ignore[valid-type]
        values=(values, None),
    )
    return create(
        "tuple",
        __config__=strict,
        schema_=(int, Field(alias="schema", ge=SCHEMA, le=SCHEMA)),
        operator=(name, ...),
        kind=(Literal[kinds], ...),
        parameters=(dict[name, Any], ...),  # type: ignore[valid-type]
        arguments=(list[Any], ...),
        keywords=(dict[name, Any], ...),  # type: ignore[valid-type]
        tensors=(Annotated[list[tensor], Field(max_length=_MAX_TENSORS)], ...),  # type: ignore[valid-type]
        training=(bool, ...),
        direction=(Literal["forward"], ...),
    )


def _parse(data: Any) -> OperatorTuple:
    call = _json_type(tuple(KINDS)).model_validate(data)
    kind = KINDS[call.kind]
    tensors = _tensors(call, kind)
    budget = [_MAX_NODES]
    for name, tree in call.parameters.items():
        _check_tree(tree, f"parameters.{name}", 0, budget, 0)
    for tree in call.arguments:
        _check_tree(tree, "arguments", len(tensors), budget, 0)
    for name, tree in call.keywords.items():
        _check_tree(tree, name, len(tensors), budget, 0)
    used = set(tensor_references([call.arguments, list(call.keywords.values())]))
    for index, tensor in enumerate(tensors):
        if not tensor.name and index not in used:
            raise reject(f"tensors.{index}", "is used by no argument")
    spec = OperatorTuple(
        operator=call.operator,
        kind=call.kind,
        parameters=call.parameters,
        arguments=tuple(call.arguments),
        keywords=call.keywords,
        tensors=tensors,
        training=call.training,
    )
    kind.check(spec)
    return spec


def _tensors(call: Any, kind: Kind) -> tuple[TensorSpec, ...]:
    tensors: list[TensorSpec] = []
    names: set[str] = set()
    storages = 0
    for index, entry in enumerate(call.tensors):
        where = f"tensors.{index}"
        if entry.name and (not kind.has_state or entry.role == "activation" or entry.name in names):
            raise reject(
                f"{where}.name", "must be unique, and only a module's own tensors have names"
            )
        if entry.stride is not None and len(entry.stride) != len(entry.shape):
            raise reject(f"{where}.stride", "must have as many entries as the shape")
        if entry.storage > storages:
            raise reject(f"{where}.storage", f"is not an integer from 0 to {storages}")
        names.add(entry.name)
        storages = max(storages, entry.storage + 1)
        if "conj" in entry.bits and not entry.dtype.startswith("complex"):
            raise reject(f"{where}.bits", "has a conjugation, but the numbers are real")
        spec = TensorSpec(
            role=entry.role,
            name=entry.name,
            shape=tuple(entry.shape),
            dtype=entry.dtype,
            stride=None if entry.stride is None else tuple(entry.stride),
            storage=entry.storage,
            offset=entry.offset,
            zeros=entry.zeros,
            bits=tuple(entry.bits),
            values=_values(entry.values, f"{where}.values"),
        )
        if spec.numel > _MAX_SIZE or spec.extent + spec.offset > _MAX_SIZE:
            raise reject(where, "is larger than the memory of any card")
        tensors.append(spec)
    return tuple(tensors)


def _values(given: Any, where: str) -> Distribution | None:
    """The values of an input. Whether they fit the operator is checked before it is built."""
    if given is None:
        return None
    values = Distribution(given.form, tuple(given.numbers))
    if problem := values.problem():
        raise reject(where, problem)
    return values


def _check_tree(tree: Any, where: str, tensors: int, budget: list[int], depth: int) -> None:
    budget[0] -= 1
    if depth > _MAX_DEPTH or budget[0] < 0:
        raise reject(where, "is too deep or too large")
    if tree is None or type(tree) is bool:
        return
    if type(tree) is int:
        if abs(tree) > _MAX_INTEGER:
            raise reject(where, f"is not an integer from {-_MAX_INTEGER} to {_MAX_INTEGER}")
    elif type(tree) is float:
        if not math.isfinite(tree):
            raise reject(where, "contains a number that is infinite or NaN")
    elif type(tree) is str:
        if len(tree) > _MAX_TEXT:
            raise reject(where, f"contains a text of more than {_MAX_TEXT} characters")
    elif type(tree) is list:
        for entry in tree:
            _check_tree(entry, where, tensors, budget, depth + 1)
    elif type(tree) is dict and len(tree) == 1:
        _check_tag(*next(iter(tree.items())), where, tensors, budget, depth)
    else:
        raise reject(where, "contains a value that an operator tuple cannot have")


def _check_tag(
    tag: Any, value: Any, where: str, tensors: int, budget: list[int], depth: int
) -> None:
    if tag == "tensor":
        if type(value) is not int or not 0 <= value < tensors:
            raise reject(where, f"refers to none of the {tensors} tensors")
    elif type(value) is list and (tag == "tuple" or (tag == "slice" and len(value) == 3)):
        for entry in value:
            _check_tree(entry, where, tensors, budget, depth + 1)
    elif tag == "dict" and type(value) is list:
        for pair in value:
            if (
                type(pair) is not list
                or len(pair) != 2
                or type(pair[0]) is not str
                or len(pair[0]) > _MAX_TEXT
            ):
                raise reject(where, "contains a dict that is not a list of pairs with text keys")
            _check_tree(pair[1], where, tensors, budget, depth + 1)
    elif (
        tag == "named_tuple"
        and type(value) is list
        and len(value) == 2
        and value[0] in NAMED_TUPLES
    ):
        _check_tree(value[1], where, tensors, budget, depth + 1)
    elif tag == "integers" and type(value) is list and len(value) <= MOST_INTEGERS:
        if any(type(number) is not int or not 0 <= number <= _MAX_SIZE for number in value):
            raise reject(where, "contains a number that is no size")
    elif tag == "complex" and type(value) is list and len(value) == 2:
        if any(type(part) not in (int, float) or not math.isfinite(part) for part in value):
            raise reject(where, "contains a malformed complex number")
    elif tag == "float" and type(value) is str and len(value) <= 32:
        if not re.fullmatch(r"-?(inf|nan|[0-9.]+e[+-]?[0-9]{1,3})", value, re.ASCII):
            raise reject(where, "contains a malformed number")
    elif (
        tag not in _CHOICES
        or type(value) is not type(_CHOICES[tag][0])
        or value not in _CHOICES[tag]
    ):
        raise reject(where, "contains a value of an unknown kind")


#: Tag -> the values that it accepts.
_CHOICES: dict[Any, tuple[Any, ...]] = {
    "ellipsis": (True,),
    "dtype": tuple(DTYPES),
    "device": ("run",),
    "memory_format": MEMORY_FORMATS,
    "layout": LAYOUTS,
}
