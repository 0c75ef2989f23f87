"""Calls whose output sizes depend on values: which they are, and how large their outputs can be.

PyTorch cannot run such a call on meta. Its inputs, or the values that its tuple describes
(`farm.types.deciding`), bound its outputs. The bound is computed before a worker uses memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from farm.subjects.registry import kind_of
from farm.types.deciding import deciding_input
from farm.types.tuple import OperatorTuple, plain, tensor_references

_INDEX_BYTES = 8  # of one 64-bit index


def is_sized_by_values(spec: OperatorTuple) -> bool:
    """True if another input of the same shapes can give an output of another size."""
    return _rule(spec) is not None or kind_of(spec).largest_outputs(spec) is not None


def largest_outputs(spec: OperatorTuple) -> int | None:
    """The most bytes that the outputs of a call can take; None if its shapes decide that."""
    rule = _rule(spec)
    return kind_of(spec).largest_outputs(spec) if rule is None else rule(spec)


def _rule(spec: OperatorTuple) -> Callable[[OperatorTuple], int] | None:
    name = kind_of(spec).called_name(spec)
    rule = _RULES.get(name)
    if rule is None or not spec.tensors:
        return None
    if name in _INDEXING:
        is_selected = any(tensor.dtype in ("bool", "uint8") for tensor in spec.tensors[1:])
        return rule if is_selected else None
    deciding = deciding_input(spec)
    if name == "where" and len(spec.arguments) > 1:
        return None
    if name == "one_hot" and deciding is None:
        return None
    if name == "repeat_interleave":
        is_open = deciding is not None and deciding.fixed is None
        return rule if is_open else None
    return rule


def _entries(spec: OperatorTuple) -> int:
    """The elements of the shape to which all tensors of a call expand."""
    rank = max(len(tensor.shape) for tensor in spec.tensors)
    shapes = [(1,) * (rank - len(tensor.shape)) + tensor.shape for tensor in spec.tensors]
    return math.prod(map(max, zip(*shapes, strict=True)))


def _places(spec: OperatorTuple) -> int:
    return _INDEX_BYTES * spec.tensors[0].numel * max(1, len(spec.tensors[0].shape))


def _selected(spec: OperatorTuple) -> int:
    return spec.tensors[0].itemsize_bytes * _entries(spec)


def _distinct(spec: OperatorTuple) -> int:
    tensor = spec.tensors[0]
    return (tensor.itemsize_bytes + 2 * _INDEX_BYTES) * tensor.numel


def _repeated(spec: OperatorTuple) -> int:
    """The rows that the counts ask for; one count is that of all rows."""
    deciding = deciding_input(spec)
    assert deciding is not None
    values = spec.tensors[deciding.index].values
    total = deciding.parts if values is None else values.numbers[0]
    first = spec.tensors[next(tensor_references(spec.arguments))]
    if len(spec.tensors) == 1:
        return _INDEX_BYTES * total
    rows = first.numel if _dimension(spec) is None else first.shape[_dimension(spec)]
    each = total * (rows if deciding.parts == 1 else 1)
    return first.itemsize_bytes * each * (first.numel // max(1, rows)) + _INDEX_BYTES * each


def _dimension(spec: OperatorTuple) -> Any:
    more = spec.arguments[2:3]
    return plain(more[0] if more else spec.keywords.get("dim"))


def _encoded(spec: OperatorTuple) -> int:
    values = spec.tensors[0].values
    return _INDEX_BYTES * spec.tensors[0].numel * (values.numbers[0] if values else 128)


def _bins(spec: OperatorTuple) -> int:
    numbers = [*spec.arguments[1:], spec.keywords.get("minlength")]
    least = max((number for number in numbers if type(number) is int), default=0)
    return _INDEX_BYTES * max(least, spec.tensors[0].numel + 1)


def _combinations(spec: OperatorTuple) -> int:
    """PyTorch selects them from all pairs, triples and so on."""
    numbers = [*spec.arguments[1:2], spec.keywords.get("r")]
    size = next((number for number in numbers if type(number) is int), 2)
    return _INDEX_BYTES * max(0, size) * spec.tensors[0].numel ** max(0, min(size, 64))


_INDEXING = ("__getitem__", "index")
_RULES: dict[str, Callable[[OperatorTuple], int]] = {
    **dict.fromkeys(("nonzero", "argwhere", "where"), _places),
    **dict.fromkeys(("masked_select", *_INDEXING), _selected),
    **dict.fromkeys(("unique", "unique_consecutive", "_unique2", "unique_dim"), _distinct),
    "unique_dim_consecutive": _distinct,
    "repeat_interleave": _repeated,
    "one_hot": _encoded,
    "bincount": _bins,
    "combinations": _combinations,
}


def sizes_in_words(specs: Iterable[OperatorTuple], *, with_values: bool) -> str:
    """Say which calls decide by values how large other calls are, or which calls there are; "" if
    none does.

    Args:
        with_values: the pass ran with values, because it reads them on the host."""
    from farm.subjects.allow_list import RETURNS_TO_HOST

    deciding = [
        spec.short_name
        for spec in specs
        if is_sized_by_values(spec) or (with_values and spec.operator in RETURNS_TO_HOST)
    ]
    names = ", ".join(dict.fromkeys(deciding))
    if not names and not with_values:
        return ""
    how = "The pass was captured with values on the CPU: sizes" if with_values else "Sizes"
    calls = f" ({names})" if names else ""
    return (
        f"{how} or branches depend on values{calls}. They are those of the example input; another "
        "input may have others (--compare-inputs)."
    )
