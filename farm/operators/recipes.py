"""How each operator that a sweep can ask for is built from a grid's values: its parameters, sizes and input shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
    """

    parameters: Mapping[str, Any]
    sizes: Mapping[str, Any]
    inputs: Callable[[Mapping[str, Any]], tuple[tuple[int, ...], ...]]
    function: str = ""  # e.g. "torch.matmul"; empty: the module torch.nn.<operator>
    derived: Mapping[str, str] = field(default_factory=dict)  # a parameter that takes another's value if unsaid

    @property
    def names(self) -> dict[str, Any]:
        return {**self.parameters, **self.sizes, **EVERYWHERE}


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


def _elementwise(function: str, operands: int = 2) -> Recipe:
    return Recipe({}, _IMAGE, lambda values: _image("channels")(values) * operands, function=function)


def _pool(parameters: Mapping[str, Any]) -> Recipe:
    return Recipe(parameters, _IMAGE, _image("channels"))


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
    "MultiheadAttention": Recipe(
        {"embed_dim": REQUIRED, "num_heads": 1, "bias": True},
        {"batch": 1, "tokens": 197},
        lambda values: ((values["batch"], values["tokens"], values["embed_dim"]),),
    ),
    "Embedding": Recipe(
        {"num_embeddings": REQUIRED, "embedding_dim": REQUIRED},
        {"batch": 1, "tokens": 128},
        lambda values: ((values["batch"], values["tokens"]),),
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
        {"batch": 1, "heads": 12, "tokens": 197, "head_features": 64},
        lambda values: ((values["batch"], values["heads"], values["tokens"], values["head_features"]),) * 3,
        function="torch.nn.functional.scaled_dot_product_attention",
    ),
    "add": _elementwise("torch.add"),
    "mul": _elementwise("torch.mul"),
}
