"""A model that catches an error of one of its modules, for tests of captures."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Raising(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        raise RuntimeError("not for this input")


class Fallback(nn.Module):
    """Has a fast way, which raises, and a slow one.

    Args:
        features: of the input.
        outputs: features of the output.
    """

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.fast, self.slow = Raising(), nn.Linear(features, outputs)

    def forward(self, x: torch.Tensor) -> Any:
        try:
            return self.fast(x)
        except RuntimeError:
            return self.slow(x) * 2
