"""Operator tuples for measuring, as captures give them."""

from __future__ import annotations

from farm.types.subject import Subject
from farm.types.tuple import OperatorTuple, TensorSpec


def subject(spec: OperatorTuple) -> Subject:
    return Subject("operator", spec.id, spec.to_json())


def linear(rows: int, inputs: int, outputs: int, dtype: str = "float32") -> Subject:
    spec = OperatorTuple(
        operator="torch.nn.functional.linear",
        kind="function",
        arguments=({"tensor": 0}, {"tensor": 1}),
        tensors=(
            TensorSpec("activation", "", (rows, inputs), dtype, storage=0),
            TensorSpec("parameter", "", (outputs, inputs), dtype, storage=1),
        ),
    )
    return subject(spec)


def relu_in_place(rows: int, columns: int) -> Subject:
    spec = OperatorTuple(
        operator="torch.Tensor.relu_",
        kind="function",
        arguments=({"tensor": 0},),
        tensors=(TensorSpec("activation", "", (rows, columns), "float32"),),
    )
    return subject(spec)


def product_that_does_not_fit() -> Subject:
    """Its two inputs have shapes that do not go together: PyTorch raises."""
    return product((4, 5), (6, 7))


def product_with_no_room() -> Subject:
    """Small inputs, and an output of 17 TB."""
    return product((2**21, 1), (1, 2**21))


def product(left: tuple[int, ...], right: tuple[int, ...]) -> Subject:
    spec = OperatorTuple(
        operator="torch.Tensor.mm",
        kind="function",
        arguments=({"tensor": 0}, {"tensor": 1}),
        tensors=(
            TensorSpec("activation", "", left, "float32", storage=0),
            TensorSpec("activation", "", right, "float32", storage=1),
        ),
    )
    return subject(spec)
