"""The shapes of outputs that are stored with a tuple are those that the capture saw."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from farm.operators.capture import capture
from farm.operators.cost import cost
from farm.subjects.parsing import parse
from farm.training.extract import extract
from farm.types.matrix_products import Products, matrix_product
from farm.types.tuple import dtype_of_call, shapes_passed
from farm.types.variant import Variant
from tests import slow


@pytest.mark.parametrize(
    "model",
    [
        "squeezenet1_1",
        pytest.param("inception_v3", marks=slow.ALIKE),
        "vit_b_16",
        "efficientnet_b0",
    ],
)
def test_what_comes_out_is_what_the_capture_saw(model):
    found = extract(Variant(model, 2, 96 if model != "vit_b_16" else 224))
    for tuple_id, spec in found.capture.tuples.items():
        seen = [text.partition(")")[0] + ")" for text in found.capture.traces[tuple_id].outputs]
        # Fused attention returns an empty tensor in place of its weights.
        assert [text for text in seen if text != "(0,)"] == list(
            map(str, found.costs[tuple_id].output_shapes)
        ), spec.to_json()
        assert shapes_passed(spec.to_json()) == spec.input_shapes


def test_an_operator_that_writes_its_input_returns_it():
    class Step(nn.Module):
        def forward(self, values):
            return torch.topk(values.add_(1), 2)

    with torch.no_grad():
        specs = capture(Step(), (torch.ones(3, 8),)).tuples.values()
    shapes = {spec.short_name: cost(spec).output_shapes for spec in specs}
    assert shapes == {"add_": ((3, 8),), "topk": ((3, 2), (3, 2))}
    data = {
        "schema": 1,
        "operator": "aten.mul_.Scalar",
        "kind": "aten",
        "parameters": {},
        "keywords": {},
    }
    data |= {"arguments": [{"tensor": 0}, 2.0], "training": False, "direction": "forward"}
    data["tensors"] = [{"role": "activation", "shape": [3, 8], "dtype": "float32", "storage": 0}]
    assert cost(parse(data)).output_shapes == ((3, 8),)


def test_a_product_has_its_sizes():
    linear = {
        "parameters": {"in_features": 768, "out_features": 10, "bias": True},
        "arguments": [{"tensor": 0}],
        "keywords": {},
        "tensors": [
            {"role": "activation", "shape": [8, 197, 768], "dtype": "bfloat16", "storage": 0}
        ],
    }
    assert matrix_product("Linear", linear) == Products(8 * 197, 10, 768)
    assert dtype_of_call(linear) == "bfloat16"
    tensors = [
        {"role": "activation", "shape": shape, "dtype": "float32", "storage": 0}
        for shape in ([4, 1, 5, 6], [3, 6, 7])
    ]
    product = matrix_product(
        "matmul", {"arguments": [{"tensor": 0}, {"tensor": 1}], "tensors": tensors}
    )
    assert product == Products(5, 7, 6, 12)


def test_what_no_rule_is_written_for_is_left_open():
    tensors = [{"role": "activation", "shape": [2, 3], "dtype": "float32", "storage": 0}]
    assert matrix_product("einsum", {"arguments": [{"tensor": 0}], "tensors": tensors}) is None
    assert matrix_product("Linear", {"arguments": [{"tensor": 0}], "tensors": tensors}) is None
    assert shapes_passed({"arguments": [8]}) == ()
