"""Sweeps: a grid over one operator's parameters and input sizes, expanded to operator tuples.

Each combination is built as a real module on the meta device and captured like a model, so that a sweep's tuples
are exactly the tuples that a model with such an operator would give. Names are checked without torch, so that a
measurement file can be refused before anything heavy loads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from farm.errors import UnknownOperator, UsageError, did_you_mean
from farm.operators.recipes import DTYPES
from farm.operators.sweep import RECIPES, REQUIRED
from farm.types.request import Sweep

if TYPE_CHECKING:
    from farm.operators.cost import Cost
    from farm.types.tuple import OperatorTuple

_PAIRS = frozenset({"kernel_size", "stride", "padding", "dilation", "output_padding", "image_size", "output_size"})


#: Combinations that are built at a time; of the first batch, so that a card soon has something to do.
FIRST_BATCH, BATCH = 100, 1000


@dataclass(frozen=True)
class _LeftOut:
    """Combinations that PyTorch refuses for one kind of reason; the example and its reason are of the first."""

    count: int
    example: str
    reason: str

    def __str__(self) -> str:
        return f"{self.reason} ({'such as ' if self.count > 1 else ''}{self.example})"


class Expansion:
    """A sweep on its way to tuples.

    Attributes:
        tried: how many of its combinations have been built so far.
    """

    def __init__(self, sweep: Sweep) -> None:
        """Raises:
        UnknownOperator, UsageError: as `check_names`.
        """
        check_names(sweep)
        self.sweep = sweep
        self.tried = 0
        self._found: set[str] = set()
        self._left_out: dict[str, _LeftOut] = {}

    @property
    def skipped(self) -> dict[str, int]:
        """How many combinations PyTorch refused, by reason with an example."""
        return {str(left): left.count for left in self._left_out.values()}

    def batches(self) -> Iterator[dict[OperatorTuple, Cost]]:
        """The tuples with their costs, equal ones once. No batch is empty.

        A grid of one batch comes in its own order, a larger one from all over the grid: what drifts on a card must not line up
        with what varies over the sweep.

        Raises:
            UsageError: in the end, when not one combination was possible.
        """
        from farm.operators.sweep_builder import Builder, Impossible

        recipe = RECIPES[self.sweep.operator]
        builder = Builder(self.sweep.operator, recipe)
        axes = list(self.sweep.grid.values())
        step = _step(self.sweep.size)
        batch: dict[OperatorTuple, Cost] = {}
        for number in range(self.sweep.size):
            values = {**recipe.names, **dict(zip(self.sweep.grid, _combination(axes, number * step), strict=True))}
            self.tried += 1
            try:
                spec, cost = builder.build(values)
            except Impossible as refusal:
                self._leave_out(refusal.kind, str(refusal), values)
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
            reason = next(map(str, self._left_out.values()), "the grid is empty")
            raise UsageError(
                f"None of the {self.sweep.size} combinations of {self.sweep} is possible: {reason}.",
                "Correct the grid.",
            )

    def _leave_out(self, kind: str, reason: str, values: Mapping[str, Any]) -> None:
        if (first := self._left_out.get(kind)) is None:
            varied = [name for name, given in self.sweep.grid.items() if len(given) > 1] or list(self.sweep.grid)
            first = _LeftOut(0, ", ".join(f"{name} {_written(values[name])}" for name in varied), reason)
        self._left_out[kind] = dataclasses.replace(first, count=first.count + 1)


def _step(size: int) -> int:
    """From one combination to the next: all are met once, since it has no divisor in common with their number."""
    if size <= FIRST_BATCH:
        return 1
    step = round(size * 0.618)  # near the golden ratio, which fills a range most evenly
    while math.gcd(step, size) > 1:
        step += 1
    return step


def _combination(axes: Sequence[Sequence[Any]], number: int) -> list[Any]:
    """The values of a combination, of which the last axis counts fastest; beyond the last it begins again."""
    values = []
    for axis in reversed(axes):
        number, place = divmod(number, len(axis))
        values.append(axis[place])
    return values[::-1]


def check_names(sweep: Sweep) -> None:
    """Check the operator, the grid's names and the kinds of its values; needs no torch.

    Raises:
        UnknownOperator: no sweep of that operator; names the nearest.
        UsageError: a name or a value that the operator does not take.
    """
    if sweep.operator not in RECIPES:
        step = did_you_mean(sweep.operator, RECIPES) or f"Sweeps know: {', '.join(RECIPES)}."
        raise UnknownOperator(f"There is no sweep of the operator '{sweep.operator}'.", step)
    names = RECIPES[sweep.operator].names
    for name in sweep.grid:
        if name not in names:
            raise UsageError(
                f"A sweep of {sweep.operator} has no '{name}'.",
                did_you_mean(name, names) or f"It has: {', '.join(names)}.",
            )
    if missing := [name for name, default in names.items() if default is REQUIRED and name not in sweep.grid]:
        raise UsageError(
            f"A sweep of {sweep.operator} needs {' and '.join(missing)}.", f"Add e.g. {missing[0]}: [64, 128]."
        )
    for name, values in sweep.grid.items():
        for value in values:
            _check_value(sweep.operator, name, value, names[name])


def _written(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _check_value(operator: str, name: str, value: Any, default: Any) -> None:
    def wrong(what: str) -> UsageError:
        return UsageError(f"{name} of a {operator} sweep is {value!r}; it must be {what}.", "Correct the grid.")

    if name == "dtype":
        if value not in (dtypes := RECIPES[operator].dtypes):
            raise wrong(f"one of {', '.join(dtypes)}")
    elif name == "out_dtype":
        if value not in DTYPES:
            raise wrong(f"one of {', '.join(DTYPES)}")
    elif name == "zeros":
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise wrong("a share from 0 to 1")
    elif isinstance(default, bool):
        if not isinstance(value, bool):
            raise wrong("true or false")
    elif isinstance(default, float):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong("a number")
    elif name == "padding" and value in ("same", "valid"):
        return
    elif not (value is None and default is None):
        numbers = value if isinstance(value, list | tuple) else [value]
        if not numbers or any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
            raise wrong("a whole number, or a pair of them")
        if name != "dim" and any(number < 0 for number in numbers):
            raise wrong("at least 0")
        if isinstance(value, list | tuple) and name not in _PAIRS:
            raise wrong("a single whole number")
