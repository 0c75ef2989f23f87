"""Expands a sweep to operator tuples with their costs. Needs torch.

Each combination of the grid is built as a real module on the meta device and captured like a model,
so a sweep's tuples equal those of a model with such an operator.

To capture a combination, rebuild its tuple and count FLOPs takes milliseconds, and a grid may have
a hundred thousand combinations. So only one combination of each *structure* (all values except
sizes) is captured. The others run once on meta with PyTorch's counter; their tuples copy the
captured one with other sizes. If both methods disagree on the first combination of a structure, or
if PyTorch refuses a combination, the capture is used."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from farm.errors import CaptureError, Unmeasurable, UsageError
from farm.operators.capture import FunctionAsModel, capture
from farm.operators.cost import Cost, cost, cost_of_run
from farm.operators.rebuild import MOST_BYTES, needed_bytes, written_inputs
from farm.subjects.allow_list import ALLOWED_OPERATORS
from farm.subjects.collective_calls import collective_tuple
from farm.subjects.encoding import (
    NotEncodable,
    TensorTable,
    dtype_of,
    tensor_spec,
)
from farm.subjects.leaf import leaf_parameters
from farm.subjects.sweep import RECIPES, SweepRecipe, check_names, packaged_tuples
from farm.types.collective import problem_of
from farm.types.distribution import spreading_step
from farm.types.request import PACKAGED_LISTS, Sweep
from farm.types.tuple import OperatorTuple

#: Combinations per batch. The first batch is small, so that a card soon has work.
FIRST_BATCH, BATCH = 100, 1000
#: Exceptions that PyTorch raises if it refuses a combination.
_REFUSALS = (RuntimeError, ValueError, TypeError, AssertionError, ZeroDivisionError)


class Expansion:
    """The expansion of a sweep to tuples."""

    def __init__(self, sweep: Sweep) -> None:
        """Raises as `check_names`."""
        check_names(sweep)
        self.sweep = sweep
        self.tried = 0  # how many combinations have been built so far
        self._skipped: dict[
            str, tuple[int, str, str]
        ] = {}  # by kind of reason: count, first reason and its example

    @property
    def skipped(self) -> dict[str, int]:
        """How many combinations PyTorch refused, by reason with an example."""
        return {
            f"{reason} ({'such as ' if count > 1 else ''}{example})": count
            for count, reason, example in self._skipped.values()
        }

    def batches(self) -> Iterator[dict[OperatorTuple, Cost]]:
        """Yields batches of distinct tuples with their costs. No batch is empty.

        Two batches may contain the same tuple. To prevent it, 110 MB of ids would stay in memory
        for a million tuples.

        A grid of at most `FIRST_BATCH` combinations keeps its order. A larger grid is visited in a
        spread order, so that a drift of the card does not correlate with a parameter of the sweep.

        Raises:
            UsageError: at the end, if no combination was possible.
        """
        if self.sweep.operator in PACKAGED_LISTS:
            self.tried = 1
            specs = [packaged.spec for packaged in packaged_tuples(self.sweep.operator)]
            yield {spec: cost(spec) for spec in specs}
            return
        recipe = RECIPES[self.sweep.operator]
        builder = Builder(self.sweep.operator, recipe)
        step = spreading_step(self.sweep.size) if self.sweep.size > FIRST_BATCH else 1
        batch: dict[OperatorTuple, Cost] = {}
        size = FIRST_BATCH
        for position in range(0, self.sweep.size * step, step):
            values = dict(recipe.names)
            for name, axis in reversed(self.sweep.grid.items()):  # the last axis varies fastest
                position, index = divmod(position, len(axis))
                values[name] = axis[index]
            self.tried += 1
            try:
                spec, its_cost = builder.build(values)
            except Impossible as refusal:
                varied = [
                    name for name, given in self.sweep.grid.items() if len(given) > 1
                ] or self.sweep.grid
                example = ", ".join(f"{name} {_size_text(values[name])}" for name in varied)
                count, reason, example = self._skipped.get(refusal.kind, (0, str(refusal), example))
                self._skipped[refusal.kind] = count + 1, reason, example
            else:
                batch[spec] = its_cost
            if len(batch) >= size:
                yield batch
                batch, size = {}, BATCH
        if batch:
            yield batch
        elif size == FIRST_BATCH:
            first = next(iter(self.skipped), "the grid is empty")
            raise UsageError(
                f"PyTorch accepts none of the {self.sweep.size} combinations of {self.sweep}: "
                f"{first}.",
                "Change the values of the grid.",
            )


def _size_text(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


class Impossible(Exception):
    """PyTorch refuses this combination; the text says why. `kind` is the text without the
    combination's own numbers.
    """

    @property
    def kind(self) -> str:
        return re.sub(r"[(\[][\d\sx,]+[)\]]|-?\d+", "…", str(self))


class _SelfAttention(torch.nn.Module):
    """Self-attention: query, key and value are the same tensor, for which PyTorch runs other
    operators.
    """

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(**parameters, batch_first=True)

    def forward(self, sequence: torch.Tensor) -> Any:
        return self.attention(sequence, sequence, sequence, need_weights=False)[0]


class Builder:
    def __init__(self, operator: str, recipe: SweepRecipe) -> None:
        self.operator = operator
        self.recipe = recipe
        #: Structure -> its captured tuple; None if every combination needs a capture.
        self._samples: dict[Any, OperatorTuple | None] = {}
        self._modules: dict[Any, torch.nn.Module] = {}

    def build(self, values: Mapping[str, Any]) -> tuple[OperatorTuple, Cost]:
        """The tuple of one combination and its cost. Raises `Impossible` if PyTorch refuses the
        combination, or no card has enough memory for it."""
        if any(min(shape, default=1) < 1 for shape in self.recipe.shapes(values)):
            raise Impossible("an input has a size of 0")
        if self.recipe.collective:
            parameters = {name: values[name] for name in self.recipe.parameters}
            spec = collective_tuple(
                self.operator, values["elements"], values["dtype"], **parameters
            )
            if problem := problem_of(spec.operator, spec.parameters, [spec.tensors[0].shape]):
                raise Impossible(f"it {problem}")
            return with_zeros(spec, float(values["zeros"])), cost(spec)
        structure = self._structure(values)
        sample = self._samples.get(structure)
        copied = self._like(sample, values) if sample is not None else None
        spec, costs = copied or self.build_by_capture(values)
        if structure not in self._samples:
            self._samples[structure] = spec if self._like(spec, values) == (spec, costs) else None
        return with_zeros(spec, float(values["zeros"])), costs

    def build_by_capture(self, values: Mapping[str, Any]) -> tuple[OperatorTuple, Cost]:
        """As `build`, but by a capture, as for a model; without the share of zeros."""
        try:
            module, inputs = self._combination(values)
            with torch.device("meta"), torch.no_grad():
                captured = capture(module, inputs)
        except (*_REFUSALS, CaptureError) as error:
            cause: BaseException = error
            if isinstance(error, CaptureError) and error.__cause__ is not None:
                cause = error.__cause__
            line = (str(cause).strip() or type(cause).__name__).splitlines()[0]
            raise Impossible(line[:200].rstrip(" .")) from error
        if len(captured.tuples) != 1:
            raise Impossible(f"it runs {len(captured.tuples)} operators instead of one")
        (spec,) = captured.tuples.values()
        try:
            return spec, cost(spec)
        except Unmeasurable as refusal:
            raise Impossible("it needs more memory than any card has") from refusal

    def _like(
        self, sample: OperatorTuple, values: Mapping[str, Any]
    ) -> tuple[OperatorTuple, Cost] | None:
        """Return a tuple and its cost without a capture; None if PyTorch refuses the combination.
        The result is a copy of ``sample``, a captured tuple that differs only in its sizes (see
        `_structure`), with the sizes of `values`."""
        table = TensorTable({})
        try:
            module, inputs = self._combination(values)
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                out = module(*inputs)
            if not self.recipe.function:
                module = getattr(module, "attention", module)
                table.add_module(module)
            for tensor in inputs:
                table.add(tensor)
            tensors = tuple(map(tensor_spec, table.layouts()[0]))
            parameters = {} if self.recipe.function else leaf_parameters(module)
        except (*_REFUSALS, NotEncodable):
            return None
        spec = dataclasses.replace(sample, parameters=parameters, tensors=tensors)
        if needed_bytes(spec) > MOST_BYTES:
            return None
        return spec, cost_of_run(
            spec, counter.get_total_flops(), table.tensors, out, written_inputs(sample)
        )

    def _structure(self, values: Mapping[str, Any]) -> Any:
        """All values that decide how the operator is captured; sizes are left out."""
        fixed = {
            name: value
            for name, value in self.recipe.given(values).items()
            if self.recipe.function or not _is_size(value)
        }
        ranks = tuple(len(shape) for shape in self.recipe.shapes(values))
        return values["dtype"], repr(sorted(fixed.items())), ranks

    def _combination(
        self, values: Mapping[str, Any]
    ) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
        """The module of one combination and its inputs, on meta."""
        dtype = dtype_of(values["dtype"])
        parameters = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in self.recipe.given(values).items()
        }
        key = values["dtype"], tuple(parameters.items())
        if (module := self._modules.get(key)) is None:
            if len(self._modules) >= 4096:
                self._modules.clear()
            with torch.device("meta"):
                module = self._modules[key] = (
                    _module(self.operator, self.recipe, parameters).to(dtype).eval()
                )
        inputs = []
        for number, shape in enumerate(self.recipe.shapes(values)):
            name = self.recipe.input_dtypes[number] if self.recipe.input_dtypes else ""
            is_transposed = number in self.recipe.transposed  # it is stored column by column
            stored = shape[::-1] if is_transposed else shape
            tensor = torch.empty(stored, dtype=dtype_of(name) if name else dtype, device="meta")
            inputs.append(tensor.t() if is_transposed else tensor)
        return module, tuple(inputs)


def _is_size(value: Any) -> bool:
    """True for an integer or a list of integers: a module of another size is built and called the
    same way.
    """
    numbers = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)


def with_zeros(spec: OperatorTuple, zeros: float) -> OperatorTuple:
    """Return the tuple with the share `zeros` of zeros in its floating-point activations.

    Tensors without dimensions, such as scales, keep their values.
    """
    if not zeros:
        return spec
    tensors = []
    for tensor in spec.tensors:
        has_zeros = tensor.role == "activation" and tensor.dtype != "int64" and tensor.shape
        tensors.append(dataclasses.replace(tensor, zeros=zeros if has_zeros else 0.0))
    return dataclasses.replace(spec, tensors=tuple(tensors))


def _module(operator: str, recipe: SweepRecipe, parameters: Mapping[str, Any]) -> torch.nn.Module:
    if recipe.function:
        keywords = dict(parameters)
        if keywords.get("out_dtype"):
            keywords["out_dtype"] = dtype_of(keywords["out_dtype"])
        function = functools.partial(ALLOWED_OPERATORS[recipe.function], **keywords)
        return FunctionAsModel((lambda *inputs: function(inputs)) if recipe.as_list else function)
    if operator == "MultiheadAttention":
        return _SelfAttention(parameters)
    module: torch.nn.Module = ALLOWED_OPERATORS[f"torch.nn.{operator}"](**parameters)
    return module
