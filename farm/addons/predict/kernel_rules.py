"""Rules for how libraries run a call: kernel properties that the tile roofline uses in addition to
a call's sizes.

The rules describe PyTorch and its libraries: which masks exclude a fused attention, what one thread
block computes alone, how many launches a list of tensors needs, and which tensors are copied first.
The constants in constants.toml were fitted to readings of an H200; predictors learn how other cards
differ. All rules use only the call's description."""

from __future__ import annotations

import itertools
import math
import operator
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from farm.addons.predict.families import operator_family, operator_type
from farm.types.matrix_products import Products, matrix_product
from farm.types.tuple import (
    DTYPES,
    contiguous_stride,
    plain,
    shapes_passed,
    table_named,
    tensor_references,
)

Tensor = Mapping[str, Any]


def constants(section: str) -> SimpleNamespace:
    """Return the constants of a section of ``constants.toml``."""
    text = Path(__file__).with_name("constants.toml").read_text(encoding="utf-8")
    return SimpleNamespace(**tomllib.loads(text)[section])


_FITTED = constants("kernel_rules")


@dataclass(frozen=True)
class KernelPlan:
    """How libraries run a call."""

    dtype: str  # of its multiplications
    flops: float
    bytes_moved: float  # including intermediate results
    serial_bytes: float = 0.0  # that one multiprocessor must move alone
    # elements that are read one at a time; a scattered element counts several times
    singles: float = 0.0
    # `singles` of additional kernels, which reorder inputs first or add a bias last
    before: float = 0.0
    warps: float = 0.0  # number of warps whose time is the memory latency
    cold_bytes: float = 0.0  # the part of bytes_moved that no cache keeps between calls: weights
    launches: float = 1
    tensor_cores: bool = True
    aligned: bool = True
    coarse: bool = False  # True if small tiles do not make the call faster
    materialised: bool = False  # True for an attention that writes its scores to memory


def kernel_plan(
    short_name: str,
    spec: Mapping[str, Any],
    dtype: str,
    flops: int,
    bytes_moved: int,
    products: Products | None,
) -> KernelPlan:
    """``spec``: result of `farm.types.tuple.OperatorTuple.to_json`; ``bytes_moved``: input and
    output bytes.
    """
    weights = [tensor for tensor in spec.get("tensors") or [] if tensor["role"] != "activation"]
    cold = sum(elements_of(tensor) * DTYPES[tensor["dtype"]][0] for tensor in weights)
    basic = KernelPlan(dtype, flops, bytes_moved, cold_bytes=min(cold, bytes_moved))
    return _plan(short_name, spec, basic, products)


def _plan(
    short_name: str, spec: Mapping[str, Any], basic: KernelPlan, products: Products | None
) -> KernelPlan:
    tensors = spec.get("tensors") or []
    family = operator_family(short_name)
    type_name = operator_type(short_name)
    if not tensors:
        return basic
    if family == "optimizer":
        return _optimizer_plan(spec, basic)
    if family.startswith("attention") and products is not None:
        return _attention_plan(short_name, spec, basic, products)
    if family.startswith("convolution") and products is not None and products.n == 1:
        return _depthwise_plan(type_name, basic, products)
    if type_name == "convolution_backward":
        return _convolution_backward_plan(spec, basic, products)
    if type_name == "convolution" and products is not None:
        return _convolution_plan(short_name, spec, basic, products)
    if family == "product":
        return _product_plan(short_name, tensors, basic, products)
    if type_name in ("native_batch_norm", "native_batch_norm_backward"):
        return replace(basic, bytes_moved=_bytes_as_float32(basic))
    if family.startswith("batch norm") and type_name.startswith("cudnn"):
        # One block for each channel computes its statistics and then applies them.
        return replace(basic, serial_bytes=basic.bytes_moved / max(1, tensors[0]["shape"][1]))
    if family.startswith("row norm"):
        copied = [_singles(tensor) for tensor in tensors if not _contiguous(tensor)]
        warps = _rows(tensors) * _FITTED.norm_warps if "layer_norm" in type_name else 0
        return replace(basic, before=sum(copied), launches=1 + len(copied), warps=warps)
    if type_name == "adaptiveavgpool2d":
        # A block for each plane, or one warp if the plane becomes a single value.
        parameters = spec.get("parameters") or {}
        output_size = plain(parameters.get("output_size", argument(spec, 1, "output_size")))
        warps_of_plane = 1 if output_size in (1, [1, 1]) else _FITTED.plane_warps
        return replace(basic, warps=math.prod(tensors[0]["shape"][:-2]) * warps_of_plane)
    if type_name == "embedding" and len(tensors) == 2:
        rows = min(map(elements_of, tensors))
        return replace(basic, launches=max(1, rows // 2) if rows <= _FITTED.few_rows else 1)
    if type_name == "roll":
        dims = plain(argument(spec, 2, "dims"))
        rolled = max(1, len(dims)) if isinstance(dims, list) else 1
        singles = elements_of(tensors[0]) * rolled * _FITTED.rolled_times
        return replace(basic, singles=singles, launches=rolled)
    if type_name in ("maxpool2d", "avgpool2d"):
        return replace(basic, singles=_pooled(spec, tensors) * _FITTED.window_value_singles)
    if family in ("pointwise", "copy"):
        singles = _uneven(tensors) if family == "pointwise" else _copied(short_name, spec, tensors)
        launches = 1 + _FITTED.singles_launches * (singles > 0)
        return replace(basic, singles=singles, launches=launches)
    return basic


def _optimizer_plan(spec: Mapping[str, Any], basic: KernelPlan) -> KernelPlan:
    launches, chunks = _list_launches(spec)
    bytes_of_element = basic.bytes_moved / max(1, sum(map(elements_of, _lists(spec)[0])))
    return replace(basic, serial_bytes=chunks * bytes_of_element, launches=max(1, launches))


def _product_plan(
    short_name: str, tensors: Sequence[Tensor], basic: KernelPlan, products: Products | None
) -> KernelPlan:
    half = DTYPES.get(basic.dtype, (4,))[0] == 2
    before, kernels = _flattened(short_name, tensors, products)
    return replace(
        basic,
        before=before,
        launches=1 + kernels,
        aligned=not half or _aligned(tensors, products),
        coarse=half and (products is None or min(products.m, products.n) > 1),
    )


def _depthwise_plan(type_name: str, basic: KernelPlan, products: Products) -> KernelPlan:
    """Depthwise convolutions run without tensor cores; their backward sums a gradient over all
    pixels per weight.
    """
    if products.count <= 2:  # one output channel of all inputs; its backward has two products
        return basic
    if type_name == "convolution_backward":
        moved = _bytes_as_float32(basic)
        return replace(basic, bytes_moved=moved * max(1, products.k))
    kernel_elements = products.k + _FITTED.depthwise_extra
    added = 2 * products.m * products.count * kernel_elements * _FITTED.depthwise_times
    flops = added * DTYPES[basic.dtype][0] / 4
    return replace(basic, dtype="float32", flops=flops, tensor_cores=False)


def _bytes_as_float32(basic: KernelPlan) -> float:
    """The moved bytes of a kernel whose time follows from its number of elements: one of half
    precision is as slow as one of float32.
    """
    return basic.bytes_moved * max(1.0, 4 / DTYPES[basic.dtype][0])


def _convolution_backward_plan(
    spec: Mapping[str, Any], basic: KernelPlan, products: Products | None
) -> KernelPlan:
    """In half precision, images and their gradients are copied to channels last for the gradient of
    the weight, and for the gradient of the image, unless windows are single pixels.
    """
    plan = replace(basic, coarse=True)
    if DTYPES[basic.dtype][0] != 2 or products is None:
        return plan
    passed = (spec["tensors"][position] for position in tensor_references(spec["arguments"][:3]))
    gradient, image, weight = passed
    of_image, of_weight, _ = plain(spec["arguments"][10])
    before = kernels = 0.0
    copied = elements_of(gradient) + elements_of(image)
    if of_weight:
        before, kernels = _FITTED.reordered_singles * copied, 3
    if of_image and math.prod(weight["shape"][2:]) > 1:
        before, kernels = before + _FITTED.reordered_singles * copied, kernels + 3
    return replace(plan, before=before, launches=1 + kernels)


def _convolution_plan(
    short_name: str, spec: Mapping[str, Any], basic: KernelPlan, products: Products
) -> KernelPlan:
    """In half precision, images are copied to channels last and back, unless each is one product. A
    bias comes last.
    """
    arguments = spec.get("arguments") or []
    tensors = spec["tensors"]
    transposed = short_name == "convolution" and len(arguments) > 6 and plain(arguments[6]) is True
    if transposed:
        return basic
    references = tensor_references([arguments, (spec.get("keywords") or {}).get("input")])
    image = tensors[next(references, 0)]
    pixels = math.prod(image["shape"][2:])
    written = products.m * products.n * products.count
    before = kernels = 0.0
    itemsize = DTYPES[basic.dtype][0]
    alone = products.count == 1 and products.k == math.prod(image["shape"][1:2])
    alone = alone and elements_of(image) == products.m * products.k
    whole = pixels == 1 or pixels * itemsize % _FITTED.loaded_bytes == 0
    if itemsize == 2 and _contiguous(image) and not (alone and whole):
        before, kernels = _FITTED.reordered_singles * (elements_of(image) + written), 2
    if len(tensors) > 2:
        before, kernels = before + written, kernels + 1 + _FITTED.singles_launches
    return replace(basic, before=before, launches=1 + kernels, coarse=True)


def _attention_plan(
    short_name: str, spec: Mapping[str, Any], basic: KernelPlan, products: Products
) -> KernelPlan:
    mask, causal, _ = attention_options(short_name, spec)
    # Each head reads keys that are expanded over heads.
    keys = 2 * products.count * products.n * products.k * DTYPES[basic.dtype][0]
    scores = 4 * products.m * products.n * products.count  # in float32
    positions = tensor_references((spec.get("arguments") or [])[:2])
    shapes = [spec["tensors"][position]["shape"] for position in positions]
    # This operator chooses its kernel at run time.
    chosen = short_name == "scaled_dot_product_attention"
    written = basic.bytes_moved + _FITTED.score_passes * scores
    unfused = replace(
        basic, bytes_moved=written, launches=_FITTED.score_launches, materialised=True
    )
    numbers_of_heads = {shape[-3] for shape in shapes if len(shape) > 2}
    if chosen and len(numbers_of_heads) > 1 and not argument(spec, 7, "enable_gqa"):
        # Without enable_gqa no fused kernel expands keys over heads: PyTorch writes them and the
        # scores to memory.
        return replace(unfused, bytes_moved=written + _FITTED.expanded_passes * keys)
    scattered = mask is not None and len(mask["shape"]) > 1 and _stride(mask)[-1] != 1
    if scattered or (chosen and any(len(shape) != 4 for shape in shapes)):
        # No fused kernel takes a mask whose rows are not contiguous, or tensors without four
        # dimensions: PyTorch multiplies in float32 and writes the scores to memory.
        return replace(unfused, dtype="float32")
    flops = basic.flops / 2 if causal and products.m == products.n else basic.flops
    launches = _FITTED.attention_launches + _FITTED.masked_launches * (
        products.m == 1 and mask is not None
    )
    return replace(basic, flops=flops, bytes_moved=max(basic.bytes_moved, keys), launches=launches)


def attention_options(short_name: str, spec: Mapping[str, Any]) -> tuple[Tensor | None, bool, bool]:
    """Return for a scaled dot product attention: its mask or None, True if causal, True if it has
    dropout.
    """
    positions = zip(
        _PLACES.get(short_name, _OTHER_PLACES), ("attn_mask", "is_causal", "dropout_p"), strict=True
    )
    mask, causal, dropped = (argument(spec, position, name) for position, name in positions)
    reference = next(iter(tensor_references(mask)), None)
    drops = isinstance(dropped, int | float) and dropped > 0
    return None if reference is None else spec["tensors"][reference], causal is True, drops


#: Positions of the mask, `is_causal` and `dropout_p` in the arguments of aten's operators. A flash
#: attention has no
#: mask: its position 99 does not exist.
_PLACES: dict[str, Sequence[int]] = table_named("attention_arguments")
_OTHER_PLACES = (3, 5, 4)


def _lists(spec: Mapping[str, Any]) -> list[list[Tensor]]:
    """Return the arguments that are lists of several tensors; if there are none, one list with all
    tensors.
    """
    tensors = spec.get("tensors") or []
    trees = [*(spec.get("arguments") or ()), *(spec.get("keywords") or {}).values()]
    lists = [
        [tensors[position] for position in tensor_references(tree)]
        for tree in trees
        if isinstance(tree, list)
    ]
    return [members for members in lists if len(members) > 1] or [list(tensors)]


def _list_launches(spec: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of launches for lists of tensors, and the sum of each launch's largest
    chunk (elements).
    """
    lists = _lists(spec)
    most = _FITTED.tensors[min(len(lists), len(_FITTED.tensors)) - 1]
    launches = chunks = tensors = blocks = largest = 0
    for tensor in lists[0]:
        left = math.prod(tensor["shape"])
        tensors += 1
        while left > 0:
            largest = max(largest, min(left, _FITTED.chunk))
            left -= _FITTED.chunk
            blocks += 1
            if blocks == _FITTED.blocks or (tensors == most and left <= 0):
                launches += 1
                chunks += largest
                tensors = int(left > 0)  # the next launch continues with this tensor
                blocks = largest = 0
    return launches + (blocks > 0), chunks + largest


def _aligned(tensors: Sequence[Tensor], products: Products | None) -> bool:
    """True if every row of the factors has an alignment that tensor cores can load."""
    if products is not None and min(products.m, products.n) == 1:  # a vector: no tensor core
        return True
    row_bytes = [products.n * 2] if products is not None else []
    for tensor in tensors:
        shape = tensor["shape"]
        if len(shape) < 2:
            continue
        strides = zip(_stride(tensor), shape, strict=True)
        between_rows = [stride for stride, size in strides if size > 1 and stride > 1]
        if between_rows:
            row_bytes.append(min(between_rows) * DTYPES[tensor["dtype"]][0])
    return all(number % _FITTED.aligned_bytes == 0 for number in row_bytes)


def products_of(short_name: str, spec: Mapping[str, Any]) -> Products | None:
    """The matrix products of an operator; None for other operators. A convolution has one for each
    group.

    They follow from the stored description alone. Known are linear layers, products, convolutions
    and attention: as modules, as functions and as aten operators, which training steps call."""
    products, name = matrix_product(short_name, spec), operator_type(short_name)
    try:
        shapes = shapes_passed(spec)
        if short_name == "einsum":
            return _of_equation(plain(spec["arguments"][0]), shapes)
        if products and products.n and products.k:
            if short_name == "matmul" and [len(shape) > 2 for shape in shapes] == [True, False]:
                rows = math.prod(shapes[0][:-1])  # all rows by one matrix
                return Products(rows, products.n, products.k)
            if products.m:
                return replace(products, count=products.count or 1)
        is_module = name == "convolution" and spec.get("kind") == "module"
        if is_module or name.startswith("convtranspose"):
            parameters = {key: plain(value) for key, value in spec["parameters"].items()}
            return _of_module(name, shapes[0], parameters)
        if short_name in ("convolution", "convolution_backward"):
            return _of_aten(name, shapes, spec["arguments"])
        if name == "convolution":  # a function, which is given its weight
            output = _function_output(shapes, spec)
            return _by_weight(shapes[0], shapes[1], output, _number(spec, 6, "groups", 1))
        if short_name in ("linear", "_scaled_mm"):
            n = shapes[1][0 if short_name == "linear" else 1]
            return Products(math.prod(shapes[0][:-1]), n, shapes[0][-1])
        if short_name == "mv":
            return Products(shapes[0][0], 1, shapes[0][1])
        if "scaled_dot_product" in name:
            query, key = shapes[:2] if "backward" not in name else shapes[1:3]
            return Products(query[-2], key[-2], query[-1], math.prod(query[:-2]))
    except (KeyError, TypeError, ValueError, IndexError):
        pass  # no rule knows this call
    return None


def _of_equation(equation: str, shapes: Sequence[Sequence[int]]) -> Products | None:
    """The products of an einsum of two tensors, such as ``ibnd,jbnd->bnij``; None for another
    number of tensors, an ellipsis or an implicit result.
    """
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    names = inputs.split(",")
    if len(names) != 2 or len(shapes) != 2 or not arrow or "." in equation:
        return None
    size_of = dict(zip("".join(names), itertools.chain(*shapes), strict=True))
    left, right, kept = map(set, (*names, result))
    sizes = [
        math.prod(size_of[name] for name in dimensions)
        for dimensions in (
            (left - right) & kept,
            (right - left) & kept,
            (left | right) - kept,
            left & right & kept,
        )
    ]
    return Products(*sizes)


def _of_module(name: str, first: Sequence[int], given: Mapping[str, Any]) -> Products:
    """A convolution, or a transposed one."""
    groups, kernel_size = given["groups"], given["kernel_size"]
    rank = len(kernel_size)
    image = output = first[-rank:]
    batch, kernel_elements = math.prod(first[: -rank - 1]), math.prod(kernel_size)
    n, k = given["out_channels"] // groups, given["in_channels"] // groups
    if name.startswith("convtranspose"):
        return Products(batch * math.prod(image), n * kernel_elements, k, groups)
    if given["padding"] != "same":
        padding = [0] * rank if given["padding"] == "valid" else given["padding"]
        shapes = (1, 1, *image), (1, 1, *kernel_size)
        output = _sizes_out(*shapes, given["stride"], padding, given["dilation"])
    return Products(batch * math.prod(output), n, k * kernel_elements, groups)


def _by_weight(
    first: Sequence[int], weight: Sequence[int], output: Sequence[int], groups: int
) -> Products:
    pixels = math.prod(output[2 - len(weight) :])
    return Products(first[0] * pixels, weight[0] // groups, math.prod(weight[1:]), groups)


def _of_aten(name: str, shapes: Sequence[Sequence[int]], arguments: Sequence[Any]) -> Products:
    if name == "convolution":
        first, weight = shapes[:2]
        stride, padding, dilation, transposed = map(plain, arguments[3:7])
        groups = plain(arguments[8])
        if transposed:
            pixels = first[0] * math.prod(first[2:])
            return Products(pixels, math.prod(weight[1:]), weight[0] // groups, groups)
        output = _sizes_out(first, weight, stride, padding, dilation)
        return _by_weight(first, weight, output, groups)
    gradient, first, weight = shapes[:3]
    groups, mask = plain(arguments[9]), plain(arguments[10])
    if plain(arguments[7]):  # transposed: input and output change places
        gradient, first = first, gradient
    products = _by_weight(first, weight, gradient, groups)
    return replace(products, count=products.count * max(1, sum(map(bool, mask[:2]))))


def _function_output(shapes: Sequence[Sequence[int]], spec: Mapping[str, Any]) -> list[int]:
    rank = len(shapes[1]) - 2
    options = ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
    stride, padding, dilation = (_number(spec, *option) for option in options)
    if isinstance(padding, str):
        padding = 0 if padding == "valid" else [size // 2 for size in shapes[1][2:]]
    by_dimension = [
        value if isinstance(value, list) else [value] * rank
        for value in (stride, padding, dilation)
    ]
    return _sizes_out(shapes[0], shapes[1], *by_dimension)


def argument(spec: Mapping[str, Any], position: int, name: str) -> Any:
    """Return an argument by its position, or by its name among the keywords."""
    arguments = spec.get("arguments") or ()
    if position < len(arguments):
        return arguments[position]
    return (spec.get("keywords") or {}).get(name)


def _number(spec: Mapping[str, Any], position: int, name: str, default: Any) -> Any:
    """Return an argument of a call; the default if the argument is absent or contains a tensor."""
    value = plain(argument(spec, position, name))
    return default if value is None or any(True for _ in tensor_references(value)) else value


def _sizes_out(
    first: Sequence[int], weight: Sequence[int], stride: Any, padding: Any, dilation: Any
) -> list[int]:
    return [
        (size + 2 * pad - jump * (width - 1) - 1) // step + 1
        for size, width, step, pad, jump in zip(
            first[2:], weight[2:], stride, padding, dilation, strict=True
        )
    ]


def elements_of(tensor: Tensor) -> int:
    return math.prod(tensor["shape"])


def _uneven(tensors: Sequence[Tensor]) -> float:
    """Return the number of elements that an elementwise operator reads one at a time
    (`KernelPlan.singles`).

    0 if all its tensors have the same dense layout.
    """
    large = [tensor for tensor in tensors if elements_of(tensor) > 1]
    if not large:
        return 0.0
    first = max(large, key=elements_of)
    strides = _strides(first)
    order = sorted(strides, key=lambda position: strides[position])
    alike = all(
        tensor["shape"] == first["shape"] and _strides(tensor) == strides for tensor in large
    )
    if alike and _without_gaps(first, order):
        return 0.0
    try:
        whole = np.broadcast_shapes(*(tuple(tensor["shape"]) for tensor in large))
    except ValueError:  # not an elementwise operator
        return 0.0
    strides = {
        position - len(first["shape"]): stride for position, stride in strides.items() if stride
    }
    fast = min(strides, key=lambda position: strides[position], default=-1)
    apart = any(
        _strides(tensor).get(fast + len(tensor["shape"]), 0) * DTYPES[tensor["dtype"]][0]
        >= _FITTED.sector_bytes
        for tensor in large
        if elements_of(tensor) == elements_of(first)
    )
    return math.prod(whole) * (_FITTED.scattered_times if apart else 1.0)


def _copied(short_name: str, spec: Mapping[str, Any], tensors: Sequence[Tensor]) -> float:
    """Return the number of elements that a copy reads one at a time (`KernelPlan.singles`).

    The result of the copy is contiguous or keeps the layout of its source.
    """
    name = operator_type(short_name)
    ordering = name in ("contiguous", "reshape", "flatten") or "contiguous_format" in str(
        spec.get("keywords")
    )
    if name == "cat":
        if all(map(_contiguous, tensors)):
            return 0.0
        return _FITTED.joined_times * sum(map(_singles, tensors))  # type: ignore[no-any-return]
    if ordering:
        return sum(_singles(tensor) for tensor in tensors if not _contiguous(tensor))
    return _uneven(tensors[:1] if name in ("to", "type_as") else tensors)


def _flattened(
    short_name: str, tensors: Sequence[Tensor], products: Products | None
) -> tuple[float, int]:
    """`KernelPlan.before` of a product whose factors must be copied first, and the number of these
    kernels.
    """
    if short_name == "matmul":
        apart = []  # tensors whose batch dimensions cannot be merged into one
        for tensor in tensors:
            strides, shape = _strides(tensor), tensor["shape"]
            if len(shape) <= 3:
                continue
            positions = [position for position in strides if position < len(shape) - 2]
            if any(
                strides[position] != strides[after] * shape[after]
                for position, after in itertools.pairwise(positions)
            ):
                apart.append(tensor)
        return sum(map(_singles, apart)), len(apart)
    features = max(tensors, key=lambda one: len(one["shape"]), default=None)
    if short_name.lower() != "linear" or features is None or len(features["shape"]) < 3:
        return 0.0, 0
    if _contiguous(features):
        return 0.0, 0
    bias = products.m * products.n if products is not None else 0  # it is added last
    return _singles(features) + bias, 2


def _pooled(spec: Mapping[str, Any], tensors: Sequence[Tensor]) -> float:
    """The number of values in all windows of a pool."""
    parameters = spec.get("parameters") or {}
    kernel_size = plain(parameters.get("kernel_size", argument(spec, 1, "kernel_size")))
    stride = plain(parameters.get("stride", argument(spec, 2, "stride"))) or kernel_size
    sides = [value if isinstance(value, list) else [value] * 2 for value in (kernel_size, stride)]
    sides = [side * 2 if len(side) == 1 else side for side in sides]
    sizes = [*sides[0], *sides[1]]
    if not all(type(size) is int and size > 0 for size in sizes):  # no rule knows this call
        return 0.0
    return elements_of(tensors[0]) * math.prod(sides[0]) / math.prod(sides[1])


def _rows(tensors: Sequence[Tensor]) -> int:
    """Rows of a layer norm: elements of the largest tensor / elements of one normalized group."""
    shapes = [tensor["shape"] for tensor in tensors]
    largest = max(shapes, key=math.prod)
    together = [
        math.prod(shape) for shape in shapes if shape == largest[len(largest) - len(shape) :]
    ]
    return math.prod(largest) // max(1, min([*together, largest[-1] if largest else 1]))


def _singles(tensor: Tensor) -> float:
    """Return the number of elements that are read one at a time (`KernelPlan.singles`) to make a
    tensor contiguous.
    """
    stride = _strides(tensor).get(len(tensor["shape"]) - 1, 1)
    scattered = stride * DTYPES[tensor["dtype"]][0] >= _FITTED.sector_bytes
    return elements_of(tensor) * (_FITTED.scattered_times if scattered else 1.0)  # type: ignore[no-any-return]


def _contiguous(tensor: Tensor) -> bool:
    return _without_gaps(tensor, list(reversed(_strides(tensor))))


def _without_gaps(tensor: Tensor, positions: Sequence[int]) -> bool:
    """True if a tensor has no gaps in memory in this order of its dimensions, fastest first."""
    strides, sizes = _strides(tensor), (tensor["shape"][position] for position in positions)
    expected = itertools.accumulate(sizes, operator.mul, initial=1)
    return all(
        strides[position] == stride for position, stride in zip(positions, expected, strict=False)
    )


def _strides(tensor: Tensor) -> dict[int, int]:
    """Stride in elements by dimension, for dimensions of more than one element."""
    strides = enumerate(zip(_stride(tensor), tensor["shape"], strict=True))
    return {position: stride for position, (stride, size) in strides if size > 1}


def _stride(tensor: Tensor) -> Sequence[int]:
    return plain(tensor.get("stride")) or contiguous_stride(tuple(tensor["shape"]))
