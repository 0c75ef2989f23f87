"""Sizes worked out from a description are those that PyTorch has."""

from __future__ import annotations

import pytest
import torch

from farm.operators.rebuild import rebuild
from farm.training.extract import extract
from farm.types.protocol import Variant
from farm.types.sizes import sizes_of


@pytest.mark.parametrize("model", ["squeezenet1_1", "inception_v3", "vit_b_16", "efficientnet_b0"])
def test_what_comes_out_is_what_pytorch_gives(model):
    known = 0
    tuples = extract(Variant(model, 2, 96 if model != "vit_b_16" else 224)).capture.tuples
    for spec in tuples.values():
        sizes = sizes_of(spec.short_name, spec.to_json())
        assert sizes.input_shapes == spec.input_shapes
        if sizes.output_shape is None:
            continue
        known += 1
        with torch.no_grad():
            out = rebuild(spec, "meta").run()
        assert tuple(out.shape) == sizes.output_shape, spec.to_json()
    assert known >= 0.8 * len(tuples)


def test_a_product_has_its_sizes():
    linear = {
        "parameters": {"in_features": 768, "out_features": 10, "bias": True},
        "arguments": [{"tensor": 0}],
        "keywords": {},
        "tensors": [{"role": "activation", "shape": [8, 197, 768], "dtype": "bfloat16", "storage": 0}],
    }
    sizes = sizes_of("Linear", linear)
    assert (sizes.m, sizes.n, sizes.k, sizes.products, sizes.dtype) == (8 * 197, 10, 768, 1, "bfloat16")
    tensors = [
        {"role": "activation", "shape": shape, "dtype": "float32", "storage": 0} for shape in ([4, 1, 5, 6], [3, 6, 7])
    ]
    sizes = sizes_of("matmul", {"arguments": [{"tensor": 0}, {"tensor": 1}], "tensors": tensors})
    assert (sizes.m, sizes.n, sizes.k, sizes.products) == (5, 7, 6, 12)
    assert sizes.output_shape == (4, 3, 5, 7)


def test_what_no_rule_is_written_for_is_left_open():
    tensors = [{"role": "activation", "shape": [2, 3], "dtype": "float32", "storage": 0}]
    assert sizes_of("einsum", {"arguments": [{"tensor": 0}], "tensors": tensors}).output_shape is None
    assert sizes_of("Conv2d", {"arguments": [{"tensor": 0}], "tensors": tensors}).output_shape is None
    assert sizes_of("arange", {"arguments": [8]}).input_shape is None
