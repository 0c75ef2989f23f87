"""Small models for tests of the compiler. The capture and the farm's processes compile the same
models.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import nn

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU"
)


class Two(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(values)))


class Pooled(nn.Module):
    """A convolution, which PyTorch runs between two generated kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 8, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return nn.functional.max_pool2d(torch.relu(self.layer(images)), 2)


class Halves(nn.Module):
    """Two layers with a graph break between them."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 32), nn.Linear(32, 8)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = torch.relu(self.first(values))
        torch._dynamo.graph_break()
        return torch.sigmoid(self.second(values))


class Sorted(Two):
    """As `Two`, with an operator that the compiler leaves to PyTorch between two graphs."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.second(_sorted(torch.relu(self.first(values))))


@torch._dynamo.disable
def _sorted(values: torch.Tensor) -> torch.Tensor:
    return torch.sort(values).values


class Picked(nn.Module):
    """Rows of a table, chosen by indices."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 16)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.table(words)) * 2


@torch.library.custom_op("farm_tests::without_shape", mutates_args=())
def without_shape(values: torch.Tensor) -> torch.Tensor:
    return values + 1


@without_shape.register_fake
def _(values: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no shape is known\nand this is the second line")


class Refused(nn.Module):
    """A model that the compiler refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return without_shape(self.layer(values))


def two() -> tuple[nn.Module, tuple[Any, ...]]:
    return Two(), (torch.randn(4, 16),)


def pooled() -> tuple[nn.Module, tuple[Any, ...]]:
    return Pooled(), (torch.randn(2, 3, 16, 16),)


def refused() -> tuple[nn.Module, tuple[Any, ...]]:
    return Refused(), (torch.randn(4, 8),)
