"""Sweeps: a grid over one operator's parameters and input sizes, expanded to operator tuples.

`RECIPES` (`farm.operators.sweep_recipes`) say how each operator is built from the values of a grid. Each combination is
built as a real module on the meta device and captured like a model, so a sweep's tuples equal those of a model with
such an operator. Names are checked without torch: a wrong measurement file is refused before torch is imported.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from farm.errors import UnknownOperator, UsageError, did_you_mean
from farm.operators.sweep_recipes import DTYPES, RECIPES, REQUIRED
from farm.types.request import Sweep

if TYPE_CHECKING:
    from farm.operators.cost import Cost
    from farm.types.tuple import OperatorTuple

_PAIRS = frozenset({"kernel_size", "stride", "padding", "dilation", "output_padding", "image_size", "output_size"})
#: Combinations per batch. The first batch is small, so that a card soon has work.
FIRST_BATCH, BATCH = 100, 1000


@dataclass(frozen=True)
class _Skipped:
    """Combinations that PyTorch refuses for one kind of reason; ``example`` and ``reason`` are of the first."""

    count: int
    example: str
    reason: str

    def __str__(self) -> str:
        return f"{self.reason} ({'such as ' if self.count > 1 else ''}{self.example})"


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
        self._skipped: dict[str, _Skipped] = {}

    @property
    def skipped(self) -> dict[str, int]:
        """How many combinations PyTorch refused, by reason with an example."""
        return {str(one): one.count for one in self._skipped.values()}

    def batches(self) -> Iterator[dict[OperatorTuple, Cost]]:
        """The different tuples with their costs. No batch is empty.

        A grid of one batch keeps its order. A larger one is visited in a spread order, so that a drift of the card does
        not coincide with what varies over the sweep.

        Raises:
            UsageError: at the end, if no combination was possible.
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
                self._skip(refusal.kind, str(refusal), values)
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
            reason = next(map(str, self._skipped.values()), "the grid is empty")
            raise UsageError(
                f"None of the {self.sweep.size} combinations of {self.sweep} is possible: {reason}.",
                "Correct the grid.",
            )

    def _skip(self, kind: str, reason: str, values: Mapping[str, Any]) -> None:
        if (first := self._skipped.get(kind)) is None:
            varied = [name for name, given in self.sweep.grid.items() if len(given) > 1] or list(self.sweep.grid)
            first = _Skipped(0, ", ".join(f"{name} {_size_text(values[name])}" for name in varied), reason)
        self._skipped[kind] = dataclasses.replace(first, count=first.count + 1)


def _step(size: int) -> int:
    """The step from one combination to the next; it is coprime to ``size``, so each is visited once."""
    if size <= FIRST_BATCH:
        return 1
    step = round(size * 0.618)  # near the golden ratio, which fills a range evenly
    while math.gcd(step, size) > 1:
        step += 1
    return step


def _combination(axes: Sequence[Sequence[Any]], number: int) -> list[Any]:
    """The values of a combination; the last axis varies fastest, and numbers beyond the last start again."""
    values = []
    for axis in reversed(axes):
        number, place = divmod(number, len(axis))
        values.append(axis[place])
    return values[::-1]


def check_names(sweep: Sweep) -> None:
    """Check the operator, the grid's names and the kinds of its values; needs no torch.

    Raises:
        UnknownOperator: there is no sweep of that operator; suggests the nearest name.
        UsageError: the operator does not take a name or a value.
    """
    if sweep.operator not in RECIPES:
        step = did_you_mean(sweep.operator, RECIPES) or f"There are sweeps of: {', '.join(RECIPES)}."
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


def _size_text(value: Any) -> str:
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
