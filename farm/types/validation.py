"""Whether a piece of JSON is an operator tuple. What comes from a database or a message is checked here, with bounds
on every size, before anything else looks at it. No torch, and one kind of error.
"""

from __future__ import annotations

import math
import re
from typing import Any

from farm.errors import TupleRejected
from farm.types.tuple import (
    DTYPES,
    KINDS,
    LAYOUTS,
    MEMORY_FORMATS,
    ROLES,
    SCHEMA,
    OperatorTuple,
    TensorSpec,
    tensor_references,
)

# Bounds of what is accepted. They are far above what a model needs and far below what hurts a worker.
_MAX_TEXT = 200
_MAX_TENSORS = 8192  # an optimizer updates all parameters in one call: five lists of 897 of efficientnet_v2_l
_MAX_DIMENSIONS = 16
_MAX_SIZE = 2**40
_MAX_INTEGER = 2**63 - 1
_MAX_DEPTH = 12
_MAX_NODES = 20_000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*\Z")
_OVERLOAD = re.compile(r"aten\.[A-Za-z0-9_]+\.[A-Za-z0-9_]+\Z")

_NEXT_STEP = "Capture the model again with this version; a tuple is never edited by hand."
_KEYS = {
    "schema",
    "operator",
    "kind",
    "parameters",
    "arguments",
    "keywords",
    "tensors",
    "training",
    "direction",
}
_TENSOR_KEYS = {"role", "name", "shape", "dtype", "stride", "storage", "offset", "zeros"}


def _reject(where: str, problem: str) -> TupleRejected:
    return TupleRejected(f"Not an operator tuple: {where} {problem}.", _NEXT_STEP)


def parse(data: Any) -> OperatorTuple:
    """The tuple that ``data`` (the result of ``json.loads``) describes.

    Raises:
        TupleRejected: it describes none; the message names the offending key. Nothing else is ever raised.
    """
    try:
        return _parse(data)
    except TupleRejected:
        raise
    except Exception as error:  # a hole in the validation must still be a refusal, not a dead worker
        raise TupleRejected(f"Not an operator tuple: {type(error).__name__}.", _NEXT_STEP) from error


def _parse(data: Any) -> OperatorTuple:
    if not isinstance(data, dict):
        raise _reject("it", f"is a {type(data).__name__}, not an object")
    if set(data) != _KEYS:
        wrong = sorted(str(key)[:40] for key in set(data) ^ _KEYS)
        raise _reject("its keys", f"are not those of schema {SCHEMA} ({', '.join(wrong[:5])})")
    if type(data["schema"]) is not int or data["schema"] != SCHEMA:
        raise _reject("schema", f"is not {SCHEMA}")
    operator = _name(data["operator"], "operator")
    if data["kind"] not in KINDS or not isinstance(data["kind"], str):
        raise _reject("kind", f"is none of {KINDS}")
    if data["kind"] == "aten" and not _OVERLOAD.match(operator):
        raise _reject("operator", "is not the name of an overload of aten")
    if type(data["training"]) is not bool:
        raise _reject("training", "is not a boolean")
    if not isinstance(data["direction"], str) or data["direction"] != "forward":
        raise _reject("direction", "is not 'forward'")
    tensors = _tensors(data["tensors"], data["kind"])
    budget = [_MAX_NODES]
    parameters = _named_trees(data["parameters"], "parameters", 0, budget)
    if data["kind"] != "module" and parameters:
        raise _reject("parameters", "belong to modules, and this is none")
    if not isinstance(data["arguments"], list):
        raise _reject("arguments", "are not a list")
    for tree in data["arguments"]:
        _check_tree(tree, "arguments", len(tensors), budget, 0)
    keywords = _named_trees(data["keywords"], "keywords", len(tensors), budget)
    used = set(tensor_references([data["arguments"], list(keywords.values())]))
    for index, tensor in enumerate(tensors):
        if not tensor.name and index not in used:
            raise _reject(f"tensors[{index}]", "is used by no argument")
    return OperatorTuple(
        operator=operator,
        kind=data["kind"],
        parameters=parameters,
        arguments=tuple(data["arguments"]),
        keywords=keywords,
        tensors=tensors,
        training=data["training"],
    )


def _name(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT or not _NAME.match(value) or not value.isascii():
        raise _reject(where, "is not a name")
    return value


def _integer(value: Any, where: str, upper: int = _MAX_SIZE, lower: int = 0) -> int:
    if type(value) is not int or not lower <= value <= upper:
        raise _reject(where, f"is not an integer from {lower} to {upper}")
    return value


def _sizes(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MAX_DIMENSIONS:
        raise _reject(where, f"is not a list of at most {_MAX_DIMENSIONS} sizes")
    return tuple(_integer(size, where) for size in value)


def _tensors(data: Any, kind: str) -> tuple[TensorSpec, ...]:
    if not isinstance(data, list) or len(data) > _MAX_TENSORS:
        raise _reject("tensors", f"is not a list of at most {_MAX_TENSORS} tensors")
    tensors: list[TensorSpec] = []
    names: set[str] = set()
    storages = 0
    for index, entry in enumerate(data):
        where = f"tensors[{index}]"
        if not isinstance(entry, dict) or not set(entry) <= _TENSOR_KEYS:
            raise _reject(where, "is not an object with the keys of a tensor")
        if not {"role", "shape", "dtype", "storage"} <= set(entry):
            raise _reject(where, "lacks role, shape, dtype or storage")
        if not isinstance(entry["role"], str) or entry["role"] not in ROLES:
            raise _reject(f"{where}.role", f"is none of {ROLES}")
        if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
            raise _reject(f"{where}.dtype", "is no known dtype")
        name = _name(entry["name"], f"{where}.name") if "name" in entry else ""
        if name and (kind != "module" or entry["role"] == "activation" or name in names):
            raise _reject(f"{where}.name", "is not the one name of a module's own tensor")
        names.add(name)
        shape = _sizes(entry["shape"], f"{where}.shape")
        stride = _sizes(entry["stride"], f"{where}.stride") if "stride" in entry else None
        if stride is not None and len(stride) != len(shape):
            raise _reject(f"{where}.stride", "has another length than the shape")
        storage = _integer(entry["storage"], f"{where}.storage", storages)
        storages = max(storages, storage + 1)
        offset = _integer(entry["offset"], f"{where}.offset") if "offset" in entry else 0
        zeros = entry.get("zeros", 0.0)
        if type(zeros) not in (int, float) or not 0 <= zeros <= 1:
            raise _reject(f"{where}.zeros", "is not a share from 0 to 1")
        spec = TensorSpec(entry["role"], name, shape, entry["dtype"], stride, storage, offset, float(zeros))
        if spec.numel > _MAX_SIZE or spec.extent + offset > _MAX_SIZE:
            raise _reject(where, "is larger than any card")
        tensors.append(spec)
    return tuple(tensors)


def _named_trees(data: Any, where: str, tensors: int, budget: list[int]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise _reject(where, "is not an object")
    for name, tree in data.items():
        _name(name, f"a name in {where}")
        _check_tree(tree, f"{where}.{name}", tensors, budget, 0)
    return dict(data)


def _check_tree(tree: Any, where: str, tensors: int, budget: list[int], depth: int) -> None:
    budget[0] -= 1
    if depth > _MAX_DEPTH or budget[0] < 0:
        raise _reject(where, "is too deep or too large")
    if tree is None or type(tree) is bool:
        return
    if type(tree) is int:
        _integer(tree, where, _MAX_INTEGER, -_MAX_INTEGER)
    elif type(tree) is float:
        if not math.isfinite(tree):
            raise _reject(where, "holds a number that JSON does not have")
    elif type(tree) is str:
        if len(tree) > _MAX_TEXT:
            raise _reject(where, "holds too long a text")
    elif type(tree) is list:
        for entry in tree:
            _check_tree(entry, where, tensors, budget, depth + 1)
    elif type(tree) is dict and len(tree) == 1:
        _check_tag(*next(iter(tree.items())), where, tensors, budget, depth)
    else:
        raise _reject(where, "holds what is not a value of an operator tuple")


def _check_tag(tag: Any, value: Any, where: str, tensors: int, budget: list[int], depth: int) -> None:
    if tag == "tensor":
        _integer(value, where, tensors - 1)
    elif type(value) is list and (tag == "tuple" or (tag == "slice" and len(value) == 3)):
        for entry in value:
            _check_tree(entry, where, tensors, budget, depth + 1)
    elif tag == "dict" and type(value) is list:
        for pair in value:
            if type(pair) is not list or len(pair) != 2 or type(pair[0]) is not str or len(pair[0]) > _MAX_TEXT:
                raise _reject(where, "holds a dict that is not a list of pairs with text keys")
            _check_tree(pair[1], where, tensors, budget, depth + 1)
    elif tag == "complex" and type(value) is list and len(value) == 2:
        if any(type(part) not in (int, float) or not math.isfinite(part) for part in value):
            raise _reject(where, "holds a malformed complex number")
    elif tag == "float" and type(value) is str and len(value) <= 32:
        if not re.fullmatch(r"-?(inf|nan|[0-9.]+e[+-]?[0-9]{1,3})", value, re.ASCII):
            raise _reject(where, "holds a malformed number")
    elif not (
        (tag == "ellipsis" and value is True)
        or (tag == "dtype" and isinstance(value, str) and value in DTYPES)
        or (tag == "device" and value == "run")
        or (tag == "memory_format" and isinstance(value, str) and value in MEMORY_FORMATS)
        or (tag == "layout" and isinstance(value, str) and value in LAYOUTS)
    ):
        raise _reject(where, "holds an unknown kind of value")
