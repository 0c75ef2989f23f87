"""A call as it is known before anybody reads it: what a predictor may look at.

What only a reading tells - the kernels that ran, clocks, flags - is not here, so that no predictor can learn from it what it
will not have when it is asked.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farm.prediction.card import CardModel
from farm.prediction.families import operator_family, operator_type
from farm.prediction.kernel_rules import course_of, drops, is_causal, mask_of
from farm.prediction.products import products_of
from farm.prediction.tiles import tile_roofline
from farm.types.sizes import Sizes, sizes_of
from farm.types.tuple import DTYPES, contiguous_stride, plain
from farm.types.value_profiles import Filling, fillings


@dataclass(frozen=True)
class Described:
    """One operator tuple on one card model, in one class of data. Sizes are of one call; None where it has no such size."""

    operator_id: str
    operator: str  # its short name
    operator_type: str  # that modules, functions and aten operators of the same work share
    operator_family: str
    dtype: str  # of the first floating tensor
    data_class: str  # "" where it is not known
    training: bool
    flops: int
    bytes_moved: int
    flops_per_byte: float
    m: int | None
    n: int | None
    k: int | None
    products: int | None  # m x k by k x n, so many times: the groups of a convolution, the heads of an attention
    tiles: int
    waves: float  # of tiles over the card's multiprocessors
    wave_share_64x64: float  # tiles of 64 x 64 over what whole waves of them would be; 1 where it makes no product
    wave_share_128x64: float
    wave_share_256x128: float
    roofline_us: float
    tile_roofline_us: float
    compute_us: float  # of the tile roofline
    traffic_us: float
    tensors: int
    itemsize_bytes: int
    elements: int  # of the largest tensor
    elements_given: int
    parameter_bytes: int
    strided_share: float  # of the elements given, those of tensors that are not contiguous
    expanded_share: float  # 1 - the least tensor given over the largest
    written_share: float  # of the bytes moved, those beyond what it is given: about what it writes
    casts: bool  # what comes out, or some tensor given, is of another dtype than the first
    run_bytes: int  # that follow one another in memory, the least over the tensors given
    casts_to_whole: bool  # what comes out is named to be whole numbers or booleans
    masked: float  # an attention that is given a mask: 0.5 of booleans, 1 of numbers
    causal: bool
    drops: bool  # an attention that leaves scores out at random
    materialised: bool  # an attention that writes its scores out: its mask, dimensions or shared keys ask for it
    along_last: float  # 1: it works along the last dimension; 0: along others; 0.5: it names none
    along: int  # elements along the dimensions that it names
    last_size: int  # of the first tensor
    rows: int  # elements of the first tensor over its last size; of an embedding, those that are asked for
    batch: int
    window: int  # elements of a convolution's or pool's kernel
    stride: int
    dilation: int
    channels_in: int
    channels_out: int
    pixels: int
    zeros: float  # the mean over activations of the shares that are zero
    positive: float  # of activations, the share of those without a negative value
    channels: float  # the mean share of variance between channels
    data_known: bool


def describe(
    card: CardModel,
    operator_id: str,
    short_name: str,
    spec: Mapping[str, Any],
    flops: int,
    bytes_moved: int,
    data_class: str = "",
    *,
    tf32: bool = False,
) -> Described:
    """
    Args:
        spec: the tuple's description (`farm.types.tuple.OperatorTuple.to_json`).
        data_class: what stands in its inputs; "" where that is not known.
    """
    sizes = sizes_of(short_name, spec)
    dtype = sizes.dtype or "float32"
    fields: dict[str, Any] = {
        **_work(card, short_name, spec, sizes, flops, _touched(short_name, spec, bytes_moved), tf32),
        **_memory(short_name, spec, sizes.output_shape or ()),
        **_shape(short_name, spec, sizes.output_shape or ()),
        **_data(spec, data_class),
    }
    fields["written_share"] = _written_share(spec, fields["bytes_moved"])
    attends = operator_family(short_name).startswith("attention")
    return Described(
        operator_id=operator_id,
        operator=short_name,
        operator_type=operator_type(short_name),
        operator_family=operator_family(short_name),
        dtype=dtype,
        data_class=data_class,
        training=bool(spec.get("training")),
        itemsize_bytes=DTYPES[dtype][0] if dtype in DTYPES else 4,
        masked=_masked(mask_of(short_name, spec)) if attends else 0.0,
        causal=attends and is_causal(short_name, spec),
        drops=attends and drops(short_name, spec),
        **fields,
    )


def _work(
    card: CardModel,
    short_name: str,
    spec: Mapping[str, Any],
    sizes: Sizes,
    flops: int,
    bytes_moved: int,
    tf32: bool,
) -> dict[str, Any]:
    """What it multiplies and moves, and how long that should take."""
    products, dtype = products_of(short_name, spec, sizes), sizes.dtype or "float32"
    if products is not None and short_name == "convolution_backward":
        flops = products.flops  # PyTorch's counter does not know of its groups
    course = course_of(short_name, spec, dtype, flops, bytes_moved, products)
    tiled = tile_roofline(card, course, products, tf32)
    return {
        "flops": flops,
        "bytes_moved": bytes_moved,
        "flops_per_byte": flops / bytes_moved if bytes_moved else 0.0,
        "m": products.m if products else None,
        "n": products.n if products else None,
        "k": products.k if products else None,
        "products": products.count if products else None,
        "tiles": tiled.tiles,
        "waves": tiled.waves,
        "wave_share_64x64": tiled.wave_shares[0],
        "wave_share_128x64": tiled.wave_shares[1],
        "wave_share_256x128": tiled.wave_shares[2],
        "roofline_us": card.roofline(dtype, tf32).estimate_us(flops, bytes_moved),
        "tile_roofline_us": tiled.time_us,
        "compute_us": tiled.compute_us,
        "traffic_us": tiled.traffic_us,
        "materialised": course.materialised,
    }


def _given(spec: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], int]]:
    """The tensors that a call is given, with their elements; a module's own alone where it is given none."""
    every = [(tensor, math.prod(tensor["shape"])) for tensor in spec.get("tensors") or []]
    return [(tensor, number) for tensor, number in every if not tensor.get("name")] or every


def _memory(short_name: str, spec: Mapping[str, Any], output: Sequence[int]) -> dict[str, Any]:
    """How many tensors and elements there are, and how they lie."""
    tensors, given = spec.get("tensors") or [], _given(spec)
    numbers = [math.prod(tensor["shape"]) for tensor in tensors]
    of_given = [number for _, number in given]
    strided = sum(number for tensor, number in given if not _contiguous(tensor))
    return {
        "tensors": len(tensors),
        "elements": max([*numbers, math.prod(output) if output else 0], default=0),
        "elements_given": sum(of_given),
        "parameter_bytes": sum(
            number * DTYPES[tensor["dtype"]][0]
            for tensor, number in zip(tensors, numbers, strict=True)
            if tensor["role"] != "activation"
        ),
        "strided_share": strided / sum(of_given) if sum(of_given) else 0.0,
        "expanded_share": 1 - min(of_given) / max(1, max(of_given)) if of_given else 0.0,
        "casts": _casts(short_name, spec, given),
        "run_bytes": min((_run_bytes(tensor) for tensor, number in given if number > 1), default=0),
        "casts_to_whole": any("float" not in dtype for dtype in _named_dtypes(short_name, spec)),
    }


def _written_share(spec: Mapping[str, Any], bytes_moved: int) -> float:
    return max(0.0, 1 - sum(map(_bytes, spec.get("tensors") or [])) / bytes_moved) if bytes_moved else 0.0


def _shape(short_name: str, spec: Mapping[str, Any], output: Sequence[int]) -> dict[str, Any]:
    """The dimensions that it works along, rows and columns, windows, channels and pixels."""
    tensors, given = spec.get("tensors") or [], _given(spec)
    first = tuple(given[0][0]["shape"]) if given else ()
    along_last, along = _along(spec, first)
    width = 0
    if operator_type(short_name) == "embedding" and len(tensors) > 1:
        width = max(tensors, key=_bytes)["shape"][-1]
        first = tuple(min(tensors, key=_bytes)["shape"])
    parameters = {name: plain(value) for name, value in (spec.get("parameters") or {}).items()}
    window, stride, dilation = _kernel(short_name, spec, parameters)
    image = given and len(given[0][0]["shape"]) >= 4
    return {
        "along_last": along_last,
        "along": along,
        "last_size": width or (first[-1] if first else 1),
        "rows": math.prod(first) if width else math.prod(first[:-1]) if first else 1,
        "batch": first[0] if first else 1,
        "window": window,
        "stride": stride,
        "dilation": dilation,
        "channels_in": first[1] if image else 0,
        "channels_out": output[1] if image and len(output) >= 4 else 0,
        "pixels": math.prod(first[2:]) if image else 0,
    }


def _data(spec: Mapping[str, Any], data_class: str) -> dict[str, Any]:
    """What stands in its activations."""
    activations = [tensor for tensor in spec.get("tensors") or [] if tensor["role"] == "activation"]
    filled = _filled(data_class, len(activations))
    return {
        "zeros": _mean([one.zeros for one in filled]),
        "positive": _mean([float(one.positive) for one in filled]),
        "channels": _mean([one.channels for one in filled]),
        "data_known": bool(data_class),
    }


def _touched(short_name: str, spec: Mapping[str, Any], bytes_moved: int) -> int:
    """The bytes of a call that touches a part of a table or cache: as counted, at most what that part comes to.

    Counts of older captures hold the whole table.
    """
    name, tensors = operator_type(short_name), spec.get("tensors") or []
    if operator_family(short_name) == "creation" and tensors:
        made_bytes = _made_bytes(short_name, spec, tensors[0])
        return bytes_moved if made_bytes is None else made_bytes
    if name == "embedding" and len(tensors) == 2:
        table, rows = max(tensors, key=_bytes), min(tensors, key=_bytes)
        width = table["shape"][-1] * DTYPES[table["dtype"]][0]
        return min(bytes_moved, math.prod(rows["shape"]) * 2 * width + _bytes(rows))
    if name in ("index_copy", "index_fill", "scatter") and len(tensors) > 1:
        return min(bytes_moved, 2 * sum(_bytes(tensor) for tensor in tensors[1:]))
    if name in ("nll_loss_forward", "nll_loss2d_forward") and len(tensors) > 1:  # a value of each row, a sector each
        return min(bytes_moved, 40 * math.prod(tensors[1]["shape"]))
    return bytes_moved


def _made_bytes(short_name: str, spec: Mapping[str, Any], like: Mapping[str, Any]) -> int | None:
    """Of what is made like a tensor, which is not read; None where its size is not told in numbers."""
    dtype, shape = (_named_dtypes(short_name, spec) or [like["dtype"]])[0], like["shape"]
    if operator_type(short_name).startswith("new_"):
        given = [plain(one) for one in (spec.get("arguments") or [])[1:]] or [
            plain((spec.get("keywords") or {}).get("size"))
        ]
        shape = given[0] if isinstance(given[0], list) else given
    if dtype not in DTYPES or not all(type(size) is int for size in shape):
        return None
    return math.prod(shape) * DTYPES[dtype][0]


def _contiguous(tensor: Mapping[str, Any]) -> bool:
    stride = tensor.get("stride")
    return stride is None or tuple(stride) == contiguous_stride(tuple(tensor["shape"]))


def _kernel(short_name: str, spec: Mapping[str, Any], parameters: Mapping[str, Any]) -> tuple[int, int, int]:
    """Elements of the window, of its step and of its dilation: of a module's parameters, or of what aten is given."""
    kind = operator_type(short_name)
    if spec.get("kind") != "module" and kind in ("convolution", "convolution_backward"):
        weights = [tensor["shape"] for tensor in spec["tensors"] if len(tensor["shape"]) > 2]
        values = [plain(value) for value in spec["arguments"][4 if kind == "convolution_backward" else 3 :]]
        keywords = spec.get("keywords") or {}
        stride = values[0] if values else plain(keywords.get("stride", 1))
        dilation = values[2] if len(values) > 2 else plain(keywords.get("dilation", 1))
        return math.prod(weights[-1][2:]) if weights else 0, _area(stride), _area(dilation)
    window, stride, dilation = (parameters.get(name) for name in ("kernel_size", "stride", "dilation"))
    return _area(window), _area(window if stride is None else stride), _area(dilation)


def _area(value: Any) -> int:
    if isinstance(value, list):
        return math.prod(value)
    return value * value if isinstance(value, int) else 0


def _bytes(tensor: Mapping[str, Any]) -> int:
    """That a tensor holds; an expanded dimension counts once."""
    shape = tensor["shape"]
    stride = tensor.get("stride") or contiguous_stride(tuple(shape))
    distinct = math.prod(size for size, step in zip(shape, stride, strict=True) if step or not size)
    return distinct * DTYPES[tensor["dtype"]][0]


def _run_bytes(tensor: Mapping[str, Any]) -> int:
    """How many bytes of a tensor follow one another before there is a step."""
    shape = tensor["shape"]
    stride = tensor.get("stride") or contiguous_stride(tuple(shape))
    run = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size > 1 and step != run:
            break
        run *= size
    return run * DTYPES[tensor["dtype"]][0]


def _casts(short_name: str, spec: Mapping[str, Any], given: Sequence[tuple[Mapping[str, Any], int]]) -> bool:
    """Whether dtypes meet: named as an argument, by the operator itself, or those of two floating tensors."""
    if not given:
        return False
    first = given[0][0]["dtype"]
    named = _named_dtypes(short_name, spec)
    return any(dtype != first for dtype in named) or any(
        "float" in t["dtype"] and t["dtype"] != first for t, _ in given
    )


def _named_dtypes(short_name: str, spec: Mapping[str, Any]) -> list[str]:
    """The dtypes that a call is told to give: as arguments, or by the operator's own name."""
    named = [
        tree["dtype"]
        for tree in [*(spec.get("arguments") or ()), *(spec.get("keywords") or {}).values()]
        if isinstance(tree, dict) and isinstance(tree.get("dtype"), str)
    ]
    return named + ([_NAMES_A_DTYPE[short_name]] if short_name in _NAMES_A_DTYPE else [])


def _masked(mask: Mapping[str, Any] | None) -> float:
    return 0.0 if mask is None else 0.5 if mask["dtype"] == "bool" else 1.0


_NAMES_A_DTYPE = {"float": "float32", "half": "float16", "bfloat16": "bfloat16", "long": "int64", "int": "int32"}
_NAMES_A_DTYPE |= {"double": "float64", "bool": "bool"}


def _along(spec: Mapping[str, Any], first: Sequence[int]) -> tuple[float, int]:
    """Whether the dimensions that it names are the last ones, and how many elements lie along them."""
    arguments: Sequence[Any] = spec.get("arguments") or ()
    named = (spec.get("keywords") or {}).get("dim", (spec.get("parameters") or {}).get("dim"))
    if named is None and len(arguments) > 1:
        named = arguments[1]
    value = plain(named)
    dimensions = value if isinstance(value, list) else [value]
    rank = len(first)
    if not rank or not all(type(one) is int and -rank <= one < rank for one in dimensions):
        return 0.5, 0
    places = {one % rank for one in dimensions}
    return float(rank - 1 in places), math.prod(first[place] for place in places)


def _filled(data_class: str, activations: int) -> list[Filling]:
    with contextlib.suppress(ValueError):
        return fillings(data_class, activations) if data_class and activations else []
    return []


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
