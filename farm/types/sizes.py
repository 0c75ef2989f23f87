"""The sizes that people ask operators by, worked out from a tuple's description without running it: what comes out, and
the m, n and k of a product.

Only for operators whose rule is written here; None for all others, never a guess. A test holds the rules against PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farm.types.tuple import DTYPES, plain, tensor_references

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """What goes in and what comes out of one call; of a product (`products` times m x k by k x n) also its sizes."""

    dtype: str | None  # of the first floating tensor, else of the first
    input_shapes: tuple[Shape, ...]  # of the tensors that the call is given, in order
    output_shape: Shape | None = None
    m: int | None = None
    n: int | None = None
    k: int | None = None
    products: int | None = None

    @property
    def input_shape(self) -> Shape | None:
        """Of the first tensor that the call is given."""
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
    sizes = Sizes(next(floating, dtypes[0] if dtypes else None), shapes)
    try:
        return _with_outputs(sizes, short_name, spec)
    except (KeyError, TypeError, ValueError, IndexError):  # called in a way that no rule here knows
        return sizes


def _with_outputs(sizes: Sizes, name: str, spec: Mapping[str, Any]) -> Sizes:
    if not sizes.input_shapes:
        return sizes
    first = sizes.input_shapes[0]
    given = {key: plain(value) for key, value in (spec.get("parameters") or {}).items()}

    def of(shape: Sequence[int], **product: int) -> Sizes:
        return Sizes(sizes.dtype, sizes.input_shapes, tuple(shape), **product)

    if name == "Linear":
        rows = math.prod(first[:-1])
        return of(
            (*first[:-1], given["out_features"]), m=rows, n=given["out_features"], k=given["in_features"], products=1
        )
    if name in ("mm", "bmm", "matmul", "addmm", "baddbmm"):
        left, right = sizes.input_shapes[-2:]
        if len(left) < 2 or len(right) < 2 or left[-1] != right[-2]:
            return sizes
        lead = broadcast([left[:-2], right[:-2]])
        return of((*lead, left[-2], right[-1]), m=left[-2], n=right[-1], k=left[-1], products=math.prod(lead))
    if name == "scaled_dot_product_attention":
        return of((*first[:-1], sizes.input_shapes[2][-1]))
    if name == "Embedding":
        return of((*first, given["embedding_dim"]))
    if name in _CONVOLUTIONS:
        return of(_convolved(first, given, _CONVOLUTIONS[name]))
    if name in _POOLS and not given.get("return_indices"):
        return of(_pooled(first, given, _POOLS[name]))
    if name in _ADAPTIVE:
        wanted = given["output_size"] if "output_size" in given else plain(spec["arguments"][1])
        wanted = wanted if isinstance(wanted, list) else [wanted] * _ADAPTIVE[name]
        kept = first[: -len(wanted)]
        return of((*kept, *(size or there for size, there in zip(wanted, first[len(kept) :], strict=True))))
    if name in _SAME:
        return of(first)
    if name in _ELEMENTWISE:
        return of(broadcast(sizes.input_shapes))
    return sizes


_CONVOLUTIONS = {"Conv1d": 1, "Conv2d": 2, "Conv3d": 3}
_POOLS = {f"{kind}Pool{rank}d": rank for kind in ("Max", "Avg") for rank in (1, 2, 3)}
_ADAPTIVE = {f"AdaptiveAvgPool{rank}d": rank for rank in (1, 2, 3)} | {
    f"adaptive_avg_pool{rank}d": rank for rank in (1, 2, 3)
}
_SAME = frozenset(
    [
        "ReLU",
        "ReLU6",
        "LeakyReLU",
        "ELU",
        "GELU",
        "SiLU",
        "Mish",
        "Sigmoid",
        "Tanh",
        "Hardswish",
        "Hardsigmoid",
        "Hardtanh",
        "Softmax",
        "LogSoftmax",
        "Identity",
        "Dropout",
        "Dropout1d",
        "Dropout2d",
        "Dropout3d",
        "AlphaDropout",
        "BatchNorm1d",
        "BatchNorm2d",
        "BatchNorm3d",
        "LayerNorm",
        "GroupNorm",
        "InstanceNorm1d",
        "InstanceNorm2d",
        "InstanceNorm3d",
        "LocalResponseNorm",
        "RMSNorm",
        "relu",
        "relu_",
        "relu6",
        "gelu",
        "silu",
        "sigmoid",
        "sigmoid_",
        "tanh",
        "softmax",
        "log_softmax",
        "hardswish",
        "hardsigmoid",
        "dropout",
        "layer_norm",
        "contiguous",
        "clone",
        "exp",
        "rsqrt",
        "sqrt",
        "neg",
        "abs",
    ]
)
_ELEMENTWISE = frozenset(
    [
        "add",
        "sub",
        "mul",
        "div",
        "add_",
        "sub_",
        "mul_",
        "div_",
        "maximum",
        "minimum",
        "ge",
        "gt",
        "le",
        "lt",
        "eq",
        "ne",
    ]
)


def _spread(value: Any, rank: int) -> list[int]:
    return list(value) if isinstance(value, list) else [value] * rank


def _convolved(first: Shape, given: Mapping[str, Any], rank: int) -> Shape:
    kernel, stride, dilation = (_spread(given[name], rank) for name in ("kernel_size", "stride", "dilation"))
    there = first[-rank:]
    if given["padding"] == "same":
        return (*first[: -rank - 1], given["out_channels"], *there)
    padding = [0] * rank if given["padding"] == "valid" else _spread(given["padding"], rank)
    sizes = (
        (size + 2 * pad - step * (width - 1) - 1) // jump + 1
        for size, pad, step, width, jump in zip(there, padding, dilation, kernel, stride, strict=True)
    )
    return (*first[: -rank - 1], given["out_channels"], *sizes)


def _pooled(first: Shape, given: Mapping[str, Any], rank: int) -> Shape:
    kernel, padding = (_spread(given[name], rank) for name in ("kernel_size", "padding"))
    stride = kernel if given.get("stride") is None else _spread(given["stride"], rank)
    dilation = _spread(given.get("dilation", 1), rank)
    there, sizes = first[-rank:], []
    for size, pad, step, width, jump in zip(there, padding, dilation, kernel, stride, strict=True):
        room = size + 2 * pad - step * (width - 1) - 1
        count = (-(-room // jump) if given.get("ceil_mode") else room // jump) + 1
        if given.get("ceil_mode") and (count - 1) * jump >= size + pad:  # no window begins in the padding behind
            count -= 1
        sizes.append(count)
    return (*first[:-rank], *sizes)


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """The shape that an elementwise operator of these gives.

    Raises:
        ValueError: they do not broadcast.
    """
    rank = max(map(len, shapes), default=0)
    filled = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    sizes = []
    for column in zip(*filled, strict=True):
        others = {size for size in column if size != 1}
        if len(others) > 1:
            raise ValueError(f"{shapes} do not broadcast")
        sizes.append(others.pop() if others else 1)
    return tuple(sizes)
