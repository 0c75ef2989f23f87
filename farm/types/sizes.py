"""The sizes of an operator call, from its tuple alone: dtype, input and output shapes, and m, n and k of matrix
products.

They are exported columns, filters and features of predictors, computed for thousands of stored tuples without torch.
An operator without a rule here has no output shape. A test compares the rules with PyTorch.
(`farm.operators.replay.output_shapes` runs any operator on fake tensors.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farm.types.tuple import DTYPES, plain, tensor_references, words

Shape = tuple[int, ...]

_CONVOLUTIONS = {f"Conv{rank}d": rank for rank in (1, 2, 3)}
_POOLS = {f"{kind}Pool{rank}d": rank for kind in ("Max", "Avg") for rank in (1, 2, 3)}
_ADAPTIVE = {f"{name}{rank}d": rank for name in ("AdaptiveAvgPool", "adaptive_avg_pool") for rank in (1, 2, 3)}
_PRODUCTS = frozenset(["mm", "bmm", "matmul", "addmm", "baddbmm"])
#: The output has the shape of the first input.
_SAME_SHAPE = words(
    """
    ReLU ReLU6 LeakyReLU ELU GELU SiLU Mish Sigmoid Tanh Hardswish Hardsigmoid Hardtanh Softmax LogSoftmax Identity
    Dropout Dropout1d Dropout2d Dropout3d AlphaDropout BatchNorm1d BatchNorm2d BatchNorm3d LayerNorm GroupNorm
    InstanceNorm1d InstanceNorm2d InstanceNorm3d LocalResponseNorm RMSNorm relu relu_ relu6 gelu silu sigmoid sigmoid_
    tanh softmax log_softmax hardswish hardsigmoid dropout layer_norm contiguous clone exp rsqrt sqrt neg abs
    """
)
#: The output has the broadcast shape of the inputs.
_ELEMENTWISE = words("add sub mul div add_ sub_ mul_ div_ maximum minimum ge gt le lt eq ne")


@dataclass(frozen=True)
class Sizes:
    """Inputs and output of one call; for a product (``products`` times m x k by k x n) also its sizes."""

    dtype: str | None  # of the first floating tensor, otherwise of the first
    input_shapes: tuple[Shape, ...]  # of the tensors that are passed in the call, in order
    output_shape: Shape | None = None
    m: int | None = None
    n: int | None = None
    k: int | None = None
    products: int | None = None

    @property
    def input_shape(self) -> Shape | None:
        """The shape of the first tensor that is passed in the call."""
        return self.input_shapes[0] if self.input_shapes else None


def sizes_of(short_name: str, spec: Mapping[str, Any]) -> Sizes:
    """The sizes of a stored operator tuple.

    Args:
        short_name: such as ``Conv2d``.
        spec: its description (`farm.types.tuple.OperatorTuple.to_json`).
    """
    tensors = spec.get("tensors") or []
    trees = [*(spec.get("arguments") or ()), *(spec.get("keywords") or {}).values()]
    shapes = tuple(tuple(tensors[index]["shape"]) for tree in trees for index in tensor_references(tree))
    dtypes = [tensor["dtype"] for tensor in tensors]
    floating = (name for name in dtypes if name in DTYPES and DTYPES[name][1][0] in "fb" and name != "bool")
    dtype = next(floating, dtypes[0] if dtypes else None)
    try:
        output, product = _output(short_name, spec, shapes)
    except (KeyError, TypeError, ValueError, IndexError):  # an unusual call, without a rule here
        output, product = None, {}
    return Sizes(dtype, shapes, output, **product)


def _output(name: str, spec: Mapping[str, Any], shapes: tuple[Shape, ...]) -> tuple[Shape | None, dict[str, int]]:
    """The output shape, and m, n, k and products of a matrix product."""
    if not shapes:
        return None, {}
    first = shapes[0]
    given = {key: plain(value) for key, value in (spec.get("parameters") or {}).items()}
    if name == "Linear":
        rows, n, k = math.prod(first[:-1]), given["out_features"], given["in_features"]
        return (*first[:-1], n), {"m": rows, "n": n, "k": k, "products": 1}
    if name in _PRODUCTS:
        left, right = shapes[-2:]
        if len(left) < 2 or len(right) < 2 or left[-1] != right[-2]:
            return None, {}
        lead, (m, k), n = broadcast([left[:-2], right[:-2]]), left[-2:], right[-1]
        return (*lead, m, n), {"m": m, "n": n, "k": k, "products": math.prod(lead)}
    if name == "scaled_dot_product_attention":
        return (*first[:-1], shapes[2][-1]), {}
    if name == "Embedding":
        return (*first, given["embedding_dim"]), {}
    if name in _CONVOLUTIONS:
        rank = _CONVOLUTIONS[name]
        lead = (*first[: -rank - 1], given["out_channels"])
        if given["padding"] == "same":
            return (*lead, *first[-rank:]), {}
        padding = 0 if given["padding"] == "valid" else given["padding"]
        return (*lead, *_windows(first[-rank:], given | {"padding": padding})), {}
    if name in _POOLS and not given.get("return_indices"):
        rank = _POOLS[name]
        stride = given["kernel_size"] if given.get("stride") is None else given["stride"]
        return (*first[:-rank], *_windows(first[-rank:], {"dilation": 1, **given, "stride": stride})), {}
    if name in _ADAPTIVE:
        size = given["output_size"] if "output_size" in given else plain(spec["arguments"][1])
        sizes = size if isinstance(size, list) else [size] * _ADAPTIVE[name]
        lead = first[: -len(sizes)]
        return (*lead, *(size or old for size, old in zip(sizes, first[len(lead) :], strict=True))), {}
    if name in _SAME_SHAPE:
        return first, {}
    return (broadcast(shapes), {}) if name in _ELEMENTWISE else (None, {})


def _windows(sizes: Shape, given: Mapping[str, Any]) -> list[int]:
    """The number of windows of a convolution or pool along each dimension."""
    names = ("padding", "dilation", "kernel_size", "stride")
    columns = [value if isinstance(value := given[name], list) else [value] * len(sizes) for name in names]
    counts = []
    for size, padding, dilation, width, stride in zip(sizes, *columns, strict=True):
        room = size + 2 * padding - dilation * (width - 1) - 1
        count = (-(-room // stride) if given.get("ceil_mode") else room // stride) + 1
        if given.get("ceil_mode") and (count - 1) * stride >= size + padding:
            count -= 1  # no window begins in the padding at the end
        counts.append(count)
    return counts


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """The broadcast shape.

    Raises:
        ValueError: the shapes do not broadcast.
    """
    rank = max(map(len, shapes), default=0)
    sizes = []
    for column in zip(*((1,) * (rank - len(shape)) + shape for shape in shapes), strict=True):
        others = {size for size in column if size != 1}
        if len(others) > 1:
            raise ValueError(f"{shapes} do not broadcast")
        sizes.append(others.pop() if others else 1)
    return tuple(sizes)
