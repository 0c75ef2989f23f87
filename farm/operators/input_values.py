"""Fills tensors with the values that a kind chooses for them (`farm.subjects.values`)."""

from __future__ import annotations

import math
import statistics

import torch

from farm.subjects.values import Fill
from farm.types.tuple import TensorSpec


def fill(base: torch.Tensor, tensor: TensorSpec, how: Fill, generator: torch.Generator) -> None:
    """Fills ``base``, the storage of ``tensor``, in place."""
    if base.numel() == 0:
        return
    if how.form == "boolean":
        base.bernoulli_(0.5, generator=generator)
    elif how.form == "index":
        first, last = int(how.shift), min(int(how.shift) + how.bound, torch.iinfo(base.dtype).max)
        if how.bound <= 1:
            base.zero_()
        else:
            base.copy_(
                torch.randint(first, last, base.shape, device=base.device, generator=generator)
            )
    elif how.form == "starts":
        count = base.numel()
        starts = torch.arange(count, device=base.device).mul_(max(0, how.bound))
        base.copy_(starts.div_(count, rounding_mode="floor").view(base.shape))
    elif how.form == "bits":
        limits = torch.iinfo(base.dtype)
        base.random_(limits.min, limits.max + 1, generator=generator)
    elif how.form == "quantized":
        largest = torch.iinfo(base.dtype).max
        values = torch.empty(base.shape, device=base.device).normal_(generator=generator)
        base.copy_(values.mul_(how.scale).round_().clamp_(-largest, largest))
    elif how.form in ("boxes", "regions"):
        _fill_boxes(base, how, generator)
    elif base.dtype.itemsize == 1:  # eight-bit floats: few kernels support them
        wider = torch.empty(base.shape, device=base.device)
        fill(wider, tensor, how, generator)
        base.copy_(wider)
    else:
        base.normal_(generator=generator)
        if how.form == "sign":
            base.sign_()
            base.masked_fill_(base == 0, 1)
        else:
            if how.form == "positive":
                base.abs_()
            if how.scale != 1:
                base.mul_(how.scale)
            if how.shift:
                base.add_(how.shift)
        if tensor.zeros > 0:
            base.masked_fill_(
                torch.rand(base.shape, device=base.device, generator=generator) < tensor.zeros, 0
            )


def _fill_boxes(base: torch.Tensor, how: Fill, generator: torch.Generator) -> None:
    """Corners of boxes in an image; for regions also the number of the image."""
    rows = base.view(-1, 5 if how.form == "regions" else 4)
    places = torch.rand(len(rows), 4, device=base.device, generator=generator).mul_(how.scale / 2)
    rows[:, -4:-2] = places[:, :2]
    rows[:, -2:] = places[:, :2] + places[:, 2:]
    if how.form == "regions":
        numbers = torch.randint(
            how.bound, rows[:, 0].shape, device=base.device, generator=generator
        )
        rows[:, 0] = numbers


def impose(
    base: torch.Tensor, zeros: float, positive: bool, channels: float, generator: torch.Generator
) -> None:
    """Changes standard normal values in place.

    Args:
        zeros: the share of zeros: the smallest values if ``positive``, as after a ReLU; otherwise
            random ones.
        positive: no value is negative.
        channels: the variance of the channels' means, as a share of the total variance.
    """
    if channels and (dimension := channel_dimension(base)) is not None:
        shape = [1] * base.dim()
        shape[dimension] = base.shape[dimension]
        each = torch.randn(shape, device=base.device, generator=generator).to(base.dtype)
        base.mul_(math.sqrt(1 - channels)).add_(each, alpha=math.sqrt(channels))
    if zeros >= 1:
        base.zero_()
    elif positive and zeros == 0:
        base.abs_()
    elif positive:
        base.sub_(statistics.NormalDist().inv_cdf(zeros)).clamp_(min=0)
    elif zeros > 0:
        base.masked_fill_(
            torch.rand(base.shape, device=base.device, generator=generator) < zeros, 0
        )


def channel_dimension(tensor: torch.Tensor) -> int | None:
    """The channel dimension of an activation: 1 for (batch, channels, ...), 2 for (batch, tokens,
    features); otherwise None."""
    return {2: 1, 3: 2, 4: 1, 5: 1}.get(tensor.dim())
