"""The table of layers and functions is complete, and its rows are what the farm does."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import farm
from benchmarks.layer_examples import FUNCTIONS, LAYERS, NO_FUNCTIONS, NO_LAYERS
from benchmarks.layer_table import CAPTURED, PAGE, outcome
from farm.errors import TupleRejected
from farm.operators.cost import costs_of
from farm.training.module_memory import step_of
from tests import slow

ROWS = dict(
    re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)  # name -> both outcomes
)


def left_out(table):
    return {name for names in table.values() for name in names.split()}


def test_each_layer_of_torch_nn_has_a_row():
    classes = {
        name
        for name, member in vars(nn).items()
        if inspect.isclass(member) and issubclass(member, nn.Module)
    }
    assert classes - left_out(NO_LAYERS) <= set(LAYERS)  # an older torch lacks some
    assert set(LAYERS) | set(FUNCTIONS) == set(ROWS)


def test_each_public_function_of_torch_nn_functional_has_a_row():
    functions = {
        name
        for name, member in vars(F).items()
        if not name.startswith("_")
        and (inspect.isbuiltin(member) or inspect.isfunction(member))
        and (member.__module__ or "torch").startswith("torch")
    }
    assert functions - left_out(NO_FUNCTIONS) - set(FUNCTIONS) <= {"sigmoid", "tanh"}


#: In these rows the farm decides by different rules. The others are like one of them.
DIFFERENT = {
    *("EmbeddingBag", "CTCLoss", "PReLU", "RReLU", "Bilinear", "MultiLabelMarginLoss"),
    *("GaussianNLLLoss", "AdaptiveLogSoftmaxWithLoss", "CrossMapLRN2d"),
    *("FractionalMaxPool2d", "MaxUnpool2d", "ReplicationPad3d", "GRU", "LSTM"),
    *("pdist", "grid_sample", "hardswish", "elu_", "grouped_mm"),
}
EACH = [
    name if name in DIFFERENT else pytest.param(name, marks=slow.ALIKE)
    for name in (*LAYERS, *FUNCTIONS)
]


@pytest.mark.parametrize("name", EACH)
def test_a_row_is_what_the_farm_does(name):
    forward, step = outcome(name, training=False), outcome(name, training=True)
    assert f"{forward} | {step}" == ROWS[name]


CALLS = {
    "randn_like": lambda x: x + torch.randn_like(x),
    "rand_like": lambda x: (torch.rand_like(x) < 0.5) * x,
    "randint_like": lambda x: x + torch.randint_like(x, 3),
    "normal": lambda x: x + torch.normal(0.0, 1.0, x.shape),
    "hann_window": lambda x: x * torch.hann_window(16),
    "fftfreq": lambda x: x * torch.fft.fftfreq(16),
    "as_tensor": lambda x: x * torch.as_tensor([2.0] * 16),
    "pad_sequence": lambda x: nn.utils.rnn.pad_sequence([x[:2], x]),
    "foreach": lambda x: torch._foreach_mul([x, x], 2.0)[0],
    "cell": lambda x: nn.LSTMCell(16, 8)(x)[0],
    "rsample": lambda x: torch.distributions.Normal(x, 1.0).rsample(),
}


class Called(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.linear, self.call = nn.Linear(16, 16), call

    def forward(self, x):
        return self.call(self.linear(x))


@pytest.mark.parametrize("name", CALLS)
def test_a_builtin_function_of_allowed_operators_is_captured(name):
    captured = farm.capture_model(Called(CALLS[name]).eval(), torch.randn(4, 16))
    assert sum(captured.counts.values()) >= 2


def test_outcomes_are_captured_or_say_why():
    for outcomes in ROWS.values():
        for found in outcomes.split(" | "):
            assert found == CAPTURED or found.startswith(("refused: ", "no derivative"))


def test_a_refused_recurrent_layer_names_the_cells_that_are_measured():
    with pytest.raises(TupleRejected) as refused:
        costs_of(step_of(nn.LSTM(4, 4), (torch.randn(3, 2, 4),), {}, optimizer="sgd"))
    assert "nn.LSTMCell" in refused.value.next_step


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_the_training_step_of_a_recurrent_cell_has_costs(cell):
    captured = step_of(cell(4, 4), (torch.randn(2, 4),), {}, optimizer="sgd")
    assert set(costs_of(captured)) == set(captured.tuples)
