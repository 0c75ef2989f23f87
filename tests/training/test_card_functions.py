"""Functions as an NVIDIA card runs them, captured without a card."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from farm.models import catalog
from farm.operators.capture import WatchedOperators
from farm.training.card_functions import as_on_card, scaled_dot_product_attention
from farm.training.extract import extract, extract_step

CUDNN, CUDNN_BACKWARD = "cudnn_batch_norm", "cudnn_batch_norm_backward"
NATIVE, NATIVE_BACKWARD = "native_batch_norm", "native_batch_norm_backward"


def ran(layer, x):
    """Names of the normalizations of one forward and backward pass, and their outputs' layouts."""
    names, layouts = [], []

    def note(func, args, kwargs):
        out = func(*args, **kwargs)
        if "batch_norm" in func._schema.name:
            names.append(func._schema.name.removeprefix("aten::"))
            layouts.append((out[0].shape, out[0].stride()))
        return out

    with FakeTensorMode(allow_non_fake_inputs=True), as_on_card(), WatchedOperators(note):
        layer(x.requires_grad_()).sum().backward()
    return names, layouts


@pytest.mark.parametrize(
    ("layer", "x", "names"),
    [
        (nn.BatchNorm2d(3), torch.randn(2, 3, 4, 4), [CUDNN, CUDNN_BACKWARD]),
        (nn.BatchNorm1d(3), torch.randn(2, 3, 4), [CUDNN, CUDNN_BACKWARD]),
        (nn.BatchNorm3d(3), torch.randn(2, 3, 4, 4, 4), [CUDNN, CUDNN_BACKWARD]),
        (nn.BatchNorm2d(3), torch.randn(2, 3, 4, 4).half(), [CUDNN, CUDNN_BACKWARD]),
        (nn.BatchNorm2d(3).double(), torch.randn(2, 3, 4, 4).double(), [CUDNN, CUDNN_BACKWARD]),
        (
            nn.BatchNorm2d(3, track_running_stats=False),
            torch.randn(2, 3, 4, 4),
            [CUDNN, CUDNN_BACKWARD],
        ),
        (nn.BatchNorm2d(3).eval(), torch.randn(2, 3, 4, 4), [CUDNN, NATIVE_BACKWARD]),
        (nn.InstanceNorm2d(3, affine=True), torch.randn(2, 3, 4, 4), [CUDNN, CUDNN_BACKWARD]),
        (nn.InstanceNorm2d(3), torch.randn(2, 3, 4, 4), [NATIVE, NATIVE_BACKWARD]),
        (nn.BatchNorm1d(3), torch.randn(2, 3), [NATIVE, NATIVE_BACKWARD]),
        (nn.BatchNorm2d(3, affine=False), torch.randn(2, 3, 4, 4), [NATIVE, NATIVE_BACKWARD]),
        (nn.BatchNorm2d(3), torch.randn(2, 3, 4, 4).bfloat16(), [NATIVE, NATIVE_BACKWARD]),
        (nn.BatchNorm2d(3).half(), torch.randn(2, 3, 4, 4).half(), [NATIVE, NATIVE_BACKWARD]),
        (nn.BatchNorm1d(1).eval(), torch.randn(65_536, 1, 1), [NATIVE, NATIVE_BACKWARD]),
        (nn.BatchNorm1d(1), torch.randn(65_536, 1, 1), [CUDNN, CUDNN_BACKWARD]),
    ],
    ids=str,
)
def test_a_card_normalizes_by_the_operator_that_pytorch_chooses(layer, x, names):
    assert ran(layer, x)[0] == names


def test_a_normalization_keeps_the_layout_of_its_input():
    x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert ran(nn.BatchNorm2d(3), x)[1] == [(x.shape, x.stride())] * 2


def test_no_operator_of_cudnn_is_predicted_if_cudnn_is_off():
    with torch.backends.cudnn.flags(enabled=False):
        assert ran(nn.BatchNorm2d(3), torch.randn(2, 3, 4, 4))[0] == [NATIVE, NATIVE_BACKWARD]


def test_instance_normalization_computes_what_pytorch_computes():
    layers = [
        nn.InstanceNorm2d(3, affine=affine, track_running_stats=tracked)
        for affine in (True, False)
        for tracked in (True, False)
    ]
    x = torch.randn(2, 3, 4, 4)
    for layer in layers:
        expected = layer(x)
        statistics = [buffer.clone() for buffer in layer.buffers()]
        layer.reset_running_stats()
        with torch.backends.cudnn.flags(enabled=False), as_on_card():
            torch.testing.assert_close(layer(x), expected)
        torch.testing.assert_close(list(layer.buffers()), statistics)


def test_a_training_step_for_a_card_has_cudnns_normalizations_and_their_owners():
    variant = catalog.variant("mobilenet_v3_small", 2, input_size=32, step="training")
    step = extract_step(variant, device_type="cuda")
    assert not step.gaps
    normalized = [
        call for call in step.calls if "batch_norm" in step.tuples[call.tuple_id].operator
    ]
    assert {call.owner for call in normalized} == {"BatchNorm2d"}
    names = {step.tuples[call.tuple_id].short_name for call in normalized}
    assert names == {CUDNN, CUDNN_BACKWARD}
    for number in {call.owner_index for call in normalized}:
        assert len([call for call in normalized if call.owner_index == number]) == 2
    on_cpu = extract_step(variant, device_type="cpu")
    assert not [name for name in on_cpu.operators if "cudnn" in name]


def test_the_flops_of_a_step_do_not_depend_on_the_normalization():
    variant = catalog.variant("resnet18", 2, input_size=32, step="training")
    assert extract(variant, device_type="cuda").flops == extract(variant).flops


def dtypes_of(step, name):
    return {
        tuple(tensor.dtype for tensor in spec.tensors)
        for spec in step.tuples.values()
        if spec.short_name == name
    }


def test_autocast_follows_the_rules_of_a_card():
    variant = catalog.variant(
        "vit_b_32", 2, input_size=224, step="training", amp="bfloat16", optimizer="adamw-fused"
    )
    step = extract_step(variant, device_type="cuda")
    assert not step.gaps
    assert dtypes_of(step, "_log_softmax") == {("bfloat16",)}
    assert dtypes_of(step, "nll_loss_forward") == {("float32", "int64")}
    assert dtypes_of(step, "cat") == {("float32", "bfloat16")}
    assert dtypes_of(step, "native_layer_norm") == {("float32",) * 3}
    on_cpu = extract_step(variant, device_type="cpu")
    assert dtypes_of(on_cpu, "_log_softmax") == {("float32",)}


@pytest.mark.parametrize("arguments", [{}, {"ignore_index": 1}, {"label_smoothing": 0.1}], ids=str)
def test_the_loss_of_a_card_is_that_of_pytorch(arguments):
    x, target = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    expected = nn.functional.cross_entropy(x, target, **arguments)
    with as_on_card():
        torch.testing.assert_close(nn.functional.cross_entropy(x, target, **arguments), expected)
        with torch.autocast("cpu", torch.bfloat16):
            actual = nn.functional.cross_entropy(x.bfloat16(), target, **arguments)
    torch.testing.assert_close(actual.float(), expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    ("mask", "is_fused"),
    [
        (torch.ones(2, 1, 8, 8, dtype=torch.bool), True),
        (torch.ones(2, 1, 1, 8, dtype=torch.bool), True),
        (torch.ones((), dtype=torch.bool).expand(2, 1, 8, 8), False),
        (torch.zeros(2, 1, 8, 1, dtype=torch.bfloat16).expand(2, 1, 8, 8), False),
    ],
)
def test_a_card_fuses_attention_only_for_masks_whose_rows_are_in_memory(mask, is_fused):
    """The rule `check_last_dim_stride_equals_1_dense` of PyTorch, for cards only."""
    operators = []

    def record(func, args, kwargs):
        operators.append(str(func))
        return func(*args, **kwargs)

    with FakeTensorMode(allow_non_fake_inputs=True), WatchedOperators(record):
        query = torch.empty(2, 4, 8, 16, dtype=torch.bfloat16)
        scaled_dot_product_attention(query, query, query, mask)
    is_found = "aten._scaled_dot_product_cudnn_attention.default" in operators
    assert is_found is is_fused
