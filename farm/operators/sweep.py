"""Sweeps: grids over one operator's parameters and input sizes. `RECIPES` say how each operator is built from the
values of a grid; `farm.operators.sweep_builder` expands a grid to operator tuples. Names are checked without torch: a
wrong measurement file is refused before torch is imported."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farm.errors import UnknownOperator, UsageError, did_you_mean
from farm.types.collective import COLLECTIVES, REDUCTIONS
from farm.types.request import CALIBRATION, Sweep
from farm.types.tuple import OperatorTuple, parse

_PAIRS = frozenset({"kernel_size", "stride", "padding", "dilation", "output_padding", "image_size", "output_size"})
_CALIBRATION_FILE = Path(__file__).parent.parent / "data" / "calibration.json"
DTYPES = ("float32", "float16", "bfloat16")
#: Names that every grid may have: the dtype, and the share of zeros in the inputs.
COMMON_NAMES: dict[str, Any] = {"dtype": "float32", "zeros": 0.0}
REQUIRED = object()


@dataclass(frozen=True)
class SweepRecipe:
    """How one operator is built from the values of a grid.

    Attributes:
        parameters: arguments of the module's constructor, or keywords of the function: name -> default, or `REQUIRED`.
        sizes: names that shape the inputs: name -> default, or `REQUIRED`.
        inputs: the shapes of the inputs.
        function: its public name, such as "torch.matmul"; "" for the module torch.nn.<operator>.
        dtypes: the dtypes that the grid may have, the default first.
        input_dtypes: the dtype of each input; "" for the grid's.
        transposed: indices of the inputs that are stored column by column.
        derived: keywords that follow from the grid's values.
        as_list: True if the function takes one list of its inputs.
        collective: a collective (`farm.types.collective`).
    """

    parameters: Mapping[str, Any]
    sizes: Mapping[str, Any]
    inputs: Callable[[Mapping[str, Any]], tuple[tuple[int, ...], ...]]
    function: str = ""
    dtypes: tuple[str, ...] = DTYPES
    input_dtypes: tuple[str, ...] = ()
    transposed: frozenset[int] = frozenset()
    derived: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda values: {}
    as_list: bool = False
    collective: bool = False

    @property
    def names(self) -> dict[str, Any]:
        return {**self.parameters, **self.sizes, **COMMON_NAMES, "dtype": self.dtypes[0]}

    def given(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The operator's parameters for one combination of the sweep's values."""
        return {**{name: values[name] for name in self.parameters}, **self.derived(values)}


def _pair(value: Any) -> tuple[int, int]:
    height, width = (value, value) if isinstance(value, int) else tuple(value)
    return int(height), int(width)


def _image(channels: str) -> Callable[[Mapping[str, Any]], tuple[tuple[int, ...], ...]]:
    return lambda values: ((values["batch"], values[channels], *_pair(values["image_size"])),)


def _tokens(features: str) -> Callable[[Mapping[str, Any]], tuple[tuple[int, ...], ...]]:
    def shapes(values: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
        middle = (values["tokens"],) if values["tokens"] else ()
        return ((values["batch"], *middle, values[features]),)

    return shapes


def _attention(values: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Shapes of query, key and value. Queries are the newest tokens of a sequence; the cache contains the earlier
    ones."""
    length = values["cache"] + values["tokens"]
    cached = (values["batch"], values["key_value_heads"] or values["heads"], length, values["head_features"])
    return _heads(values), cached, cached


def _heads(values: Mapping[str, Any]) -> tuple[int, ...]:
    return values["batch"], values["heads"], values["tokens"], values["head_features"]


def _image_or_heads(values: Mapping[str, Any], *, rotated: bool = False) -> tuple[tuple[int, ...], ...]:
    """Two equal shapes: images, or queries of many heads if tokens are given. With ``rotated`` the second has one head:
    all heads of a token are rotated by the same angles."""
    if not values["tokens"]:
        return _image("channels")(values) * 2
    one = _heads(values)
    return one, ((one[0], 1, *one[2:]) if rotated else one)


_IMAGE: dict[str, Any] = {"batch": 1, "channels": 64, "image_size": 56}
_ROWS: dict[str, Any] = {"batch": 1, "tokens": 0}
_SCORES: dict[str, Any] = {"batch": 1, "tokens": 197, "features": 197}
_CONVOLUTION: dict[str, Any] = {"in_channels": REQUIRED, "out_channels": REQUIRED, "kernel_size": 1}
_CONVOLUTION |= {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, "bias": True}
_PRODUCT: dict[str, Any] = {"m": REQUIRED, "n": REQUIRED, "k": REQUIRED}
_HEADS: dict[str, Any] = {"heads": 12, "tokens": 0, "head_features": 64}
_KEYS: dict[str, Any] = {"batch": 1, "heads": 12, "tokens": 128, "head_features": 64}
_ANGLES: dict[str, Any] = {"batch": 1, "tokens": 128, "head_features": 64}
_LINEAR: dict[str, Any] = {"in_features": REQUIRED, "out_features": REQUIRED, "bias": True}
_NORM: dict[str, Any] = {"eps": 1e-5, "affine": True}
_ROW_NORM: dict[str, Any] = {"normalized_shape": REQUIRED, "eps": 1e-5, "elementwise_affine": True}
_SIZE: dict[str, Any] = {"batch": 1, "image_size": 56}
_POOL: dict[str, Any] = {"kernel_size": 2, "stride": None, "padding": 0}

RECIPES: dict[str, SweepRecipe] = {
    "Conv2d": SweepRecipe(_CONVOLUTION, _SIZE, _image("in_channels")),
    "ConvTranspose2d": SweepRecipe({**_CONVOLUTION, "output_padding": 0}, _SIZE, _image("in_channels")),
    "Linear": SweepRecipe(_LINEAR, _ROWS, _tokens("in_features")),
    "BatchNorm2d": SweepRecipe({"num_features": REQUIRED, **_NORM}, _SIZE, _image("num_features")),
    "GroupNorm": SweepRecipe(
        {"num_groups": REQUIRED, "num_channels": REQUIRED, **_NORM}, _SIZE, _image("num_channels")
    ),
    "LayerNorm": SweepRecipe(_ROW_NORM, _ROWS, _tokens("normalized_shape")),
    "RMSNorm": SweepRecipe({**_ROW_NORM, "eps": 1e-6}, _ROWS, _tokens("normalized_shape")),
    "MultiheadAttention": SweepRecipe(
        {"embed_dim": REQUIRED, "num_heads": 1, "bias": True},
        {"batch": 1, "tokens": 197},
        lambda values: ((values["batch"], values["tokens"], values["embed_dim"]),),
    ),
    "Embedding": SweepRecipe(
        {"num_embeddings": REQUIRED, "embedding_dim": REQUIRED},
        {"batch": 1, "tokens": 128},
        lambda values: ((values["batch"], values["tokens"]),),
        input_dtypes=("int64",),
    ),
    "MaxPool2d": SweepRecipe({**_POOL, "dilation": 1, "ceil_mode": False}, _IMAGE, _image("channels")),
    "AvgPool2d": SweepRecipe({**_POOL, "ceil_mode": False}, _IMAGE, _image("channels")),
    "AdaptiveAvgPool2d": SweepRecipe({"output_size": 1}, _IMAGE, _image("channels")),
    **dict.fromkeys(
        ("ReLU", "ReLU6", "SiLU", "Hardswish", "Hardsigmoid"),
        SweepRecipe({"inplace": False}, _IMAGE, _image("channels")),
    ),
    **dict.fromkeys(("GELU", "Sigmoid", "Tanh"), SweepRecipe({}, _IMAGE, _image("channels"))),
    "Softmax": SweepRecipe({"dim": -1}, _SCORES, _tokens("features")),
    "matmul": SweepRecipe(
        {},
        _PRODUCT,
        lambda values: ((values["m"], values["k"]), (values["k"], values["n"])),
        function="torch.matmul",
    ),
    "bmm": SweepRecipe(
        {},
        {"batch": 1, **_PRODUCT},
        lambda values: ((values["batch"], values["m"], values["k"]), (values["batch"], values["k"], values["n"])),
        function="torch.bmm",
    ),
    "softmax": SweepRecipe({"dim": -1}, _SCORES, _tokens("features"), function="torch.nn.functional.softmax"),
    "scaled_dot_product_attention": SweepRecipe(
        {"is_causal": False},
        {"batch": 1, "heads": 12, "key_value_heads": 0, "tokens": 197, "cache": 0, "head_features": 64},
        _attention,
        function="torch.nn.functional.scaled_dot_product_attention",
        derived=lambda values: {"enable_gqa": True} if values["key_value_heads"] not in (0, values["heads"]) else {},
    ),
    "_scaled_mm": SweepRecipe(
        {"out_dtype": "bfloat16", "use_fast_accum": False},
        _PRODUCT,
        lambda values: ((values["m"], values["k"]), (values["k"], values["n"]), (), ()),
        function="torch._scaled_mm",
        dtypes=("float8_e4m3fn", "float8_e5m2"),
        input_dtypes=("", "float8_e4m3fn", "float32", "float32"),
        transposed=frozenset({1}),
    ),
    "add": SweepRecipe({}, {**_IMAGE, **_HEADS}, _image_or_heads, function="torch.add"),
    "mul": SweepRecipe(
        {}, {**_IMAGE, **_HEADS}, functools.partial(_image_or_heads, rotated=True), function="torch.mul"
    ),
    "neg": SweepRecipe({}, _KEYS, lambda values: (_heads(values),), function="torch.neg"),
    "cat": SweepRecipe({"dim": -1}, _KEYS, lambda values: (_heads(values),) * 2, function="torch.cat", as_list=True),
    "cos": SweepRecipe({}, _ANGLES, _tokens("head_features"), function="torch.cos"),
    "sin": SweepRecipe({}, _ANGLES, _tokens("head_features"), function="torch.sin"),
    **{
        name: SweepRecipe(
            {"cards": 2, "beside": 0, **({"reduction": "sum"} if about.reduces else {})},
            {"elements": REQUIRED},
            lambda values: ((values["elements"],),),
            collective=True,
        )
        for name, about in COLLECTIVES.items()
    },
}


def calibration_tuples() -> list[OperatorTuple]:
    """Return the operator tuples whose readings calibrate predictions for a card, the most useful one first."""
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
    if not numbers or any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
        return "a whole number, or a pair of them"
    if name != "dim" and min(numbers) < 0:
        return "at least 0"
    return "a single whole number" if several and name not in _PAIRS else ""
