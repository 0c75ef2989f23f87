"""Quantised variants: what is refused, what is built, and what a capture contains."""

import dataclasses

import pytest
import torch
from torch import nn

from farm.errors import TupleRejected, UnsupportedModel, UsageError
from farm.models import catalog, quantization
from farm.models.quantization import SCHEMES, check, layers_in_words, quantized
from farm.operators.cost import cost
from farm.operators.rebuild import rebuild
from farm.requests.memory import memory_of
from farm.settings import settings
from farm.subjects.registry import kind_of
from farm.training.extract import extract
from farm.types.replacement import replaced
from farm.types.tensor_kinds import bytes_of, has_composites
from farm.types.tuple import OperatorTuple, TensorSpec
from farm.types.variant import Variant

FEATURES, HIDDEN, BATCH = 256, 512, 32


class Layers(nn.Module):
    def __init__(self, features=FEATURES, hidden=HIDDEN):
        super().__init__()
        self.first, self.second = nn.Linear(features, hidden), nn.Linear(hidden, features)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def layers():
    return Layers(), torch.randn(BATCH, FEATURES)


def odd_layers():
    """Only one of its layers has sizes that are multiples of 16."""
    return nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 10)), torch.randn(BATCH, 64)


def no_layers():
    return nn.Sequential(nn.Conv2d(3, 4, 3)), torch.randn(2, 3, 8, 8)


@pytest.fixture
def two_layers(monkeypatch):
    """The function `layers`, as a model of the catalog."""
    monkeypatch.setattr(settings(), "models", {"layers": f"{__name__}:layers"})
    return catalog.resolve("layers")


def variant_of(scheme, dtype="bfloat16", **fields):
    return Variant(
        model="layers", batch=BATCH, input_size=8, dtype=dtype, quantize=scheme, **fields
    )


@pytest.mark.parametrize(
    ("scheme", "fields", "card_kind", "told"),
    [
        ("int4-weights", {"dtype": "float32"}, "", "bfloat16"),
        ("fp8", {"dtype": "float16"}, "", "int8-weights"),
        ("int8", {"dtype": "float64"}, "", "bfloat16"),
        ("int4-weights", {}, "cpu", "int8-weights"),
        ("fp8", {}, "cpu", "GPU"),
        ("int8", {}, "cuda", "--compile"),
    ],
)
def test_what_a_scheme_refuses_is_told_with_what_works(scheme, fields, card_kind, told):
    with pytest.raises(UsageError) as refused:
        check(variant_of(scheme, **fields), card_kind)
    assert told in f"{refused.value.message} {refused.value.next_step}"


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    missing = replaced(quantization, "PACKAGE", "no_such_package")
    with missing, pytest.raises(UsageError, match="not installed") as refused:
        check(variant_of("int8-weights"))
    assert "pip install" in refused.value.next_step


@pytest.mark.parametrize(
    "fields", [{"step": "training", "mode": "train"}, {"tensor_parallel": 2}, {"quantize": "int3"}]
)
def test_a_variant_that_cannot_be_quantised_is_refused(fields):
    with pytest.raises(UsageError):
        variant_of(**{"scheme": fields.pop("quantize", "int8")}, **fields)


@pytest.mark.parametrize(
    ("model", "scheme", "told"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3)), "int8", "no torch.nn.Linear"),
        (Layers(24, 40), "int4-weights", "24 x 40, are not multiples of 128"),
    ],
)
def test_a_model_without_a_layer_that_a_scheme_accepts_is_refused(model, scheme, told):
    with pytest.raises(UnsupportedModel, match=told):
        quantized(model.to(torch.bfloat16), variant_of(scheme))


def test_the_layers_of_a_transformer_are_quantised_but_not_its_attention():
    layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True).to(torch.bfloat16).eval()
    quantized(layer, variant_of("int8-weights"))
    assert has_composites(layer.linear1)
    assert not has_composites(layer.self_attn)
    with torch.no_grad():
        assert layer(torch.randn(2, 8, 256, dtype=torch.bfloat16)).isfinite().all()


def test_a_model_is_quantised_once():
    model = quantized(Layers().to(torch.bfloat16), variant_of("int8-weights"))
    with pytest.raises(UnsupportedModel, match="already"):
        quantized(model, variant_of("int8-weights"))


def test_layers_with_other_sizes_stay_and_are_counted():
    model, _ = odd_layers()
    line = layers_in_words(variant_of("fp8"), model)
    assert "1 of 2 linear layers" in line
    assert "multiples of 16" in line


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_capture_has_the_products_and_the_size_of_the_packed_weights(scheme, two_layers):
    variant = two_layers.variant(batch=BATCH, dtype="bfloat16", quantize=scheme)
    extraction = extract(variant, model=two_layers)
    assert extraction.refusal("layers") is None
    assert extraction.flops == extraction.model_flops
    inputs = {"int4-weights": 1024}  # tiles are filled up with zeros
    width, middle = inputs.get(scheme, FEATURES), inputs.get(scheme, HIDDEN)
    assert extraction.flops == 2 * BATCH * (width * HIDDEN + middle * FEATURES)
    plain_bytes = memory_of(dataclasses.replace(variant, quantize="")).parameters
    packed_bytes = memory_of(variant).parameters
    assert packed_bytes < plain_bytes * (1.0 if scheme == "int4-weights" else 0.55)


def test_packed_weights_have_values_of_both_signs(two_layers):
    variant = two_layers.variant(batch=BATCH, dtype="bfloat16", quantize="int8-weights")
    model = two_layers.build(variant, device="cpu")
    plain = two_layers.build(dataclasses.replace(variant, quantize=""), device="cpu")
    assert has_composites(model)
    assert bytes_of(model.parameters()) < 0.55 * bytes_of(plain.parameters())
    packed = 0
    for spec in extract(variant, model=two_layers).capture.tuples.values():
        for tensor in rebuild(spec, torch.device("cpu")).tensors:
            if tensor.dtype == torch.int8:
                packed += 1
                assert tensor.min() < -60
                assert tensor.max() > 60
    assert packed


def packed_product(**changes):
    """A product of 32 x 1024 with packed weights of 512 x 1024, in groups of 128."""
    shapes = {"self": (32, 1024), "mat2": (64, 8, 32, 4), "scales": (8, 512, 2)} | changes
    dtypes = {"self": "bfloat16", "mat2": "int32", "scales": "bfloat16"}
    tensors = tuple(
        TensorSpec("parameter", "", shape, dtypes[name], storage=storage)
        for storage, (name, shape) in enumerate(shapes.items())
    )
    arguments = ({"tensor": 0}, {"tensor": 1}, 128, {"tensor": 2})
    return OperatorTuple(
        "aten._weight_int4pack_mm.default", "aten", arguments=arguments, tensors=tensors
    )


def integer_product(**changes):
    """A product of 4 x 64 with weights of int8, 32 x 64."""
    shapes = {"self": (4, 64), "mat2": (32, 64), "scales": (32,)} | changes
    dtypes = {"self": "bfloat16", "mat2": "int8", "scales": "bfloat16"}
    tensors = tuple(
        TensorSpec("parameter", "", shape, dtypes[name], storage=storage)
        for storage, (name, shape) in enumerate(shapes.items())
    )
    arguments = ({"tensor": 0}, {"tensor": 1}, {"tensor": 2})
    return OperatorTuple(
        "aten._weight_int8pack_mm.default", "aten", arguments=arguments, tensors=tensors
    )


def test_a_product_with_weights_of_int8_runs_and_counts_its_multiply_adds():
    spec = integer_product()
    built = rebuild(spec, torch.device("cpu"))
    left, weights, scales = built.tensors
    assert weights.abs().max() > 60
    expected = (left.float() @ weights.float().t()) * scales.float()
    assert torch.allclose(built.run().float(), expected, rtol=0.05, atol=0.5)
    assert cost(spec).flops == 2 * 4 * 64 * 32


@pytest.mark.parametrize(
    "changes", [{"scales": (31,)}, {"self": (4, 63)}, {"mat2": (32, 64, 1)}, {"scales": (32, 1)}]
)
def test_a_product_with_weights_of_int8_of_other_sizes_is_rejected_before_it_runs(changes):
    kind = kind_of(integer_product())
    kind.admit(integer_product())
    with pytest.raises(TupleRejected, match="do not belong together"):
        kind.admit(integer_product(**changes))


def test_a_product_of_eight_bits_that_is_written_to_a_given_output_has_a_cost():
    shapes = (("self", (32, 64), (64, 1)), ("mat2", (64, 16), (1, 64)))
    tensors = [
        TensorSpec("activation", "", shape, "float8_e4m3fn", stride=stride, storage=storage)
        for storage, (_, shape, stride) in enumerate(shapes)
    ]
    tensors += [
        TensorSpec("activation", "", shape, "float32", storage=2 + number)
        for number, shape in enumerate([(32, 1), (1, 16)])
    ]
    tensors.append(TensorSpec("activation", "", (32, 16), "bfloat16", storage=4))
    spec = OperatorTuple(
        "aten._scaled_mm.out",
        "aten",
        arguments=tuple({"tensor": index} for index in range(4)),
        keywords={"out": {"tensor": 4}, "out_dtype": {"dtype": "bfloat16"}},
        tensors=tuple(tensors),
    )
    assert cost(spec).flops == 2 * 32 * 64 * 16
    assert cost(spec).output_shapes == ((32, 16),)


@pytest.mark.parametrize(
    "changes", [{"scales": (7, 512, 2)}, {"scales": (8, 511, 2)}, {"self": (32, 1040)}]
)
def test_a_packed_product_whose_sizes_do_not_fit_is_rejected_before_it_runs(changes):
    kind = kind_of(packed_product())
    kind.admit(packed_product())
    with pytest.raises(TupleRejected, match="do not belong together"):
        kind.admit(packed_product(**changes))
