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
import statistics
from dataclasses import dataclass

import torch

from farm.words.tuple import OperatorTuple, TensorSpec, plain, tensor_references

# Bits behind the point of each format.
_MANTISSA_BITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}

_ADDING = frozenset({"add_", "__iadd__", "sub_", "__isub__", "subtract_"})
_SCALING = frozenset({"mul_", "__imul__", "multiply_", "div_", "__itruediv__", "__idiv__", "divide_", "true_divide_"})
# The identity for large arguments; for positive ones.
_IDENTITY_WHEN_LARGE = frozenset({"silu", "hardswish", "mish"})
_IDENTITY_WHEN_POSITIVE = frozenset({"leakyrelu", "elu", "celu", "rrelu"})
_NEEDS_POSITIVE = frozenset(
    {"sqrt", "rsqrt", "log", "log2", "log10", "log1p", "reciprocal", "pow", "__rpow__", "__rtruediv__", "__pow__"}
)
_DIVIDING = frozenset(
    {"div", "divide", "true_divide", "floor_divide", "remainder", "fmod"}
    | {f"__{name}__" for name in ("truediv", "itruediv", "idiv", "floordiv", "ifloordiv", "mod", "imod")}
)
_INDEXING = frozenset({"__getitem__", "__setitem__"})

_LARGE = 24.0  # exp(-24) is far below half a unit in the last place of 1 in single precision


@dataclass(frozen=True)
class Fill:
    """How one tensor is filled: ``shift + scale * N(0, 1)``, or a variant of it.

    ``form`` is 'normal', 'positive' (the absolute value of the normal one is taken), 'sign' (plus or minus one),
    'index' (integers from 0 to ``bound - 1``), 'ends' (of equal parts of ``bound``, in order) or 'boolean'.
    """

    form: str = "normal"
    scale: float = 1.0
    shift: float = 0.0
    bound: int = 0


def fill_of(spec: OperatorTuple, index: int, written: frozenset[int]) -> Fill:
    """How tensor ``index`` of ``spec`` is to be filled; ``written`` are the tensors that the operator writes."""
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
    bits = _MANTISSA_BITS.get(target.dtype, 10)
    if name in _ADDING:
        if index not in written:
            # So small that hardly any sum moves; float16 has no room for less.
            return Fill(scale=2.0 ** -(bits + 3) if target.dtype == "float16" else 2.0**-40)
        scalars = [value for value in spec.arguments if isinstance(value, int | float) and not isinstance(value, bool)]
        if scalars and scalars[0]:  # begin where the sum no longer moves
            return Fill("positive", shift=min(abs(scalars[0]) * 2.0 ** (bits + 2), 2.0**14))
        return None
    if name in _SCALING and index not in written:
        return Fill("sign")
    function = name.rstrip("_").replace("_", "").lower()
    if function in _IDENTITY_WHEN_LARGE:
        return Fill("positive", shift=_LARGE)
    if function in _IDENTITY_WHEN_POSITIVE:
        return Fill("positive")
    return None


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


def fill(base: torch.Tensor, tensor: TensorSpec, how: Fill, generator: torch.Generator) -> None:
    """Fills ``base``, the memory behind ``tensor``, in place."""
    if base.numel() == 0:
        return
    if how.form == "boolean":
        base.bernoulli_(0.5, generator=generator)
    elif how.form == "ends":
        base.copy_(
            torch.arange(1, base.numel() + 1, device=base.device)
            .mul_(how.bound)
            .div_(base.numel(), rounding_mode="floor")
        )
    elif how.form == "index":
        if how.bound <= 1:
            base.zero_()
        else:
            largest = torch.iinfo(base.dtype).max
            base.copy_(torch.randint(0, min(how.bound, largest), base.shape, device=base.device, generator=generator))
    elif base.dtype.itemsize == 1:  # eight-bit floats: few kernels take them
        wider = torch.empty(base.shape, device=base.device)
        fill(wider, tensor, how, generator)
        base.copy_(wider)
    else:
        _fill_numbers(base, how, generator)
        if tensor.zeros > 0:
            mask = torch.rand(base.shape, device=base.device, generator=generator) < tensor.zeros
            base.masked_fill_(mask, 0)


def impose(
    base: torch.Tensor,
    zeros: float,
    positive: bool,
    channels: float,
    generator: torch.Generator,
) -> None:
    """Give standard normal values a share of the variance between channels, of zeros, and no negative ones.

    Zeros lie where a ReLU leaves them if nothing is negative, else at random places.
    """
    if channels and (dimension := channel_dimension(base)) is not None:
        shape = [1] * base.dim()
        shape[dimension] = base.shape[dimension]
        each = torch.randn(shape, device=base.device, generator=generator).to(base.dtype)
        base.mul_(math.sqrt(1 - channels)).add_(each, alpha=math.sqrt(channels))
    if zeros >= 1:
        base.zero_()
    elif positive and zeros == 0:
        base.abs_()
    elif positive:
        base.sub_(statistics.NormalDist().inv_cdf(zeros)).clamp_(min=0)
    elif zeros > 0:
        base.masked_fill_(torch.rand(base.shape, device=base.device, generator=generator) < zeros, 0)


def channel_dimension(tensor: torch.Tensor) -> int | None:
    """Where the channels of an activation are: second for images and rows, last for tokens; None where nowhere."""
    if tensor.dim() in (2, 4, 5):
        return 1
    return 2 if tensor.dim() == 3 else None


def _fill_numbers(base: torch.Tensor, how: Fill, generator: torch.Generator) -> None:
    base.normal_(generator=generator)
    if how.form == "sign":
        base.sign_()
        base.masked_fill_(base == 0, 1)
        return
    if how.form == "positive":
        base.abs_()
    if how.scale != 1:
        base.mul_(how.scale)
    if how.shift:
        base.add_(how.shift)
