"""Rules for the values of aten operators' input tensors.

Aten operators run below the argument checks of PyTorch's public functions: an index out of range
crashes the process in a pool's backward, and overwrites memory in an embedding's backward. So each
integer argument needs a rule for its values; without one the tuple is rejected. Variances, inverse
deviations and second moments are positive, a log-sum-exp is above the scores, a step count is
valid: the result is finite, and kernels take the same branches as in a training step."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from farm.errors import TupleRejected
from farm.subjects.allow_list import (
    arguments_of,
    computes_by_element,
    tensor_arguments,
    written_by_schema,
)
from farm.subjects.values import (
    ALONG,
    MANTISSA_BITS,
    NOTHING,
    POSITIVE,
    PROBABILITY,
    QUANTIZED,
    Fill,
    adding_nothing,
    are_integers,
    beyond,
    is_number,
    settled,
    storage_users,
    trained,
)
from farm.types.deciding import deciding_input
from farm.types.tuple import (
    OperatorTuple,
    TensorSpec,
    names_listed,
    plain,
    table_named,
    tensor_references,
    words,
)

_ANYTHING = Fill("index", bound=100)  # integers that are only operands
_BITS = Fill("bits")
_STAYS_ZERO = Fill("near", scale=0.0)

#: Operators without indices: their integers are only operands, and any value is valid.
_COMPUTE = names_listed("without_indices")
_DIVIDING = names_listed("dividing")
#: Operator -> integer argument -> the rule for its values.
_DECLARED: dict[str, dict[str, str]] = table_named("integer_values")
_PROBABILITIES = names_listed("of_probabilities")
#: Arguments that are not indices, of operators with indices.
_INDEXED = frozenset({"self", "src", "source", "values", "value"})
_BY_POSITION = frozenset(
    {"index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put", "_index_put_impl_"}
)
#: Arguments that are the state of a random generator, reserved memory of a library, or a counter.
_STATES = words("philox_seed philox_offset reserveSpace reserve growth_tracker dropout_state")
#: Argument of an aten operator -> its values.
_BY_NAME = {name: Fill(**how) for name, how in table_named("values_of_arguments").items()}
#: (operator, argument that must be positive); also for operators in place.
_POSITIVE_ARGUMENTS = frozenset(
    {(name, "self") for name in words("sqrt rsqrt log log2 log10 log1p reciprocal pow")}
    | {("div", "other"), ("addcdiv", "tensor2")}
    # with a negative concentration, the draw of a gamma distribution never ends
    | {(name, "self") for name in words("_standard_gamma _standard_gamma_grad _sample_dirichlet")}
    | {("_standard_gamma_grad", "output")}
    | {("_dirichlet_grad", argument) for argument in words("x alpha total")}
)


#: (operator, argument that is a scale of quantised numbers).
_SCALES = frozenset({("_scaled_mm", "scale_a"), ("_scaled_mm", "scale_b")})


@functools.lru_cache(maxsize=8192)
def aten_fills(spec: OperatorTuple) -> tuple[Fill, ...]:
    """The values for each tensor of a tuple of kind `aten`; the same `Fill` for tensors that share
    a storage. Raises `TupleRejected` if no rule says which values of an integer tensor are
    valid."""
    over = written_by_schema(spec)
    fill_of: dict[int, Fill] = {}
    for storage, indices in storage_users(spec).items():
        fills = [_aten_fill(spec, index, over) for index in indices]
        limited = [fill for fill in fills if fill.form in ("index", "starts")]
        if limited:
            if len({spec.tensors[index].dtype for index in indices}) > 1:
                raise _refused(spec, indices[0], "shares its memory with a tensor of another dtype")
            if indices[0] in over and any(fill != _ANYTHING and fill.bound > 0 for fill in limited):
                raise _refused(spec, indices[0], "is an index that the operator also writes")
            fill_of[storage] = min(limited, key=_end)
        else:
            fill_of[storage] = next((fill for fill in fills if fill != Fill()), fills[0])
    return tuple(fill_of[tensor.storage] for tensor in spec.tensors)


def _end(fill: Fill) -> float:
    return fill.shift + fill.bound


def _refused(spec: OperatorTuple, index: int, why: str) -> TupleRejected:
    names = " and ".join(dict.fromkeys(name for name, _ in tensor_arguments(spec)[index]))
    names = names or f"tensor {index}"
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
    if are_integers(tensor):
        fill = _integers(spec, index)
        return QUANTIZED if fill is _ANYTHING and tensor.dtype == "int8" else fill
    name = spec.short_name.removeprefix("_foreach_")
    arguments = [argument for argument, _ in tensor_arguments(spec)[index]]
    if index in over:
        fixed = _fixed_point(spec, name, arguments, tensor)
        if fixed is not None:
            return fixed
    for argument in arguments:
        if (name.removesuffix("_"), argument) in _POSITIVE_ARGUMENTS:
            return POSITIVE
        if argument in _BY_NAME:
            return _BY_NAME[argument]
        if (name, argument) in _SCALES:
            return POSITIVE
        if index not in over:
            beside = _beside_written(spec, name, argument, over)
            if beside is not None:
                return beside
    if name == "_amp_update_scale_":
        return Fill("near", scale=0.0, shift=2.0**127)  # doubling it overflows, so it stays
    if name in _PROBABILITIES:
        return PROBABILITY
    if name == "normal":  # its deviations
        return POSITIVE
    if "output" in arguments and "softmax_backward" in name and tensor.shape:
        classes = max(1, tensor.shape[plain(arguments_of(spec)["dim"])])
        shift = -math.log(classes) if name.startswith("_log") else 0.0
        return Fill("near", shift=shift) if shift else Fill("positive", scale=1 / classes)
    return trained(tensor, "weight" in arguments) if tensor.role == "parameter" else Fill()


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
        if "other" in arguments:
            return Fill("sign")
        moving = any(abs(abs(number) - 1) > near_one for number in numbers)
        return _STAYS_ZERO if moving else None
    if name in ("addcmul_", "addcdiv_") and {"tensor1", "tensor2"} & set(arguments):
        return _STAYS_ZERO if name == "addcmul_" else POSITIVE
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
    if name == "addcmul_" and argument in ("tensor1", "tensor2"):
        # their product is too small to change the target
        return Fill(scale=2.0**-7 if target.dtype == "float16" else 2.0**-20)
    if name == "addcdiv_" and argument == "tensor1":
        return adding_nothing(target)
    if name == "lerp_" and argument in ("weight", "weights"):
        return Fill("near", scale=0.0, shift=0.5)
    if argument not in ("source", "src", "values"):
        return None
    accumulates = arguments_of(spec).get("accumulate") is True
    if accumulates or name in ("index_add_", "scatter_add_"):
        return adding_nothing(target)
    return None


def _numbers(spec: OperatorTuple) -> list[float]:
    """The scalars that a call adds or multiplies by; empty if it adds or multiplies by a tensor."""
    if _tensors(spec, "other"):
        return []
    values: list[Any] = []
    for argument in ("other", "scalar", "scalars"):
        tree = plain(arguments_of(spec).get(argument))
        values += tree if isinstance(tree, list) else [tree]
    return [float(value) for value in values if is_number(value)]


def _tensors(spec: OperatorTuple, argument: str) -> list[int]:
    return list(tensor_references(arguments_of(spec).get(argument)))


def _integers(spec: OperatorTuple, index: int) -> Fill:
    """The values of an integer tensor, by the strictest rule of the arguments that contain it."""
    rules = [
        _rule(spec, argument, position) for argument, position in tensor_arguments(spec)[index]
    ]
    valid = [rule for rule in rules if rule is not None]
    if not spec.tensors[index].numel:
        return NOTHING
    if not rules or len(valid) < len(rules):
        raise _refused(spec, index, "has no rule for its valid values")
    if spec.tensors[index].dtype in ("uint8", "int8") and any(
        fill is not _ANYTHING and fill.bound for fill in valid
    ):
        raise _refused(spec, index, "may be an index or a mask")
    # An equal rule that was computed, such as for a table without rows, is no permission.
    if any(fill.bound < 1 for fill in valid if fill is not NOTHING and fill is not _BITS):
        raise _refused(spec, index, "has no valid value")
    return min(valid, key=_end)


def _rule(spec: OperatorTuple, argument: str, position: int) -> Fill | None:
    name = spec.short_name
    if argument in _STATES:
        return NOTHING
    if name.rstrip("_") in _DIVIDING and argument in ("self", "other"):
        return Fill("index", bound=100, shift=1.0) if argument == "other" else _ANYTHING
    if argument == "out" or computes_by_element(spec.operator) or name in _COMPUTE:
        return _ANYTHING
    if argument in _INDEXED and name in ALONG | _BY_POSITION:
        return _ANYTHING
    declared = _DECLARED.get(name, {}).get(argument)
    if declared is not None:
        return _declared(spec, declared)
    deciding = deciding_input(spec)
    if deciding and deciding.form == "ends" and _tensors(spec, argument) == [deciding.index]:
        return NOTHING  # the ends of the segments are written afterwards
    bound = _bound(spec, argument, position)
    return None if bound is None else Fill("index", bound=bound)


def _declared(spec: OperatorTuple, rule: str) -> Fill:
    """The values of a rule of the table ``integer_values``."""
    form, _, rest = rule.partition(" ")
    argument, _, number = rest.partition(" ")
    if form == "any":
        return _ANYTHING
    if form == "bits":
        return _BITS
    if form == "positive":
        return Fill("index", bound=8, shift=1.0)
    if form == "number":
        tree = plain(arguments_of(spec)[argument])
        return Fill("index", bound=math.prod(tree) if isinstance(tree, list) else int(tree))
    tensor = spec.tensors[_tensors(spec, argument)[0]]
    match form:
        case "size":
            return Fill("index", bound=tensor.shape[int(number)])
        case "cells":
            return Fill("index", bound=math.prod(tensor.shape[-int(number) :]))
        case "elements":
            return Fill("index", bound=tensor.numel)
        case "from_1":
            return Fill("index", bound=tensor.shape[int(number)], shift=1.0)
        case "starts":
            return Fill("starts", bound=tensor.numel)
        case "starts_of_rows":
            return Fill("starts", bound=tensor.shape[0])
    raise ValueError(f"The rule '{rule}' has an unknown form.")


def _bound(spec: OperatorTuple, argument: str, position: int) -> int | None:
    """The exclusive upper bound of valid indices; None if no rule applies."""
    name, call = spec.short_name, arguments_of(spec)
    indexed = _tensors(spec, "self")
    if not indexed:
        return None
    sizes = spec.tensors[indexed[0]].shape
    if argument == "index" and name in ALONG:
        return sizes[int(call["dim"])] if sizes else 1
    if argument == "indices" and name in _BY_POSITION:
        dimension = 0
        for entry in call["indices"][:position]:  # a mask covers as many dimensions as it has
            masks = [spec.tensors[number] for number in tensor_references(entry)]
            is_mask = masks and masks[0].dtype in ("bool", "uint8")
            dimension += len(masks[0].shape) if is_mask else 1
        return sizes[dimension] if dimension < len(sizes) else None
    return None
