"""Overloads of aten, such as ``aten.mul.Tensor``, which public functions call, also in a backward.
Their schemas say what they write. aten checks few arguments, so integers need rules."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from farm.subjects.base import Kind, reject
from farm.subjects.values import Fill
from farm.types.tuple import OperatorTuple, names_listed

if TYPE_CHECKING:
    import torch

_OVERLOAD = re.compile(r"aten\.[A-Za-z0-9_]+\.[A-Za-z0-9_]+\Z")
#: Operators that read only the shape of their argument `self`, or only write it.
_SELF_NOT_READ = names_listed("self_not_read")


class Aten(Kind):
    """One overload of aten, named with the overload."""

    name = "aten"

    def check(self, spec: OperatorTuple) -> None:
        if not _OVERLOAD.match(spec.operator):
            raise reject("operator", "is not the name of an overload of aten")
        if spec.parameters:
            raise reject("parameters", "must be empty, because the operator is not a module")

    def called_name(self, spec: OperatorTuple) -> str:
        return spec.short_name

    def admit(self, spec: OperatorTuple) -> None:
        from farm.subjects.aten_values import aten_fills
        from farm.subjects.shapes import check_enumerated, check_order, check_shapes

        check_order(spec)
        check_enumerated(spec)
        aten_fills(spec)
        check_shapes(spec)

    def target(
        self, spec: OperatorTuple, tensors: list[torch.Tensor], device: torch.device
    ) -> Callable[..., Any]:
        from farm.subjects.allow_list import overload_of

        overload: Callable[..., Any] = overload_of(spec.operator)
        return overload

    def values(self, spec: OperatorTuple, index: int, written: frozenset[int]) -> Fill:
        """Raises `TupleRejected` if no rule says which values of an integer tensor are valid."""
        from farm.subjects.aten_values import aten_fills

        return aten_fills(spec)[index]

    def may_be_zero(self, spec: OperatorTuple, index: int, written: frozenset[int]) -> bool:
        return self.values(spec, index, written).form == "normal"

    def written(self, spec: OperatorTuple) -> frozenset[int]:
        from farm.subjects.allow_list import written_by_schema

        return written_by_schema(spec)

    def outputs(self, spec: OperatorTuple) -> frozenset[int]:
        """The tensors that are only the argument ``out``."""
        from farm.subjects.allow_list import tensor_arguments

        if not spec.operator.endswith(".out"):
            return frozenset()
        return frozenset(
            index
            for index, arguments in enumerate(tensor_arguments(spec))
            if arguments == (("out", 0),)
        )

    def host_storages(self, spec: OperatorTuple) -> frozenset[int]:
        from farm.subjects.allow_list import read_by_host

        return read_by_host(spec)

    def run_on_meta(self, spec: OperatorTuple, built: Any) -> Any:
        """An operator that only returns arguments that it writes runs only to count its FLOPs."""
        from farm.subjects.allow_list import RETURNS_TO_HOST, overload_of

        returns = overload_of(spec.operator)._schema.returns
        if all(value.alias_info is not None for value in returns):
            if spec.operator.endswith(".out"):
                built.run()
            return [built.tensors[index] for index in sorted(built.written)[: len(returns)]]
        return None if spec.operator in RETURNS_TO_HOST else built.run()

    def unread_storages(self, spec: OperatorTuple) -> frozenset[int]:
        from farm.subjects.allow_list import tensor_arguments

        unread = super().unread_storages(spec)
        if spec.short_name not in _SELF_NOT_READ:
            return unread
        read = set()
        for tensor, arguments in zip(spec.tensors, tensor_arguments(spec), strict=True):
            if any(name != "self" for name, _ in arguments):
                read.add(tensor.storage)
        return unread | (frozenset(tensor.storage for tensor in spec.tensors) - read)
