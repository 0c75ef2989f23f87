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
    selecting  a mask whose marks are the output

This module does not import torch: job planning uses it.
"""

from __future__ import annotations

import functools
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
}


@dataclass(frozen=True)
class DecidingInput:
    """An input of a call whose values decide how much work it does.

    ``index`` is the index of its tensor. ``bound`` is the length that segments divide, or the
    number of valid values. ``parts`` is the number of segments, or of values."""

    index: int
    form: str
    bound: int
    parts: int

    @property
    def least_step(self) -> int:
        return TILE_ROWS if self.form == "ends" else 1

    @property
    def is_needed(self) -> bool:
        """True if a call without recorded values may do any amount of work."""
        return self.form in ("ends", "starts")

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
    index = _only_tensor(_argument(spec, position, argument))
    if index is None or (spec.operator == "torch.where" and len(spec.arguments) > 1):
        return None

    tensor = spec.tensors[index]
    if not tensor.numel or (tensor.stride is not None and 0 in tensor.stride):
        return None
    if tensor.dtype == "bool":
        is_mask = form in ("gathered", "selecting")
        return DecidingInput(index, "selecting", 2, tensor.numel) if is_mask else None
    if "int" not in tensor.dtype or form == "selecting":
        return None
    bound = _BOUNDS[form](spec, index)
    if bound <= 0:
        return None
    return DecidingInput(index, form, bound, tensor.numel - _last_is_end(spec))


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


_BOUNDS: dict[str, Callable[[OperatorTuple, int], int]] = {
    "ends": _divided_rows,
    "starts": _bagged_indices,
    "gathered": _gathered_rows,
    "binned": _bins,
}
