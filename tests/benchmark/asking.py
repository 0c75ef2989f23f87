"""A model that asks whether a CUDA graph is being captured, and runs something else then."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import nn


class Asking(nn.Module):
    """Eagerly one addition; in a graph a product with a constant as well."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if torch.cuda.is_current_stream_capturing():
            x = torch.mul(x, 0.5)
        return torch.add(x, 1.0)


def model() -> tuple[nn.Module, torch.Tensor]:
    return Asking(), torch.randn(32, 64)


@contextlib.contextmanager
def capturing(answer: bool = True) -> Iterator[None]:
    """On a host without a card, where PyTorch cannot tell: as while a graph is captured, or not."""
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=answer):
        yield


def record(run: Callable[[], object]) -> Callable[[], object]:
    """Where there are no graphs: what runs while one would be captured runs again when it would be
    replayed.
    """

    def again() -> object:
        with capturing():
            return run()

    again()
    return again
