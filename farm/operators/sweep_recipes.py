"""How the operators of a sweep are built from the values of a grid: a table, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
