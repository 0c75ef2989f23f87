"""Checks of shapes that aten's operators leave to their callers.

The kernel of a backward trusts that its tensors belong together: with a saved mean of too few
elements it reads beyond its memory. So the forward runs on meta with the arguments that the
backward shares with it, and the gradient and all saved outputs must have the shapes that it
returns. PyTorch's `derivatives.yaml` says which argument is which;
`benchmarks/operator_registry.py` makes the table."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from farm.errors import TupleRejected
from farm.subjects.allow_list import arguments_of
from farm.subjects.encoding import decode, dtype_of
from farm.types.tuple import OperatorTuple, table_named

_META = torch.device("meta")
#: Backward operator -> its forward, and the meaning of its arguments there.
_CALLS: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("backward_calls.toml").read_text(encoding="utf-8")
)
#: Values of arguments that only the forward has; they change no shape.
_NEUTRAL: dict[str, Any] = table_named("neutral_arguments")


@functools.lru_cache(maxsize=8192)
def check_shapes(spec: OperatorTuple) -> None:
    """Raises `TupleRejected` if the tensors of a call of kind `aten` do not belong together."""
    call = _CALLS.get(spec.short_name)
    if call is None:
        return
    with _disable_current_modes(), torch.no_grad():
        tensors = [
            torch.empty(tensor.shape, dtype=dtype_of(tensor.dtype), device=_META)
            for tensor in spec.tensors
        ]
        given = {name: decode(tree, tensors, _META) for name, tree in arguments_of(spec).items()}
        try:
            outputs = _outputs(call, given, spec)
        except TupleRejected:
            raise
        except Exception as error:
            first = str(error).partition("\n")[0][:200]
            raise _refused(spec, f"its forward does not accept them: {first}") from error
    for name, meaning in call.items():
        kind, _, number = meaning.partition(" ")
        saved = given.get(name)
        if kind == "output" and isinstance(saved, torch.Tensor):
            made = outputs[int(number)]
            if name == "offset2bag" and not saved.numel():
                continue  # the operator computes it from the offsets
            if isinstance(made, torch.Tensor) and not _fits(saved, made, is_gradient=number == "0"):
                shapes = f"{name} has the shape {tuple(saved.shape)}, not {tuple(made.shape)}"
                raise _refused(spec, shapes)


def _outputs(call: Mapping[str, str], given: Mapping[str, Any], spec: OperatorTuple) -> list[Any]:
    """What the forward returns on meta."""
    packet, _, overload = call["forward"].partition(".")
    forward = getattr(getattr(torch.ops.aten, packet), overload or "default")
    arguments = _shared(call, given)
    gradient = next(given[name] for name, meaning in call.items() if meaning == "output 0")
    for argument in forward._schema.arguments:
        if argument.name in arguments or argument.has_default_value():
            continue
        if argument.name == "output_size":
            arguments["output_size"] = gradient.shape[-_pooled_dimensions(spec) :]
        elif argument.name in ("self", "input"):  # the operator keeps the shape
            arguments[argument.name] = torch.empty_like(gradient)
        elif argument.name == "random_samples":
            sizes = given["self"].shape
            batch = sizes[:1] if len(sizes) > _pooled_dimensions(spec) + 1 else (1,)
            channels = sizes[-_pooled_dimensions(spec) - 1]
            shape = (*batch, channels, _pooled_dimensions(spec))
            arguments["random_samples"] = torch.empty(
                shape, dtype=given["self"].dtype, device=_META
            )
        else:
            arguments[argument.name] = _NEUTRAL.get(argument.name)
    returned = forward(**arguments)
    return list(returned) if isinstance(returned, tuple | list) else [returned]


def _shared(call: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the forward that the backward has."""
    gradient = next(given[name] for name, meaning in call.items() if meaning == "output 0")
    shared: dict[str, Any] = {}
    for name, meaning in call.items():
        kind, _, of = meaning.rpartition(" ")
        value = given.get(name)
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


def _pooled_dimensions(spec: OperatorTuple) -> int:
    return 3 if "3d" in spec.short_name else 2


def _refused(spec: OperatorTuple, why: str) -> TupleRejected:
    return TupleRejected(
        f"The tensors of '{spec.operator}' do not belong together: {why}.",
        "Capture the model again with this version. Do not edit a tuple by hand.",
    )
