"""Capture a `torch.nn.Module` of the caller without registering it. A hash of its calls is part of its name."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from farm.api.notebook import table
from farm.errors import CaptureError, UnseenOperators, UsageError
from farm.models.catalog import titled_by
from farm.types.format import count_of
from farm.types.label import label_of
from farm.types.protocol import Variant, content_id
from farm.types.tuple import OperatorTuple

if TYPE_CHECKING:
    from torch import nn

    from farm.training.extract import Extraction


@dataclass(frozen=True, eq=False)
class CapturedModel:
    """A model with its example inputs and the operator tuples of one pass. A notebook shows a table of the tuples.

    `variant` identifies the model by its calls, their order and their modules. Weights do not change the variant.
    """

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
        return tuple(self.extraction.capture.tuples.values())

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of calls in one pass, by tuple id."""
        return self.extraction.capture.counts

    @property
    def mismatches(self) -> Mapping[str, str]:
        """Why a tuple is not measured, by tuple id: its operator, called alone, runs something else than in the model.
        Usually empty."""
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
            (label_of(spec), self.counts[id], count_of(costs[id].flops, "FLOP"), count_of(costs[id].bytes, "B"))
            for id, spec in self.extraction.capture.tuples.items()
        ]
        return table(self.title, ("operator tuple", "calls", "FLOPs of one", "moved by one"), rows)


def capture_model(
    model: nn.Module, args: Any = (), kwargs: Mapping[str, Any] | None = None, *, grad: bool = False
) -> CapturedModel:
    """Capture a model as operator tuples. Measures nothing and does not change the model.

    The model runs on fake tensors, which need no memory and no arithmetic. If it depends on values in its tensors, a
    copy runs once on the model's device instead.

    Args:
        model: the module, in the mode (``eval()`` or ``train()``) to measure.
        args: its positional arguments, as a tuple or list; any other value is the only argument.
        kwargs: its keyword arguments.
        grad: enable gradients: the pass also saves the tensors for a backward pass, as in training.

    Raises:
        UsageError: the model has lazy modules, or a dtype that the farm does not measure.
        CaptureError: the model does not run on these inputs, is compiled or scripted, or has parts that an
            operator tuple cannot describe.
    """
    import torch
    from torch import nn

    from farm.operators import self_check
    from farm.operators.capture import capture, predict
    from farm.operators.cost import cost
    from farm.training.extract import Extraction

    if not isinstance(model, nn.Module):
        raise UsageError(f"A value of type {type(model).__name__} is not a model.", "Give a torch.nn.Module.")
    if any(nn.parameter.is_lazy(entry) for entry in (*model.parameters(), *model.buffers())):
        raise UsageError(
            f"{type(model).__name__} has lazy modules, whose parameters have no shapes yet.",
            "Call the model once on an input before its capture.",
        )
    args = tuple(args) if isinstance(args, tuple | list) else (args,)
    named = dict(kwargs or {})
    values = (*args, *named.values())
    there = [*model.parameters(), *model.buffers(), *(value for value in values if isinstance(value, torch.Tensor))]
    about: Any = {"device_type": there[0].device.type if there else "cpu", "grad_enabled": grad}
    with contextlib.redirect_stdout(sys.stderr):  # keep output of the model's code apart from results
        try:
            taken = predict(model, args, named, **about)
            taken = self_check.checked(taken, taken.device_type)
        except UnseenOperators:
            raise
        except CaptureError:
            if about["device_type"] == "meta":
                raise
            taken = capture(copy.deepcopy(model), args, named, **about)
            taken = self_check.checked_on(there[0].device, taken)
    extraction = Extraction(taken, {id: cost(spec) for id, spec in taken.tuples.items()}, model_flops=0)
    if (refusal := extraction.refusal(type(model).__name__)) is not None:
        raise refusal
    calls = [[call.module_path, call.tuple_id, list(call.reads), list(call.writes)] for call in taken.calls]
    name = f"{type(model).__name__}-{content_id(calls)[:12]}"
    variant = variant_named(name, [*model.parameters(), *values], values, training=taken.training)
    return CapturedModel(variant, extraction, model, args, named, grad)


def variant_named(name: str, tensors: Iterable[Any], values: Iterable[Any], *, training: bool) -> Variant:
    """Return a variant: its dtype is that of the first tensor with decimals, its sizes are those of the first value."""
    import torch

    shape = next((tuple(value.shape) for value in values if isinstance(value, torch.Tensor)), ())
    floating = [one.dtype for one in tensors if isinstance(one, torch.Tensor) and one.is_floating_point()]
    return Variant(
        model=name,
        batch=max(1, shape[0]) if shape else 1,
        input_size=max(1, shape[-1]) if len(shape) > 1 else 1,
        dtype=str(floating[0]).removeprefix("torch.") if floating else "float32",
        mode="train" if training else "eval",
    )
