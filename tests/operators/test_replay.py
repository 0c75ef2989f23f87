"""What of a tuple can be placed."""

import torch
from torch import nn

from farm.operators.capture import capture
from farm.operators.rebuild import offloadable, placements_of


def tuple_of(module, *inputs):
    with torch.no_grad():
        (spec,) = capture(module, inputs).tuples.values()
    return spec


def test_parameters_are_inputs_and_what_a_call_makes_is_an_output():
    inputs, outputs = offloadable(tuple_of(nn.Conv2d(3, 4, 3), torch.ones(1, 3, 8, 8)))
    assert (len(inputs), outputs) == (3, 1)  # weight, bias, image
    assert len(placements_of(tuple_of(nn.Linear(4, 4, bias=False), torch.ones(2, 4)), "all")) == 7


def test_what_is_written_in_place_is_an_input():
    assert offloadable(tuple_of(nn.ReLU(inplace=True), torch.ones(8))) == ((0,), 0)


def test_each_memory_that_a_call_makes_counts_once():
    class Largest(nn.Module):
        def forward(self, values):
            return torch.topk(values, 2)

    assert offloadable(tuple_of(Largest(), torch.ones(2, 8)))[1] == 2
