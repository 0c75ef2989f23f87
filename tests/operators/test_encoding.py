"""Every leaf class of torch.nn is described by parameters that build its equal."""

import inspect

import pytest
import torch
from torch import nn

from farm.subjects.allow_list import LEAF_CLASSES
from farm.subjects.leaf import build_leaf, describe_leaf

_SPECIAL = {
    "MultiheadAttention": {"embed_dim": 8, "num_heads": 2},
    "TransformerEncoderLayer": {"d_model": 8, "nhead": 2},
    "GroupNorm": {"num_groups": 2, "num_channels": 4},
    "LSTM": {"input_size": 3, "hidden_size": 4, "proj_size": 2},
    "RNN": {"input_size": 3, "hidden_size": 4, "nonlinearity": "relu"},
    "GRU": {"input_size": 3, "hidden_size": 4, "num_layers": 2},
    "Unflatten": {"dim": 1, "unflattened_size": (2, 2)},
    "Upsample": {"scale_factor": 2.0},
    "UpsamplingBilinear2d": {"scale_factor": 2},
    "UpsamplingNearest2d": {"size": (4, 4)},
    "LPPool1d": {"norm_type": 2, "kernel_size": 3},
    "LPPool2d": {"norm_type": 2, "kernel_size": 3},
    "LPPool3d": {"norm_type": 2, "kernel_size": 3},
    "Threshold": {"threshold": 0.5, "value": 1.0},
    "ConstantPad1d": {"padding": 1, "value": 0.5},
    "ConstantPad2d": {"padding": 1, "value": 0.5},
    "ConstantPad3d": {"padding": 1, "value": 0.5},
}


def _arguments(leaf):
    if leaf.__name__ in _SPECIAL:
        return _SPECIAL[leaf.__name__]
    parameters = list(inspect.signature(leaf.__init__).parameters.values())[1:]
    return {
        p.name: 2 for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    }


@pytest.mark.parametrize(
    "leaf", sorted(LEAF_CLASSES, key=lambda leaf: leaf.__name__), ids=lambda leaf: leaf.__name__
)
def test_a_leaf_is_described_and_built_again(leaf):
    module = leaf(**_arguments(leaf))
    parameters = describe_leaf(module)
    assert parameters is not None
    again = build_leaf(leaf, parameters)
    assert again.extra_repr() == module.extra_repr()
    assert {name: t.shape for name, t in again.state_dict().items()} == {
        name: t.shape for name, t in module.state_dict().items()
    }


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(4, 8, (3, 5), stride=2, padding=(1, 2), groups=2, bias=False),
        nn.Conv2d(4, 4, 3, padding="same", padding_mode="reflect"),
        nn.BatchNorm2d(4, affine=False, track_running_stats=False, momentum=None),
        nn.GroupNorm(2, 4, affine=False),
        nn.MultiheadAttention(8, 2, bias=False, kdim=4, vdim=6, add_bias_kv=True, batch_first=True),
        nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", norm_first=True, bias=False),
        nn.LayerNorm((4, 4), elementwise_affine=True, bias=False),
        nn.Embedding(5, 3, padding_idx=1, max_norm=2.0),
        nn.LSTM(3, 4, 2, bias=False, bidirectional=True, dropout=0.1),
        nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum"),
    ],
    ids=lambda module: type(module).__name__,
)
def test_unusual_parameters_survive(module):
    again = build_leaf(type(module), describe_leaf(module))
    assert repr(again) == repr(module)
    assert {name: t.shape for name, t in again.state_dict().items()} == {
        name: t.shape for name, t in module.state_dict().items()
    }


@pytest.mark.parametrize(
    "module", [nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False), nn.GroupNorm(2, 4)], ids=repr
)
def test_a_parameter_that_a_later_torch_has_changes_no_description(module):
    assert "bias" not in describe_leaf(module)


@pytest.mark.skipif(
    "bias" not in inspect.signature(nn.BatchNorm2d).parameters, reason="of torch 2.13"
)
def test_a_normalisation_without_a_bias_is_another():
    assert describe_leaf(nn.BatchNorm2d(4, bias=False))["bias"] is False
    again = build_leaf(nn.BatchNorm2d, describe_leaf(nn.BatchNorm2d(4, bias=False)))
    assert again.bias is None


def _changed_attribute():
    module = nn.Conv2d(4, 4, 3)
    module.out_channels = 7
    return module


def _tied():
    module = nn.MultiheadAttention(8, 2)
    module.out_proj.bias = nn.Parameter(torch.zeros(8))
    module.out_proj.weight = module.in_proj_weight
    return module


def _custom_activation():
    return nn.TransformerEncoderLayer(8, 2, activation=torch.tanh)


@pytest.mark.parametrize(
    "make",
    [_changed_attribute, _tied, _custom_activation, lambda: nn.CrossEntropyLoss(torch.ones(3))],
)
def test_what_parameters_do_not_tell_is_no_leaf(make):
    assert describe_leaf(make()) is None
