"""Operators of libraries that no list names: a training step with them is refused, not captured
without them.
"""

from __future__ import annotations

import pytest

import farm
from farm.errors import FarmError
from farm.models import own
from farm.training.extract import extract

MODEL = """
import torch
from torch import nn

@torch.library.custom_op("unlisted_library::shift", mutates_args=())
def shift(values: torch.Tensor) -> torch.Tensor:
    return values + 1

@shift.register_fake
def _(values):
    return torch.empty_like(values)

shift.register_autograd(lambda context, gradient: gradient)

class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, values):
        return shift(self.layer(values))

def net():
    return Shifted(), torch.randn(4, 8)
"""


def test_a_step_with_an_unlisted_operator_of_a_library_is_refused_by_its_name(tmp_path):
    file = tmp_path / "shifted.py"
    file.write_text(MODEL)
    variant = farm.variant(own.register(f"{file}:net"), 4, step="training", optimizer="sgd")
    with pytest.raises(FarmError, match=r"unlisted_library\.shift"):
        extract(variant)
