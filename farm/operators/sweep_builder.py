"""The part of sweeps that needs torch: one combination of a grid becomes one operator tuple, with its cost.

To capture a combination like a model, build its tuple again and count that takes milliseconds, and a grid may have a
hundred thousand. So the capture is made once of each *structure*: what of a combination is no mere size. The others are run
once on meta, with PyTorch's counter, and described as the capture has shown. Where the two ways do not agree on the first of
a structure, and where PyTorch refuses, the capture decides.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from farm.errors import CaptureError, Unmeasurable
from farm.operators.capture import capture
from farm.operators.cost import Cost, cost, cost_of_run
from farm.operators.encoding import NotEncodable, TensorTable
from farm.operators.encoding import leaf_parameters
from farm.operators.rebuild import MOST_BYTES, needed_bytes, written_inputs
from farm.types.tuple import OperatorTuple, TensorSpec

if TYPE_CHECKING:
    from farm.operators.recipes import Recipe


class Impossible(Exception):
    """PyTorch refuses this combination; the text says why. `kind` is the same without the combination's own figures."""

    @property
    def kind(self) -> str:
        return re.sub(r"[(\[][\d\sx,]+[)\]]|-?\d+", "…", str(self))


class _Function(torch.nn.Module):
    """A function with its keywords, as a model would call it."""

    def __init__(self, function: Any, keywords: Mapping[str, Any], as_list: bool) -> None:
        super().__init__()
        self.function = function
        self.keywords = dict(keywords)
        self.as_list = as_list

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*([inputs] if self.as_list else inputs), **self.keywords)


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
    "torch.neg": torch.neg,
    "torch.cat": torch.cat,
    "torch.cos": torch.cos,
    "torch.sin": torch.sin,
    "torch._scaled_mm": torch._scaled_mm,
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
        torch.nn.RMSNorm,
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
#: What PyTorch raises where it does not take a combination.
_REFUSALS = (RuntimeError, ValueError, TypeError, AssertionError, ZeroDivisionError)
_KEPT_MODULES = 4096
_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int64": torch.int64,
}


@dataclass(frozen=True)
class _Captured:
    """What the capture of one combination of a structure shows of all of them."""

    spec: OperatorTuple
    written: frozenset[int]  # indices of the tensors that the operator writes


@dataclass(frozen=True)
class _Given:
    """One combination, built on meta: the module, its leaf (None for a function) and the inputs."""

    module: torch.nn.Module
    leaf: torch.nn.Module | None
    inputs: tuple[torch.Tensor, ...]


class Builder:
    """Builds the tuples of one operator's combinations, one after the other."""

    def __init__(self, operator: str, recipe: Recipe) -> None:
        self.operator = operator
        self.recipe = recipe
        self._known: dict[Any, _Captured | None] = {}  # structure -> its capture, None where only captures tell
        self._modules: dict[Any, torch.nn.Module] = {}

    def build(self, values: Mapping[str, Any]) -> tuple[OperatorTuple, Cost]:
        """The tuple of one combination, and what it costs.

        Raises:
            Impossible: PyTorch does not take the combination, or it is larger than any card.
        """
        if any(size < 1 for shape in self.recipe.inputs(values) for size in shape):
            raise Impossible("an input has a size of 0")
        structure = self._structure(values)
        known = self._known.get(structure)
        if known is None:
            spec, costs = self.build_by_capture(values)
            if structure not in self._known:
                captured = _Captured(spec, written_inputs(spec))
                alike = self._like(captured, values) == (spec, costs)
                self._known[structure] = captured if alike else None
        else:
            spec, costs = self._like(known, values) or self.build_by_capture(values)
        return with_zeros(spec, float(values["zeros"])), costs

    def build_by_capture(self, values: Mapping[str, Any]) -> tuple[OperatorTuple, Cost]:
        """As `build`, the way a model's tuples are made, and without the share of zeros."""
        try:
            given = self._given(values)
            with torch.device("meta"), torch.no_grad():
                taken = capture(given.module, given.inputs)
        except (*_REFUSALS, CaptureError) as error:
            raise Impossible(_reason(error)) from error
        if len(taken.tuples) != 1:
            raise Impossible(f"it runs {len(taken.tuples)} operators instead of one")
        (spec,) = taken.tuples.values()
        try:
            return spec, cost(spec)
        except Unmeasurable as refusal:
            raise Impossible("no card has the memory that it needs") from refusal

    def _like(self, known: _Captured, values: Mapping[str, Any]) -> tuple[OperatorTuple, Cost] | None:
        """The tuple and its cost, described as the capture of its structure has shown; None where PyTorch refuses."""
        try:
            given = self._given(values)
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                out = given.module(*given.inputs)
            spec, tensors = _describe(known.spec, given)
        except (*_REFUSALS, NotEncodable):
            return None
        if needed_bytes(spec) > MOST_BYTES:
            return None
        return spec, cost_of_run(spec, counter.get_total_flops(), tensors, out, known.written)

    def _structure(self, values: Mapping[str, Any]) -> Any:
        """What decides how the operator is captured; sizes only decide whether PyTorch takes them."""
        told = self.recipe.given(values)
        fixed = {name: value for name, value in told.items() if self.recipe.function or not _is_size(value)}
        ranks = tuple(len(shape) for shape in self.recipe.inputs(values))
        return values["dtype"], repr(sorted(fixed.items())), ranks

    def _given(self, values: Mapping[str, Any]) -> _Given:
        dtype = _DTYPES[values["dtype"]]
        parameters = {name: _hashable(value) for name, value in self.recipe.given(values).items()}
        key = values["dtype"], tuple(parameters.items())
        if (module := self._modules.get(key)) is None:
            if len(self._modules) >= _KEPT_MODULES:
                self._modules.clear()
            with torch.device("meta"):
                module = self._modules[key] = _module(self.operator, self.recipe, parameters).to(dtype).eval()
        shapes = self.recipe.inputs(values)
        inputs = tuple(self._input(number, shape, dtype) for number, shape in enumerate(shapes))
        leaf = None if self.recipe.function else getattr(module, "attention", module)
        return _Given(module, leaf, inputs)

    def _input(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        own = self.recipe.input_dtypes[number] if self.recipe.input_dtypes else ""
        across = number in self.recipe.transposed
        made = torch.empty(shape[::-1] if across else shape, dtype=_DTYPES[own] if own else dtype, device="meta")
        return made.t() if across else made


def _describe(like: OperatorTuple, given: _Given) -> tuple[OperatorTuple, list[torch.Tensor]]:
    """The tuple of a call that differs from another in sizes only, and its tensors in order."""
    table = TensorTable({})
    if given.leaf is not None:
        table.add_module(given.leaf)
    for tensor in given.inputs:
        table.add(tensor)
    tensors = tuple(TensorSpec(*layout) for layout in table.layouts(table.storages()))
    parameters = {} if given.leaf is None else leaf_parameters(given.leaf)
    spec = dataclasses.replace(like, parameters=parameters, tensors=tensors)
    return spec, table.tensors


def _is_size(value: Any) -> bool:
    """Whether a parameter is a number, or several: of another size, a module is built and called the same."""
    numbers = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)


def with_zeros(spec: OperatorTuple, zeros: float) -> OperatorTuple:
    """The same tuple with that share of zeros in its floating-point activations; a scale is none that could have zeros."""
    if not zeros:
        return spec

    def has_zeros(tensor: TensorSpec) -> bool:
        return tensor.role == "activation" and tensor.dtype != "int64" and bool(tensor.shape)

    tensors = tuple(
        dataclasses.replace(tensor, zeros=zeros) if has_zeros(tensor) else tensor for tensor in spec.tensors
    )
    return dataclasses.replace(spec, tensors=tensors)


def _module(operator: str, recipe: Recipe, parameters: Mapping[str, Any]) -> torch.nn.Module:
    if recipe.function:
        keywords = {**parameters, **({"out_dtype": _DTYPES[out]} if (out := parameters.get("out_dtype")) else {})}
        return _Function(_FUNCTIONS[recipe.function], keywords, recipe.as_list)
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
