"""Chooses the values of a rebuilt operator's input tensors. They affect its power; invalid values
make it fail.

Requirements:

- Activations are standard normal, weights are scaled as in trained layers, variances are positive,
  indices are in range. No value is NaN, infinite or unusual for a model. A sweep may set a share of
  zeros.
- An operator that writes its input runs millions of times on one buffer. So the values are chosen
  such that the buffer does not change and keeps random mantissas: addends below half a unit in the
  last place of the sum, factors of plus and minus one, arguments for which an activation function
  is the identity. For other factors the buffer is zero.
- Aten operators run below the argument checks of PyTorch's public functions: an index out of range
  crashes the process in a pool's backward, and overwrites memory in an embedding's backward. So
  each integer argument needs a rule for its values; without one the tuple is rejected.
- Variances, inverse deviations and second moments of aten operators are positive, a log-sum-exp is
  above the scores, a step count is valid: the result is finite, and kernels take the same branches
  as in a training step.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from farm.errors import TupleRejected
from farm.operators.allow_list import arguments_of, tensor_arguments, written_by_schema
from farm.types.tuple import (
    OperatorTuple,
    TensorSpec,
    names_listed,
    plain,
    table_named,
    tensor_references,
    words,
)

# Mantissa bits of each format.
MANTISSA_BITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}

# Activation functions that are the identity for large arguments, and for positive ones.
_IDENTITY_IF_LARGE = frozenset({"silu", "hardswish", "mish"})
_IDENTITY_IF_POSITIVE = frozenset({"leakyrelu", "elu", "celu", "rrelu"})
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
        boolean     random, half of them True
    """

    form: str = "normal"
    scale: float = 1.0
    shift: float = 0.0
    bound: int = 0


_SPREAD = Fill("positive", scale=0.2, shift=0.9)
_POSITIVE = Fill("positive", shift=0.5)


def settled(activation: str) -> Fill | None:
    """Values that an in-place activation (`silu`) leaves unchanged; None if all become constant
    after some calls.
    """
    function = activation.rstrip("_").replace("_", "").lower()
    if function in _IDENTITY_IF_LARGE:
        return Fill("positive", shift=_LARGE)
    if function in _IDENTITY_IF_POSITIVE:
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
    return Fill(
        "positive",
        shift=min(abs(addend) * 2.0 ** (MANTISSA_BITS.get(target.dtype, 10) + 2), 2.0**14),
    )


def fill(base: torch.Tensor, tensor: TensorSpec, how: Fill, generator: torch.Generator) -> None:
    """Fills ``base``, the storage of ``tensor``, in place."""
    if base.numel() == 0:
        return
    if how.form == "boolean":
        base.bernoulli_(0.5, generator=generator)
    elif how.form == "index":
        first, last = int(how.shift), min(int(how.shift) + how.bound, torch.iinfo(base.dtype).max)
        if how.bound <= 1:
            base.zero_()
        else:
            base.copy_(
                torch.randint(first, last, base.shape, device=base.device, generator=generator)
            )
    elif base.dtype.itemsize == 1:  # eight-bit floats: few kernels support them
        wider = torch.empty(base.shape, device=base.device)
        fill(wider, tensor, how, generator)
        base.copy_(wider)
    else:
        base.normal_(generator=generator)
        if how.form == "sign":
            base.sign_()
            base.masked_fill_(base == 0, 1)
        else:
            if how.form == "positive":
                base.abs_()
            if how.scale != 1:
                base.mul_(how.scale)
            if how.shift:
                base.add_(how.shift)
        if tensor.zeros > 0:
            base.masked_fill_(
                torch.rand(base.shape, device=base.device, generator=generator) < tensor.zeros, 0
            )


def impose(
    base: torch.Tensor, zeros: float, positive: bool, channels: float, generator: torch.Generator
) -> None:
    """Changes standard normal values in place.

    Args:
        zeros: the share of zeros: the smallest values if ``positive``, as after a ReLU; otherwise
            random ones.
        positive: no value is negative.
        channels: the variance of the channels' means, as a share of the total variance.
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
        base.masked_fill_(
            torch.rand(base.shape, device=base.device, generator=generator) < zeros, 0
        )


def channel_dimension(tensor: torch.Tensor) -> int | None:
    """The channel dimension of an activation: 1 for (batch, channels, ...), 2 for (batch, tokens,
    features); otherwise None."""
    return {2: 1, 3: 2, 4: 1, 5: 1}.get(tensor.dim())


_ADDING = words("add_ __iadd__ sub_ __isub__ subtract_")
_SCALING = words("mul_ __imul__ multiply_ div_ __itruediv__ __idiv__ divide_ true_divide_")
_NEEDS_POSITIVE = words(
    "sqrt rsqrt log log2 log10 log1p reciprocal pow __rpow__ __rtruediv__ __pow__"
)
_DIVIDING = names_listed("dividing")


def values_for(spec: OperatorTuple, index: int, written: frozenset[int]) -> Fill:
    """The values for tensor ``index``; the operator writes the tensors ``written``. Raises as
    `aten_fills`.
    """
    if spec.kind == "aten":
        return aten_fills(spec)[index]
    tensor = spec.tensors[index]
    if tensor.dtype == "bool":
        return Fill("boolean")
    if "float" not in tensor.dtype and "complex" not in tensor.dtype:
        if (
            spec.kind == "kernel"
        ):  # 0 is a valid index; a measurement uses the values of the running model
            return _NOTHING
        return Fill(
            "index", bound=0 if tensor.name == "num_batches_tracked" else _index_bound(spec, index)
        )
    concerned = written and (tensor.role == "activation" or index in written)
    if concerned and (in_place := _in_place(spec, index, written)) is not None:
        return in_place
    name = spec.operator.rsplit(".", 1)[-1]
    if tensor.role != "activation":
        leaf = tensor.name.rsplit(".", 1)[-1]
        is_variance = spec.operator.endswith("batch_norm") and spec.arguments[2:3] == (
            {"tensor": index},
        )
        if leaf == "running_var" or name in _NEEDS_POSITIVE or is_variance:
            return _SPREAD
        return _trained(tensor, leaf == "weight")
    positive = {name, name.rstrip("_")} & _NEEDS_POSITIVE or (
        name == "_scaled_mm" and not tensor.shape
    )
    return _POSITIVE if positive else Fill()


def may_be_zero(spec: OperatorTuple, index: int, written: frozenset[int]) -> bool:
    """True if the result is finite if tensor ``index`` has zeros; False for divisors and inputs of
    logarithms.
    """
    if spec.kind == "aten":
        return aten_fills(spec)[index].form == "normal"
    name = spec.operator.rsplit(".", 1)[-1]
    divisors = spec.arguments[1:2] if name in _DIVIDING or name.rstrip("_") in _DIVIDING else ()
    if any(index in tensor_references(argument) for argument in divisors):
        return False
    return index in written or values_for(spec, index, written).form != "positive"


def _trained(tensor: TensorSpec, is_weight: bool) -> Fill:
    if len(tensor.shape) >= 2:  # this scale keeps the variance of the activations
        return Fill(scale=1 / math.sqrt(max(1, math.prod(tensor.shape[1:]))))
    return Fill(scale=0.1, shift=1.0) if is_weight else Fill(scale=0.02)


def _in_place(spec: OperatorTuple, index: int, written: frozenset[int]) -> Fill | None:
    name = spec.operator.rsplit(".", 1)[-1]
    target = spec.tensors[min(written)]
    if name in _ADDING:
        if index not in written:
            return adding_nothing(target)
        scalars = [
            value
            for value in spec.arguments
            if isinstance(value, int | float) and not isinstance(value, bool)
        ]
        return beyond(scalars[0], target) if scalars and scalars[0] else None
    if name in _SCALING and index not in written:
        return Fill("sign")
    return settled(name)


def _index_bound(spec: OperatorTuple, index: int) -> int:
    """Indices from 0 to below this number are valid."""
    name = spec.operator.rsplit(".", 1)[-1]
    if "num_embeddings" in spec.parameters:
        return int(plain(spec.parameters["num_embeddings"]))
    if name in ("embedding", "embedding_bag") and len(spec.arguments) > 1:
        table = next(tensor_references(spec.arguments[1]), None)
        if table is not None and spec.tensors[table].shape:
            return spec.tensors[table].shape[0]
    if name not in ("__getitem__", "__setitem__") or len(spec.arguments) < 2:
        sizes = [
            size
            for number, one in enumerate(spec.tensors)
            if number != index
            for size in one.shape
            if size > 0
        ]
        return max(1, min(sizes, default=128))
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
    return max(1, min((size for size in shape if size > 0), default=1))


_ANYTHING = Fill("index", bound=100)  # integers that are only operands
_NOTHING = Fill("index", bound=0)
_STAYS_ZERO = Fill("near", scale=0.0)

#: Operators without indices: their integers are only operands, and any value is valid.
_COMPUTE = names_listed("without_indices")
#: Arguments that are not indices, of operators with indices.
_INDEXED = frozenset({"self", "src", "source", "values", "value"})
_ALONG = names_listed("indexed_along_a_dimension")
_BY_POSITION = frozenset(
    {"index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put", "_index_put_impl_"}
)
#: Arguments that are the state of a random generator, reserved memory of a library, or a counter.
_STATES = frozenset({"philox_seed", "philox_offset", "reserveSpace", "reserve", "growth_tracker"})
#: Argument of an aten operator -> its values.
_BY_NAME = {name: Fill(**how) for name, how in table_named("values_of_arguments").items()}
#: (operator, argument that must be positive); also for operators in place.
_POSITIVE_ARGUMENTS = frozenset(
    {(name, "self") for name in words("sqrt rsqrt log log2 log10 log1p reciprocal pow")}
    | {("div", "other"), ("addcdiv", "tensor2")}
)


@functools.lru_cache(maxsize=8192)
def storage_users(spec: OperatorTuple) -> dict[int, list[int]]:
    """Storage number -> indices of its tensors."""
    found: dict[int, list[int]] = {}
    for index, tensor in enumerate(spec.tensors):
        found.setdefault(tensor.storage, []).append(index)
    return found


@functools.lru_cache(maxsize=8192)
def aten_fills(spec: OperatorTuple) -> tuple[Fill, ...]:
    """The values for each tensor of a tuple of kind `aten`; the same `Fill` for tensors that share
    a storage. Raises `TupleRejected` if no rule says which values of an integer tensor are
    valid."""
    over = written_by_schema(spec)
    found: dict[int, Fill] = {}
    for storage, indices in storage_users(spec).items():
        its = [_aten_fill(spec, index, over) for index in indices]
        if any(fill.form == "index" for fill in its):
            if len({spec.tensors[index].dtype for index in indices}) > 1:
                raise _refused(spec, indices[0], "shares its memory with a tensor of another dtype")
            if indices[0] in over and any(fill != _ANYTHING and fill.bound > 0 for fill in its):
                raise _refused(spec, indices[0], "is an index that the operator also writes")
            found[storage] = min(its, key=lambda fill: fill.shift + fill.bound)
        else:
            found[storage] = next((fill for fill in its if fill != Fill()), its[0])
    return tuple(found[tensor.storage] for tensor in spec.tensors)


def _refused(spec: OperatorTuple, index: int, why: str) -> TupleRejected:
    names = (
        " and ".join(dict.fromkeys(name for name, _ in tensor_arguments(spec)[index]))
        or f"tensor {index}"
    )
    return TupleRejected(
        f"'{spec.operator}' cannot be run with random values: the tensor {names} "
        f"({spec.tensors[index].dtype}) {why}.",
        "The operator stays without a reading. Report the operator and its model to the "
        "developers of the farm.",
    )


def _aten_fill(spec: OperatorTuple, index: int, over: frozenset[int]) -> Fill:
    tensor = spec.tensors[index]
    if tensor.dtype == "bool":
        return Fill("boolean")
    if "float" not in tensor.dtype and "complex" not in tensor.dtype:
        return _integers(spec, index)
    name = spec.short_name.removeprefix("_foreach_")
    arguments = [argument for argument, _ in tensor_arguments(spec)[index]]
    if index in over and (fixed := _fixed_point(spec, name, arguments, tensor)) is not None:
        return fixed
    for argument in arguments:
        if (name.removesuffix("_"), argument) in _POSITIVE_ARGUMENTS:
            return _POSITIVE
        if argument in _BY_NAME:
            return _BY_NAME[argument]
        if index not in over and (other := _beside_written(spec, name, argument, over)) is not None:
            return other
    if name == "_amp_update_scale_":
        return Fill("near", scale=0.0, shift=2.0**127)  # doubling it overflows, so it stays
    if name == "bernoulli":
        return Fill("near", scale=0.0, shift=0.5)
    if "output" in arguments and "softmax_backward" in name and tensor.shape:
        classes = max(1, tensor.shape[plain(arguments_of(spec)["dim"])])
        shift = -math.log(classes) if name.startswith("_log") else 0.0
        return Fill("near", shift=shift) if shift else Fill("positive", scale=1 / classes)
    return _trained(tensor, "weight" in arguments) if tensor.role == "parameter" else Fill()


def _fixed_point(
    spec: OperatorTuple, name: str, arguments: Sequence[str], target: TensorSpec
) -> Fill | None:
    """Values of a written tensor that the operator does not change; None if any values are
    valid.
    """
    if "self" not in arguments:
        return None
    numbers = _numbers(spec)
    if name in ("add_", "sub_"):
        if "other" in arguments:  # the call adds the tensor to itself
            return _STAYS_ZERO
        return beyond(max(map(abs, numbers)), target) if any(numbers) else None
    if name in ("mul_", "div_"):
        near_one = 2.0 ** -(MANTISSA_BITS.get(target.dtype, 10) + 2)
        moving = any(abs(abs(number) - 1) > near_one for number in numbers)
        return Fill("sign") if "other" in arguments else _STAYS_ZERO if moving else None
    if name in ("addcmul_", "addcdiv_") and {"tensor1", "tensor2"} & set(arguments):
        return _STAYS_ZERO if name == "addcmul_" else _POSITIVE
    return settled("silu" if name == "gelu_" else name)


def _beside_written(
    spec: OperatorTuple, name: str, argument: str, over: frozenset[int]
) -> Fill | None:
    """Values of a tensor that is read, if the operator writes another tensor; None if any values
    are valid.
    """
    if not over:
        return None
    target = spec.tensors[min(over)]
    if name in ("add_", "sub_") and argument == "other":
        return adding_nothing(target)
    if name in ("mul_", "div_") and argument == "other":
        return Fill("sign")
    if name == "addcmul_" and argument in (
        "tensor1",
        "tensor2",
    ):  # their product is too small to change the target
        return Fill(scale=2.0**-7 if target.dtype == "float16" else 2.0**-20)
    if name == "addcdiv_" and argument == "tensor1":
        return adding_nothing(target)
    if name == "lerp_" and argument in ("weight", "weights"):
        return Fill("near", scale=0.0, shift=0.5)
    accumulates = (
        name in ("index_add_", "scatter_add_") or arguments_of(spec).get("accumulate") is True
    )
    return (
        adding_nothing(target) if accumulates and argument in ("source", "src", "values") else None
    )


def _numbers(spec: OperatorTuple) -> list[float]:
    """The scalars that a call adds or multiplies by; empty if it adds or multiplies by a tensor."""
    if _tensors(spec, "other"):
        return []
    found: list[Any] = []
    for argument in ("other", "scalar", "scalars"):
        tree = plain(arguments_of(spec).get(argument))
        found += tree if isinstance(tree, list) else [tree]
    return [
        float(value)
        for value in found
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]


def _tensors(spec: OperatorTuple, argument: str) -> list[int]:
    return list(tensor_references(arguments_of(spec).get(argument)))


def _integers(spec: OperatorTuple, index: int) -> Fill:
    """The values of an integer tensor, by the strictest rule of the arguments that contain it."""
    rules = [
        _rule(spec, argument, position) for argument, position in tensor_arguments(spec)[index]
    ]
    valid = [rule for rule in rules if rule is not None]
    if not spec.tensors[index].numel:
        return _NOTHING
    if not rules or len(valid) < len(rules):
        raise _refused(spec, index, "has no rule for its valid values")
    if spec.tensors[index].dtype in ("uint8", "int8") and any(
        fill is not _ANYTHING and fill.bound for fill in valid
    ):
        raise _refused(spec, index, "may be an index or a mask")
    if any(fill is not _NOTHING and fill.bound < 1 for fill in valid):
        raise _refused(spec, index, "has no valid value")
    return min(valid, key=lambda fill: fill.shift + fill.bound)


def _rule(spec: OperatorTuple, argument: str, position: int) -> Fill | None:
    name = spec.short_name
    if argument in _STATES:
        return _NOTHING
    if argument == "out" or name in _COMPUTE:
        return _ANYTHING
    if name == "div":
        return Fill("index", bound=100, shift=1.0) if argument == "other" else _ANYTHING
    if argument in _INDEXED and name in _ALONG | _BY_POSITION:
        return _ANYTHING
    bound = _bound(spec, argument, position)
    return None if bound is None else Fill("index", bound=bound)


def _bound(spec: OperatorTuple, argument: str, position: int) -> int | None:
    """The exclusive upper bound of valid indices; None if no rule applies."""
    name, call = spec.short_name, arguments_of(spec)

    def shape(of: str) -> tuple[int, ...]:
        return spec.tensors[_tensors(spec, of)[0]].shape

    if argument == "indices" and name == "embedding":
        return shape("weight")[0]
    if argument == "indices" and name == "embedding_dense_backward":
        return int(call["num_weights"])
    if argument == "target" and name.startswith("nll_loss"):
        return shape("self")[1 if len(shape("self")) > 1 else 0]
    if argument == "indices" and "max_pool" in name and name.endswith("_backward"):
        return math.prod(shape("self")[-3 if "3d" in name else -2 :])
    if argument == "index" and name in _ALONG:
        sizes = shape("self")
        return sizes[int(call["dim"])] if sizes else 1
    if argument == "indices" and name in _BY_POSITION:
        sizes, dimension = shape("self"), 0
        for entry in call["indices"][:position]:  # a mask covers as many dimensions as it has
            masks = [spec.tensors[one] for one in tensor_references(entry)]
            dimension += len(masks[0].shape) if masks and masks[0].dtype in ("bool", "uint8") else 1
        return sizes[dimension] if dimension < len(sizes) else None
    return None
