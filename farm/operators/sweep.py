"""Sweeps: a grid over one operator's parameters and input sizes, expanded to operator tuples.

`RECIPES` (`farm.operators.sweep_recipes`) say how each operator is built from the values of a grid. Each combination is
built as a real module on the meta device and captured like a model, so a sweep's tuples equal those of a model with
such an operator. Names are checked without torch: a wrong measurement file is refused before torch is imported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.errors import UnknownOperator, UsageError, did_you_mean
from farm.operators.sweep_recipes import DTYPES, RECIPES, REQUIRED
from farm.types.request import CALIBRATION, Sweep

if TYPE_CHECKING:
    from farm.operators.cost import Cost
    from farm.types.tuple import OperatorTuple

_PAIRS = frozenset({"kernel_size", "stride", "padding", "dilation", "output_padding", "image_size", "output_size"})
_CALIBRATION_FILE = Path(__file__).parent.parent / "data" / "calibration.json"
#: Combinations per batch. The first batch is small, so that a card soon has work.
FIRST_BATCH, BATCH = 100, 1000


class Expansion:
    """The expansion of a sweep to tuples.

    Attributes:
        tried: how many combinations have been built so far.
    """

    def __init__(self, sweep: Sweep) -> None:
        """
        Raises:
            UnknownOperator, UsageError: see `check_names`.
        """
        check_names(sweep)
        self.sweep = sweep
        self.tried = 0
        self._found: set[str] = set()
        self._skipped: dict[str, tuple[int, str, str]] = {}  # by kind of reason: count, first reason and its example

    @property
    def skipped(self) -> dict[str, int]:
        """How many combinations PyTorch refused, by reason with an example."""
        return {
            f"{reason} ({'such as ' if count > 1 else ''}{example})": count
            for count, reason, example in self._skipped.values()
        }

    def batches(self) -> Iterator[dict[OperatorTuple, Cost]]:
        """Yields batches of distinct tuples with their costs. No batch is empty.

        A grid of at most `FIRST_BATCH` combinations keeps its order. A larger grid is visited in a spread order, so
        that a drift of the card does not correlate with a parameter of the sweep.

        Raises:
            UsageError: at the end, if no combination was possible.
        """
        from farm.operators.sweep_builder import Builder, Impossible

        if self.sweep.operator == CALIBRATION:
            from farm.operators.cost import cost

            self.tried = 1
            yield {spec: cost(spec) for spec in calibration_tuples()}
            return
        recipe = RECIPES[self.sweep.operator]
        builder = Builder(self.sweep.operator, recipe)
        step = round(self.sweep.size * 0.618) if self.sweep.size > FIRST_BATCH else 1  # near the golden ratio
        while math.gcd(step, self.sweep.size) > 1:  # so that each combination is visited once
            step += 1
        batch: dict[OperatorTuple, Cost] = {}
        for place in range(0, self.sweep.size * step, step):
            values = dict(recipe.names)
            for name, axis in reversed(self.sweep.grid.items()):  # the last axis varies fastest
                place, index = divmod(place, len(axis))
                values[name] = axis[index]
            self.tried += 1
            try:
                spec, cost = builder.build(values)
            except Impossible as refusal:
                varied = [name for name, given in self.sweep.grid.items() if len(given) > 1] or self.sweep.grid
                example = ", ".join(f"{name} {_size_text(values[name])}" for name in varied)
                count, reason, example = self._skipped.get(refusal.kind, (0, str(refusal), example))
                self._skipped[refusal.kind] = count + 1, reason, example
            else:
                if spec.id not in self._found:
                    self._found.add(spec.id)
                    batch[spec] = cost
            if len(batch) >= (FIRST_BATCH if len(self._found) <= FIRST_BATCH else BATCH):
                yield batch
                batch = {}
        if batch:
            yield batch
        if not self._found:
            first = next(iter(self.skipped), "the grid is empty")
            raise UsageError(
                f"PyTorch accepts none of the {self.sweep.size} combinations of {self.sweep}: {first}.",
                "Change the values of the grid.",
            )


def calibration_tuples() -> list[OperatorTuple]:
    """Return the operator tuples whose readings calibrate predictions for a card, the most useful one first."""
    from farm.types.tuple import parse

    return [parse(spec) for spec in json.loads(_CALIBRATION_FILE.read_text(encoding="utf-8"))]


def check_names(sweep: Sweep) -> None:
    """Check the operator, the grid's names and the kinds of its values; needs no torch.

    Raises:
        UnknownOperator: there is no sweep of that operator; suggests the nearest name.
        UsageError: the operator has no parameter of that name, or does not accept a value.
    """
    if sweep.operator == CALIBRATION:
        if sweep.grid:
            raise UsageError("The calibration measures a fixed list of operator tuples.", "Remove the grid.")
        return
    if sweep.operator not in RECIPES:
        step = did_you_mean(sweep.operator, RECIPES) or f"Choose one of {', '.join(RECIPES)}."
        raise UnknownOperator(f"There is no sweep of the operator '{sweep.operator}'.", step)
    names = RECIPES[sweep.operator].names
    for name in sweep.grid:
        if name not in names:
            raise UsageError(
                f"A sweep of {sweep.operator} has no parameter or size '{name}'.",
                did_you_mean(name, names) or f"Choose from: {', '.join(names)}.",
            )
    if missing := [name for name, default in names.items() if default is REQUIRED and name not in sweep.grid]:
        raise UsageError(
            f"The grid of a {sweep.operator} sweep needs {' and '.join(missing)}.",
            f"Add for example {missing[0]}: [64, 128].",
        )
    for name, values in sweep.grid.items():
        for value in values:
            if problem := _problem(sweep.operator, name, value, names[name]):
                text = f"{name} of a {sweep.operator} sweep is {value!r}; it must be {problem}."
                raise UsageError(text, f"Change the values of {name} in the grid.")


def _size_text(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _problem(operator: str, name: str, value: Any, default: Any) -> str:
    """The requirement that a value of the grid violates; "" if the value is valid."""
    several = isinstance(value, list | tuple)
    numbers = value if several else [value]
    if name in ("dtype", "out_dtype"):
        dtypes = RECIPES[operator].dtypes if name == "dtype" else DTYPES
        return "" if value in dtypes else f"one of {', '.join(dtypes)}"
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(default, float):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name == "zeros":
            return "" if is_number and 0 <= value <= 1 else "a share from 0 to 1"
        return "" if is_number else "a number"
    if (name == "padding" and value in ("same", "valid")) or (value is None and default is None):
        return ""
    if not numbers or any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
        return "a whole number, or a pair of them"
    if name != "dim" and min(numbers) < 0:
        return "at least 0"
    return "a single whole number" if several and name not in _PAIRS else ""
