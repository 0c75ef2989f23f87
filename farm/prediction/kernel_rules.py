"""How libraries run a call, as far as its description tells: what the tile roofline knows of kernels beyond a call's sizes.

The rules are those of PyTorch and its libraries: which mask keeps a fused attention from running, what one block works through
alone, how many launches a list of tensors takes, which tensors are copied first. How long that takes, in the constants below, was
read off an H200; what other cards make of it is left to what predictors learn.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farm.prediction.families import operator_family, operator_type
from farm.prediction.products import Products
from farm.types.sizes import broadcast
from farm.types.tuple import DTYPES, contiguous_stride, plain, tensor_references

#: Of an attention that writes its scores out: passes over them as float32, and over keys that are written for every head; launches.
SCORE_PASSES, EXPANDED_PASSES, SCORE_LAUNCHES = 20, 4, 16
ATTENTION_LAUNCHES = 6  # that the steps of a fused attention, each of which waits for the one before, take as long as
MASKED_LAUNCHES = 3  # more, where each sequence asks for one position and a mask says which it may see
SECTOR_BYTES = 32  # that memory hands out at once
SCATTERED_TIMES = 2.5  # times as long as one by one, where each value lies in another sector
JOINED_TIMES = 1.6  # times as long as other copies, where not all that it joins lies in order
ROLLED_TIMES = 1.9  # times as long as one by one, for each dimension that is rolled
WINDOW_VALUE_SINGLES = 0.7  # of an element that is fetched one by one, for each value of a pool's window
SINGLES_LAUNCHES = 0.5  # of a launch, that working out where each element lies takes at least
REORDERED_SINGLES = 0.5  # of an element that is fetched one by one, of an image that is turned channels last or back
FEW_ROWS = 16  # rows of a table that are looked up one behind the other, each in half the time of a launch
DEPTHWISE_EXTRA = 14  # multiply-adds that an output of a depthwise convolution takes beside those of its window
DEPTHWISE_TIMES = 3.3  # times as long as where channels are summed up, each of them takes
NORM_WARPS, PLANE_WARPS = 4, 8  # of a block that normalises a row, or pools a plane
LOADED_BYTES = 8  # that an image has to be a multiple of, to be a factor of a product as it lies
ALIGNED_BYTES = 16  # that a row has to be a multiple of, for tensor cores to be fed with it
#: Of a launch over lists of tensors (`multi_tensor_apply`): elements that a block works through, blocks, and tensors of each list
#: by the number of lists.
CHUNK, BLOCKS, TENSORS = 65536, 320, (110, 64, 48, 36, 30)


@dataclass(frozen=True)
class Course:
    """How a call runs.

    Attributes:
        serial_bytes: those that one multiprocessor has to move alone, one after the other, at least.
        singles: elements that are fetched one by one, not several at a time; those that lie apart count several times.
        before: of such elements, those that kernels of their own put in order before, or add a bias to behind.
        warps: that each work through so little that they take as long as what they wait for.
    """

    dtype: str  # that it multiplies in
    flops: float
    bytes_moved: float  # with what it writes on the way
    serial_bytes: float = 0.0
    singles: float = 0.0
    before: float = 0.0
    warps: float = 0.0
    cold_bytes: float = 0.0  # of all, what no cache holds from one call to the next: its weights
    launches: float = 1
    tensor_cores: bool = True  # that it may use, where the dtype has some
    aligned: bool = True
    coarse: bool = False  # small tiles do not make it faster
    materialised: bool = False  # an attention that writes its scores out


def course_of(
    short_name: str, spec: Mapping[str, Any], dtype: str, flops: int, bytes_moved: int, products: Products | None
) -> Course:
    """
    Args:
        spec: the tuple's description (`farm.types.tuple.OperatorTuple.to_json`).
        bytes_moved: that it must read and write at least once.
    """
    course = _course_of(short_name, spec, dtype, flops, bytes_moved, products)
    weights = [one for one in spec.get("tensors") or [] if one["role"] != "activation"]
    cold = sum(math.prod(one["shape"]) * DTYPES[one["dtype"]][0] for one in weights)
    return dataclasses.replace(course, cold_bytes=min(cold, bytes_moved))


def _course_of(
    short_name: str, spec: Mapping[str, Any], dtype: str, flops: int, bytes_moved: int, products: Products | None
) -> Course:
    tensors, family, kind = spec.get("tensors") or [], operator_family(short_name), operator_type(short_name)
    plainly = Course(dtype, flops, bytes_moved)
    if not tensors:
        return plainly
    if family == "optimizer":
        launches, chunks = _of_lists(spec)
        of_element = bytes_moved / max(1, sum(map(_elements, _lists(spec)[0])))
        return dataclasses.replace(plainly, serial_bytes=chunks * of_element, launches=max(1, launches))
    if family.startswith("attention") and products is not None:
        return _of_attention(short_name, spec, dtype, flops, bytes_moved, products)
    if family.startswith("convolution") and products is not None and products.n == 1:
        return _of_windows(kind, dtype, plainly, products)
    if kind == "convolution_backward":
        return dataclasses.replace(plainly, coarse=True)
    if kind == "convolution" and products is not None:
        return _of_convolution(short_name, spec, dtype, plainly, products)
    if family == "product":
        half = DTYPES.get(dtype, (4,))[0] == 2
        aligned = not half or _aligned(tensors, products)
        before, kernels = _flattened(short_name, tensors, products)
        coarse = half and (products is None or min(products.m, products.n) > 1)
        return dataclasses.replace(plainly, before=before, launches=1 + kernels, aligned=aligned, coarse=coarse)
    if family.startswith("batch norm") and kind.startswith("cudnn"):
        # One block for each channel, which gathers its statistics and then applies them.
        return dataclasses.replace(plainly, serial_bytes=bytes_moved / max(1, tensors[0]["shape"][1]))
    if family.startswith("row norm"):
        copied = [_singles(one) for one in tensors if not _contiguous(one)]
        warps = _rows(tensors) * NORM_WARPS if "layer_norm" in kind else 0
        return dataclasses.replace(plainly, before=sum(copied), launches=1 + len(copied), warps=warps)
    if kind == "adaptiveavgpool2d":
        return dataclasses.replace(plainly, warps=_planes(spec, tensors))
    if kind == "embedding" and len(tensors) == 2:
        rows = min(map(_elements, tensors))
        return dataclasses.replace(plainly, launches=max(1, rows // 2) if rows <= FEW_ROWS else 1)
    if kind == "roll":
        dims = plain(_argument(spec, 2, "dims"))
        rolled = max(1, len(dims)) if isinstance(dims, list) else 1
        return dataclasses.replace(plainly, singles=_elements(tensors[0]) * rolled * ROLLED_TIMES, launches=rolled)
    if kind in ("maxpool2d", "avgpool2d"):
        return dataclasses.replace(plainly, singles=_pooled(spec, tensors) * WINDOW_VALUE_SINGLES)
    if family in ("pointwise", "copy"):
        singles = _uneven(tensors) if family == "pointwise" else _copied(short_name, spec, tensors)
        return dataclasses.replace(plainly, singles=singles, launches=1 + SINGLES_LAUNCHES * (singles > 0))
    return plainly


def _of_windows(kind: str, dtype: str, plainly: Course, products: Products) -> Course:
    """Depthwise convolutions: no tensor core does them, and their backward sums a gradient up over all pixels for each weight."""
    if products.count <= 2:  # one output channel of all inputs; a backward makes two products of it
        return plainly
    if kind == "convolution_backward":
        return dataclasses.replace(plainly, bytes_moved=plainly.bytes_moved * max(1, products.k))
    added = 2 * products.m * products.count * (products.k + DEPTHWISE_EXTRA) * DEPTHWISE_TIMES
    return dataclasses.replace(plainly, dtype="float32", flops=added * DTYPES[dtype][0] / 4, tensor_cores=False)


def _of_convolution(
    short_name: str, spec: Mapping[str, Any], dtype: str, plainly: Course, products: Products
) -> Course:
    """Forward. Half precision turns images channels last, and back, unless each is a product by itself; a bias is added behind."""
    arguments, tensors = spec.get("arguments") or [], spec["tensors"]
    if short_name == "convolution" and len(arguments) > 6 and plain(arguments[6]) is True:  # transposed
        return plainly
    image = tensors[next(tensor_references([arguments, (spec.get("keywords") or {}).get("input")]), 0)]
    pixels = math.prod(image["shape"][2:])
    written, before, kernels = products.m * products.n * products.count, 0.0, 0.0
    alone = (
        products.count == 1
        and products.k == math.prod(image["shape"][1:2])
        and _elements(image) == products.m * products.k
    )
    whole = pixels == 1 or pixels * DTYPES[dtype][0] % LOADED_BYTES == 0
    if DTYPES[dtype][0] == 2 and _contiguous(image) and not (alone and whole):
        before, kernels = REORDERED_SINGLES * (_elements(image) + written), 2
    if len(tensors) > 2:
        before, kernels = before + written, kernels + 1 + SINGLES_LAUNCHES
    return dataclasses.replace(plainly, before=before, launches=1 + kernels, coarse=True)


def _of_attention(
    short_name: str, spec: Mapping[str, Any], dtype: str, flops: float, bytes_moved: float, products: Products
) -> Course:
    mask = mask_of(short_name, spec)
    # What is expanded over heads is read by each.
    keys = 2 * products.count * products.n * products.k * DTYPES[dtype][0]
    scores = 4 * products.m * products.n * products.count  # in float32
    places = [place for argument in (spec.get("arguments") or [])[:2] for place in tensor_references(argument)]
    heads = {shape[-3] for shape in (spec["tensors"][place]["shape"] for place in places) if len(shape) > 2}
    if short_name == "scaled_dot_product_attention" and len(heads) > 1 and not _argument(spec, 7, "enable_gqa"):
        # No fused kernel expands keys over heads unless it is told to: PyTorch writes them out, and the scores.
        passes = bytes_moved + SCORE_PASSES * scores + EXPANDED_PASSES * keys
        return Course(dtype, flops, passes, launches=SCORE_LAUNCHES, materialised=True)
    given = [len(spec["tensors"][place]["shape"]) for place in places]
    if (mask is not None and len(mask["shape"]) > 1 and _stride(mask)[-1] != 1) or (
        short_name == "scaled_dot_product_attention" and any(rank != 4 for rank in given)
    ):
        # No fused kernel takes a mask that does not lie row by row, or tensors of other than four dimensions: PyTorch
        # multiplies in float32 and writes the scores out.
        passes = bytes_moved + SCORE_PASSES * scores
        return Course("float32", flops, passes, launches=SCORE_LAUNCHES, materialised=True)
    half = is_causal(short_name, spec) and products.m == products.n
    launches = ATTENTION_LAUNCHES + MASKED_LAUNCHES * (products.m == 1 and mask is not None)
    return Course(dtype, flops / 2 if half else flops, max(bytes_moved, keys), launches=launches)


def mask_of(short_name: str, spec: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The mask that a scaled dot product attention is given."""
    given = _argument(spec, _PLACES.get(short_name, _PLACES_OF_OTHERS)[0], "attn_mask")
    references = list(tensor_references(given))
    return spec["tensors"][references[0]] if references else None  # type: ignore[no-any-return]


def is_causal(short_name: str, spec: Mapping[str, Any]) -> bool:
    return _argument(spec, _PLACES.get(short_name, _PLACES_OF_OTHERS)[1], "is_causal") is True


def drops(short_name: str, spec: Mapping[str, Any]) -> bool:
    """Whether an attention leaves scores out at random."""
    given = _argument(spec, _PLACES.get(short_name, _PLACES_OF_OTHERS)[2], "dropout_p")
    return isinstance(given, int | float) and given > 0


#: Where mask, `is_causal` and `dropout_p` stand among the arguments of aten's operators; a flash attention takes no mask.
_PLACES = {
    "_scaled_dot_product_flash_attention": (99, 4, 3),
    "_scaled_dot_product_efficient_attention": (3, 6, 5),
    "_scaled_dot_product_cudnn_attention": (3, 6, 5),
    "_scaled_dot_product_flash_attention_backward": (99, 11, 10),
    "_scaled_dot_product_efficient_attention_backward": (4, 11, 9),
    "_scaled_dot_product_cudnn_attention_backward": (8, 14, 13),
}
_PLACES_OF_OTHERS = (3, 5, 4)


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


# -- how tensors lie


def _uneven(tensors: Sequence[Mapping[str, Any]]) -> float:
    """`Course.singles` of an elementwise operator: none if all its tensors lie alike, without gaps, in whatever order."""
    large = [one for one in tensors if math.prod(one["shape"]) > 1]
    if not large:
        return 0.0
    first = max(large, key=lambda one: math.prod(one["shape"]))
    if all(one["shape"] == first["shape"] and _steps(one) == _steps(first) for one in large) and _dense(first):
        return 0.0
    try:
        whole = broadcast([tuple(one["shape"]) for one in large])
    except ValueError:  # no elementwise operator's
        return 0.0
    steps = {place - len(first["shape"]): step for place, step in _steps(first).items() if step}
    fast = min(steps, key=lambda place: steps[place], default=-1)
    apart = any(
        _steps(one).get(fast + len(one["shape"]), 0) * DTYPES[one["dtype"]][0] >= SECTOR_BYTES
        for one in large
        if math.prod(one["shape"]) == math.prod(first["shape"])
    )
    return math.prod(whole) * (SCATTERED_TIMES if apart else 1.0)


def _copied(short_name: str, spec: Mapping[str, Any], tensors: Sequence[Mapping[str, Any]]) -> float:
    """`Course.singles` of a copy: its source goes into the order of its dimensions, or keeps its own."""
    name = operator_type(short_name)
    ordering = name in ("contiguous", "reshape", "flatten") or "contiguous_format" in str(spec.get("keywords"))
    if name == "cat":
        return JOINED_TIMES * sum(map(_singles, tensors)) if not all(map(_contiguous, tensors)) else 0.0
    if ordering:
        return sum(_singles(one) for one in tensors if not _contiguous(one))
    return _uneven(tensors[:1] if name in ("to", "type_as") else tensors)


def _flattened(short_name: str, tensors: Sequence[Mapping[str, Any]], products: Products | None) -> tuple[float, int]:
    """`Course.before` of a product whose factors have to be put in order first, and the kernels of that.

    A linear layer that is given rows of several dimensions out of order has its bias added behind. Of batches of several
    dimensions those are written out that are not one.
    """
    name = operator_type(short_name)
    if name == "matmul":
        apart = [one for one in tensors if len(one["shape"]) > 3 and not _one_batch(one)]
        return sum(map(_singles, apart)), len(apart)
    given = max(tensors, key=lambda one: len(one["shape"]), default=None)
    if name != "linear" or given is None or len(given["shape"]) < 3 or _contiguous(given):
        return 0.0, 0
    return _singles(given) + (products.m * products.n if products is not None else 0), 2


def _one_batch(tensor: Mapping[str, Any]) -> bool:
    """Whether all dimensions but the last two can be walked as one."""
    steps, shape = _steps(tensor), tensor["shape"]
    places = [place for place in steps if place < len(shape) - 2]
    return all(steps[one] == steps[next_] * shape[next_] for one, next_ in itertools.pairwise(places))


def _pooled(spec: Mapping[str, Any], tensors: Sequence[Mapping[str, Any]]) -> float:
    """The values of all windows of a pool."""
    given = spec.get("parameters") or {}
    window, step = (
        plain(given.get(name, _argument(spec, place, name))) for place, name in ((1, "kernel_size"), (2, "stride"))
    )
    sides = [value if isinstance(value, list) else [value] * 2 for value in (window, step or window)]
    sides = [side * 2 if len(side) == 1 else side for side in sides]
    if not all(type(size) is int and size > 0 for side in sides for size in side):  # called in a way that no rule knows
        return 0.0
    return _elements(tensors[0]) * math.prod(sides[0]) / math.prod(sides[1])


def _elements(tensor: Mapping[str, Any]) -> int:
    return math.prod(tensor["shape"])


def _rows(tensors: Sequence[Mapping[str, Any]]) -> int:
    """Over which a layer norm goes: elements of the largest tensor over those that are normalised together."""
    largest = max((one["shape"] for one in tensors), key=math.prod)
    together = [
        math.prod(one["shape"]) for one in tensors if one["shape"] == largest[len(largest) - len(one["shape"]) :]
    ]
    return math.prod(largest) // max(1, min([*together, largest[-1] if largest else 1]))


def _planes(spec: Mapping[str, Any], tensors: Sequence[Mapping[str, Any]]) -> int:
    """Warps of an adaptive pool: a block for each plane, or one for each where the plane becomes a single value."""
    wanted = plain((spec.get("parameters") or {}).get("output_size", _argument(spec, 1, "output_size")))
    planes = math.prod(tensors[0]["shape"][:-2])
    return planes if wanted in (1, [1, 1]) else planes * PLANE_WARPS


def _singles(tensor: Mapping[str, Any]) -> float:
    """`Course.singles` of putting it into the order of its dimensions."""
    step = _steps(tensor).get(len(tensor["shape"]) - 1, 1)
    return math.prod(tensor["shape"]) * (SCATTERED_TIMES if step * DTYPES[tensor["dtype"]][0] >= SECTOR_BYTES else 1.0)


def _contiguous(tensor: Mapping[str, Any]) -> bool:
    return _without_gaps(tensor, list(reversed(_steps(tensor))))


def _dense(tensor: Mapping[str, Any]) -> bool:
    """Whether it fills its memory without gaps, in whatever order of its dimensions."""
    steps = _steps(tensor)
    return _without_gaps(tensor, sorted(steps, key=lambda place: steps[place]))


def _without_gaps(tensor: Mapping[str, Any], places: Sequence[int]) -> bool:
    """Whether it fills its memory in this order of its dimensions, the fastest first."""
    steps, expected = _steps(tensor), 1
    for place in places:
        if steps[place] != expected:
            return False
        expected *= tensor["shape"][place]
    return True


def _steps(tensor: Mapping[str, Any]) -> dict[int, int]:
    """Place -> step in elements, of the dimensions that have more than one."""
    steps = enumerate(zip(_stride(tensor), tensor["shape"], strict=True))
    return {place: step for place, (step, size) in steps if size > 1}


def _stride(tensor: Mapping[str, Any]) -> Sequence[int]:
    return plain(tensor.get("stride")) or contiguous_stride(tuple(tensor["shape"]))
