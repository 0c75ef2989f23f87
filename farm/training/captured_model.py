"""Capture a `torch.nn.Module` of the caller without registering it. A hash of its calls is part of
its name.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from farm.errors import CaptureError, UnseenOperators, UnsupportedTensor, UsageError, refused, told
from farm.models.resolved import shape_of, titled_by
from farm.models.user_code import captured_code
from farm.subjects.label import label_of
from farm.types.deciding import lacks_values
from farm.types.fields import content_id
from farm.types.format import count_of
from farm.types.notebook import table
from farm.types.tuple import OperatorTuple
from farm.types.variant import Variant

if TYPE_CHECKING:
    from torch import nn

    from farm.operators.captured import CapturedPass
    from farm.training.extract import Extraction

_log = logging.getLogger(__name__)

_DTYPES = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True, eq=False)
class CapturedModel:
    """A model with its example inputs and the operator tuples of one pass. A notebook shows a table
    of the tuples.

    `variant` identifies the model by its calls, their order and their modules. Weights do not
    change the variant."""

    variant: Variant
    extraction: Extraction = field(repr=False)
    model: nn.Module = field(repr=False)
    args: tuple[Any, ...] = field(repr=False)
    kwargs: Mapping[str, Any] = field(repr=False)
    grad: bool = False

    @property
    def title(self) -> str:
        """Title of the model, with the sizes of its inputs."""
        return titled_by(self.variant, (*self.args, *self.kwargs.values()))

    @property
    def tuples(self) -> tuple[OperatorTuple, ...]:
        """The distinct operator tuples, in the order of their first call."""
        costs, specs = self.extraction.costs, self.extraction.capture.tuples
        return tuple(replace(spec, observed_cost=costs[id]) for id, spec in specs.items())

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of calls in one pass, by tuple id."""
        return self.extraction.capture.counts

    @property
    def mismatches(self) -> Mapping[str, str]:
        """Why a tuple is not measured, by tuple id: its operator, called alone, runs something else
        than in the model. Usually empty."""
        return self.extraction.capture.mismatches

    @property
    def flops(self) -> int:
        """FLOPs of one pass: 2 per multiply-add of matrix products, convolutions and attention."""
        return self.extraction.flops

    @property
    def bytes_moved(self) -> int:
        """Minimum number of bytes that the calls of one pass must read and write."""
        return self.extraction.bytes_moved

    def _repr_html_(self) -> str:
        costs = self.extraction.costs
        rows = [
            (
                label_of(spec),
                self.counts[id],
                count_of(costs[id].flops, "FLOP"),
                count_of(costs[id].bytes, "B"),
            )
            for id, spec in self.extraction.capture.tuples.items()
        ]
        return table(self.title, ("operator tuple", "calls", "FLOPs of one", "moved by one"), rows)


def capture_model(
    model: nn.Module, args: Any = (), kwargs: Mapping[str, Any] | None = None, *, grad: bool = False
) -> CapturedModel:
    """Capture a model as operator tuples. Measures nothing and does not change the model.

    The model runs on fake tensors, which need no memory and no arithmetic. If it depends on values
    in its tensors, a copy runs once on the model's device instead. If values decide how much work
    its operators do, such as the routing of a mixture of experts, a copy runs too.

    Args:
        model: the module, in the mode (``eval()`` or ``train()``) to measure.
        args: its positional arguments, as a tuple or list; any other value is the only argument.
        kwargs: its keyword arguments.
        grad: enable gradients: the pass also saves the tensors for a backward pass, as in training.

    Raises:
        UsageError: the model has lazy modules, or a dtype that the farm does not measure.
        CaptureError: the model does not run on these inputs, is compiled or scripted, or has parts
            that an operator tuple cannot describe.
    """
    from torch import nn

    if not isinstance(model, nn.Module):
        raise UsageError(
            f"A value of type {type(model).__name__} is not a model.", "Give a torch.nn.Module."
        )
    if any(nn.parameter.is_lazy(entry) for entry in (*model.parameters(), *model.buffers())):
        raise UsageError(
            f"{type(model).__name__} has lazy modules, whose parameters have no shapes yet.",
            "Call the model once on an input before its capture.",
        )
    args = _positional(args)
    named = dict(kwargs or {})
    values = (*args, *named.values())
    device_type = _device_type([*model.parameters(), *model.buffers(), *values])
    extraction = _extraction(model, args, named, device_type, grad=grad)
    captured = extraction.capture
    # weights do not change the variant
    plain = {id_: spec.without_values.id for id_, spec in captured.tuples.items()}
    calls = [
        [call.module_path, plain[call.tuple_id], list(call.reads), list(call.writes)]
        for call in captured.calls
    ]
    name = f"{type(model).__name__}-{content_id(calls)[:12]}"
    variant = variant_named(
        name, [*model.parameters(), *values], values, training=captured.training
    )
    return CapturedModel(variant, extraction, model, args, named, grad)


def _positional(args: Any) -> tuple[Any, ...]:
    """The positional arguments; a value that is no list, and a named tuple, is the only
    argument.
    """
    several = isinstance(args, tuple | list) and not hasattr(args, "_fields")
    return tuple(args) if several else (args,)


def _device_type(values: Iterable[Any]) -> str:
    import torch

    return next((value.device.type for value in values if isinstance(value, torch.Tensor)), "cpu")


def _extraction(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device_type: str,
    *,
    grad: bool,
) -> Extraction:
    """The operators of a model on a kind of device. Raises as `capture_model`."""
    from farm.operators.cost import costs_of
    from farm.training.extract import Extraction

    name = type(model).__name__
    with refused(f"{name} cannot be captured"), captured_code():
        captured = _captured(model, args, dict(kwargs), device_type, grad)
        extraction = Extraction(captured, costs_of(captured))
    refusal = extraction.refusal(name)
    if refusal is not None:
        raise refusal
    return extraction


def _captured(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str, grad: bool
) -> CapturedPass:
    import torch

    from farm.operators import self_check
    from farm.operators.capture import capture, predict, settled
    from farm.types.program_state import tensors_restored

    options: Any = {"device_type": device_type, "grad_enabled": grad}
    try:
        captured = self_check.checked(predict(model, args, kwargs, **options), device_type)
    except (UnseenOperators, UnsupportedTensor):
        raise
    except CaptureError as error:
        if device_type == "meta":
            raise
        copied, copied_args, copied_kwargs = _copies_of((model, args, kwargs), error)
    else:
        return _with_values(captured, model, args, kwargs, options)
    tensors = [*model.parameters(), *model.buffers(), *args, *kwargs.values()]
    model_device = torch.device(_device_type(tensors))
    with tensors_restored(copied):
        captured = settled(copied, lambda: capture(copied, copied_args, copied_kwargs, **options))
    return self_check.checked_on(model_device, captured)


def _with_values(
    captured: CapturedPass,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: dict[str, Any],
) -> CapturedPass:
    """A capture with the values that decide how much work its calls do. If they are unknown, a copy
    runs with values; they stay unknown if that is not possible."""
    from farm.operators.capture import capture
    from farm.operators.deciding_values import with_values
    from farm.types.program_state import tensors_restored

    if options["device_type"] == "meta" or not any(map(lacks_values, captured.tuples.values())):
        return captured
    try:
        copied, positionals, named = copy.deepcopy((model, args, kwargs))
        with tensors_restored(copied):
            return with_values(captured, lambda: capture(copied, positionals, named, **options))
    except Exception:  # a lock, a file, a generator; or it runs on fake tensors only
        _log.debug("The values that decide the work of calls are unknown", exc_info=True)
        return captured


def _copies_of(
    run: tuple[nn.Module, tuple[Any, ...], dict[str, Any]], error: CaptureError
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Copies of a model and its arguments, with which it may run with values: it may write to its
    arguments. Raises ``error`` with the reason if they cannot be copied.
    """
    try:
        return copy.deepcopy(run)
    except Exception as problem:  # a lock, a file, a generator
        raise CaptureError(
            f"{error.message} A run with values needs a copy of the model, which cannot be made: "
            f"{told(problem)}",
            f"{error.next_step} Or remove the attribute that cannot be copied.",
        ) from error


def as_captured_for(captured: CapturedModel, device_type: str) -> Extraction:
    """The operators of a captured model on a kind of device. A model on a CPU is captured again for
    a card: without a card, as one is expected to run it."""
    if captured.extraction.capture.device_type == device_type:
        return captured.extraction
    try:
        return _extraction(
            captured.model, captured.args, captured.kwargs, device_type, grad=captured.grad
        )
    except CaptureError:  # it depends on values, and there is no card to run it
        return captured.extraction


def positional(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the keyword arguments of example inputs: a tensor, a tuple of positional
    arguments, or a mapping of keyword arguments.
    """
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return _positional(inputs), {}


def no_model(value: Any) -> UsageError:
    """The error for a value that is neither a name, a variant nor a captured model."""
    return UsageError(
        f"A value of type {type(value).__name__} is neither a model's name, a variant nor a "
        "captured model.",
        "Give a module with its example inputs: farm.estimate(module, inputs) or "
        "farm.capture_model(module, inputs).",
    )


def variant_named(
    name: str, tensors: Iterable[Any], values: Iterable[Any], *, training: bool
) -> Variant:
    """Return a variant: its dtype is that of the first tensor with decimals, its sizes are those of
    the first value.
    """
    import torch
    from torch.nn.utils.rnn import PackedSequence

    first = next(
        (value for value in values if isinstance(value, torch.Tensor | PackedSequence)), None
    )
    shape = shape_of(first)
    dtypes = [
        str(tensor.dtype).removeprefix("torch.")
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
    ]
    input_size = max(1, shape[-1]) if len(shape) > 1 else 1
    return Variant(
        model=name,
        batch=max(1, shape[0]) if shape else 1,
        input_size=input_size,
        dtype=next((dtype for dtype in dtypes if dtype in _DTYPES), "float32"),
        mode="train" if training else "eval",
    )
