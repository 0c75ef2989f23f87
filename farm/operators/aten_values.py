"""What stands in the tensors of an aten operator, by the names that its schema gives its arguments.

Requirements:

- These operators are called below the checks of PyTorch's public functions: an index of a pool's backward that lies outside its
  input ends the process, a row of an embedding's backward beyond the table overwrites memory. So an integer tensor is filled by
  a rule that names its argument, and what no rule names is refused.
- What is a variance, an inverse deviation or a second moment is positive, a log-sum-exp lies above the scores, a count of steps
  is a count: the result is finite, and takes the way that it takes in a training step.
- What is written over and over stays as it is, or goes to where it stays. The one number that a factor other than one leaves
  alone is zero.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from farm.errors import TupleRejected
from farm.operators.aten import given, places, written
from farm.operators.filling import MANTISSA_BITS, Fill, adding_nothing, beyond, settled
from farm.types.tuple import OperatorTuple, TensorSpec, plain, tensor_references


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ANYTHING = Fill("index", bound=100)  # integers that are only computed with
_NOTHING = Fill("index", bound=0)
_STAYS_ZERO = Fill("near", scale=0.0)

#: The arguments that hold integers to compute with, of operators that take no indices: any value will do.
_COMPUTE = _words(
    """
    abs add add_ all amax amin any argmax bitwise_and bitwise_not bitwise_or bitwise_xor cat clamp clamp_ clamp_max
    clamp_max_ clamp_min clamp_min_ clone constant_pad_nd copy copy_ cumsum eq fill fill_ flip full_like ge gt isnan le
    logical_and logical_not logical_or logical_xor lt masked_fill masked_fill_ max maximum mean min minimum mul mul_ ne
    neg neg_ new_empty new_full new_ones new_zeros ones_like pow prod rand_like randn_like repeat roll rsub
    select_backward select_scatter sgn sign slice_backward slice_scatter sort stack sub sub_ sum topk tril triu where
    zero_ zeros_like _local_scalar_dense _to_copy _foreach_add_ _foreach_copy_ _foreach_zero_
    """
)
#: Of operators that take indices: those arguments that are none.
_INDEXED = frozenset({"self", "src", "source", "values", "value"})
_ALONG = _words(
    """
    gather scatter scatter_ scatter_add scatter_add_ scatter_reduce index_select index_add index_add_ index_copy
    index_copy_ index_fill index_fill_
    """
)
_BY_POSITION = frozenset({"index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put", "_index_put_impl_"})
#: The state of random numbers, what a library keeps for itself, and counts.
_STATES = frozenset({"philox_seed", "philox_offset", "reserveSpace", "reserve", "growth_tracker"})

_SPREAD = Fill("positive", scale=0.2, shift=0.9)
_BY_NAME: dict[str, Fill] = {
    **dict.fromkeys(("running_var", "save_var", "save_invstd", "rstd"), _SPREAD),
    **dict.fromkeys(("exp_avg_sqs", "max_exp_avg_sqs", "state_sums", "saved_norms"), _SPREAD),
    "logsumexp": Fill("near", scale=0.1, shift=20.0),
    "state_steps": Fill("near", scale=0.0, shift=10.0),
    "total_weight": Fill("near", scale=0.0, shift=2.0),
    "lr": Fill("near", scale=0.0, shift=1e-12),
    "found_inf": _STAYS_ZERO,
    "inv_scale": Fill("near", scale=0.0, shift=1.0),
    "grad_scale": Fill("near", scale=0.0, shift=1.0),
}
_POSITIVE = Fill("positive", shift=0.5)
_POSITIVE_ARGUMENTS = frozenset(
    [
        (f"{name}{end}", "self")
        for name in ("sqrt", "rsqrt", "log", "log2", "log10", "log1p", "reciprocal", "pow")
        for end in ("", "_")
    ]
    + [(f"div{end}", "other") for end in ("", "_")]
    + [(f"addcdiv{end}", "tensor2") for end in ("", "_")]
)


@functools.lru_cache(maxsize=8192)
def fills_of(spec: OperatorTuple) -> tuple[Fill, ...]:
    """How each tensor of a tuple of kind `aten` is to be filled; equal for those that share a storage.

    Raises:
        TupleRejected: of an integer tensor it is not known which values are valid.
    """
    over = written(spec)
    behind: dict[int, list[int]] = {}
    for index, tensor in enumerate(spec.tensors):
        behind.setdefault(tensor.storage, []).append(index)
    found: dict[int, Fill] = {}
    for storage, indices in behind.items():
        its = [_fill(spec, index, over) for index in indices]
        if any(fill.form == "index" for fill in its):
            if len({spec.tensors[index].dtype for index in indices}) > 1:
                raise _refused(spec, indices[0], "shares its memory with another type of numbers")
            if indices[0] in over and any(fill != _ANYTHING and fill.bound > 0 for fill in its):
                raise _refused(spec, indices[0], "is written while it is looked up")
            found[storage] = min(its, key=lambda fill: fill.shift + fill.bound)
        else:
            found[storage] = next((fill for fill in its if fill != Fill()), its[0])
    return tuple(found[tensor.storage] for tensor in spec.tensors)


def _refused(spec: OperatorTuple, index: int, why: str) -> TupleRejected:
    names = " and ".join(dict.fromkeys(name for name, _ in places(spec)[index])) or f"tensor {index}"
    return TupleRejected(
        f"'{spec.operator}' cannot be run with made-up values: its {names} ({spec.tensors[index].dtype}) {why}.",
        "It stays unmeasured; report it with the model that holds it.",
    )


def _fill(spec: OperatorTuple, index: int, over: frozenset[int]) -> Fill:
    tensor = spec.tensors[index]
    if tensor.dtype == "bool":
        return Fill("boolean")
    if "float" not in tensor.dtype and "complex" not in tensor.dtype:
        return _integers(spec, index)
    name = spec.short_name.removeprefix("_foreach_")
    arguments = [argument for argument, _ in places(spec)[index]]
    if index in over and (kept := _kept(spec, name, arguments, tensor)) is not None:
        return kept
    for argument in arguments:
        if (name, argument) in _POSITIVE_ARGUMENTS:
            return _POSITIVE
        if argument in _BY_NAME:
            return _BY_NAME[argument]
        if index not in over and (other := _beside_written(spec, name, argument, over)) is not None:
            return other
    if name == "_amp_update_scale_":
        return Fill("near", scale=0.0, shift=2.0**127)  # twice as much is no number, and so it stays
    if name == "bernoulli":
        return Fill("near", scale=0.0, shift=0.5)
    if "output" in arguments and "softmax_backward" in name and tensor.shape:
        classes = max(1, tensor.shape[plain(given(spec)["dim"])])
        shift = -math.log(classes) if name.startswith("_log") else 0.0
        return Fill("near", shift=shift) if shift else Fill("positive", scale=1 / classes)
    if tensor.role == "parameter":
        if len(tensor.shape) >= 2:  # as wide as keeps the variance of what passes through
            return Fill(scale=1 / math.sqrt(max(1, math.prod(tensor.shape[1:]))))
        return Fill(scale=0.1, shift=1.0) if "weight" in arguments else Fill(scale=0.02)
    return Fill()


# ------------------------------------------------------------------------------------------------ written over


def _kept(spec: OperatorTuple, name: str, arguments: Sequence[str], target: TensorSpec) -> Fill | None:
    """For what is written; None where any value will do."""
    if "self" not in arguments:
        return None
    numbers = _numbers(spec)
    if name in ("add_", "sub_"):
        if "other" in arguments:  # with itself
            return _STAYS_ZERO
        return beyond(max(map(abs, numbers)), target) if any(numbers) and not _tensors(spec, "other") else None
    if name in ("mul_", "div_"):
        near_one = 2.0 ** -(MANTISSA_BITS.get(target.dtype, 10) + 2)
        moving = any(abs(abs(number) - 1) > near_one for number in numbers)
        if "other" in arguments:
            return Fill("sign")
        return _STAYS_ZERO if moving and not _tensors(spec, "other") else None
    if name in ("addcmul_", "addcdiv_") and {"tensor1", "tensor2"} & set(arguments):
        return _STAYS_ZERO if name == "addcmul_" else _POSITIVE
    return settled("silu" if name == "gelu_" else name)


def _beside_written(spec: OperatorTuple, name: str, argument: str, over: frozenset[int]) -> Fill | None:
    """For what an operator reads that writes another tensor."""
    if not over:
        return None
    target = spec.tensors[min(over)]
    if name in ("add_", "sub_") and argument == "other":
        return adding_nothing(target)
    if name in ("mul_", "div_") and argument == "other":
        return Fill("sign")
    if name == "addcmul_" and argument in ("tensor1", "tensor2"):  # of their product
        return Fill(scale=2.0**-7 if target.dtype == "float16" else 2.0**-20)
    if name == "addcdiv_" and argument == "tensor1":
        return adding_nothing(target)
    if name == "lerp_" and argument in ("weight", "weights"):
        return Fill("near", scale=0.0, shift=0.5)
    accumulates = name in ("index_add_", "scatter_add_") or given(spec).get("accumulate") is True
    if accumulates and argument in ("source", "src", "values"):
        return adding_nothing(target)
    return None


def _numbers(spec: OperatorTuple) -> list[float]:
    """The scalars of a call by which something is added or multiplied."""
    found = []
    for argument in ("other", "scalar", "scalars"):
        tree = plain(given(spec).get(argument))
        for value in tree if isinstance(tree, list) else [tree]:
            if isinstance(value, int | float) and not isinstance(value, bool):
                found.append(float(value))
    return found if not _tensors(spec, "other") else []


def _tensors(spec: OperatorTuple, argument: str) -> list[int]:
    return list(tensor_references(given(spec).get(argument)))


# ------------------------------------------------------------------------------------------------ integers


def _integers(spec: OperatorTuple, index: int) -> Fill:
    """The strictest of the rules for the arguments that a tensor of integers is given as."""
    rules = [_rule(spec, argument, position) for argument, position in places(spec)[index]]
    known = [rule for rule in rules if rule is not None]
    if not spec.tensors[index].numel:
        return _NOTHING
    if not rules or len(known) < len(rules):
        raise _refused(spec, index, "has no rule")
    if spec.tensors[index].dtype in ("uint8", "int8") and any(fill is not _ANYTHING and fill.bound for fill in known):
        raise _refused(spec, index, "may be a mask")
    if any(fill is not _NOTHING and fill.bound < 1 for fill in known):
        raise _refused(spec, index, "has no valid value")
    return min(known, key=lambda fill: fill.shift + fill.bound)


def _rule(spec: OperatorTuple, argument: str, position: int) -> Fill | None:
    name = spec.short_name
    if argument in _STATES:
        return _NOTHING
    if name in _COMPUTE:
        return _ANYTHING
    if name == "div":
        return Fill("index", bound=100, shift=1.0) if argument == "other" else _ANYTHING
    if argument in _INDEXED and name in _ALONG | _BY_POSITION:
        return _ANYTHING
    bound = _bound(spec, argument, position)
    return None if bound is None else Fill("index", bound=bound)


def _bound(spec: OperatorTuple, argument: str, position: int) -> int | None:
    """Indices are valid from 0 to below this number; None where no rule says so."""
    name, call = spec.short_name, given(spec)

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
        before = call["indices"][:position]
        sizes, dimension = shape("self"), sum(map(lambda entry: _dimensions(spec, entry), before))
        return sizes[dimension] if dimension < len(sizes) else None
    return None


def _dimensions(spec: OperatorTuple, entry: Any) -> int:
    """How many dimensions an entry of an index stands for: a mask for as many as it has."""
    mask = next(tensor_references(entry), None)
    masks = mask is not None and spec.tensors[mask].dtype in ("bool", "uint8")
    return len(spec.tensors[mask].shape) if mask is not None and masks else 1
