"""The part of sweeps that needs torch: one combination of a grid becomes one operator tuple."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from farm.errors import CaptureError, Unmeasurable
from farm.operators.capture import capture
from farm.operators.cost import cost
from farm.words.tuple import OperatorTuple

if TYPE_CHECKING:
    from farm.operators.recipes import Recipe


class Impossible(Exception):
    """PyTorch refuses this combination; the text says why. `kind` is the same without the combination's own figures."""

    @property
    def kind(self) -> str:
        return re.sub(r"[(\[][\d\sx,]+[)\]]|-?\d+", "…", str(self))


class _Function(torch.nn.Module):
    """A function with its keywords, as a model would call it."""

    def __init__(self, function: Any, keywords: Mapping[str, Any]) -> None:
        super().__init__()
        self.function = function
        self.keywords = dict(keywords)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs, **self.keywords)


class _SelfAttention(torch.nn.Module):
    """Attention of one sequence to itself: one tensor three times, which decides the path PyTorch takes."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(**parameters, batch_first=True)

    def forward(self, sequence: torch.Tensor) -> Any:
        return self.attention(sequence, sequence, sequence, need_weights=False)[0]


# Named here, not looked up: what a file says never chooses an attribute.
_FUNCTIONS = {
    "torch.matmul": torch.matmul,
    "torch.bmm": torch.bmm,
    "torch.add": torch.add,
    "torch.mul": torch.mul,
    "torch.nn.functional.softmax": torch.nn.functional.softmax,
    "torch.nn.functional.scaled_dot_product_attention": torch.nn.functional.scaled_dot_product_attention,
}
_MODULES = {
    cls.__name__: cls
    for cls in (
        torch.nn.Conv2d,
        torch.nn.ConvTranspose2d,
        torch.nn.Linear,
        torch.nn.BatchNorm2d,
        torch.nn.GroupNorm,
        torch.nn.LayerNorm,
        torch.nn.Embedding,
        torch.nn.MaxPool2d,
        torch.nn.AvgPool2d,
        torch.nn.AdaptiveAvgPool2d,
        torch.nn.ReLU,
        torch.nn.ReLU6,
        torch.nn.SiLU,
        torch.nn.Hardswish,
        torch.nn.Hardsigmoid,
        torch.nn.GELU,
        torch.nn.Sigmoid,
        torch.nn.Tanh,
        torch.nn.Softmax,
    )
}
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def build(operator: str, recipe: Recipe, values: Mapping[str, Any]) -> OperatorTuple:
    """The tuple of one combination.

    Raises:
        Impossible: PyTorch does not take the combination, or it is larger than any card.
    """
    dtype = _DTYPES[values["dtype"]]
    parameters = {name: _hashable(values[name]) for name in recipe.parameters}
    shapes = recipe.inputs(values)
    if any(size < 1 for shape in shapes for size in shape):
        raise Impossible("an input has a size of 0")
    try:
        with torch.device("meta"), torch.no_grad():
            module = _module(operator, recipe, parameters).to(dtype).eval()
            inputs = tuple(
                torch.empty(shape, dtype=torch.int64 if operator == "Embedding" else dtype) for shape in shapes
            )
            taken = capture(module, inputs)
    except (RuntimeError, ValueError, TypeError, AssertionError, ZeroDivisionError, CaptureError) as error:
        raise Impossible(_reason(error)) from error
    if len(taken.tuples) != 1:
        raise Impossible(f"it runs {len(taken.tuples)} operators instead of one")
    (spec,) = taken.tuples.values()
    try:
        cost(spec)  # kept for whoever stores it
    except Unmeasurable as refusal:
        raise Impossible("no card has the memory that it needs") from refusal
    return with_zeros(spec, float(values["zeros"]))


def with_zeros(spec: OperatorTuple, zeros: float) -> OperatorTuple:
    """The same tuple with that share of zeros in its floating-point activations."""
    if not zeros:
        return spec
    tensors = tuple(
        dataclasses.replace(tensor, zeros=zeros) if tensor.role == "activation" and tensor.dtype in _DTYPES else tensor
        for tensor in spec.tensors
    )
    return dataclasses.replace(spec, tensors=tensors)


def _module(operator: str, recipe: Recipe, parameters: Mapping[str, Any]) -> torch.nn.Module:
    if recipe.function:
        return _Function(_FUNCTIONS[recipe.function], parameters)
    if operator == "MultiheadAttention":
        return _SelfAttention(parameters)
    module: torch.nn.Module = _MODULES[operator](**parameters)
    return module


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _reason(error: BaseException) -> str:
    """The first line of PyTorch's message."""
    if isinstance(error, CaptureError) and error.__cause__ is not None:
        error = error.__cause__
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line[:200].rstrip(" .")
