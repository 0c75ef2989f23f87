"""The part of sweeps that needs torch: one combination of a grid becomes one operator tuple with its cost.

Capturing a combination like a model, rebuilding its tuple and counting that takes milliseconds, and a grid may have a
hundred thousand combinations. So only one combination of each *structure* is captured: all that is not a mere size. The
others run once on meta with PyTorch's counter, and are described after the captured one. If the two ways disagree on
the first combination of a structure, or if PyTorch refuses a combination, the capture decides.
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
from farm.operators.allow_list import ALLOWED_OPERATORS
from farm.operators.capture import capture
from farm.operators.cost import Cost, cost, cost_of_run
from farm.operators.encoding import NotEncodable, TensorTable, dtype_of, leaf_parameters
from farm.operators.rebuild import MOST_BYTES, needed_bytes, written_inputs
from farm.types.tuple import OperatorTuple, TensorSpec

if TYPE_CHECKING:
    from farm.operators.sweep_recipes import SweepRecipe

#: What PyTorch raises if it does not take a combination.
_REFUSALS = (RuntimeError, ValueError, TypeError, AssertionError, ZeroDivisionError)
_KEPT_MODULES = 4096


class Impossible(Exception):
    """PyTorch refuses this combination; the text says why. `kind` is the text without the combination's own numbers."""

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
    """Self-attention of one sequence: the same tensor three times, which decides the path that PyTorch takes."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(**parameters, batch_first=True)

    def forward(self, sequence: torch.Tensor) -> Any:
        return self.attention(sequence, sequence, sequence, need_weights=False)[0]


@dataclass(frozen=True)
class _Sample:
    """The captured combination of a structure; ``written`` are the indices of the tensors that the operator writes."""

    spec: OperatorTuple
    written: frozenset[int]


@dataclass(frozen=True)
class _Combination:
    """One combination, built on meta: the module, its leaf (None for a function) and the inputs."""

    module: torch.nn.Module
    leaf: torch.nn.Module | None
    inputs: tuple[torch.Tensor, ...]


class Builder:
    """Builds the tuples of one operator's combinations."""

    def __init__(self, operator: str, recipe: SweepRecipe) -> None:
        self.operator = operator
        self.recipe = recipe
        self._samples: dict[Any, _Sample | None] = {}  # by structure; None if every combination needs a capture
        self._modules: dict[Any, torch.nn.Module] = {}

    def build(self, values: Mapping[str, Any]) -> tuple[OperatorTuple, Cost]:
        """The tuple of one combination and its cost.

        Raises:
            Impossible: PyTorch does not take the combination, or it is larger than any card.
        """
        if any(size < 1 for shape in self.recipe.inputs(values) for size in shape):
            raise Impossible("an input has a size of 0")
        structure = self._structure(values)
        sample = self._samples.get(structure)
        if sample is not None:
            spec, costs = self._like(sample, values) or self.build_by_capture(values)
        else:
            spec, costs = self.build_by_capture(values)
            if structure not in self._samples:
                sample = _Sample(spec, written_inputs(spec))
                self._samples[structure] = sample if self._like(sample, values) == (spec, costs) else None
        return with_zeros(spec, float(values["zeros"])), costs

    def build_by_capture(self, values: Mapping[str, Any]) -> tuple[OperatorTuple, Cost]:
        """As `build`, in the way a model's tuples are made, and without the share of zeros."""
        try:
            made = self._combination(values)
            with torch.device("meta"), torch.no_grad():
                captured = capture(made.module, made.inputs)
        except (*_REFUSALS, CaptureError) as error:
            raise Impossible(_reason(error)) from error
        if len(captured.tuples) != 1:
            raise Impossible(f"it runs {len(captured.tuples)} operators instead of one")
        (spec,) = captured.tuples.values()
        try:
            return spec, cost(spec)
        except Unmeasurable as refusal:
            raise Impossible("no card has the memory that it needs") from refusal

    def _like(self, sample: _Sample, values: Mapping[str, Any]) -> tuple[OperatorTuple, Cost] | None:
        """The tuple and its cost, described after the sample of its structure; None if PyTorch refuses."""
        try:
            made = self._combination(values)
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                out = made.module(*made.inputs)
            spec, tensors = _describe(sample.spec, made)
        except (*_REFUSALS, NotEncodable):
            return None
        if needed_bytes(spec) > MOST_BYTES:
            return None
        return spec, cost_of_run(spec, counter.get_total_flops(), tensors, out, sample.written)

    def _structure(self, values: Mapping[str, Any]) -> Any:
        """What decides how the operator is captured; sizes only decide whether PyTorch takes them."""
        given = self.recipe.given(values)
        fixed = {name: value for name, value in given.items() if self.recipe.function or not _is_size(value)}
        ranks = tuple(len(shape) for shape in self.recipe.inputs(values))
        return values["dtype"], repr(sorted(fixed.items())), ranks

    def _combination(self, values: Mapping[str, Any]) -> _Combination:
        dtype = dtype_of(values["dtype"])
        given = self.recipe.given(values).items()
        parameters = {name: tuple(value) if isinstance(value, list) else value for name, value in given}
        key = values["dtype"], tuple(parameters.items())
        if (module := self._modules.get(key)) is None:
            if len(self._modules) >= _KEPT_MODULES:
                self._modules.clear()
            with torch.device("meta"):
                module = self._modules[key] = _module(self.operator, self.recipe, parameters).to(dtype).eval()
        shapes = self.recipe.inputs(values)
        inputs = tuple(self._input(number, shape, dtype) for number, shape in enumerate(shapes))
        leaf = None if self.recipe.function else getattr(module, "attention", module)
        return _Combination(module, leaf, inputs)

    def _input(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        own = self.recipe.input_dtypes[number] if self.recipe.input_dtypes else ""
        transposed = number in self.recipe.transposed
        made = torch.empty(shape[::-1] if transposed else shape, dtype=dtype_of(own) if own else dtype, device="meta")
        return made.t() if transposed else made


def _describe(like: OperatorTuple, made: _Combination) -> tuple[OperatorTuple, list[torch.Tensor]]:
    """The tuple of a call that differs from ``like`` in sizes only, and its tensors in order."""
    table = TensorTable({})
    if made.leaf is not None:
        table.add_module(made.leaf)
    for tensor in made.inputs:
        table.add(tensor)
    tensors = tuple(TensorSpec(*layout) for layout in table.layouts(table.storages()))
    parameters = {} if made.leaf is None else leaf_parameters(made.leaf)
    return dataclasses.replace(like, parameters=parameters, tensors=tensors), table.tensors


def _is_size(value: Any) -> bool:
    """Whether a parameter is a whole number, or several: a module of another size is built and called the same."""
    numbers = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)


def with_zeros(spec: OperatorTuple, zeros: float) -> OperatorTuple:
    """The same tuple with that share of zeros in its floating-point activations, except in scalars (scales)."""
    if not zeros:
        return spec

    def has_zeros(tensor: TensorSpec) -> bool:
        return tensor.role == "activation" and tensor.dtype != "int64" and bool(tensor.shape)

    tensors = tuple(
        dataclasses.replace(tensor, zeros=zeros) if has_zeros(tensor) else tensor for tensor in spec.tensors
    )
    return dataclasses.replace(spec, tensors=tensors)


def _module(operator: str, recipe: SweepRecipe, parameters: Mapping[str, Any]) -> torch.nn.Module:
    if recipe.function:
        keywords = {**parameters, **({"out_dtype": dtype_of(out)} if (out := parameters.get("out_dtype")) else {})}
        return _Function(ALLOWED_OPERATORS[recipe.function], keywords, recipe.as_list)
    if operator == "MultiheadAttention":
        return _SelfAttention(parameters)
    module: torch.nn.Module = ALLOWED_OPERATORS[f"torch.nn.{operator}"](**parameters)
    return module


def _reason(error: BaseException) -> str:
    """The first line of PyTorch's message."""
    if isinstance(error, CaptureError) and error.__cause__ is not None:
        error = error.__cause__
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line[:200].rstrip(" .")
