"""Operators of libraries, such as ``torchvision.roi_align.default``. A list of the library says
which may be called (`farm.subjects.libraries`).

The list also has rules for values that an operator trusts:

    boxes                   corners of boxes, in the last dimension of four numbers
    regions TENSOR SCALE    an image's number, and a box in it after its multiplication by a scale
    regions NUMBER SCALE    the same for so many images
    below TENSOR DIMENSION  indices below a size of another argument
    any                     any integers

An integer tensor without a rule is refused. Other tensors have the values of activations, and those
that a call writes are zero. The parameter ``version`` is that of the library."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from farm.errors import TupleRejected
from farm.subjects.base import Kind, reject
from farm.subjects.values import Fill, are_integers, storage_users, trained
from farm.types.tuple import OperatorTuple, TensorSpec, plain, tensor_references

if TYPE_CHECKING:
    import torch

    from farm.subjects.libraries import LibraryOperator

_OVERLOAD = re.compile(r"(?!(aten|torch|prim|prims)\.)\w+\.\w+\.\w+\Z", re.ASCII)
_LARGEST_IMAGE = 1e4  # pixels of a side
_COLUMNS = {"boxes": 4, "regions": 5}
_MOST_VERSION = 64  # characters
_LARGEST_ELEMENT_BYTES = 8


class Library(Kind):
    """One overload of a library, named with its namespace and the overload."""

    name = "library"
    is_predictable = False
    must_run_on_meta = True

    def check(self, spec: OperatorTuple) -> None:
        if not _OVERLOAD.match(spec.operator):
            raise reject("operator", "is not the name of an overload of a library")
        version = spec.parameters.get("version")
        is_version = type(version) is str and len(version) <= _MOST_VERSION
        if set(spec.parameters) != {"version"} or not is_version:
            raise reject("parameters", "must be the version of the library")

    def called_name(self, spec: OperatorTuple) -> str:
        """The full name: no rule for an operator of PyTorch applies to it."""
        return spec.operator

    def admit(self, spec: OperatorTuple) -> None:
        from farm.subjects.allow_list import arguments_of, overload_of
        from farm.subjects.libraries import version_of
        from farm.subjects.shapes import check_enumerated

        overload_of(spec.operator)
        entry = _entry(spec)
        version = version_of(entry.library)
        if version != spec.parameters["version"]:
            raise TupleRejected(
                f"'{spec.operator}' is of version '{spec.parameters['version']}' of "
                f"{entry.library}; this host has version '{version}'.",
                f"Install the same version of {entry.library} on both hosts.",
            )
        check_enumerated(spec)
        passed = arguments_of(spec)
        for name, (least, most) in entry.limits.items():
            if name in passed:
                _check_limits(spec, name, least, most)
        if spec.operator == "torchvision._roi_align_backward.default":
            _check_gradient_of_regions(spec)
        for index, tensor in enumerate(spec.tensors):
            if tensor.extent < tensor.numel:
                raise _refused(spec, index, "has elements that share memory")
            self.values(spec, index, self.written(spec))

    def target(
        self, spec: OperatorTuple, tensors: list[torch.Tensor], device: torch.device
    ) -> Callable[..., Any]:
        """Raises `TupleRejected` if the operator has no kernel for the device."""
        import torch

        from farm.subjects.allow_list import overload_of
        from farm.subjects.libraries import lacks

        overload: Callable[..., Any] = overload_of(spec.operator)
        has_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key
        is_real = device.type in ("cpu", "cuda")
        if is_real and not has_kernel(_qualified(spec), device.type.upper()):
            raise lacks(spec.operator, _entry(spec).library)
        return overload

    def values(self, spec: OperatorTuple, index: int, written: frozenset[int]) -> Fill:
        """Raises `TupleRejected` if an integer tensor has no rule, or one that does not fit.
        Tensors that share memory get the same values."""
        rules = _entry(spec).values
        users = storage_users(spec)[spec.tensors[index].storage]
        ruled = [user for user in users if any(name in rules for name in _names(spec, user))]
        if len(ruled) > 1:
            raise _refused(spec, index, "shares its memory with another argument")
        if ruled:
            return _declared(spec, ruled[0], users, written)
        tensor = spec.tensors[index]
        if are_integers(tensor):
            raise _refused(spec, index, "has no rule for its valid values")
        if tensor.dtype == "bool":
            return Fill("boolean")
        if index in written:
            return Fill("near", scale=0.0)
        return trained(tensor, is_weight=False) if tensor.role == "parameter" else Fill()

    def may_be_zero(self, spec: OperatorTuple, index: int, written: frozenset[int]) -> bool:
        return self.values(spec, index, written).form == "normal"

    def written(self, spec: OperatorTuple) -> frozenset[int]:
        from farm.subjects.allow_list import written_by_schema

        return written_by_schema(spec)

    def largest_outputs(self, spec: OperatorTuple) -> int | None:
        from farm.subjects.libraries import listed

        entry = listed(spec.operator)
        if entry is None or not entry.selects_from:
            return None
        return _LARGEST_ELEMENT_BYTES * _tensor(spec, entry.selects_from).numel

    def run_on_meta(self, spec: OperatorTuple, built: Any) -> Any:
        """Raises `NotImplementedError` if the operator has no kernel for meta: one that is made for
        any device may read memory that a tensor on meta does not have."""
        import torch

        if not torch._C._dispatch_has_kernel_for_dispatch_key(_qualified(spec), "Meta"):
            raise NotImplementedError("it has no kernel for meta")
        return built.run()


def _qualified(spec: OperatorTuple) -> str:
    """The name of the overload in PyTorch's dispatcher: ``torchvision::nms``."""
    namespace, packet, name = spec.operator.split(".")
    return f"{namespace}::{packet}" + ("" if name == "default" else f".{name}")


def _entry(spec: OperatorTuple) -> LibraryOperator:
    from farm.subjects.allow_list import overload_of
    from farm.subjects.libraries import listed

    entry = listed(spec.operator)
    if entry is None:
        overload_of(spec.operator)  # raises the error for an operator that no list allows
    assert entry is not None
    return entry


def _check_limits(spec: OperatorTuple, name: str, least: int, most: int) -> None:
    """Raise `TupleRejected` if an argument is no number between two limits, no such numbers, or has
    another number of rows."""
    from farm.subjects.allow_list import arguments_of, overload_of

    tree = arguments_of(spec)[name]
    tensors = list(tensor_references(tree))
    if tensors:
        values = [next(iter(spec.tensors[index].shape), 1) for index in tensors]
    else:
        value = plain(tree)
        values = list(value) if isinstance(value, list | tuple) else [value]
    schema = overload_of(spec.operator)._schema.arguments
    (argument,) = [argument for argument in schema if argument.name == name]
    if tree is None and str(argument.real_type).startswith("Optional["):
        return
    is_number = [type(value) in (int, float) and least <= value <= most for value in values]
    length = argument.N if not tensors and argument.N is not None else len(values)
    if not all(is_number) or len(values) != length:
        raise TupleRejected(
            f"'{spec.operator}' is measured for {name} from {least} to {most}.",
            "Choose another size.",
        )


def _check_gradient_of_regions(spec: OperatorTuple) -> None:
    """The kernel trusts that the gradient has the shape of the forward's output."""
    from farm.subjects.allow_list import arguments_of

    passed = arguments_of(spec)
    sizes = [plain(passed.get(name)) for name in ("channels", "pooled_height", "pooled_width")]
    grad, rois = _tensor(spec, "grad"), _tensor(spec, "rois")
    if list(grad.shape) != [*rois.shape[:1], *sizes]:
        text = f"The gradient of '{spec.operator}' has the shape {grad.shape}."
        raise TupleRejected(text, "Capture the model again. Do not edit a tuple by hand.")


def _declared(spec: OperatorTuple, index: int, users: list[int], written: frozenset[int]) -> Fill:
    """The values of a storage with the tensor ``index``, for which the list has a rule, and the
    other tensors ``users``."""
    rules = _entry(spec).values
    form, *words = next(rules[name] for name in _names(spec, index) if name in rules).split()
    tensor = spec.tensors[index]
    others = [spec.tensors[user] for user in users if user != index]
    is_alone = not any(are_integers(other) or other.dtype != tensor.dtype for other in others)
    if not is_alone or (others and are_integers(tensor)):
        raise _refused(spec, index, "shares its memory with another argument")
    if form == "any":
        return Fill("index", bound=100) if are_integers(tensor) else Fill()
    if index in written:
        raise _refused(spec, index, "has a rule for its values, but the operator writes it")
    if form == "below":
        shape, dimension = _tensor(spec, words[0]).shape, int(words[1])
        bound = shape[dimension] if -len(shape) <= dimension < len(shape) else 0
        if bound < 1 and tensor.numel:
            raise _refused(spec, index, "has no valid value")
        return Fill("index", bound=bound)
    columns = _COLUMNS[form]
    is_table = tensor.shape[1:] == (columns,) and tensor.stride is None and not tensor.offset
    ends = [other.offset + other.extent for other in others]
    if not is_table or max(ends, default=0) > tensor.extent:
        raise _refused(spec, index, f"is no contiguous table of {columns} columns")
    if form == "boxes":
        return Fill("boxes", scale=_LARGEST_IMAGE / 10)
    images, side = _images(spec, *words)
    # a kernel reads pixels of the first row, also of an image without rows
    if not (images > 0 and side > 0 and math.isfinite(side)):
        raise _refused(spec, index, "has no valid value")
    return Fill("regions", scale=min(side, _LARGEST_IMAGE), bound=images)


def _images(spec: OperatorTuple, argument: str, scale: str) -> tuple[int, float]:
    """The number of images, and the shorter side of one before its multiplication by a scale."""
    from farm.subjects.allow_list import arguments_of

    passed = arguments_of(spec)
    factor = plain(passed.get(scale))
    if type(factor) not in (int, float) or not factor > 0:
        return 0, math.nan
    if not list(tensor_references(passed.get(argument))):
        number = plain(passed.get(argument))
        return (number, 16.0 / factor) if type(number) is int else (0, math.nan)
    shape = _tensor(spec, argument).shape
    return (shape[0], min(shape[-2:]) / factor) if len(shape) == 4 else (0, math.nan)


def _names(spec: OperatorTuple, index: int) -> Iterator[str]:
    from farm.subjects.allow_list import tensor_arguments

    return (name for name, _ in tensor_arguments(spec)[index])


def _tensor(spec: OperatorTuple, name: str) -> TensorSpec:
    """The tensor that a call passes as an argument of which a rule speaks."""
    from farm.subjects.allow_list import arguments_of

    index = next(tensor_references(arguments_of(spec).get(name)), None)
    if index is None:
        text = f"'{spec.operator}' is called without the tensor {name}."
        raise TupleRejected(text, "Capture the model again. Do not edit a tuple by hand.")
    return spec.tensors[index]


def _refused(spec: OperatorTuple, index: int, why: str) -> TupleRejected:
    names = " and ".join(dict.fromkeys(_names(spec, index))) or str(index)
    return TupleRejected(
        f"'{spec.operator}' cannot be run with random values: the tensor {names} {why}.",
        "Add a rule to the list of the library's operators, or measure the model without it.",
    )
