"""The values of a rebuilt operator's input tensors: their forms, and the rules for operators of
PyTorch's public API. They affect its power; invalid values make it fail.

- Activations are standard normal, weights are scaled as in trained layers, variances are positive,
  indices are in range. No value is NaN, infinite or unusual for a model. A sweep may set a share of
  zeros.
- An operator that writes its input runs millions of times on one buffer. So the values are chosen
  such that the buffer does not change and keeps random mantissas: addends below half a unit in the
  last place of the sum, factors of plus and minus one, arguments for which an activation function
  is the identity. For other factors the buffer is zero."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

from farm.types.tuple import (
    OperatorTuple,
    TensorSpec,
    names_listed,
    plain,
    tensor_references,
    words,
)

# Mantissa bits of each format.
MANTISSA_BITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}

# Activation functions that are the identity for large arguments, and for positive ones.
_IDENTITY_IF_LARGE = frozenset({"silu", "hardswish", "mish"})
_IDENTITY_IFPOSITIVE = frozenset({"leakyrelu", "elu", "celu", "rrelu"})
_LARGE = 24.0  # exp(-24) is far below half a unit in the last place of 1 in single precision


@dataclass(frozen=True)
class Fill:
    """The values of one tensor: ``shift + scale * N(0, 1)``, or another form.

    ``form`` is one of:

        normal      ``shift + scale * N(0, 1)``
        near        as normal, but value profiles do not replace the values
        positive    ``shift + scale * |N(0, 1)|``
        sign        plus or minus one
        index       integers from ``shift`` to below ``shift + bound``
        starts      ascending integers from 0 to below ``bound``, evenly spaced
        boolean     random, half of them True
        quantized   integers as of a weight that was quantised to int8: ``scale * N(0, 1)``, rounded
        bits        integers of which each bit is random, as of several packed numbers
        boxes       corners of boxes in an image with sides of ``scale``
        regions     a number below ``bound`` and such a box in each row
    """

    form: str = "normal"
    scale: float = 1.0
    shift: float = 0.0
    bound: int = 0


_SPREAD = Fill("positive", scale=0.2, shift=0.9)
POSITIVE = Fill("positive", shift=0.5)
PROBABILITY = Fill("near", scale=0.0, shift=0.5)
NOTHING = Fill("index", bound=0)  # integers that are zero
#: Operands of int8. The largest of a thousand normal weights is 3.5 deviations, and becomes 127.
QUANTIZED = Fill("quantized", scale=36.0)


def settled(activation: str) -> Fill | None:
    """Values that an in-place activation (`silu`) leaves unchanged; None if all become constant
    after some calls.
    """
    function = activation.rstrip("_").replace("_", "").lower()
    if function in _IDENTITY_IF_LARGE:
        return Fill("positive", shift=_LARGE)
    if function in _IDENTITY_IFPOSITIVE:
        return Fill("positive")
    return None


def adding_nothing(target: TensorSpec) -> Fill:
    """Addends so small that they change almost no value of ``target``; float16 cannot represent
    smaller ones.
    """
    bits = MANTISSA_BITS.get(target.dtype, 10)
    return Fill(scale=2.0 ** -(bits + 3) if target.dtype == "float16" else 2.0**-40)


def beyond(addend: float, target: TensorSpec) -> Fill:
    """Values of ``target`` so large that adding ``addend`` does not change them."""
    bits = MANTISSA_BITS.get(target.dtype, 10)
    return Fill("positive", shift=min(abs(addend) * 2.0 ** (bits + 2), 2.0**14))


@functools.lru_cache(maxsize=8192)
def storage_users(spec: OperatorTuple) -> dict[int, list[int]]:
    """Storage number -> indices of its tensors."""
    users: dict[int, list[int]] = {}
    for index, tensor in enumerate(spec.tensors):
        users.setdefault(tensor.storage, []).append(index)
    return users


_ADDING = words("add_ __iadd__ sub_ __isub__ subtract_")
_SCALING = words("mul_ __imul__ multiply_ div_ __itruediv__ __idiv__ divide_ true_divide_")
_NEEDS_POSITIVE = words(
    "sqrt rsqrt log log2 log10 log1p reciprocal pow __rpow__ __rtruediv__ __pow__ multinomial "
    "poisson gaussian_nll_loss GaussianNLLLoss"
)
_NEEDS_PROBABILITY = words("bernoulli binomial binary_cross_entropy BCELoss")
_PROBABILITY = Fill(scale=0.02, shift=0.5)
#: Products of integers.
_INTEGER_PRODUCTS = frozenset({"_int_mm", "_weight_int8pack_mm"})
_DIVIDING = names_listed("dividing")
_PROBABILITIES = names_listed("of_probabilities")
#: Operators whose indices select places of one dimension.
ALONG = names_listed("indexed_along_a_dimension")


def public_values(spec: OperatorTuple, index: int, written: frozenset[int]) -> Fill:
    """The values for tensor ``index``; the operator writes the tensors ``written``."""
    tensor = spec.tensors[index]
    if tensor.dtype == "bool":
        return Fill("boolean")
    if are_integers(tensor):
        if tensor.dtype == "int8" and spec.short_name in _INTEGER_PRODUCTS:
            return QUANTIZED
        counts = tensor.name == "num_batches_tracked"
        first = 1 if _is_divisor(spec, index) else 0
        return NOTHING if counts else Fill("index", shift=first, bound=_index_bound(spec, index))
    if written and (tensor.role == "activation" or index in written):
        in_place = _in_place(spec, index, written)
        if in_place is not None:
            return in_place
    name = spec.operator.rsplit(".", 1)[-1]
    if name in _PROBABILITIES:
        return PROBABILITY
    if tensor.role != "activation":
        leaf = tensor.name.rsplit(".", 1)[-1]
        is_variance = spec.operator.endswith("batch_norm") and spec.arguments[2:3] == (
            {"tensor": index},
        )
        if leaf == "running_var" or name in _NEEDS_POSITIVE or is_variance:
            return _SPREAD
        return trained(tensor, leaf == "weight")
    if {name, name.rstrip("_")} & _NEEDS_POSITIVE or spec.operator == "torch.normal":
        return POSITIVE
    if name in _NEEDS_PROBABILITY:
        return _PROBABILITY
    is_scale = name == "_scaled_mm" and tensor.dtype == "float32"
    return POSITIVE if is_scale else Fill()


def keeps_finite(spec: OperatorTuple, index: int, written: frozenset[int]) -> bool:
    """True if the result is finite if tensor ``index`` has zeros; False for divisors and inputs of
    logarithms.
    """
    if _is_divisor(spec, index):
        return False
    return index in written or public_values(spec, index, written).form != "positive"


def _is_divisor(spec: OperatorTuple, index: int) -> bool:
    name = spec.operator.rsplit(".", 1)[-1]
    is_division = {name, name.rstrip("_")} & _DIVIDING
    return bool(is_division) and index in tensor_references(spec.arguments[1:2])


def are_integers(tensor: TensorSpec) -> bool:
    """True for integers; booleans have values of their own."""
    return "float" not in tensor.dtype and "complex" not in tensor.dtype and tensor.dtype != "bool"


def trained(tensor: TensorSpec, is_weight: bool) -> Fill:
    """Values as those of a trained parameter."""
    if len(tensor.shape) >= 2:  # this scale keeps the variance of the activations
        return Fill(scale=1 / math.sqrt(max(1, math.prod(tensor.shape[1:]))))
    return Fill(scale=0.1, shift=1.0) if is_weight else Fill(scale=0.02)


def _in_place(spec: OperatorTuple, index: int, written: frozenset[int]) -> Fill | None:
    name = spec.operator.rsplit(".", 1)[-1]
    target = spec.tensors[min(written)]
    if name in _ADDING:
        if index not in written:
            return adding_nothing(target)
        scalar = next(filter(is_number, spec.arguments), 0)
        return beyond(scalar, target) if scalar else None
    if name in _SCALING and index not in written:
        return Fill("sign")
    return settled(name)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _index_bound(spec: OperatorTuple, index: int) -> int:
    """Indices from 0 to below this number are valid."""
    name = spec.operator.rsplit(".", 1)[-1]
    if "num_embeddings" in spec.parameters:
        return int(plain(spec.parameters["num_embeddings"]))
    if name in ("embedding", "embedding_bag") and len(spec.arguments) > 1:
        table = next(tensor_references(spec.arguments[1]), None)
        if table is not None and spec.tensors[table].shape:
            return spec.tensors[table].shape[0]
    classes = spec.keywords.get("num_classes", next(iter(spec.arguments[1:2]), None))
    if name == "one_hot" and type(classes) is int and classes > 0:
        return classes
    along = _size_along(spec, name)
    if along is not None:
        return along
    if name not in ("__getitem__", "__setitem__") or len(spec.arguments) < 2:
        others = spec.tensors[:index] + spec.tensors[index + 1 :]
        sizes = itertools.chain.from_iterable(tensor.shape for tensor in others)
        return max(1, min(filter(None, sizes), default=128))
    indexed = next(tensor_references(spec.arguments[0]), None)
    shape = spec.tensors[indexed].shape if indexed is not None else ()
    key = spec.arguments[1]
    entries = key["tuple"] if isinstance(key, dict) and "tuple" in key else [key]
    dimension = 0
    for position, entry in enumerate(entries):
        if isinstance(entry, dict) and "ellipsis" in entry:
            rest = sum(1 for later in entries[position + 1 :] if later is not None)
            dimension = max(dimension, len(shape) - rest)
        elif entry == {"tensor": index} and dimension < len(shape):
            return max(1, shape[dimension])
        elif entry is not None and not isinstance(entry, bool):
            dimension += 1
    return max(1, min(filter(None, shape), default=1))


def _size_along(spec: OperatorTuple, name: str) -> int | None:
    """The size of the dimension that an operator of `ALONG` indexes; None for others."""
    indexed = next(tensor_references(spec.arguments[:1]), None)
    if indexed is None or name not in ALONG | {"take_along_dim"}:
        return None
    shape = spec.tensors[indexed].shape
    dim = spec.keywords.get("dim", next(iter(spec.arguments[1:2]), None))
    if name == "take_along_dim":
        dim = spec.keywords.get("dim", next(iter(spec.arguments[2:3]), None))
    if not is_number(dim) or not -len(shape) <= dim < len(shape):
        return None
    return max(1, shape[int(dim)])
