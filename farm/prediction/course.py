"""How libraries run a call, as far as its description tells: what the tile roofline knows of kernels beyond a call's sizes.

These are rules of PyTorch and its libraries, not of readings: which mask keeps a fused attention from running, what one block works
through alone, how many launches a list of tensors takes, which rows tensor cores cannot fetch at full speed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farm.prediction.families import operator_family, operator_type
from farm.prediction.products import Products
from farm.words.tuple import DTYPES, contiguous_stride, plain, tensor_references

SCORE_PASSES, SCORE_LAUNCHES = (
    10,
    8,
)  # over the scores of an attention that writes them out: as float32, one step a kernel
ATTENTION_LAUNCHES = 6  # that the steps of a fused attention, each of which waits for the one before, take as long as
SCATTERED = 2.0  # times as long, where values are fetched one by one
ALIGNED_BYTES = 16  # that a row has to be a multiple of, for tensor cores to be fed with it
#: Of a launch over lists of tensors (`multi_tensor_apply`): elements that a block works through, blocks, and tensors of each list
#: by the number of lists.
CHUNK, BLOCKS, TENSORS = 65536, 320, (110, 64, 48, 36, 30)


@dataclass(frozen=True)
class Course:
    """`serial_bytes` are those that one multiprocessor has to move alone, one after the other, at least."""

    dtype: str  # that it multiplies in
    flops: float
    bytes_moved: float  # with what it writes on the way
    serial_bytes: float = 0.0
    cold_bytes: float = 0.0  # of all, what no cache holds from one call to the next: its weights
    launches: int = 1
    aligned: bool = True
    materialised: bool = False  # an attention that writes its scores out


def course_of(
    short_name: str, spec: Mapping[str, Any], dtype: str, flops: int, bytes_moved: int, products: Products | None
) -> Course:
    """
    Args:
        spec: the tuple's description (`farm.words.tuple.OperatorTuple.to_json`).
        bytes_moved: that it must read and write at least once.
    """
    course = _course_of(short_name, spec, dtype, flops, bytes_moved, products)
    weights = [one for one in spec.get("tensors") or [] if one["role"] != "activation"]
    cold = sum(math.prod(one["shape"]) * DTYPES[one["dtype"]][0] for one in weights)
    return dataclasses.replace(course, cold_bytes=min(cold, bytes_moved))


def _course_of(
    short_name: str, spec: Mapping[str, Any], dtype: str, flops: int, bytes_moved: int, products: Products | None
) -> Course:
    tensors, family = spec.get("tensors") or [], operator_family(short_name)
    if family == "optimizer":
        launches, chunks = _of_lists(spec)
        of_element = bytes_moved / max(1, sum(math.prod(one["shape"]) for one in _lists(spec)[0]))
        return Course(dtype, flops, bytes_moved, chunks * of_element, launches=max(1, launches))
    if family.startswith("attention") and products is not None:
        return _of_attention(short_name, spec, dtype, flops, bytes_moved, products)
    if family in ("batch norm", "batch norm backward") and operator_type(short_name).startswith("cudnn"):
        # One block for each channel, which gathers its statistics and then applies them.
        return Course(dtype, flops, bytes_moved, bytes_moved / tensors[0]["shape"][1])
    if operator_type(short_name) == "convolution_backward" and products is not None and products.n == 1:
        # Depthwise: for each weight of a window the gradient is summed up over all pixels again.
        return Course(dtype, flops, bytes_moved * max(1, products.k))
    if family == "product" and DTYPES.get(dtype, (4,))[0] == 2:
        return Course(dtype, flops, bytes_moved, aligned=_aligned(tensors, products))
    if family in ("copy", "pointwise") and any(_scattered(one) for one in tensors):
        return Course(dtype, flops, bytes_moved * SCATTERED)
    return Course(dtype, flops, bytes_moved)


def _of_attention(
    short_name: str, spec: Mapping[str, Any], dtype: str, flops: float, bytes_moved: float, products: Products
) -> Course:
    mask = mask_of(short_name, spec)
    if mask is not None and len(mask["shape"]) > 1 and _stride(mask)[-1] != 1:
        # No fused kernel takes a mask that does not lie row by row: PyTorch multiplies in float32 and writes the scores out.
        scores = 4 * products.m * products.n * products.count
        passes = bytes_moved + SCORE_PASSES * scores
        return Course("float32", flops, passes, launches=SCORE_LAUNCHES, materialised=True)
    half = is_causal(short_name, spec) and products.m == products.n
    return Course(dtype, flops / 2 if half else flops, bytes_moved, launches=ATTENTION_LAUNCHES)


def mask_of(short_name: str, spec: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The mask that a scaled dot product attention is given."""
    given = _argument(spec, _PLACES.get(short_name, (3, 5))[0], "attn_mask")
    references = list(tensor_references(given))
    return spec["tensors"][references[0]] if references else None  # type: ignore[no-any-return]


def is_causal(short_name: str, spec: Mapping[str, Any]) -> bool:
    return _argument(spec, _PLACES.get(short_name, (3, 5))[1], "is_causal") is True


#: Where mask and `is_causal` stand among the arguments of aten's operators; a flash attention takes no mask.
_PLACES = {
    "_scaled_dot_product_flash_attention": (99, 4),
    "_scaled_dot_product_efficient_attention": (3, 6),
    "_scaled_dot_product_cudnn_attention": (3, 6),
    "_scaled_dot_product_flash_attention_backward": (99, 11),
    "_scaled_dot_product_efficient_attention_backward": (4, 11),
    "_scaled_dot_product_cudnn_attention_backward": (8, 14),
}


def _argument(spec: Mapping[str, Any], place: int, name: str) -> Any:
    given = spec.get("arguments") or ()
    return given[place] if place < len(given) else (spec.get("keywords") or {}).get(name)


def _lists(spec: Mapping[str, Any]) -> list[list[Mapping[str, Any]]]:
    """The lists of tensors among a call's arguments; what is given one by one is one list."""
    tensors = spec.get("tensors") or []
    trees = [*(spec.get("arguments") or ()), *(spec.get("keywords") or {}).values()]
    lists = [[tensors[place] for place in tensor_references(tree)] for tree in trees if isinstance(tree, list)]
    return [one for one in lists if len(one) > 1] or [list(tensors)]


def _of_lists(spec: Mapping[str, Any]) -> tuple[int, int]:
    """The launches that lists of tensors take, and the elements of the largest chunk of each, summed."""
    lists = _lists(spec)
    most = TENSORS[min(len(lists), len(TENSORS)) - 1]
    launches = chunks = tensors = blocks = largest = 0
    for one in lists[0]:
        left = math.prod(one["shape"])
        tensors += 1
        while left > 0:
            largest = max(largest, min(left, CHUNK))
            left -= CHUNK
            blocks += 1
            if blocks == BLOCKS or (tensors == most and left <= 0):
                launches, chunks = launches + 1, chunks + largest
                tensors, blocks, largest = int(left > 0), 0, 0
    return launches + (blocks > 0), chunks + largest


def _aligned(tensors: Sequence[Mapping[str, Any]], products: Products | None) -> bool:
    """Whether every row, in memory, of the matrices that are multiplied begins where tensor cores can fetch it."""
    if products is not None and min(products.m, products.n) == 1:  # a vector: no tensor core
        return True
    widths = [products.n * 2] if products is not None else []
    for tensor in tensors:
        if len(tensor["shape"]) > 1:
            steps = sorted(step for step, size in zip(_stride(tensor), tensor["shape"], strict=True) if size > 1)
            widths += [step * DTYPES[tensor["dtype"]][0] for step in steps if step > 1][:1]
    return all(width % ALIGNED_BYTES == 0 for width in widths)


def _scattered(tensor: Mapping[str, Any]) -> bool:
    """Whether its elements do not lie in the order of its dimensions; what is expanded, or begins late, counts as if they did."""
    shape, stride = tensor["shape"], _stride(tensor)
    steps = [step for step, size in zip(stride, shape, strict=True) if size > 1 and step]
    return steps != sorted(steps, reverse=True) or bool(steps and steps[-1] != 1)


def _stride(tensor: Mapping[str, Any]) -> Sequence[int]:
    return plain(tensor.get("stride")) or contiguous_stride(tuple(tensor["shape"]))
