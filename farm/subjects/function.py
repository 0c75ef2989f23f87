"""Functions of PyTorch's public API, such as ``torch.add``."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from farm.errors import TupleRejected
from farm.subjects.base import Kind, reject
from farm.types.tuple import OperatorTuple

if TYPE_CHECKING:
    import torch


class PublicOperator(Kind):
    """An operator of the public API, from the allow-list."""

    public = True

    def admit(self, spec: OperatorTuple) -> None:
        from farm.subjects.allow_list import ALLOWED_OPERATORS
        from farm.subjects.shapes import check_order

        if spec.operator not in ALLOWED_OPERATORS:
            text = f"'{spec.operator}' is not in this version's allow-list of operators."
            raise TupleRejected(text, "Capture the model again with this version.")
        check_order(spec)

    def operator(self, spec: OperatorTuple, *, is_module: bool) -> Any:
        """The function, or the class of the module. Raises `TupleRejected` if it is the other."""
        from torch import nn

        from farm.subjects.allow_list import ALLOWED_OPERATORS

        operator = ALLOWED_OPERATORS[spec.operator]
        if (isinstance(operator, type) and issubclass(operator, nn.Module)) != is_module:
            text = f"The tuple has the kind {spec.kind}, but '{spec.operator}' is of another kind."
            raise TupleRejected(text, "Capture the model again with this version.")
        return operator

    def run_on_meta(self, spec: OperatorTuple, built: Any) -> Any:
        from farm.subjects.allow_list import RETURNS_TO_HOST

        return None if spec.operator in RETURNS_TO_HOST else built.run()


class Function(PublicOperator):
    """A function: it has no parameters and no tensors of its own."""

    name = "function"

    def recorded_name(self, function: Any) -> str:
        """The name in the allow-list, also of a function that is replaced at the moment."""
        from farm.subjects.allow_list import FUNCTION_NAMES

        name = FUNCTION_NAMES.get(function) or FUNCTION_NAMES.get(inspect.unwrap(function))
        return name or ""

    def check(self, spec: OperatorTuple) -> None:
        if spec.parameters:
            raise reject("parameters", "must be empty, because the operator is not a module")

    def target(
        self, spec: OperatorTuple, tensors: list[torch.Tensor], device: torch.device
    ) -> Callable[..., Any]:
        function: Callable[..., Any] = self.operator(spec, is_module=False)
        return function

    def with_roles(self, spec: OperatorTuple, trained: tuple[bool, ...]) -> OperatorTuple:
        """A view of a parameter is a parameter, and a frozen parameter is a buffer."""
        tensors = []
        for tensor, is_trained in zip(spec.tensors, trained, strict=True):
            role = tensor.role
            if is_trained:
                role = "parameter"
            elif role == "parameter":
                role = "buffer"
            tensors.append(dataclasses.replace(tensor, role=role))
        return dataclasses.replace(spec, tensors=tuple(tensors))
