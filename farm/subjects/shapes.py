"""Checks of shapes that aten's operators leave to their callers.

The kernel of a backward trusts that its tensors belong together: with a saved mean of too few
elements it reads beyond its memory. So the forward runs on meta with the arguments that the
backward shares with it, and the gradient and all saved outputs must have the shapes that it
returns. PyTorch's `derivatives.yaml` says which argument is which;
`benchmarks/operator_registry.py` makes the table."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from farm.errors import TupleRejected
from farm.subjects.allow_list import (
    arguments_of,
    overload_of,
    registered,
    tensor_arguments,
    written_by_schema,
)
from farm.subjects.encoding import decode, dtype_of
from farm.types.tuple import OperatorTuple, TensorSpec, names_listed, table_named

_META = torch.device("meta")
#: Backward operator -> its forward, and the meaning of its arguments there.
_CALLS: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("backward_calls.toml").read_text(encoding="utf-8")
)
#: Operator -> the public operator that checks its arguments.
_CHECKED_BY: dict[str, str] = table_named("checked_by")
#: Backward operators whose kernels broadcast their tensors.
_BROADCASTING = names_listed("broadcasting_backwards")
#: Values of arguments that only the forward has; they change no shape.
_NEUTRAL: dict[str, Any] = table_named("neutral_arguments")


#: Largest order of a polynomial: a kernel computes one term after the other for each element.
MOST_TERMS = 1000


def check_order(spec: OperatorTuple) -> None:
    """Raises `TupleRejected` if a call computes polynomials of a huge order: its time has no bound
    that follows from its shapes."""
    if "_polynomial_" not in spec.operator:
        return
    order = spec.keywords.get("n", next(iter(spec.arguments[1:2]), None))
    if isinstance(order, int | float) and not abs(order) <= MOST_TERMS:
        raise TupleRejected(
            f"'{spec.operator}' computes polynomials of the order {order}; the limit is "
            f"{MOST_TERMS}.",
            "Choose a smaller order in the model.",
        )


#: Types of arguments that PyTorch also accepts as numbers, without a check of their range.
_ENUMERATED = ("ScalarType", "Layout", "MemoryFormat")


def check_enumerated(spec: OperatorTuple) -> None:
    """Raises `TupleRejected` if a call of kind `aten` passes a number as a dtype, a layout or a
    memory format: a number that PyTorch does not know ends the process."""
    call = arguments_of(spec)
    for argument in overload_of(spec.operator)._schema.arguments:
        is_enumerated = any(name in str(argument.real_type) for name in _ENUMERATED)
        if is_enumerated and isinstance(call.get(argument.name), int | float):
            raise TupleRejected(
                f"The argument {argument.name} of '{spec.operator}' is a number.",
                "Capture the model again with this version. Do not edit a tuple by hand.",
            )


@functools.lru_cache(maxsize=8192)
def check_shapes(spec: OperatorTuple) -> None:
    """Raises `TupleRejected` if the tensors of a call of kind `aten` do not belong together."""
    for index in sorted(_must_not_overlap(spec)):
        if _overlaps(spec.tensors[index]):
            raise _refused(spec, f"the tensor {index} has elements that share memory")
    name = spec.short_name
    if name not in _CALLS and name not in _CHECKED_BY and name not in _RULES:
        return
    with _disable_current_modes(), torch.no_grad():
        tensors = [
            torch.empty(tensor.shape, dtype=dtype_of(tensor.dtype), device=_META)
            for tensor in spec.tensors
        ]
        passed = {name: decode(tree, tensors, _META) for name, tree in arguments_of(spec).items()}
        problem = _RULES[name](passed) if name in _RULES else ""
        if problem:
            raise _refused(spec, problem)
        try:
            _check_as_public(name, passed)
            if name in _CALLS:
                _check_saved(spec, _CALLS[name], passed)
        except TupleRejected:
            raise
        except Exception as error:
            first = str(error).partition("\n")[0][:200]
            raise _refused(spec, f"PyTorch does not accept them: {first}") from error


def _check_as_public(name: str, passed: Mapping[str, Any]) -> None:
    """Run the public operator whose checks an operator leaves out, on meta."""
    if name not in _CHECKED_BY:
        return
    public = registered(_CHECKED_BY[name])
    arguments = {}
    for argument in public._schema.arguments:
        if argument.name in passed:
            arguments[argument.name] = passed[argument.name]
        elif not argument.has_default_value():
            arguments[argument.name] = _NEUTRAL.get(argument.name)
    public(**arguments)


def _check_saved(spec: OperatorTuple, call: Mapping[str, str], passed: Mapping[str, Any]) -> None:
    """Compare the gradient and the saved outputs of a backward with those of its forward."""
    inputs = [passed[name] for name, meaning in call.items() if meaning in ("self", "input")]
    gradient = _gradient(call, passed)
    is_empty = any(isinstance(tensor, torch.Tensor) and not tensor.numel() for tensor in inputs)
    if is_empty and gradient.numel():
        raise _refused(spec, "the input is empty, but its gradient is not")
    outputs = _outputs(call, passed, spec)
    for name, meaning in call.items():
        kind, _, number = meaning.partition(" ")
        saved = passed.get(name)
        if kind != "output" or not isinstance(saved, torch.Tensor):
            continue
        made = outputs[int(number)]
        if name == "offset2bag" and not saved.numel():
            continue  # the operator computes it from the offsets
        if not isinstance(made, torch.Tensor):
            continue
        if spec.short_name in _BROADCASTING and _broadcast(saved.shape, made.shape):
            continue
        if not _fits(saved, made, is_gradient=number == "0"):
            shapes = f"{name} has the shape {tuple(saved.shape)}, not {tuple(made.shape)}"
            raise _refused(spec, shapes)


def _must_not_overlap(spec: OperatorTuple) -> frozenset[int]:
    """The tensors that a kernel may write or read as one piece of memory: what it writes, and what
    a forward saved."""
    if spec.short_name.startswith("_fused_"):
        return frozenset(range(len(spec.tensors)))
    meanings = _CALLS.get(spec.short_name, {})
    saved = {
        name
        for name, meaning in meanings.items()
        if meaning.startswith("output") and not name.startswith("grad")
    }
    return written_by_schema(spec) | {
        index
        for index, arguments in enumerate(tensor_arguments(spec))
        if any(name in saved for name, _ in arguments)
    }


def _overlaps(tensor: TensorSpec) -> bool:
    """True if two elements may have the same address."""
    end = 0
    for step, size in sorted(zip(tensor.strides, tensor.shape, strict=True)):
        if size > 1:
            if step <= end:
                return True
            end += step * (size - 1)
    return False


def _outputs(call: Mapping[str, str], passed: Mapping[str, Any], spec: OperatorTuple) -> list[Any]:
    """What the forward returns on meta."""
    forward = registered(call["forward"])
    arguments = _shared(call, passed)
    gradient = _gradient(call, passed)
    for argument in forward._schema.arguments:
        if argument.name in arguments or argument.has_default_value():
            continue
        if argument.name == "output_size":
            arguments["output_size"] = gradient.shape[-_pooled_dimensions(spec) :]
        elif argument.name in ("self", "input"):  # the operator keeps the shape
            arguments[argument.name] = torch.empty_like(gradient)
        elif argument.name == "random_samples":
            sizes = passed["self"].shape
            batch = sizes[:1] if len(sizes) > _pooled_dimensions(spec) + 1 else (1,)
            channels = sizes[-_pooled_dimensions(spec) - 1]
            shape = (*batch, channels, _pooled_dimensions(spec))
            arguments["random_samples"] = torch.empty(
                shape, dtype=passed["self"].dtype, device=_META
            )
        else:
            arguments[argument.name] = _NEUTRAL.get(argument.name)
    _check_as_public(call["forward"], arguments)
    returned = forward(**arguments)
    return list(returned) if isinstance(returned, tuple | list) else [returned]


def _gradient(call: Mapping[str, str], passed: Mapping[str, Any]) -> torch.Tensor:
    """The gradient of the first output."""
    return next(passed[name] for name, meaning in call.items() if meaning == "output 0")


def _shared(call: Mapping[str, str], passed: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the forward that the backward has."""
    gradient = _gradient(call, passed)
    shared: dict[str, Any] = {}
    for name, meaning in call.items():
        kind, _, of = meaning.rpartition(" ")
        value = passed.get(name)
        if name == "forward" or kind == "output":
            continue
        if kind == "sizes" and value is not None:
            shared[of] = torch.empty(value, dtype=gradient.dtype, device=_META)
        elif kind == "rows":
            shape = (value, *gradient.shape[1:])
            shared[of] = torch.empty(shape, dtype=gradient.dtype, device=_META)
        elif value is not None:
            shared[of] = value
    return shared


def _fits(saved: torch.Tensor, made: torch.Tensor, *, is_gradient: bool) -> bool:
    """A saved output may be larger than in the call on meta: kernels keep statistics of a mode that
    they do not read."""
    return saved.shape == made.shape or (not is_gradient and saved.numel() >= made.numel())


def _broadcast(shape: torch.Size, other: torch.Size) -> bool:
    """True if PyTorch can broadcast two shapes to one."""
    ends = zip(reversed(shape), reversed(other), strict=False)
    return all(size == partner or 1 in (size, partner) for size, partner in ends)


def _pooled_dimensions(spec: OperatorTuple) -> int:
    return 3 if "3d" in spec.short_name else 2


def _sizes_of_attention(passed: Mapping[str, Any]) -> str:
    query, key, value = passed["query"], passed["key"], passed["value"]
    if not query.dim() == key.dim() == value.dim() == 4:
        return "query, key and value must have four dimensions"
    if not query.numel() or not key.numel() or not value.numel():
        return "a tensor is empty"
    batch, heads, rows, features = query.shape
    if key.shape[:3] != value.shape[:3] or key.shape[0] != batch or key.shape[3] != features:
        return "query, key and value have different sizes"
    if heads % max(1, key.shape[1]):
        return "the heads of the queries are no multiple of those of the keys"
    mask = passed.get("attn_mask", passed.get("attn_bias"))
    expected = (batch, heads, rows, key.shape[2])
    if mask is not None and not _expands_to(mask.shape, expected):
        return f"the mask has the shape {tuple(mask.shape)}, which does not expand to {expected}"
    return ""


def _expands_to(shape: torch.Size, expected: tuple[int, ...]) -> bool:
    ends = zip(reversed(shape), reversed(expected), strict=False)
    return len(shape) <= len(expected) and all(size in (1, whole) for size, whole in ends)


def _sizes_of_optimizer(passed: Mapping[str, Any]) -> str:
    """All lists have one tensor per parameter, with its shape; a count of steps has one element."""
    parameters = passed["self"]
    for name, tensors in passed.items():
        if not isinstance(tensors, list) or not tensors:
            continue
        if len(tensors) != len(parameters):
            return f"{name} has {len(tensors)} tensors, not {len(parameters)}"
        for parameter, tensor in zip(parameters, tensors, strict=True):
            expected = torch.Size(()) if name == "state_steps" else parameter.shape
            if tensor.shape != expected and not (name == "state_steps" and tensor.numel() == 1):
                return f"{name} has the shape {tuple(tensor.shape)}, not {tuple(expected)}"
    alone = ("lr", "grad_scale", "found_inf")
    if any(
        isinstance(passed.get(name), torch.Tensor) and passed[name].numel() != 1 for name in alone
    ):
        return "a scale has more than one element"
    return ""


def _sizes_of_weight_norm(passed: Mapping[str, Any]) -> str:
    direction, length, dim = passed["v"], passed["g"], passed.get("dim", 0)
    if not direction.dim() or dim not in (0, direction.dim() - 1):
        return "the dimension must be the first or the last one"
    expected = [1] * direction.dim()
    expected[dim] = direction.shape[dim]
    return "" if list(length.shape) == expected else f"g has the shape {tuple(length.shape)}"


def _sizes_of_inverse_transform(passed: Mapping[str, Any]) -> str:
    """Half of the last dimension of the result is the input."""
    dims, size, shape = passed["dim"], passed["last_dim_size"], passed["self"].shape
    is_valid = dims and all(-len(shape) <= dim < len(shape) for dim in dims)
    if not is_valid or size < 1 or shape[dims[-1]] != size // 2 + 1:
        return f"the result of {size} elements does not belong to the input {tuple(shape)}"
    return ""


#: Mode of a recurrent layer of cuDNN -> the gates of its cells.
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}


def _sizes_of_recurrent_layer(passed: Mapping[str, Any]) -> str:
    """cuDNN trusts that the steps of a packed sequence end with the input, and the weights fit."""
    rows, steps, buffer = passed["input"], passed["batch_sizes"], passed.get("weight_buf")
    gates = _GATES.get(passed["mode"])
    hidden, projected = passed["hidden_size"], passed["proj_size"]
    if gates is None or hidden < 1 or projected < 0 or rows.dim() != (2 if steps else 3):
        return f"the input has {rows.dim()} dimensions, or the layer has no valid mode or size"
    is_descending = steps == sorted(steps, reverse=True)
    if steps and (not is_descending or steps[-1] < 1 or sum(steps) != rows.shape[0]):
        return "the steps of the packed sequence are not those of the input"
    directions, output = 2 if passed["bidirectional"] else 1, projected or hidden
    weights, each = passed["weight"], passed["weight_stride0"]
    if each not in (2, 3, 4, 5) or len(weights) != passed["num_layers"] * directions * each:
        return f"the layer has {len(weights)} weights"
    for number, weight in enumerate(weights):
        layer, place = number // (directions * each), number % each
        before = rows.shape[-1] if layer == 0 else output * directions
        matrices = [(gates * hidden, before), (gates * hidden, output)]
        biases = [(gates * hidden,)] * (2 if each > 3 else 0)
        shapes = [*matrices, *biases, (output, hidden)]
        if tuple(weight.shape) != shapes[place]:
            return f"the weight {number} has the shape {tuple(weight.shape)}, not {shapes[place]}"
    if buffer is not None and buffer.numel() < sum(weight.numel() for weight in weights):
        return "the buffer of the weights is smaller than the weights"
    return ""


def _sizes_of_packed_product(passed: Mapping[str, Any]) -> str:
    """Of a product with packed weights of four bits: its kernel does not compare the number of
    groups with that of the scales."""
    left, packed, scales = passed["self"], passed["mat2"], passed["qScaleAndZeros"]
    group = passed["qGroupSize"]
    if left.dim() != 2 or packed.dim() != 4 or scales.dim() != 3:
        return "the matrix, the packed weights and the scales must have 2, 4 and 3 dimensions"
    if group not in (32, 64, 128, 256):
        return f"the group size is {group}"
    features = packed.shape[1] * packed.shape[3] * 32  # a tile has 16, two tiles share a number
    rows = packed.shape[0] * 8
    if packed.shape[2] != 32 or left.shape[1] != features or features % group:
        return "the packed weights have other sizes than the matrix"
    expected = (features // group, rows, 2)
    if tuple(scales.shape) != expected:
        return f"the scales have the shape {tuple(scales.shape)}, not {expected}"
    return "" if scales.is_contiguous() and packed.is_contiguous() else "a tensor has gaps"


def _sizes_of_integer_weights(passed: Mapping[str, Any]) -> str:
    """Of a product with weights of int8: its kernel reads all tensors as if they had no gaps."""
    left, weights, scales = passed["self"], passed["mat2"], passed["scales"]
    if left.dim() != 2 or weights.dim() != 2 or weights.dtype != torch.int8:
        return "the matrix and the weights of int8 must have 2 dimensions"
    if left.shape[1] != weights.shape[1] or tuple(scales.shape) != (weights.shape[0],):
        return "the weights or the scales have other sizes than the matrix"
    has_gaps = not all(tensor.is_contiguous() for tensor in (left, weights, scales))
    return "a tensor has gaps" if has_gaps else ""


_RULES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "_fft_c2r": _sizes_of_inverse_transform,
    "_weight_norm_interface": _sizes_of_weight_norm,
    "_weight_int4pack_mm": _sizes_of_packed_product,
    "_weight_int8pack_mm": _sizes_of_integer_weights,
    "_cudnn_rnn": _sizes_of_recurrent_layer,
    "_cudnn_rnn_backward": _sizes_of_recurrent_layer,
    **dict.fromkeys(names_listed("attention_operators"), _sizes_of_attention),
    **dict.fromkeys(names_listed("fused_optimizers"), _sizes_of_optimizer),
}


def _refused(spec: OperatorTuple, why: str) -> TupleRejected:
    return TupleRejected(
        f"The tensors of '{spec.operator}' do not belong together: {why}.",
        "Capture the model again with this version. Do not edit a tuple by hand.",
    )
