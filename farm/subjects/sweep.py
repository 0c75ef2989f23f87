"""Sweeps: grids over one operator's parameters and input sizes. `RECIPES` say how each operator is
built from the values of a grid; `farm.operators.sweep_builder` expands a grid to operator tuples.
Names are checked without torch: a wrong measurement file is refused before torch is imported."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farm.errors import UnknownOperator, UsageError, did_you_mean, reading_package
from farm.subjects.parsing import parse
from farm.types.collective import COLLECTIVES, REDUCTIONS
from farm.types.protocol import Protocol
from farm.types.request import PACKAGED_LISTS, Sweep
from farm.types.tuple import OperatorTuple

_PAIRS = frozenset(
    {"kernel_size", "stride", "padding", "dilation", "output_padding", "image_size", "output_size"}
)
_DATA = Path(__file__).parent.parent / "data"
DTYPES = ("float32", "float16", "bfloat16")
#: Names that every grid may have: the dtype, and the share of zeros in the inputs.
COMMON_NAMES: dict[str, Any] = {"dtype": "float32", "zeros": 0.0}
REQUIRED = object()


@dataclass(frozen=True)
class SweepRecipe:
    """How one operator is built from the values of a grid: an entry of ``sweeps.json``.

    ``parameters`` are arguments of the module's constructor, or keywords of the function; ``sizes``
    shape the inputs. Both are name -> default, or `REQUIRED`. The shape of each of the ``inputs``
    has names of sizes and parameters, and numbers. `a?` is left out if it is 0, `a|b` is b if a is
    0, `a+b` is the sum; an image size is a height and a width."""

    parameters: Mapping[str, Any]
    sizes: Mapping[str, Any]
    inputs: Sequence[str]
    inputs_without_tokens: Sequence[str] = ()  # the shapes if the size `tokens` is 0; (): the same
    # its public name, such as "torch.matmul"; "" for the module torch.nn.<operator>
    function: str = ""
    dtypes: Sequence[str] = DTYPES  # that the grid may have, the default first
    input_dtypes: Sequence[str] = ()  # the dtype of each input; "" for the grid's
    transposed: Sequence[int] = ()  # indices of the inputs that are stored column by column
    as_list: bool = False  # True if the function takes one list of its inputs
    collective: bool = False  # see `farm.types.collective`

    @property
    def names(self) -> dict[str, Any]:
        return {**self.parameters, **self.sizes, **COMMON_NAMES, "dtype": self.dtypes[0]}

    def given(self, values: Mapping[str, Any]) -> dict[str, Any]:
        parameters = {name: values[name] for name in self.parameters}
        if values.get("key_value_heads") not in (None, 0, values.get("heads")):
            parameters["enable_gqa"] = True
        return parameters

    def shapes(self, values: Mapping[str, Any]) -> list[tuple[int, ...]]:
        inputs = (
            self.inputs if values.get("tokens", 1) else self.inputs_without_tokens or self.inputs
        )
        return [
            tuple(size for word in shape.split() for size in _sizes(word, values))
            for shape in inputs
        ]


def _sizes(word: str, values: Mapping[str, Any]) -> tuple[int, ...]:
    """The sizes that a word of `SweepRecipe.inputs` stands for."""
    if word.isdigit():
        return (int(word),)
    if word == "image_size":
        value = values[word]
        height, width = (value, value) if isinstance(value, int) else value
        return int(height), int(width)
    size = 0
    for names in word.rstrip("?").split("|"):
        size = size or sum(values[name] for name in names.split("+"))
    return (size,) if size or not word.endswith("?") else ()


def _recipes() -> Iterator[tuple[str, SweepRecipe]]:
    """Yield operator and recipe. In the file, several operators may have one recipe."""
    for names, recipe in json.loads(
        Path(__file__).with_name("sweeps.json").read_text(encoding="utf-8")
    ).items():
        for part in ("parameters", "sizes"):
            recipe[part] = {
                name: REQUIRED if value == "required" else value
                for name, value in recipe[part].items()
            }
        for name in names.split():
            yield name, SweepRecipe(**recipe)
    for name, collective in COLLECTIVES.items():
        parameters = {
            "cards": 2,
            "beside": 0,
            **({"reduction": "sum"} if collective.reduces else {}),
        }
        yield name, SweepRecipe(parameters, {"elements": REQUIRED}, ("elements",), collective=True)


RECIPES = dict(_recipes())


@dataclass(frozen=True)
class PackagedTuple:
    """An operator tuple of a packaged list.

    Attributes:
        conditions: what differs from the protocol of the request, such as ``{"tf32": True}``.
    """

    spec: OperatorTuple
    conditions: Mapping[str, Any]

    def protocol(self, usual: Protocol) -> Protocol:
        """The protocol of the tuple in a request with the protocol ``usual``."""
        return dataclasses.replace(usual, **self.conditions)


def packaged_tuples(name: str) -> list[PackagedTuple]:
    """Return the operator tuples of a packaged list, one of `PACKAGED_LISTS`, the most useful one
    first. A tuple may be in the list under several conditions.
    """
    file = _DATA / f"{name}.json"
    with reading_package(file):
        entries = json.loads(file.read_text(encoding="utf-8"))
        packaged = []
        for entry in entries:
            conditions = entry.pop("conditions", {})
            packaged.append(PackagedTuple(parse(entry), conditions))
        return packaged


def check_names(sweep: Sweep) -> None:
    """Check the operator, the grid's names and the kinds of its values; needs no torch. Raises
    `UnknownOperator`, which suggests the nearest name, if there is no sweep of that operator;
    `UsageError` if it has no parameter of that name, or does not accept a value."""
    if sweep.operator in PACKAGED_LISTS:
        if sweep.grid:
            raise UsageError(
                f"The {sweep.operator} measures a fixed list of operator tuples.",
                "Remove the grid.",
            )
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
    if missing := [
        name for name, default in names.items() if default is REQUIRED and name not in sweep.grid
    ]:
        raise UsageError(
            f"The grid of a {sweep.operator} sweep needs {' and '.join(missing)}.",
            f"Add for example {missing[0]}: [64, 128].",
        )
    for name, values in sweep.grid.items():
        for value in values:
            if problem := _problem(sweep.operator, name, value, names[name]):
                text = f"{name} of a {sweep.operator} sweep is {value!r}; it must be {problem}."
                raise UsageError(text, f"Change the values of {name} in the grid.")


def _problem(operator: str, name: str, value: Any, default: Any) -> str:
    """The requirement that a value of the grid violates; "" if the value is valid."""
    several = isinstance(value, list | tuple)
    numbers = value if several else [value]
    if name in ("dtype", "out_dtype"):
        dtypes = RECIPES[operator].dtypes if name == "dtype" else DTYPES
        return "" if value in dtypes else f"one of {', '.join(dtypes)}"
    if name == "reduction":
        return "" if value in REDUCTIONS else f"one of {', '.join(REDUCTIONS)}"
    if name == "cards":
        return "" if type(value) is int and value > 1 else "at least 2"
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(default, float):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name == "zeros":
            return "" if is_number and 0 <= value <= 1 else "a share from 0 to 1"
        return "" if is_number else "a number"
    if (name == "padding" and value in ("same", "valid")) or (value is None and default is None):
        return ""
    if not numbers or any(
        isinstance(number, bool) or not isinstance(number, int) for number in numbers
    ):
        return "a whole number, or a pair of them"
    if name != "dim" and min(numbers) < 0:
        return "at least 0"
    return "a single whole number" if several and name not in _PAIRS else ""
