"""Sweeps: a grid over one operator's parameters and input sizes, expanded to operator tuples.

Each combination is built as a real module on the meta device and captured like a model, so that a sweep's tuples
are exactly the tuples that a model with such an operator would give. Names are checked without torch, so that a
measurement file can be refused before anything heavy loads.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from farm.errors import UnknownOperator, UsageError, did_you_mean
from farm.operators.recipes import DTYPES, RECIPES, REQUIRED
from farm.words.request import Sweep

if TYPE_CHECKING:
    from farm.words.tuple import OperatorTuple

_PAIRS = frozenset({"kernel_size", "stride", "padding", "dilation", "output_padding", "image_size", "output_size"})


@dataclass(frozen=True)
class _LeftOut:
    """Combinations that PyTorch refuses for one kind of reason; the example and its reason are of the first."""

    count: int
    example: str
    reason: str

    def __str__(self) -> str:
        return f"{self.reason} ({'such as ' if self.count > 1 else ''}{self.example})"


@dataclass(frozen=True)
class Expansion:
    """What a sweep came to: its tuples, and how many combinations PyTorch refused, by reason with an example."""

    tuples: tuple[OperatorTuple, ...]
    skipped: Mapping[str, int]


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


def expand(sweep: Sweep) -> list[OperatorTuple]:
    """The operator tuples of a sweep, equal ones once, in the grid's order.

    Raises:
        UnknownOperator, UsageError: as `check_names`; also when not one combination is possible.
    """
    return list(explore(sweep).tuples)


def explore(sweep: Sweep) -> Expansion:
    """As `expand`, and says which combinations PyTorch refuses (a kernel larger than its image) and why."""
    if sweep.id not in _EXPLORED:
        _EXPLORED.clear()  # the command line and the store ask for the same sweep, one after the other
        _EXPLORED[sweep.id] = _explore(sweep)
    return _EXPLORED[sweep.id]


_EXPLORED: dict[str, Expansion] = {}


def _explore(sweep: Sweep) -> Expansion:
    check_names(sweep)
    from farm.operators import sweep_building

    recipe = RECIPES[sweep.operator]
    found: dict[str, OperatorTuple] = {}
    skipped: dict[str, _LeftOut] = {}
    varied = [name for name, given in sweep.grid.items() if len(given) > 1] or list(sweep.grid)
    for combination in itertools.product(*sweep.grid.values()):
        values = {**recipe.names, **dict(zip(sweep.grid, combination, strict=True))}
        try:
            spec = sweep_building.build(sweep.operator, recipe, values)
        except sweep_building.Impossible as refusal:
            example = ", ".join(f"{name} {_written(values[name])}" for name in varied)
            first = skipped.get(refusal.kind, _LeftOut(0, example, str(refusal)))
            skipped[refusal.kind] = dataclasses.replace(first, count=first.count + 1)
            continue
        found.setdefault(spec.id, spec)
    if not found:
        reason = next(map(str, skipped.values()), "the grid is empty")
        raise UsageError(
            f"None of the {sweep.size} combinations of {sweep} is possible: {reason}.", "Correct the grid."
        )
    return Expansion(tuple(found.values()), {str(left): left.count for left in skipped.values()})


def _written(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _check_value(operator: str, name: str, value: Any, default: Any) -> None:
    def wrong(what: str) -> UsageError:
        return UsageError(f"{name} of a {operator} sweep is {value!r}; it must be {what}.", "Correct the grid.")

    if name == "dtype":
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
