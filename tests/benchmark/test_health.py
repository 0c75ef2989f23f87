"""A card is checked with a known product before it measures."""

import torch

from farm.benchmark import health


def test_this_cpu_is_healthy():
    assert health.check(torch, torch.device("cpu")) == ""


def test_a_wrong_product_is_found(monkeypatch):
    left, times = torch.Tensor.to, []

    def flipped(self, *arguments, **options):
        moved = left(self, *arguments, **options)
        if len(arguments) == 2:
            times.append(1)
            moved = moved.clone()
            moved[0, 0] += 1
        return moved

    monkeypatch.setattr(torch.Tensor, "to", flipped)
    assert "came out wrong in" in health.check(torch, torch.device("cpu"))
    assert times


def test_a_time_that_cannot_be_is_found():
    assert health.implausible(0.01) == ""
    assert "is plausible" in health.implausible(1e-9)
    assert "is plausible" in health.implausible(60.0)
