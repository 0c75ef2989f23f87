"""How each operator that a sweep can ask for is built from a grid's values: its parameters, sizes and input shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

DTYPES = ("float32", "float16", "bfloat16")
#: Names that every operator's grid may have: the dtype, and the share of zeros in the inputs.
EVERYWHERE: dict[str, Any] = {"dtype": "float32", "zeros": 0.0}
REQUIRED = object()


@dataclass(frozen=True)
class Recipe:
    """How one operator is built from grid values.

    ``parameters`` go to the module's constructor (or to the function as keywords), ``sizes`` shape the inputs;
    both map a name to its default, or to `REQUIRED`. ``inputs`` gives the inputs' shapes.

    ``dtypes`` are what the grid's dtype may be, the default first. ``input_dtypes`` says of which dtype each input is, where
    that is not the grid's ("" where it is); ``transposed`` are inputs that lie in memory column by column.
    ``derived`` gives keywords that follow from the grid's values; ``as_list`` says that the function takes its inputs in a
    list.
    """

    parameters: Mapping[str, Any]
    sizes: Mapping[str, Any]
    inputs: Callable[[Mapping[str, Any]], tuple[tuple[int, ...], ...]]
    function: str = ""  # e.g. "torch.matmul"; empty: the module torch.nn.<operator>
    dtypes: tuple[str, ...] = DTYPES
    input_dtypes: tuple[str, ...] = ()
    transposed: frozenset[int] = frozenset()
    derived: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda values: {}
    as_list: bool = False

    @property
    def names(self) -> dict[str, Any]:
        return {**self.parameters, **self.sizes, **EVERYWHERE, "dtype": self.dtypes[0]}

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


def _activation(parameters: Mapping[str, Any] | None = None) -> Recipe:
    return Recipe({"inplace": False, **(parameters or {})}, _IMAGE, _image("channels"))


def _plain_activation() -> Recipe:
    return Recipe({}, _IMAGE, _image("channels"))


def _pool(parameters: Mapping[str, Any]) -> Recipe:
    return Recipe(parameters, _IMAGE, _image("channels"))


def _attention(values: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Query, key and value: the queries are the newest tokens of a sequence, whose earlier ones lie in the cache."""
    kept = (
        values["batch"],
        values["key_value_heads"] or values["heads"],
        values["cache"] + values["tokens"],
        values["head_features"],
    )
    return (values["batch"], values["heads"], values["tokens"], values["head_features"]), kept, kept


def _heads(values: Mapping[str, Any]) -> tuple[int, ...]:
    return values["batch"], values["heads"], values["tokens"], values["head_features"]


def _image_or_heads(values: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Two alike: images, or where tokens are given queries of many heads."""
    return (_heads(values),) * 2 if values["tokens"] else _image("channels")(values) * 2


def _turned(values: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """As `_image_or_heads`; but all heads of a token are turned by the same angles."""
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

RECIPES: dict[str, Recipe] = {
    "Conv2d": Recipe(_CONVOLUTION, {"batch": 1, "image_size": 56}, _image("in_channels")),
    "ConvTranspose2d": Recipe(
        {**_CONVOLUTION, "output_padding": 0}, {"batch": 1, "image_size": 56}, _image("in_channels")
    ),
    "Linear": Recipe(
        {"in_features": REQUIRED, "out_features": REQUIRED, "bias": True},
        {"batch": 1, "tokens": 0},
        _tokens("in_features"),
    ),
    "BatchNorm2d": Recipe(_NORM, {"batch": 1, "image_size": 56}, _image("num_features")),
    "GroupNorm": Recipe(
        {"num_groups": REQUIRED, "num_channels": REQUIRED, "eps": 1e-5, "affine": True},
        {"batch": 1, "image_size": 56},
        _image("num_channels"),
    ),
    "LayerNorm": Recipe(
        {"normalized_shape": REQUIRED, "eps": 1e-5, "elementwise_affine": True},
        {"batch": 1, "tokens": 0},
        _tokens("normalized_shape"),
    ),
    "RMSNorm": Recipe(
        {"normalized_shape": REQUIRED, "eps": 1e-6, "elementwise_affine": True},
        {"batch": 1, "tokens": 0},
        _tokens("normalized_shape"),
    ),
    "MultiheadAttention": Recipe(
        {"embed_dim": REQUIRED, "num_heads": 1, "bias": True},
        {"batch": 1, "tokens": 197},
        lambda values: ((values["batch"], values["tokens"], values["embed_dim"]),),
    ),
    "Embedding": Recipe(
        {"num_embeddings": REQUIRED, "embedding_dim": REQUIRED},
        {"batch": 1, "tokens": 128},
        lambda values: ((values["batch"], values["tokens"]),),
        input_dtypes=("int64",),
    ),
    "MaxPool2d": _pool({"kernel_size": 2, "stride": None, "padding": 0, "dilation": 1, "ceil_mode": False}),
    "AvgPool2d": _pool({"kernel_size": 2, "stride": None, "padding": 0, "ceil_mode": False}),
    "AdaptiveAvgPool2d": _pool({"output_size": 1}),
    "ReLU": _activation(),
    "ReLU6": _activation(),
    "SiLU": _activation(),
    "Hardswish": _activation(),
    "Hardsigmoid": _activation(),
    "GELU": _plain_activation(),
    "Sigmoid": _plain_activation(),
    "Tanh": _plain_activation(),
    "Softmax": Recipe({"dim": -1}, {"batch": 1, "tokens": 197, "features": 197}, _tokens("features")),
    "matmul": Recipe(
        {},
        {"m": REQUIRED, "n": REQUIRED, "k": REQUIRED},
        lambda values: ((values["m"], values["k"]), (values["k"], values["n"])),
        function="torch.matmul",
    ),
    "bmm": Recipe(
        {},
        {"batch": 1, "m": REQUIRED, "n": REQUIRED, "k": REQUIRED},
        lambda values: ((values["batch"], values["m"], values["k"]), (values["batch"], values["k"], values["n"])),
        function="torch.bmm",
    ),
    "softmax": Recipe(
        {"dim": -1},
        {"batch": 1, "tokens": 197, "features": 197},
        _tokens("features"),
        function="torch.nn.functional.softmax",
    ),
    "scaled_dot_product_attention": Recipe(
        {"is_causal": False},
        {"batch": 1, "heads": 12, "key_value_heads": 0, "tokens": 197, "cache": 0, "head_features": 64},
        _attention,
        function="torch.nn.functional.scaled_dot_product_attention",
        derived=lambda values: {"enable_gqa": True} if values["key_value_heads"] not in (0, values["heads"]) else {},
    ),
    "_scaled_mm": Recipe(
        {"out_dtype": "bfloat16", "use_fast_accum": False},
        {"m": REQUIRED, "n": REQUIRED, "k": REQUIRED},
        lambda values: ((values["m"], values["k"]), (values["k"], values["n"]), (), ()),
        function="torch._scaled_mm",
        dtypes=("float8_e4m3fn", "float8_e5m2"),
        input_dtypes=("", "float8_e4m3fn", "float32", "float32"),
        transposed=frozenset({1}),
    ),
    "add": Recipe({}, {**_IMAGE, **_HEADS}, _image_or_heads, function="torch.add"),
    "mul": Recipe({}, {**_IMAGE, **_HEADS}, _turned, function="torch.mul"),
    "neg": Recipe({}, {"batch": 1, **_HEADS, "tokens": 128}, lambda values: (_heads(values),), function="torch.neg"),
    "cat": Recipe(
        {"dim": -1},
        {"batch": 1, **_HEADS, "tokens": 128},
        lambda values: (_heads(values),) * 2,
        function="torch.cat",
        as_list=True,
    ),
    "cos": Recipe({}, _ANGLES, _tokens("head_features"), function="torch.cos"),
    "sin": Recipe({}, _ANGLES, _tokens("head_features"), function="torch.sin"),
}
