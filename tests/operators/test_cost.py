"""FLOPs are PyTorch's own; bytes are what must move at least."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from farm.errors import CaptureError
from farm.operators.capture import capture
from farm.operators.cost import cost, model_flops


class _Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def cost_of(model, *inputs):
    (spec,) = capture(
        model if isinstance(model, nn.Module) else _Model(model), inputs
    ).tuples.values()
    return cost(spec)


def test_a_linear_layer_costs_two_per_multiply_add_and_its_matrices():
    counted = cost_of(nn.Linear(16, 8), torch.randn(4, 16))
    assert counted.flops == 2 * 4 * 16 * 8
    assert counted.bytes == 4 * (4 * 16 + 16 * 8 + 8 + 4 * 8)


def test_a_convolution_costs_two_per_multiply_add():
    assert (
        cost_of(nn.Conv2d(3, 5, 3, padding=1), torch.randn(2, 3, 8, 8)).flops
        == 2 * 2 * 8 * 8 * 3 * 5 * 9
    )


@pytest.mark.parametrize(
    ("function", "inputs", "elements"),
    [
        (lambda x: x + 1, (torch.randn(10),), 20),
        (lambda x: x.add_(1), (torch.randn(10),), 20),
        (lambda x, y: x.add_(y), (torch.randn(10), torch.randn(10)), 30),
        (lambda x: x + x, (torch.randn(10),), 20),
        (lambda x, y: x + y.expand(5, 10), (torch.randn(5, 10), torch.randn(1, 10)), 50 + 10 + 50),
        (lambda x: x[:, ::2].contiguous(), (torch.randn(4, 10),), 40),
        (lambda x: torch.add(x[:5], x[2:7]), (torch.randn(10),), 7 + 5),
    ],
)
def test_bytes_count_each_distinct_element_once(function, inputs, elements):
    assert cost_of(function, *inputs).bytes == 4 * elements


def test_an_embedding_reads_the_rows_that_are_asked_for():
    counted = cost_of(nn.Embedding(1000, 4), torch.zeros(3, dtype=torch.int64))
    assert counted.bytes == 3 * 8 + 3 * 4 * 4 + 3 * 4 * 4


def test_half_precision_moves_half_the_bytes():
    full, half = (
        cost_of(lambda x: F.softmax(x, -1), torch.randn(8, 8, dtype=t))
        for t in (torch.float32, torch.float16)
    )
    assert full.bytes == 2 * half.bytes


def test_a_model_that_cannot_run_on_its_input_is_refused_with_what_it_said():
    with pytest.raises(CaptureError, match="on its example input: RuntimeError: "):
        model_flops(nn.Linear(4, 4, device="meta"), (torch.empty(2, 3, device="meta"),))


@pytest.mark.parametrize(
    ("function", "elements"),
    [
        (lambda cache, new, index: cache.index_copy_(0, index, new), 4 * 8 + 4 * 8),
        (
            lambda cache, new, index: cache.scatter_(0, index[:, None].expand(4, 8), new),
            4 * 8 + 4 * 8,
        ),
        (lambda cache, new, index: cache.index_add_(0, index, new), 4 * 8 + 2 * 4 * 8),
        (lambda cache, new, index: cache.index_select(0, index), 2 * 4 * 8),
        (lambda cache, new, index: cache.gather(0, index[:, None].expand(4, 8)), 2 * 4 * 8),
        (lambda cache, new, index: F.embedding(index, cache), 2 * 4 * 8),
    ],
    ids=["index_copy_", "scatter_", "index_add_", "index_select", "gather", "embedding"],
)
def test_of_a_large_tensor_the_part_that_is_touched_counts(function, elements):
    counted = cost_of(function, torch.randn(1000, 8), torch.randn(4, 8), torch.tensor([3, 1, 4, 5]))
    assert counted.bytes == elements * 4 + 4 * 8


@pytest.mark.parametrize(
    ("write", "elements"),
    [
        (lambda cache, new: cache.__setitem__(slice(10, 14), new), 4 * 8 + 4 * 8),
        (lambda cache, new: cache.__setitem__((slice(10, 14), 0), 0.0), 4),
    ],
    ids=["rows", "a number"],
)
def test_what_is_written_in_place_is_what_its_slices_mean(write, elements):
    assert cost_of(write, torch.randn(1000, 8), torch.randn(4, 8)).bytes == elements * 4
