"""A capture describes what runs: all of it, once, in order, and without changing it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from farm.errors import CaptureError
from farm.models import catalog
from farm.operators.capture import capture, predict
from farm.operators.profiler import verify_on_device
from tests import slow
from tests.operators.fallback import Fallback


class Shapes(nn.Module):
    """Views that cost nothing, views that must copy, an operator in place, a tensor made on the
    way.
    """

    def forward(self, x):
        x = x.transpose(1, 2)
        x = x.reshape(x.shape[0], -1)  # must copy
        x += x.new_ones(x.shape)
        return x.view(-1)[None].unsqueeze(0)


class Opaque(nn.Module):
    def forward(self, x):
        return torch.ops.aten._add_relu(x, x)


def names(found):
    return [found.tuples[call.tuple_id].short_name for call in found.calls]


def test_views_are_free_and_copies_are_not():
    found = capture(Shapes().eval(), (torch.randn(2, 3, 4),))
    assert names(found) == ["reshape", "new_ones", "add_"]
    assert not found.gaps
    assert not found.overlaps


def test_what_has_no_owner_is_a_gap_with_its_place_and_reason():
    found = capture(nn.Sequential(Opaque()), (torch.randn(2),))
    assert len(found.gaps) == 1
    assert "aten._add_relu" in found.gaps[0]
    assert "allow-list" in found.gaps[0]


def test_a_subclass_of_a_leaf_is_looked_into():
    class Norm(nn.LayerNorm):
        def forward(self, x):
            return F.layer_norm(
                x.permute(0, 2, 1), self.normalized_shape, self.weight, self.bias, self.eps
            )

    found = capture(Norm(8), (torch.randn(2, 8, 3),))
    assert names(found) == ["layer_norm"]
    (spec,) = found.tuples.values()
    assert [tensor.role for tensor in spec.tensors] == ["activation", "parameter", "parameter"]


def test_a_leaf_that_its_parameters_do_not_rebuild_is_looked_into():
    hooked, changed, normed = (
        nn.Linear(4, 4),
        nn.Dropout(0.5),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    )
    hooked.register_forward_hook(lambda module, args, out: out * 2)
    changed.forward = lambda x: x + 1
    found = capture(nn.Sequential(hooked, changed, normed).eval(), (torch.randn(2, 4),))
    assert not found.gaps
    assert names(found)[:3] == ["linear", "mul", "add"]
    assert "Linear" not in names(found)


def test_equal_calls_collapse_whatever_their_weights():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
    found = capture(model, (torch.randn(2, 8),))
    assert len(found.calls) == 4
    assert sorted(found.counts.values()) == [2, 2]
    assert [call.module_path for call in found.calls] == ["0", "1", "2", "3"]


def test_one_tensor_passed_three_times_stays_one():
    attention = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    (spec,) = capture(_SelfAttention(attention), (torch.randn(2, 5, 16),)).tuples.values()
    assert spec.short_name == "MultiheadAttention"
    assert len(spec.activations) == 1
    assert spec.input_shapes == ((2, 5, 16),) * 3


class _SelfAttention(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("grad_enabled", [False, True])
def test_attention_takes_the_path_that_it_takes_unobserved(grad_enabled):
    attention = _SelfAttention(nn.MultiheadAttention(16, 4, batch_first=True)).eval()
    layer = nn.TransformerEncoderLayer(16, 4, batch_first=True, dim_feedforward=32).eval()
    for model in (attention, layer):
        seen = verify_on_device(model, (torch.randn(2, 5, 16),), "cpu", grad_enabled=grad_enabled)
        assert seen.differences == []
        fused = any(
            "_native_multi_head" in name or "_transformer_encoder" in name
            for name in seen.capture.operators
        )
        assert fused is not grad_enabled


def test_calls_say_what_they_read_and_write():
    class Residual(nn.Module):
        def forward(self, x):
            y = torch.relu(x)
            y += x
            return torch.cat([y, y.view(-1, 1).view_as(y)])

    found = capture(Residual(), (torch.randn(4, 4),))
    relu, add, cat = found.calls
    assert relu.reads == add.reads[1:]
    assert relu.writes == add.writes == cat.reads
    assert [found.tensors[index].size_bytes for index in cat.writes] == [128]


def test_batch_norm_in_training_writes_its_buffers():
    found = capture(nn.BatchNorm1d(4).train(), (torch.randn(8, 4),))
    (call,) = found.calls
    assert {found.tensors[index].role for index in call.writes} == {"buffer", "activation"}
    assert found.training


@pytest.mark.parametrize(
    "model", [nn.LSTM(4, 8, 2), nn.GRU(4, 8, bidirectional=True), nn.RNN(4, 8, nonlinearity="relu")]
)
def test_recurrent_modules_are_one_call(model):
    image = torch.randn(3, 2, 4)
    real, fake = capture(model.eval(), (image,)), predict(model.to("meta"), (image.to("meta"),))
    assert names(real) == [type(model).__name__]
    assert real.tuples.keys() == fake.tuples.keys()


@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        "vit_b_32",
        *(pytest.param(name, marks=slow.ALIKE) for name in ("swin_t", "googlenet")),
    ],
)
def test_a_prediction_on_meta_is_what_runs(name):
    model, image = catalog.build(name, device="cpu"), catalog.example_inputs(name, device="cpu")
    seen = verify_on_device(model, image, "cpu")
    assert seen.differences == []
    predicted = predict(catalog.build(name), catalog.example_inputs(name))
    assert [call.tuple_id for call in predicted.calls] == [
        call.tuple_id for call in seen.capture.calls
    ]


def test_predicting_leaves_the_model_as_it_was():
    model = catalog.build("resnet18")
    before = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    call = nn.Module.__call__
    predict(model, catalog.example_inputs("resnet18"))
    assert {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()} == before
    assert nn.Module.__call__ is call


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float16"},
        {"dtype": "bfloat16"},
        {"memory_format": "channels_last"},
        {"mode": "train"},
    ],
)
def test_variants_are_other_tuples_without_gaps(options):
    inputs = {key: value for key, value in options.items() if key != "mode"}
    plain = predict(
        catalog.build("resnet18"), catalog.example_inputs(catalog.variant("resnet18", 2))
    )
    found = predict(
        catalog.build(catalog.variant("resnet18", **options)),
        catalog.example_inputs(catalog.variant("resnet18", 2, **inputs)),
    )
    assert not found.gaps
    assert not found.overlaps
    assert len(found.calls) == len(plain.calls)
    shared = {found.tuples[key].short_name for key in found.tuples.keys() & plain.tuples.keys()}
    assert not shared & {"Conv2d", "BatchNorm2d", "MaxPool2d"}


def test_compiled_and_scripted_models_are_refused():
    for model in (torch.compile(nn.ReLU()), torch.jit.script(nn.Sequential(nn.ReLU()))):
        for run in (capture, predict):
            with pytest.raises(CaptureError, match="cannot be captured"):
                run(nn.Sequential(model), (torch.randn(2),))


def test_a_model_that_raises_says_where():
    with pytest.raises(CaptureError, match="'1'"):
        capture(nn.Sequential(nn.ReLU(), nn.Linear(3, 3)), (torch.randn(2, 4),))
    assert nn.Module.__call__.__name__ == "_wrapped_call_impl"


@pytest.mark.parametrize("run", [capture, predict])
def test_calls_after_an_error_that_the_model_catches_belong_to_their_own_module(run):
    found = run(nn.Sequential(Fallback(8, 8)), (torch.randn(2, 8),))
    calls = [(found.tuples[call.tuple_id].short_name, call.module_path) for call in found.calls]
    assert calls == [("Linear", "0.slow"), ("mul", "0")]
    assert not found.gaps


def test_an_error_after_one_that_the_model_caught_has_its_own_place():
    with pytest.raises(CaptureError, match="raised at '1'"):
        capture(nn.Sequential(Fallback(8, 8), nn.Linear(3, 3)), (torch.randn(2, 8),))


class Caught(nn.Module):
    """Attention with a mask of a wrong shape, which it notices after its first product."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        try:
            return self.attention(x, x, x, attn_mask=torch.zeros(3, 3))[0]
        except RuntimeError:
            return x + 1


@pytest.mark.parametrize("run", [capture, predict])
def test_what_ran_before_an_error_that_the_model_catches_is_a_gap(run):
    found = run(Caught().train(), (torch.randn(2, 4, 8),))
    assert found.gaps
    assert all("the call raised an error afterwards" in gap for gap in found.gaps)
