"""Inputs whose values decide how much work a call does.

The shapes of a call do not show how many rows each expert of a mixture of experts multiplies. The
integers that say it are data, and the model produces them. So a tuple describes these integers as a
`Distribution`.

``operator_names.toml`` declares the inputs. Each has a form:

    ends       the end of each segment of a dimension, ascending: the rows of each expert
    starts     the start of each segment: the bags of an embedding
    gathered   indices of rows of a large tensor. Their number is a shape; how many differ
               decides the traffic
    binned     integers that are counted: equal neighbours are counted one after the other
    selecting  a mask whose marks are the output, or values whose nonzero ones are
    placing    a mask whose marks get the values of another input, so their number is a shape
    distinct   values of which each different one is in the output once
    runs       values of which each run of equal ones is in the output once
    repeats    how often each row is in the output
    classes    the classes of a one-hot encoding that does not say how many there are

This module does not import torch: job planning uses it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from farm.types.distribution import MOST_SEGMENTS, Distribution
from farm.types.tuple import OperatorTuple, TensorSpec, table_named, tensor_references

#: Operator -> position and name of its declared input, and the form of its values.
_DECLARED: dict[str, tuple[int, str, str]] = table_named("deciding")

#: Smallest step of the segments of a product: no kernel for Hopper or Blackwell has tiles of fewer
#: rows.
TILE_ROWS = 64
#: A smaller output is gathered from a cache, whatever its indices are.
LEAST_GATHERED_BYTES = 2**22
#: Of one row: single elements are gathered in another way.
LEAST_ROW_BYTES = 32

#: Form of an input -> the forms of distributions that describe it.
_DISTRIBUTIONS_OF = {
    "ends": ("lengths", "segments"),
    "starts": ("segments",),
    "gathered": ("places",),
    "binned": ("places",),
    "selecting": ("marks",),
    "placing": (),
    "distinct": ("distinct",),
    "runs": ("distinct",),
    "repeats": ("repeats",),
    "classes": ("below",),
}
#: The description of such values is exact, so the rebuilt call has outputs of the same sizes.
EXACT = ("selecting", "placing", "distinct", "runs", "repeats", "classes")
#: Rows of an output that a call may ask for by its values; a trial also checks their memory.
MOST_ROWS = 2**31
#: Values that the host computes for one exact description.
MOST_VALUES = 2**28


@dataclass(frozen=True)
class DecidingInput:
    """An input of a call whose values decide how much work it does.

    ``index`` is the index of its tensor. ``bound`` is the length that segments divide, the number
    of valid values, or the largest sum of counts. ``parts`` is the number of segments, or of
    values. ``fixed``: what the values must amount to, because another argument says it."""

    index: int
    form: str
    bound: int
    parts: int
    fixed: int | None = None

    @property
    def least_step(self) -> int:
        return TILE_ROWS if self.form == "ends" else 1

    @property
    def is_needed(self) -> bool:
        """True if a call without recorded values may do any amount of work."""
        return self.form in ("ends", "starts")

    @property
    def is_described(self) -> bool:
        """True if a tuple describes the values; False if other arguments determine them."""
        return self.form != "placing"

    def problem(self, values: Distribution) -> str:
        """Say why values do not fit this input; "" if they do."""
        if values.form not in _DISTRIBUTIONS_OF[self.form]:
            return f"cannot have values of the form {values.form}"
        has_segments = self.form in ("ends", "starts")
        if has_segments and self.parts > MOST_SEGMENTS:
            return f"has more than {MOST_SEGMENTS} segments"
        if has_segments and values.segments != self.parts:
            return f"has {self.parts} segments, but its values describe {values.segments}"
        if has_segments and values.shortest > self.bound:
            return f"has the length {self.bound}, but its values need at least {values.shortest}"
        if values.form == "marks" and values.numbers[0] > self.parts:
            return f"has {self.parts} entries, but its values describe {values.numbers[0]} marks"
        if values.form == "distinct" and values.numbers[0] > self.bound:
            return (
                f"has at most {self.bound} different values, but they describe {values.numbers[0]}"
            )
        if values.form in ("repeats", "below") and values.numbers[0] > self.bound:
            return f"asks for {values.numbers[0]} rows; the limit is {self.bound}"
        if values.form == "repeats" and values.numbers[1] > self.parts:
            return f"has {self.parts} counts, but its values describe {values.numbers[1]}"
        return ""


def declared_operators() -> list[str]:
    """Return the operators with a declared input."""
    return list(_DECLARED)


def may_decide(operator: str) -> bool:
    """True if an operator has a declared input."""
    return operator in _DECLARED


@functools.lru_cache(maxsize=8192)
def deciding_input(spec: OperatorTuple) -> DecidingInput | None:
    """Return the input of a call whose values decide its work; None if it has none."""
    if spec.operator not in _DECLARED:
        return None
    position, argument, form = _DECLARED[spec.operator]
    tree = _argument(spec, position, argument)
    if form == "repeats" and len(spec.arguments) == 1 and tree is None:
        tree = spec.arguments[0]  # the counts alone
    index = _only_tensor(tree)
    if index is None or (spec.operator == "torch.where" and len(spec.arguments) > 1):
        return None

    tensor = spec.tensors[index]
    if not tensor.numel or (form in EXACT and tensor.extent > MOST_VALUES):
        return None
    if form == "placing":
        return _placing(spec, index, tree)
    if tensor.stride is not None and 0 in tensor.stride:
        return None
    if form == "gathered" and tensor.dtype == "bool":
        form = "selecting"
    if form in _OF_INTEGERS and "int" not in tensor.dtype:
        return None
    return _INPUT_OF[form](spec, index, form)


def lacks_values(spec: OperatorTuple) -> bool:
    """True if the work of a call is unknown, because nobody has recorded the values that decide
    it.
    """
    deciding = deciding_input(spec)
    if deciding is None or not deciding.is_needed:
        return False
    return spec.tensors[deciding.index].values is None


def _argument(spec: OperatorTuple, position: int, name: str) -> Any:
    return spec.arguments[position] if position < len(spec.arguments) else spec.keywords.get(name)


def _only_tensor(tree: Any) -> int | None:
    """Return the index of the tensor in a JSON tree; None if there is not exactly one."""
    indices = list(tensor_references(tree))
    return indices[0] if len(indices) == 1 else None


def _tensor(spec: OperatorTuple, position: int, name: str) -> TensorSpec | None:
    index = _only_tensor(_argument(spec, position, name))
    return None if index is None else spec.tensors[index]


def _distinct(spec: OperatorTuple, index: int, form: str) -> DecidingInput | None:
    """Values of which each different one is an output; None if rows are compared."""
    tensor = spec.tensors[index]
    position = {"unique": 4, "unique_consecutive": 3, "_unique2": 9}[spec.short_name]
    if _argument(spec, position, "dim") is not None or "complex" in tensor.dtype:
        return None
    most = _MOST_DISTINCT.get(tensor.dtype, 2**31)
    return DecidingInput(index, form, min(tensor.numel, most), tensor.numel)


#: How many integers from 0 a dtype represents exactly, where they are fewer than 2**31.
_MOST_DISTINCT = {
    "bool": 2,
    "uint8": 2**8,
    "int8": 2**7,
    "int16": 2**15,
    "uint16": 2**16,
    "float32": 2**24,
    "float16": 2**11,
    "bfloat16": 2**8,
    "float8_e4m3fn": 2**4,
    "float8_e5m2": 2**3,
}


def _placing(spec: OperatorTuple, index: int, tree: Any) -> DecidingInput | None:
    """A mask with as many marks as there are values to place; None if any number is valid."""
    mask, target = spec.tensors[index], _tensor(spec, 0, "self")
    values = _tensor(spec, 2, "source" if "scatter" in spec.operator else "values")
    if mask.dtype != "bool" or target is None or values is None:
        return None
    stored = math.prod(
        size for size, step in zip(mask.shape, mask.strides, strict=True) if step or size == 1
    )
    if "scatter" in spec.operator:
        marks = min(target.numel, values.numel) * stored // max(1, target.numel)
        return DecidingInput(index, "placing", 2, stored, min(marks, stored))
    entries = tree["tuple"] if isinstance(tree, dict) and "tuple" in tree else tree
    entries = entries if isinstance(entries, list) else [entries]
    place = entries.index({"tensor": index})
    before, after = entries[:place], entries[place + 1 :]
    if {"ellipsis": True} in before:
        rest = len(after)
    else:
        rest = len(target.shape) - sum(entry is not None for entry in before) - len(mask.shape)
    if not 0 <= rest < len(values.shape) or values.shape[-1 - rest] == 1 or stored != mask.numel:
        return None
    return DecidingInput(index, "placing", 2, stored, min(values.shape[-1 - rest], stored))


def _last_is_end(spec: OperatorTuple) -> bool:
    """True if the offsets of an embedding's bags end with the number of indices."""
    return (
        _argument(spec, 9, "include_last_offset") is True
        or spec.parameters.get("include_last_offset") is True
    )


def _divided_rows(spec: OperatorTuple, index: int) -> int:
    """The length of the dimension that a grouped product divides: rows, columns, or what both
    matrices share.
    """
    left, right = _tensor(spec, 0, "self"), _tensor(spec, 1, "mat2")
    if left is None or right is None:
        return 0
    if len(left.shape) == 2:
        return left.shape[0] if len(right.shape) == 3 else left.shape[1]
    return right.shape[-1]


def _bagged_indices(spec: OperatorTuple, index: int) -> int:
    indices = _tensor(spec, 1 if spec.operator == "torch.embedding_bag" else 0, "input")
    return 0 if indices is None else indices.numel


def _gathered_rows(spec: OperatorTuple, index: int) -> int:
    """The number of rows from which a call gathers; 0 if what it gathers is small."""
    table = _tensor(spec, 0, "input")
    key = _argument(spec, 1, "")
    if isinstance(key, dict) and "tuple" in key:
        key = key["tuple"]
    if isinstance(key, list):
        key = key[0]
    # 0: the dimension of index_select
    if table is None or not table.shape or key not in ({"tensor": index}, 0):
        return 0
    rows = max(1, table.shape[0])
    row_bytes = table.numel // rows * table.itemsize_bytes
    if row_bytes < LEAST_ROW_BYTES:
        return 0
    is_large = row_bytes * spec.tensors[index].numel >= LEAST_GATHERED_BYTES
    return table.shape[0] if is_large else 0


def _bins(spec: OperatorTuple, index: int) -> int:
    if "bincount" in spec.operator:
        return spec.tensors[index].numel
    bins = _argument(spec, 1, "bins")
    return bins if type(bins) is int else 0


def _selected(spec: OperatorTuple, index: int, form: str) -> DecidingInput | None:
    """A mask, or values of which those that are not zero select; masked_select accepts only
    masks."""
    tensor = spec.tensors[index]
    if tensor.dtype != "bool" and "masked_select" in spec.operator:
        return None
    return DecidingInput(index, form, bound=2, parts=tensor.numel)


def _repeated(spec: OperatorTuple, index: int, form: str) -> DecidingInput:
    total = spec.keywords.get("output_size")
    fixed = total if type(total) is int else None
    return DecidingInput(index, form, bound=MOST_ROWS, parts=spec.tensors[index].numel, fixed=fixed)


def _classes(spec: OperatorTuple, index: int, form: str) -> DecidingInput | None:
    """None if an argument says how many classes there are."""
    number = _argument(spec, 1, "num_classes")
    if number is not None and number != -1:
        return None
    return DecidingInput(index, form, bound=MOST_ROWS, parts=spec.tensors[index].numel)


def _bounded(spec: OperatorTuple, index: int, form: str) -> DecidingInput | None:
    """None if the bound shows that the values decide nothing."""
    bound = _BOUNDS[form](spec, index)
    if bound <= 0:
        return None
    parts = spec.tensors[index].numel - _last_is_end(spec)
    return DecidingInput(index, form, bound=bound, parts=parts)


_BOUNDS: dict[str, Callable[[OperatorTuple, int], int]] = {
    "ends": _divided_rows,
    "starts": _bagged_indices,
    "gathered": _gathered_rows,
    "binned": _bins,
}

_OF_INTEGERS = (*_BOUNDS, "repeats", "classes")
#: Form -> function of a call, the index of the input and the form. `_placing` needs the argument.
_INPUT_OF: dict[str, Callable[[OperatorTuple, int, str], DecidingInput | None]] = {
    **dict.fromkeys(_BOUNDS, _bounded),
    "distinct": _distinct,
    "runs": _distinct,
    "selecting": _selected,
    "repeats": _repeated,
    "classes": _classes,
}
