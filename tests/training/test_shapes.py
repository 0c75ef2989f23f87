"""Tensors of an operator of aten that do not belong together are refused: its kernel trusts them."""

from __future__ import annotations

import dataclasses

import pytest

from farm.errors import TupleRejected
from farm.operators.rebuild import rebuild
from farm.types.tuple import OperatorTuple, TensorSpec


def call(name, arguments, *tensors):
    """A call of `aten.{name}`; ``T`` in the arguments is the next tensor."""
    numbers = iter(range(len(tensors)))
    passed = tuple({"tensor": next(numbers)} if entry is T else entry for entry in arguments)
    stored = tuple(
        dataclasses.replace(tensor, storage=number) for number, tensor in enumerate(tensors)
    )
    return OperatorTuple(f"aten.{name}", "aten", {}, passed, {}, stored)


T = object()


def floats(*shape, stride=None):
    return TensorSpec("activation", "", shape, "float32", stride=stride)


def integers(*shape, stride=None):
    return TensorSpec("activation", "", shape, "int64", stride=stride)


ROWS, PER_ROW, WEIGHT = floats(4, 8), floats(4, 1), floats(8)
IMAGE, CHANNELS, FEWER = floats(2, 4, 8, 8), floats(4), floats(3)
POOLED, PLACES = floats(2, 4, 4, 4), integers(2, 4, 4, 4)
HEADS, FEWER_KEYS = floats(1, 2, 16, 8), floats(1, 2, 8, 8)
LAYER_NORM = (T, T, [8], T, T, T, T, [True, True, True])
BATCH_NORM = (T, T, T, T, T, T, T, True, 1e-5, [True, True, True])
POOL = (T, T, [2, 2], [2, 2], [0, 0], [1, 1], False, T)
HALF = floats(4, 5)

VALID = {
    "layer norm": call(
        "native_layer_norm_backward.default",
        LAYER_NORM,
        ROWS,
        ROWS,
        PER_ROW,
        PER_ROW,
        WEIGHT,
        WEIGHT,
    ),
    "batch norm": call(
        "native_batch_norm_backward.default", BATCH_NORM, IMAGE, IMAGE, *[CHANNELS] * 5
    ),
    "pool": call("max_pool2d_with_indices_backward.default", POOL, POOLED, IMAGE, PLACES),
    "average": call("_adaptive_avg_pool2d_backward.default", (T, T), POOLED, IMAGE),
    "attention": call(
        "_scaled_dot_product_flash_attention_for_cpu.default", (T,) * 3, *[HEADS] * 3
    ),
    "transform": call(
        "_fft_c2r.default", (T, [1], 0, 8), TensorSpec("activation", "", (4, 5), "complex64")
    ),
    "by element": call("tanh_backward.default", (T, T), floats(4, 3, 8), floats(4, 1, 8)),
    "by element, of a row": call("silu_backward.default", (T, T), floats(4, 3, 8), floats(8)),
    "without broadcasting": call("gelu_backward.default", (T, T), ROWS, ROWS),
    "in place": call("add_.Tensor", (T, T), ROWS, ROWS),
    "optimizer": call(
        "_fused_sgd_.default",
        ([{"tensor": 0}], [{"tensor": 1}], [{"tensor": 2}]),
        *[ROWS] * 3,
    ),
}


SGD = {
    "weight_decay": 0.0,
    "momentum": 0.9,
    "lr": 0.1,
    "dampening": 0.0,
    "nesterov": False,
    "maximize": False,
    "is_first_step": False,
}


@pytest.mark.parametrize("name", VALID)
def test_tensors_that_belong_together_are_built(name):
    keywords = SGD if name == "optimizer" else {}
    rebuild(dataclasses.replace(VALID[name], keywords=keywords), "cpu").run()


@pytest.mark.parametrize(
    ("name", "index", "tensor", "why"),
    [
        ("layer norm", 2, floats(1, 1), "mean has the shape"),
        ("layer norm", 3, floats(2, 1), "rstd has the shape"),
        ("layer norm", 0, floats(4, 7), "grad_out has the shape"),
        ("layer norm", 4, floats(3), "PyTorch does not accept them"),
        ("batch norm", 2, FEWER, "PyTorch does not accept them"),
        ("batch norm", 3, FEWER, "PyTorch does not accept them"),
        ("batch norm", 5, FEWER, "save_mean has the shape"),
        ("batch norm", 6, FEWER, "save_invstd has the shape"),
        ("pool", 2, integers(2, 4, 2, 2), "indices has the shape"),
        ("pool", 2, integers(2, 4, 4, 4, stride=(0, 0, 0, 0)), "elements that share memory"),
        ("pool", 0, floats(2, 4, 8, 8), "grad_output has the shape"),
        ("average", 1, floats(2, 4, 4, 0), "the input is empty"),
        ("attention", 1, FEWER_KEYS, "different sizes"),
        ("attention", 2, floats(1, 2, 16, 4, 1), "four dimensions"),
        ("attention", 0, floats(1, 2, 0, 8), "empty"),
        ("transform", 0, TensorSpec("activation", "", (4, 4), "complex64"), "does not belong"),
        ("by element", 1, floats(4, 2, 8), "output has the shape"),
        ("without broadcasting", 1, floats(1, 8), "grad_output has the shape"),
        ("in place", 0, floats(4, 8, stride=(0, 1)), "elements that share memory"),
        ("optimizer", 1, floats(2, 8), "has the shape"),
        ("optimizer", 1, floats(4, 8, stride=(0, 1)), "elements that share memory"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_belong_together_are_refused(name, index, tensor, why):
    spec = VALID[name]
    tensors = list(spec.tensors)
    tensors[index] = dataclasses.replace(tensor, storage=index)
    with pytest.raises(TupleRejected, match=why):
        rebuild(dataclasses.replace(spec, tensors=tuple(tensors)), "meta")
