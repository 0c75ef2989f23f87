"""Operators of libraries, such as ``torchvision.roi_align.default``. A list of the library says
which may be called (`farm.subjects.libraries`).

The list also has rules for values that an operator trusts:

    boxes               corners of boxes, in the last dimension of four numbers
    regions TENSOR SCALE    an image's number, and a box in it after its multiplication by a scale
    regions NUMBER SCALE    the same for so many images
    below TENSOR DIMENSION  indices below a size of another argument
    any                 any integers

An integer tensor without a rule is refused. Other tensors have the values of activations."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from farm.errors import TupleRejected
from farm.subjects.aten import Aten
from farm.subjects.base import reject
from farm.subjects.values import Fill, are_integers, storage_users, trained
from farm.types.tuple import OperatorTuple, plain, tensor_references

_OVERLOAD = re.compile(r"(?!(aten|torch|prim|prims)\.)\w+\.\w+\.\w+\Z", re.ASCII)
_LARGEST_IMAGE = 1e4  # pixels of a side
_COLUMNS = {"boxes": 4, "regions": 5}


class Library(Aten):
    """One overload of a library, named with its namespace and the overload."""

    name = "library"

    def check(self, spec: OperatorTuple) -> None:
        if not _OVERLOAD.match(spec.operator):
            raise reject("operator", "is not the name of an overload of a library")
        if spec.parameters:
            raise reject("parameters", "must be empty, because the operator is not a module")

    def admit(self, spec: OperatorTuple) -> None:
        from farm.subjects.allow_list import arguments_of
        from farm.subjects.libraries import listed

        entry = listed(spec.operator)
        for name, (least, most) in (entry.limits if entry else {}).items():
            value = plain(arguments_of(spec).get(name))
            tensors = list(tensor_references(arguments_of(spec).get(name)))
            if tensors:
                value = max((spec.tensors[index].shape or (1,))[0] for index in tensors)
            if type(value) not in (int, float) or not least <= value <= most:
                raise TupleRejected(
                    f"'{spec.operator}' is measured for {name} from {least} to {most}.",
                    "Choose another size.",
                )
        if spec.short_name == "_roi_align_backward":
            _check_gradient_of_regions(spec)
        for index in range(len(spec.tensors)):
            self.values(spec, index, frozenset())

    def values(self, spec: OperatorTuple, index: int, written: frozenset[int]) -> Fill:
        """Raises `TupleRejected` if an integer tensor has no rule, or one that does not fit."""
        from farm.subjects.allow_list import tensor_arguments
        from farm.subjects.libraries import listed

        entry = listed(spec.operator)
        rules: Mapping[str, str] = entry.values if entry else {}
        names = [name for name, _ in tensor_arguments(spec)[index]]
        declared = [rules[name] for name in names if name in rules]
        tensor = spec.tensors[index]
        if len(declared) > 1 or (declared and len(storage_users(spec)[tensor.storage]) > 1):
            raise _refused(spec, names, "shares its memory with another argument")
        if declared:
            return _declared(spec, index, names, declared[0])
        if tensor.dtype == "bool":
            return Fill("boolean")
        if are_integers(tensor):
            raise _refused(spec, names, "has no rule for its valid values")
        return trained(tensor, is_weight=False) if tensor.role == "parameter" else Fill()


def _check_gradient_of_regions(spec: OperatorTuple) -> None:
    """The kernel trusts that the gradient has the shape of the forward's output."""
    from farm.subjects.allow_list import arguments_of

    passed = arguments_of(spec)
    grad, rois = (spec.tensors[next(tensor_references(passed[name]))] for name in ("grad", "rois"))
    sizes = [plain(passed[name]) for name in ("channels", "pooled_height", "pooled_width")]
    if list(grad.shape) != [*rois.shape[:1], *sizes]:
        text = f"The gradient of '{spec.operator}' has the shape {grad.shape}."
        raise TupleRejected(text, "Capture the model again. Do not edit a tuple by hand.")


def _declared(spec: OperatorTuple, index: int, names: list[str], rule: str) -> Fill:
    from farm.subjects.allow_list import arguments_of

    form, *words = rule.split()
    tensor, passed = spec.tensors[index], arguments_of(spec)
    if form == "any":
        return Fill("index", bound=100) if are_integers(tensor) else Fill()
    if form == "below":
        source = spec.tensors[next(tensor_references(passed[words[0]]))]
        bound = source.shape[int(words[1])] if source.shape else 1
        if bound < 1 and tensor.numel:
            raise _refused(spec, names, "has no valid value")
        return Fill("index", bound=bound)
    columns = _COLUMNS[form]
    if tensor.shape[1:] != (columns,) or tensor.stride is not None or tensor.offset:
        raise _refused(spec, names, f"is no contiguous table of {columns} columns")
    if form == "boxes":
        return Fill("boxes", scale=_LARGEST_IMAGE / 10)
    images, extent = _images(spec, passed[words[0]])
    factor = plain(passed[words[1]])
    side = extent / factor if type(factor) in (int, float) and factor > 0 else math.nan
    if not (images > 0 and math.isfinite(side)):
        raise _refused(spec, names, "has no valid value")
    return Fill("regions", scale=min(side, _LARGEST_IMAGE), bound=images)


def _images(spec: OperatorTuple, tree: Any) -> tuple[int, float]:
    """The number of images, and the shorter side of one."""
    index = next(tensor_references(tree), None)
    if index is None:
        number = plain(tree)
        return (number, 16.0) if type(number) is int else (0, 0.0)
    shape = spec.tensors[index].shape
    return (shape[0], float(min(shape[-2:]))) if len(shape) == 4 else (0, 0.0)


def _refused(spec: OperatorTuple, names: list[str], why: str) -> TupleRejected:
    return TupleRejected(
        f"'{spec.operator}' cannot be run with random values: the tensor {' and '.join(names)} "
        f"{why}.",
        "Add a rule to the list of the library's operators, or measure the model without it.",
    )
