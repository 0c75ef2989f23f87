"""A call that would need too much is refused before it uses memory."""

from __future__ import annotations

import pytest
import torch

from farm.errors import TupleRejected, Unmeasurable
from farm.operators.output_sizes import MOST_OUTPUTS, check_size, trial
from farm.types.tuple import OperatorTuple, TensorSpec

CPU = torch.device("cpu")
ONE, TWO = {"tensor": 0}, {"tensor": 1}


def call(operator, *arguments, tensors=(), **keywords):
    kind = "aten" if operator.startswith("aten.") else "function"
    return OperatorTuple(operator, kind, {}, arguments, keywords, tuple(tensors))


def floats(*shape, storage=0):
    return TensorSpec("activation", "", shape, "float32", storage=storage)


def test_the_outputs_are_known_before_they_are_allocated():
    spec = call("aten.full.default", [1000, 1000], 1.0)
    assert trial(spec).new_bytes == 4_000_000
    check_size(spec, CPU, 8_000_000, 1.0)
    with pytest.raises(Unmeasurable, match="outputs need") as caught:
        check_size(spec, CPU, 7_999_999, 1.0)  # of two calls at once
    assert caught.value.reason == "out_of_memory"
    check_size(spec, torch.device("cuda"), 4_000_000, 1.0)


@pytest.mark.parametrize(
    "spec",
    [
        call("torch.full", [2**20, 2**20], 1.0),
        call("torch.rand", 2**40),
        call("aten.arange.default", 2**40),
        call(
            "torch.nn.functional.one_hot",
            ONE,
            2**40,
            tensors=[TensorSpec("activation", "", (8,), "int64")],
        ),
        call(
            "aten.embedding_dense_backward.default",
            ONE,
            TWO,
            2**40,
            -1,
            False,
            tensors=[floats(4, 8), TensorSpec("activation", "", (4,), "int64", storage=1)],
        ),
    ],
    ids=lambda spec: spec.short_name,
)
def test_a_scalar_cannot_ask_for_more_memory_than_there_is(spec):
    with pytest.raises((Unmeasurable, TupleRejected)):
        check_size(spec, CPU, 2**40, 300.0)


def test_a_product_that_takes_days_is_refused():
    spec = call(
        "aten.mm.default",
        ONE,
        TWO,
        tensors=[floats(2**17, 2**17), floats(2**17, 2**17, storage=1)],
    )
    assert trial(spec).flops == 2 * 2**51
    check_size(spec, torch.device("cuda"), 2**40, 300.0)
    with pytest.raises(Unmeasurable, match="FLOPs, which takes at least 450 s"):
        check_size(spec, CPU, 2**40, 300.0)


def test_a_split_into_too_many_parts_is_refused():
    wide = TensorSpec("activation", "", (MOST_OUTPUTS + 1,), "float32", stride=(0,))
    for spec in (
        call("torch.unbind", ONE, tensors=[wide]),
        call("torch.Tensor.unbind", ONE, 0, tensors=[wide]),
        call("torch.functional.split", ONE, 1, tensors=[wide]),
        call("torch.chunk", ONE, 10**6, tensors=[wide]),
        call("aten.unbind_copy.int", ONE, tensors=[wide]),
    ):
        with pytest.raises(TupleRejected, match="at most 100000 are measured"):
            trial(spec)
    assert trial(call("torch.chunk", ONE, 2, tensors=[wide])) is not None


def test_an_output_that_would_change_its_size_is_refused():
    tensors = [floats(8), floats(3, storage=1)]
    with pytest.raises(TupleRejected, match="shape or the memory"):
        trial(call("aten.abs.out", ONE, out=TWO, tensors=tensors))


def test_an_empty_tensor_of_a_huge_size_is_refused():
    with pytest.raises(TupleRejected, match="empty tensor"):
        trial(
            call("aten.adaptive_max_pool2d.default", ONE, [2**31, 0], tensors=[floats(2, 4, 8, 8)])
        )


def test_an_overload_that_does_not_accept_its_arguments_is_not_run():
    with pytest.raises(Unmeasurable) as caught:
        trial(call("aten.mm.default", ONE, TWO, tensors=[floats(2, 3), floats(2, 3, storage=1)]))
    assert caught.value.reason == "raised"
