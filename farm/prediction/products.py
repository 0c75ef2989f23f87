"""The matrix products of an operator: `count` products of m x k by k x n. A convolution is one for each group.

They follow from the stored description alone: of linear layers, products, convolutions and attention, as modules, as
functions and in aten's order of arguments, which training steps call. None for other operators.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from farm.prediction.families import operator_type
from farm.types.sizes import Sizes, sizes_of
from farm.types.tuple import plain, tensor_references


@dataclass(frozen=True)
class Products:
    """`count` independent products of m x k by k x n."""

    m: int
    n: int
    k: int
    count: int = 1

    @property
    def flops(self) -> int:
        """2 for each multiply-add."""
        return 2 * self.m * self.n * self.k * self.count


def products_of(short_name: str, spec: Mapping[str, Any], sizes: Sizes | None = None) -> Products | None:
    """
    Args:
        short_name: such as ``Conv2d``.
        spec: the tuple's description (`farm.types.tuple.OperatorTuple.to_json`).
        sizes: those of `farm.types.sizes.sizes_of`, if known.
    """
    sizes = sizes or sizes_of(short_name, spec)
    name, shapes = operator_type(short_name), sizes.input_shapes
    if sizes.n and sizes.k and short_name == "matmul" and [len(shape) > 2 for shape in shapes] == [True, False]:
        return Products(math.prod(shapes[0][:-1]), sizes.n, sizes.k)  # all rows by one matrix
    if sizes.m and sizes.n and sizes.k:
        return Products(sizes.m, sizes.n, sizes.k, sizes.products or 1)
    try:
        if name.startswith("convtranspose") or (name == "convolution" and spec.get("kind") == "module"):
            return _of_module(name, sizes, {key: plain(value) for key, value in spec["parameters"].items()})
        if short_name in ("convolution", "convolution_backward"):
            return _of_aten(name, shapes, spec["arguments"])
        if name == "convolution":  # a function, which is given its weight
            return _by_weight(shapes[0], shapes[1], _function_output(shapes, spec), _number(spec, 6, "groups", 1))
        if name in ("linear", "_scaled_mm"):
            return Products(math.prod(shapes[0][:-1]), shapes[1][0 if name == "linear" else 1], shapes[0][-1])
        if "scaled_dot_product" in name:
            query, key = shapes[:2] if "backward" not in name else shapes[1:3]
            return Products(query[-2], key[-2], query[-1], math.prod(query[:-2]))
    except (KeyError, TypeError, ValueError, IndexError):
        pass  # no rule knows this call
    return None


def _of_module(name: str, sizes: Sizes, given: Mapping[str, Any]) -> Products:
    """A convolution, or a transposed one."""
    first, groups, rank = sizes.input_shapes[0], given["groups"], len(given["kernel_size"])
    batch, window = math.prod(first[: -rank - 1]), math.prod(given["kernel_size"])
    n, k = given["out_channels"] // groups, given["in_channels"] // groups
    if name.startswith("convtranspose"):
        return Products(batch * math.prod(first[-rank:]), n * window, k, groups)
    assert sizes.output_shape is not None
    return Products(batch * math.prod(sizes.output_shape[-rank:]), n, k * window, groups)


def _by_weight(first: Sequence[int], weight: Sequence[int], output: Sequence[int], groups: int) -> Products:
    pixels = math.prod(output[2 - len(weight) :])
    return Products(first[0] * pixels, weight[0] // groups, math.prod(weight[1:]), groups)


def _of_aten(name: str, shapes: Sequence[Sequence[int]], arguments: Sequence[Any]) -> Products:
    if name == "convolution":
        first, weight = shapes[:2]
        stride, padding, dilation, transposed, groups = (*map(plain, arguments[3:7]), plain(arguments[8]))
        if transposed:
            return Products(first[0] * math.prod(first[2:]), math.prod(weight[1:]), weight[0] // groups, groups)
        return _by_weight(first, weight, _sizes_out(first, weight, stride, padding, dilation), groups)
    gradient, first, weight = shapes[:3]
    groups, mask = plain(arguments[9]), plain(arguments[10])
    if plain(arguments[7]):  # transposed: input and output change places
        gradient, first = first, gradient
    one = _by_weight(first, weight, gradient, groups)
    return replace(one, count=one.count * max(1, sum(map(bool, mask[:2]))))


def _function_output(shapes: Sequence[Sequence[int]], spec: Mapping[str, Any]) -> list[int]:
    rank = len(shapes[1]) - 2
    stride, padding, dilation = (
        _number(spec, place, word, otherwise)
        for place, word, otherwise in ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
    )
    if isinstance(padding, str):
        padding = 0 if padding == "valid" else [size // 2 for size in shapes[1][2:]]
    spread = (value if isinstance(value, list) else [value] * rank for value in (stride, padding, dilation))
    return _sizes_out(shapes[0], shapes[1], *spread)


def argument(spec: Mapping[str, Any], place: int, name: str) -> Any:
    """An argument by its place, or by its name among the keywords."""
    given = spec.get("arguments") or ()
    return given[place] if place < len(given) else (spec.get("keywords") or {}).get(name)


def _number(spec: Mapping[str, Any], place: int, name: str, default: Any) -> Any:
    """An argument that is not a tensor, or the default."""
    value = plain(argument(spec, place, name))
    return default if value is None or any(True for _ in tensor_references(value)) else value


def _sizes_out(first: Sequence[int], weight: Sequence[int], stride: Any, padding: Any, dilation: Any) -> list[int]:
    return [
        (size + 2 * pad - jump * (width - 1) - 1) // step + 1
        for size, width, step, pad, jump in zip(first[2:], weight[2:], stride, padding, dilation, strict=True)
    ]
