"""What stands in a rebuilt operator's tensors: values decide power, and wrong ones decide the result.

Requirements:

- Activations are standard normal, weights scaled as trained layers are, variances positive, indices in range:
  no NaN, no infinity, nothing that a model would not meet. A share of zeros is honoured where a sweep asks.
- An operator that writes its input is run millions of times on one buffer. Its data is chosen at a fixed point of
  the operation, with random mantissas, so that the buffer stays what it was: an addend below half a unit in the
  last place of the sum, factors of plus and minus one, the range in which an activation function is the identity.
"""

from __future__ import annotations

import math

from farm.operators import aten_values
from farm.operators.filling import Fill, adding_nothing, beyond, settled
from farm.types.tuple import OperatorTuple, plain, tensor_references

_ADDING = frozenset({"add_", "__iadd__", "sub_", "__isub__", "subtract_"})
_SCALING = frozenset({"mul_", "__imul__", "multiply_", "div_", "__itruediv__", "__idiv__", "divide_", "true_divide_"})
_NEEDS_POSITIVE = frozenset(
    {"sqrt", "rsqrt", "log", "log2", "log10", "log1p", "reciprocal", "pow", "__rpow__", "__rtruediv__", "__pow__"}
)
_DIVIDING = frozenset(
    {"div", "divide", "true_divide", "floor_divide", "remainder", "fmod"}
    | {f"__{name}__" for name in ("truediv", "itruediv", "idiv", "floordiv", "ifloordiv", "mod", "imod")}
)
_INDEXING = frozenset({"__getitem__", "__setitem__"})


def fill_of(spec: OperatorTuple, index: int, written: frozenset[int]) -> Fill:
    """How tensor ``index`` of ``spec`` is to be filled; ``written`` are the tensors that the operator writes."""
    if spec.kind == "aten":
        return aten_values.fills_of(spec)[index]
    tensor = spec.tensors[index]
    if tensor.dtype == "bool":
        return Fill("boolean")
    if "float" not in tensor.dtype and "complex" not in tensor.dtype:
        if spec.operator == "torch._grouped_mm":  # which rows are which expert's
            return Fill("ends", bound=spec.tensors[0].shape[0])
        return Fill("index", bound=0 if tensor.name == "num_batches_tracked" else _index_bound(spec, index))
    if tensor.role != "activation" and index not in written:
        return _weight(spec, index)
    if written and (in_place := _in_place(spec, index, written)) is not None:
        return in_place
    if tensor.role != "activation":
        return _weight(spec, index)
    name = spec.operator.rsplit(".", 1)[-1]
    if name.rstrip("_") in _NEEDS_POSITIVE or name in _NEEDS_POSITIVE or (name == "_scaled_mm" and not tensor.shape):
        return Fill("positive", shift=0.5)
    return Fill()


def may_be_zero(spec: OperatorTuple, index: int, written: frozenset[int]) -> bool:
    """Whether zeros in tensor ``index`` leave the result finite: not where it is divided by or its logarithm taken."""
    if spec.kind == "aten":
        return aten_values.fills_of(spec)[index].form == "normal"
    name = spec.operator.rsplit(".", 1)[-1]
    divisors = spec.arguments[1:2] if name in _DIVIDING or name.rstrip("_") in _DIVIDING else ()
    if any(index in tensor_references(argument) for argument in divisors):
        return False
    return index in written or fill_of(spec, index, written).form != "positive"


def _weight(spec: OperatorTuple, index: int) -> Fill:
    tensor = spec.tensors[index]
    leaf = tensor.name.rsplit(".", 1)[-1]
    name = spec.operator.rsplit(".", 1)[-1]
    if leaf == "running_var" or name in _NEEDS_POSITIVE or _is_running_var(spec, index):
        return Fill("positive", scale=0.2, shift=0.9)
    if len(tensor.shape) >= 2:  # as wide as keeps the variance of what passes through
        return Fill(scale=1 / math.sqrt(max(1, math.prod(tensor.shape[1:]))))
    if leaf == "weight":
        return Fill(scale=0.1, shift=1.0)
    return Fill(scale=0.02)


def _is_running_var(spec: OperatorTuple, index: int) -> bool:
    return spec.operator.endswith("batch_norm") and len(spec.arguments) > 2 and spec.arguments[2] == {"tensor": index}


def _in_place(spec: OperatorTuple, index: int, written: frozenset[int]) -> Fill | None:
    name = spec.operator.rsplit(".", 1)[-1]
    target = spec.tensors[min(written)]
    if name in _ADDING:
        if index not in written:
            return adding_nothing(target)
        scalars = [value for value in spec.arguments if isinstance(value, int | float) and not isinstance(value, bool)]
        if scalars and scalars[0]:
            return beyond(scalars[0], target)
        return None
    if name in _SCALING and index not in written:
        return Fill("sign")
    return settled(name)


def _index_bound(spec: OperatorTuple, index: int) -> int:
    """Indices are valid below this number."""
    name = spec.operator.rsplit(".", 1)[-1]
    if "num_embeddings" in spec.parameters:
        return int(plain(spec.parameters["num_embeddings"]))
    if name in ("embedding", "embedding_bag") and len(spec.arguments) > 1:
        table = next(tensor_references(spec.arguments[1]), None)
        if table is not None and spec.tensors[table].shape:
            return spec.tensors[table].shape[0]
    if name in _INDEXING and len(spec.arguments) > 1:
        return _getitem_bound(spec, index)
    others = [tensor.shape for number, tensor in enumerate(spec.tensors) if number != index and tensor.shape]
    sizes = [size for shape in others for size in shape if size > 0]
    return max(1, min(sizes, default=128))


def _getitem_bound(spec: OperatorTuple, index: int) -> int:
    indexed = next(tensor_references(spec.arguments[0]), None)
    shape = spec.tensors[indexed].shape if indexed is not None else ()
    key = spec.arguments[1]
    entries = key["tuple"] if isinstance(key, dict) and "tuple" in key else [key]
    dimension = 0
    for position, entry in enumerate(entries):
        if entry is None or isinstance(entry, bool):
            continue
        if isinstance(entry, dict) and "ellipsis" in entry:
            rest = sum(1 for later in entries[position + 1 :] if later is not None)
            dimension = max(dimension, len(shape) - rest)
            continue
        if entry == {"tensor": index} and dimension < len(shape):
            return max(1, shape[dimension])
        dimension += 1
    return max(1, min((size for size in shape if size > 0), default=1))
