"""Sweeps: a grid over one operator's parameters and input sizes, expanded to operator tuples.

`RECIPES` say how each operator is built from the values of a grid. Each combination is built as a real module on the
meta device and captured like a model, so a sweep's tuples equal those of a model with such an operator. Names are
checked without torch: a wrong measurement file is refused before anything heavy is imported.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from farm.errors import UnknownOperator, UsageError, did_you_mean
from farm.types.request import Sweep

if TYPE_CHECKING:
    from farm.operators.cost import Cost
    from farm.types.tuple import OperatorTuple

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
        dtypes: what the grid's dtype may be, the default first.
        input_dtypes: the dtype of each input; "" for the grid's.
        transposed: the inputs that are stored column by column.
        derived: keywords that follow from the grid's values.
        as_list: the function takes its inputs in a list.
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

    @property
    def names(self) -> dict[str, Any]:
        return {**self.parameters, **self.sizes, **COMMON_NAMES, "dtype": self.dtypes[0]}

    def given(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters of one combination."""
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


def _on_images(parameters: Mapping[str, Any] | None = None) -> SweepRecipe:
    """An activation function or a pool of images."""
    return SweepRecipe(parameters or {}, _IMAGE, _image("channels"))


def _attention(values: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Query, key and value: the queries are the newest tokens of a sequence; the cache holds the earlier ones."""
    length = values["cache"] + values["tokens"]
    cached = (values["batch"], values["key_value_heads"] or values["heads"], length, values["head_features"])
    return _heads(values), cached, cached


def _heads(values: Mapping[str, Any]) -> tuple[int, ...]:
    return values["batch"], values["heads"], values["tokens"], values["head_features"]


def _image_or_heads(values: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Two equal shapes: images, or queries of many heads if tokens are given."""
    return (_heads(values),) * 2 if values["tokens"] else _image("channels")(values) * 2


def _rotated(values: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """As `_image_or_heads`, but all heads of a token are rotated by the same angles."""
    one, other = _image_or_heads(values)
    return one, ((other[0], 1, *other[2:]) if values["tokens"] else other)


_IMAGE: dict[str, Any] = {"batch": 1, "channels": 64, "image_size": 56}
_CONVOLUTION: dict[str, Any] = {
    "in_channels": REQUIRED,
    "out_channels": REQUIRED,
    "kernel_size": 1,
    "stride": 1,
    "padding": 0,
    "dilation": 1,
    "groups": 1,
    "bias": True,
}
_HEADS: dict[str, Any] = {"heads": 12, "tokens": 0, "head_features": 64}
_ANGLES: dict[str, Any] = {"batch": 1, "tokens": 128, "head_features": 64}
_NORM: dict[str, Any] = {"num_features": REQUIRED, "eps": 1e-5, "affine": True}

RECIPES: dict[str, SweepRecipe] = {
    "Conv2d": SweepRecipe(_CONVOLUTION, {"batch": 1, "image_size": 56}, _image("in_channels")),
    "ConvTranspose2d": SweepRecipe(
        {**_CONVOLUTION, "output_padding": 0}, {"batch": 1, "image_size": 56}, _image("in_channels")
    ),
    "Linear": SweepRecipe(
        {"in_features": REQUIRED, "out_features": REQUIRED, "bias": True},
        {"batch": 1, "tokens": 0},
        _tokens("in_features"),
    ),
    "BatchNorm2d": SweepRecipe(_NORM, {"batch": 1, "image_size": 56}, _image("num_features")),
    "GroupNorm": SweepRecipe(
        {"num_groups": REQUIRED, "num_channels": REQUIRED, "eps": 1e-5, "affine": True},
        {"batch": 1, "image_size": 56},
        _image("num_channels"),
    ),
    "LayerNorm": SweepRecipe(
        {"normalized_shape": REQUIRED, "eps": 1e-5, "elementwise_affine": True},
        {"batch": 1, "tokens": 0},
        _tokens("normalized_shape"),
    ),
    "RMSNorm": SweepRecipe(
        {"normalized_shape": REQUIRED, "eps": 1e-6, "elementwise_affine": True},
        {"batch": 1, "tokens": 0},
        _tokens("normalized_shape"),
    ),
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
    "MaxPool2d": _on_images({"kernel_size": 2, "stride": None, "padding": 0, "dilation": 1, "ceil_mode": False}),
    "AvgPool2d": _on_images({"kernel_size": 2, "stride": None, "padding": 0, "ceil_mode": False}),
    "AdaptiveAvgPool2d": _on_images({"output_size": 1}),
    **dict.fromkeys(("ReLU", "ReLU6", "SiLU", "Hardswish", "Hardsigmoid"), _on_images({"inplace": False})),
    **dict.fromkeys(("GELU", "Sigmoid", "Tanh"), _on_images()),
    "Softmax": SweepRecipe({"dim": -1}, {"batch": 1, "tokens": 197, "features": 197}, _tokens("features")),
    "matmul": SweepRecipe(
        {},
        {"m": REQUIRED, "n": REQUIRED, "k": REQUIRED},
        lambda values: ((values["m"], values["k"]), (values["k"], values["n"])),
        function="torch.matmul",
    ),
    "bmm": SweepRecipe(
        {},
        {"batch": 1, "m": REQUIRED, "n": REQUIRED, "k": REQUIRED},
        lambda values: ((values["batch"], values["m"], values["k"]), (values["batch"], values["k"], values["n"])),
        function="torch.bmm",
    ),
    "softmax": SweepRecipe(
        {"dim": -1},
        {"batch": 1, "tokens": 197, "features": 197},
        _tokens("features"),
        function="torch.nn.functional.softmax",
    ),
    "scaled_dot_product_attention": SweepRecipe(
        {"is_causal": False},
        {"batch": 1, "heads": 12, "key_value_heads": 0, "tokens": 197, "cache": 0, "head_features": 64},
        _attention,
        function="torch.nn.functional.scaled_dot_product_attention",
        derived=lambda values: {"enable_gqa": True} if values["key_value_heads"] not in (0, values["heads"]) else {},
    ),
    "_scaled_mm": SweepRecipe(
        {"out_dtype": "bfloat16", "use_fast_accum": False},
        {"m": REQUIRED, "n": REQUIRED, "k": REQUIRED},
        lambda values: ((values["m"], values["k"]), (values["k"], values["n"]), (), ()),
        function="torch._scaled_mm",
        dtypes=("float8_e4m3fn", "float8_e5m2"),
        input_dtypes=("", "float8_e4m3fn", "float32", "float32"),
        transposed=frozenset({1}),
    ),
    "add": SweepRecipe({}, {**_IMAGE, **_HEADS}, _image_or_heads, function="torch.add"),
    "mul": SweepRecipe({}, {**_IMAGE, **_HEADS}, _rotated, function="torch.mul"),
    "neg": SweepRecipe(
        {}, {"batch": 1, **_HEADS, "tokens": 128}, lambda values: (_heads(values),), function="torch.neg"
    ),
    "cat": SweepRecipe(
        {"dim": -1},
        {"batch": 1, **_HEADS, "tokens": 128},
        lambda values: (_heads(values),) * 2,
        function="torch.cat",
        as_list=True,
    ),
    "cos": SweepRecipe({}, _ANGLES, _tokens("head_features"), function="torch.cos"),
    "sin": SweepRecipe({}, _ANGLES, _tokens("head_features"), function="torch.sin"),
}


# ------------------------------------------------------------------------------------------------ expansion

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
