"""The description of a call before it is measured, and its features: the numbers that predictors
learn from.

Kernels, clocks and flags are not features, because only a measurement shows them. `VERSION`
increases when a feature is added or removed or changes its meaning. A stored predictor for another
version of the features is refused."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from farm.addons.predict.families import operator_family, operator_type
from farm.addons.predict.kernel_rules import (
    argument,
    attention_options,
    elements_of,
    kernel_plan,
    products_of,
)
from farm.addons.predict.tile_roofline import WAVE_TILES, CardRates, tile_roofline
from farm.types.tuple import DTYPES, contiguous_stride, dtype_of_call, names_listed, plain
from farm.types.value_profiles import fillings

VERSION = 5
#: In this version, only the features of these operators use the output's shape.
_WITH_OUTPUT = names_listed("features_of_the_output")


@dataclass(frozen=True)
class CallDescription:
    """One operator tuple on one card model, in one class of data. Sizes are of one call; None: no
    such size.
    """

    operator_id: str
    operator: str  # its short name
    operator_type: str  # shared by modules, functions and aten operators of the same work
    operator_family: str
    dtype: str  # of the first floating tensor
    data_class: str  # "" if unknown
    training: bool
    flops: int
    bytes_moved: int
    flops_per_byte: float
    m: int | None
    n: int | None
    k: int | None
    # number of matrix products: groups of a convolution, heads of an attention
    products: int | None
    tiles: int
    waves: float  # tiles over the card's multiprocessors
    wave_share_64x64: (
        float  # number of waves / number rounded up, for 64 x 64 tiles; 1 without products
    )
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
    strided_share: float  # share of the input elements that are in non-contiguous tensors
    expanded_share: float  # 1 - size of the smallest input / size of the largest
    written_share: float  # share of the moved bytes beyond the inputs: approximately the output
    casts: bool  # True if the output or an input has another dtype than the first input
    run_bytes: int  # length of contiguous runs, the minimum over the inputs
    casts_to_whole: bool  # True if the call names an integer or boolean output dtype
    masked: float  # mask of an attention: 0.5 for booleans, 1 for numbers
    causal: bool
    drops: bool  # True for an attention with dropout
    materialised: bool  # True for an attention that writes its scores to memory
    along_last: float  # named dimensions: 1: the last; 0: others; 0.5: none
    along: int  # elements along the named dimensions
    last_size: int  # of the first tensor
    rows: int  # elements of the first tensor / its last size; for an embedding, the looked-up rows
    batch: int
    window: int  # elements of the kernel of a convolution or pool
    stride: int
    dilation: int
    channels_in: int
    channels_out: int
    pixels: int
    zeros: float  # mean share of zeros of activations
    positive: float  # share of activations without negative values
    channels: float  # variance between channels / all variance, mean over activations
    data_known: bool


Tensor = Mapping[str, Any]


def describe(
    card: CardRates,
    operator_id: str,
    short_name: str,
    spec: Mapping[str, Any],
    flops: int,
    bytes_moved: int,
    data_class: str = "",
    *,
    tf32: bool = False,
    outputs: Sequence[Sequence[int]] | None = None,
) -> CallDescription:
    """Describe a call. ``spec`` is the result of `farm.types.tuple.OperatorTuple.to_json`;
    ``data_class`` is "" if unknown; ``outputs`` are the shapes of the outputs; None if unknown."""
    dtype, family = dtype_of_call(spec) or "float32", operator_family(short_name)
    output = outputs[0] if outputs and short_name in _WITH_OUTPUT else ()
    bytes_moved = _bytes_touched(short_name, spec, bytes_moved)
    attends = family.startswith("attention")
    mask, causal, drops = attention_options(short_name, spec) if attends else (None, False, False)
    masked = 0.0
    if mask is not None:
        masked = 0.5 if mask["dtype"] == "bool" else 1.0
    written_share = 0.0
    if bytes_moved:
        read_bytes = sum(map(_bytes, spec.get("tensors") or []))
        written_share = max(0.0, 1 - read_bytes / bytes_moved)
    return CallDescription(
        operator_id=operator_id,
        operator=short_name,
        operator_type=operator_type(short_name),
        operator_family=family,
        dtype=dtype,
        data_class=data_class,
        training=bool(spec.get("training")),
        itemsize_bytes=DTYPES[dtype][0] if dtype in DTYPES else 4,
        masked=masked,
        causal=causal,
        drops=drops,
        written_share=written_share,
        **_work(card, short_name, spec, dtype, flops, bytes_moved, tf32),
        **_memory(short_name, spec, output),
        **_shape(short_name, spec, output),
        **_values(spec, data_class),
    )


def _work(
    card: CardRates,
    short_name: str,
    spec: Mapping[str, Any],
    dtype: str,
    flops: int,
    bytes_moved: int,
    tf32: bool,
) -> dict[str, Any]:
    """Matrix products and moved bytes of a call, and its time by the tile roofline."""
    products = products_of(short_name, spec)
    if products is not None and short_name == "convolution_backward":
        flops = products.flops  # PyTorch's counter ignores groups
    plan = kernel_plan(short_name, spec, dtype, flops, bytes_moved, products)
    tiled = tile_roofline(card, plan, products, tf32)
    m = n = k = count = None
    if products is not None:
        m, n, k, count = products.m, products.n, products.k, products.count
    return {
        "flops": flops,
        "bytes_moved": bytes_moved,
        "flops_per_byte": flops / bytes_moved if bytes_moved else 0.0,
        "m": m,
        "n": n,
        "k": k,
        "products": count,
        "tiles": tiled.tiles,
        "waves": tiled.waves,
        "compute_us": tiled.compute_us,
        "traffic_us": tiled.traffic_us,
        **{
            f"wave_share_{m}x{n}": share
            for (m, n), share in zip(WAVE_TILES, tiled.wave_shares, strict=True)
        },
        "roofline_us": card.roofline(dtype, tf32).estimate_us(flops, bytes_moved),
        "tile_roofline_us": tiled.time_us,
        "materialised": plan.materialised,
    }


def _given(spec: Mapping[str, Any]) -> list[Tensor]:
    """Return the inputs of a call; if there are none, the module's own tensors."""
    every = spec.get("tensors") or []
    return [tensor for tensor in every if not tensor.get("name")] or every


def _memory(short_name: str, spec: Mapping[str, Any], output: Sequence[int]) -> dict[str, Any]:
    """The number of tensors and elements, and their memory layout."""
    tensors, inputs = spec.get("tensors") or [], _given(spec)
    numbers, dtypes = [elements_of(tensor) for tensor in inputs], _named_dtypes(short_name, spec)
    strided = sum(
        elements_of(tensor)
        for tensor in inputs
        if tensor.get("stride") is not None
        and tuple(tensor["stride"]) != contiguous_stride(tuple(tensor["shape"]))
    )
    parameters = [tensor for tensor in tensors if tensor["role"] != "activation"]
    others = {*dtypes, *(tensor["dtype"] for tensor in inputs if "float" in tensor["dtype"])}
    return {
        "tensors": len(tensors),
        "elements": max(
            [*map(elements_of, tensors), math.prod(output) if output else 0], default=0
        ),
        "elements_given": sum(numbers),
        "parameter_bytes": sum(
            elements_of(tensor) * DTYPES[tensor["dtype"]][0] for tensor in parameters
        ),
        "strided_share": strided / sum(numbers) if sum(numbers) else 0.0,
        "expanded_share": 1 - min(numbers) / max(1, max(numbers)) if numbers else 0.0,
        "casts": bool(inputs) and bool(others - {inputs[0]["dtype"]}),
        "run_bytes": min(
            (_run_bytes(tensor) for tensor in inputs if elements_of(tensor) > 1), default=0
        ),
        "casts_to_whole": any("float" not in dtype for dtype in dtypes),
    }


def _shape(short_name: str, spec: Mapping[str, Any], output: Sequence[int]) -> dict[str, Any]:
    """Named dimensions, rows and columns, windows, channels and pixels of a call."""
    tensors, inputs = spec.get("tensors") or [], _given(spec)
    first = tuple(inputs[0]["shape"]) if inputs else ()
    along_last, along = _along(spec, first)
    last_size = first[-1] if first else 1
    rows = math.prod(first[:-1])
    if operator_type(short_name) == "embedding" and len(tensors) > 1:
        first = tuple(min(tensors, key=_bytes)["shape"])
        width = max(tensors, key=_bytes)["shape"][-1]
        last_size = width or (first[-1] if first else 1)
        rows = math.prod(first) if width else math.prod(first[:-1])
    window, stride, dilation = _window(short_name, spec)
    image = inputs and len(inputs[0]["shape"]) >= 4
    return {
        "along_last": along_last,
        "along": along,
        "last_size": last_size,
        "rows": rows,
        "batch": first[0] if first else 1,
        "window": window,
        "stride": stride,
        "dilation": dilation,
        "channels_in": first[1] if image else 0,
        "channels_out": output[1] if image and len(output) >= 4 else 0,
        "pixels": math.prod(first[2:]) if image else 0,
    }


def _values(spec: Mapping[str, Any], data_class: str) -> dict[str, Any]:
    activations = sum(tensor["role"] == "activation" for tensor in spec.get("tensors") or [])
    profiles: Sequence[Any] = ()
    with contextlib.suppress(ValueError):
        profiles = fillings(data_class, activations) if data_class and activations else ()
    number = max(1, len(profiles))
    return {
        "zeros": sum(float(profile.zeros) for profile in profiles) / number,
        "positive": sum(float(profile.positive) for profile in profiles) / number,
        "channels": sum(float(profile.channels) for profile in profiles) / number,
        "data_known": bool(data_class),
    }


def _bytes_touched(short_name: str, spec: Mapping[str, Any], bytes_moved: int) -> int:
    """Limit the moved bytes to the used part of a table or cache. Counts of older captures contain
    all of it.
    """
    name, tensors = operator_type(short_name), spec.get("tensors") or []
    if operator_family(short_name) == "creation" and tensors:
        created = _bytes_created(short_name, spec, tensors[0])
        return bytes_moved if created is None else created
    if name == "embedding" and len(tensors) == 2:
        table, rows = max(tensors, key=_bytes), min(tensors, key=_bytes)
        width = table["shape"][-1] * DTYPES[table["dtype"]][0]
        return min(bytes_moved, elements_of(rows) * 2 * width + _bytes(rows))
    if name in ("index_copy", "index_fill", "scatter") and len(tensors) > 1:
        return min(bytes_moved, 2 * sum(map(_bytes, tensors[1:])))
    if name in ("nll_loss_forward", "nll_loss2d_forward") and len(tensors) > 1:
        # one value, thus one sector, of each row
        return min(bytes_moved, 40 * elements_of(tensors[1]))
    return bytes_moved


def _bytes_created(short_name: str, spec: Mapping[str, Any], like: Tensor) -> int | None:
    """Bytes of a tensor that a call such as `zeros_like` creates; None if its shape is not given in
    numbers.
    """
    dtype, shape = (_named_dtypes(short_name, spec) or [like["dtype"]])[0], like["shape"]
    if operator_type(short_name).startswith("new_"):
        sizes = [plain(size) for size in (spec.get("arguments") or [])[1:]]
        sizes = sizes or [plain((spec.get("keywords") or {}).get("size"))]
        shape = sizes[0] if isinstance(sizes[0], list) else sizes
    if dtype not in DTYPES or not all(type(size) is int for size in shape):
        return None
    return math.prod(shape) * DTYPES[dtype][0]


def _window(short_name: str, spec: Mapping[str, Any]) -> tuple[int, int, int]:
    """Elements of window, stride and dilation (products over dimensions), from parameters or aten's
    arguments.
    """
    type_name = operator_type(short_name)
    if spec.get("kind") != "module" and type_name in ("convolution", "convolution_backward"):
        weights = [tensor["shape"] for tensor in spec["tensors"] if len(tensor["shape"]) > 2]
        values = [
            plain(value)
            for value in spec["arguments"][4 if type_name == "convolution_backward" else 3 :]
        ]
        keywords = spec.get("keywords") or {}
        stride = values[0] if values else plain(keywords.get("stride", 1))
        dilation = values[2] if len(values) > 2 else plain(keywords.get("dilation", 1))
        return math.prod(weights[-1][2:]) if weights else 0, _area(stride), _area(dilation)
    parameters = spec.get("parameters") or {}
    window, stride, dilation = (
        plain(parameters.get(name)) for name in ("kernel_size", "stride", "dilation")
    )
    return _area(window), _area(window if stride is None else stride), _area(dilation)


def _area(value: Any) -> int:
    if isinstance(value, list):
        return math.prod(value)
    return value * value if isinstance(value, int) else 0


def _bytes(tensor: Tensor) -> int:
    """Size in memory; an expanded dimension counts once."""
    stride = tensor.get("stride") or contiguous_stride(tuple(tensor["shape"]))
    distinct = math.prod(
        size for size, step in zip(tensor["shape"], stride, strict=True) if step or not size
    )
    return distinct * DTYPES[tensor["dtype"]][0]


def _run_bytes(tensor: Tensor) -> int:
    """Number of contiguous bytes up to the first gap in memory."""
    shape = tensor["shape"]
    stride = tensor.get("stride") or contiguous_stride(tuple(shape))
    run = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size > 1 and step != run:
            break
        run *= size
    return run * DTYPES[tensor["dtype"]][0]


#: Operators whose name determines the dtype of their output.
_NAMED_DTYPES = {
    "float": "float32",
    "half": "float16",
    "bfloat16": "bfloat16",
    "long": "int64",
    "int": "int32",
}
_NAMED_DTYPES |= {"double": "float64", "bool": "bool"}


def _named_dtypes(short_name: str, spec: Mapping[str, Any]) -> list[str]:
    """Output dtypes that the arguments or the name of a call specify."""
    trees = [*(spec.get("arguments") or ()), *(spec.get("keywords") or {}).values()]
    named = [
        tree["dtype"]
        for tree in trees
        if isinstance(tree, dict) and isinstance(tree.get("dtype"), str)
    ]
    return named + ([_NAMED_DTYPES[short_name]] if short_name in _NAMED_DTYPES else [])


def _along(spec: Mapping[str, Any], first: Sequence[int]) -> tuple[float, int]:
    """Return `CallDescription.along_last` and `along` of a call."""
    named = (spec.get("keywords") or {}).get("dim", (spec.get("parameters") or {}).get("dim"))
    value = plain(argument(spec, 1, "") if named is None else named)
    dimensions, rank = value if isinstance(value, list) else [value], len(first)
    if not rank or not all(
        type(dimension) is int and -rank <= dimension < rank for dimension in dimensions
    ):
        return 0.5, 0
    positions = {dimension % rank for dimension in dimensions}
    return float(rank - 1 in positions), math.prod(first[position] for position in positions)


def _log(value: float | None) -> float:
    return math.log2(1 + value) if value else 0.0


def _grain(value: int | None) -> float:
    """Return the largest power of two, up to 64, that divides a size: libraries choose kernels by
    it.
    """
    return float(min(6, (value & -value).bit_length() - 1)) if value else 6.0


Feature = Callable[[CallDescription], float]


def _of(transform: Callable[[Any], float], *names: str, **attributes: str) -> dict[str, Feature]:
    """Features that transform one attribute each: by equal names, or `feature="attribute"`."""
    attributes = dict(zip(names, names, strict=True)) | attributes

    def feature(attribute: str) -> Feature:
        return lambda call: transform(getattr(call, attribute))

    return {name: feature(attribute) for name, attribute in attributes.items()}


#: All features, in their order. Sizes are logarithms to base 2; shares are unchanged.
_FEATURES: dict[str, Feature] = {
    **_of(math.log2, tile_roofline="tile_roofline_us"),
    "over_roofline": lambda call: math.log2(call.tile_roofline_us / call.roofline_us),
    "bound": lambda call: math.log2((call.compute_us + 1e-2) / (call.traffic_us + 1e-2)),
    **_of(_log, "bytes_moved", "flops_per_byte", "m", "n", "k", "products", "tiles"),
    "last_wave": lambda call: call.waves / math.ceil(call.waves) if call.waves else 1.0,
    **_of(float, "wave_share_64x64", "wave_share_128x64", "wave_share_256x128"),
    **_of(_grain, grain_m="m", grain_n="n", grain_k="k"),
    **_of(math.log2, itemsize="itemsize_bytes"),
    "floating": lambda call: float("float" in call.dtype),
    **_of(float, "training"),
    **_of(_log, "tensors", "elements", "elements_given", "parameter_bytes"),
    **_of(float, strided="strided_share", expanded="expanded_share", written="written_share"),
    **_of(float, "casts"),
    **_of(_log, run="run_bytes"),
    **_of(float, "casts_to_whole", "masked", "drops", "causal", "materialised", "along_last"),
    **_of(_log, "along"),
    # Winograd's method saves multiplications in a 3 x 3 convolution with stride 1 and one group.
    "winograd": lambda call: float(
        call.window == 9 and call.stride == 1 and call.dilation == 1 and call.products == 1
    ),
    **_of(_log, "last_size"),
    **_of(_grain, grain_last="last_size"),
    **_of(
        _log,
        "rows",
        "batch",
        "window",
        "stride",
        "dilation",
        "channels_in",
        "channels_out",
        "pixels",
    ),
    **_of(_grain, grain_pixels="pixels"),
    **_of(float, "zeros", "positive", "channels"),
}
NAMES = tuple(_FEATURES)


def numbers_of(calls: Sequence[CallDescription]) -> npt.NDArray[np.float64]:
    """Return the features. Shape: calls x `NAMES`."""
    rows = [[feature(call) for feature in _FEATURES.values()] for call in calls]
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(NAMES))
