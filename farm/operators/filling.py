"""How memory is filled: numbers, signs, indices, masks, and classes of data."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import torch

from farm.types.tuple import TensorSpec

# Bits behind the point of each format.
MANTISSA_BITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}

# The identity for large arguments; for positive ones.
_IDENTITY_WHEN_LARGE = frozenset({"silu", "hardswish", "mish"})
_IDENTITY_WHEN_POSITIVE = frozenset({"leakyrelu", "elu", "celu", "rrelu"})
_LARGE = 24.0  # exp(-24) is far below half a unit in the last place of 1 in single precision


@dataclass(frozen=True)
class Fill:
    """How one tensor is filled: ``shift + scale * N(0, 1)``, or a variant of it.

    ``form`` is 'normal', 'near' (the same, of what no class of data is to replace), 'positive' (the absolute value of the
    normal one is taken), 'sign' (plus or minus one), 'index' (integers from ``shift`` to below ``shift + bound``), 'ends' (of
    equal parts of ``bound``, in order) or 'boolean'.
    """

    form: str = "normal"
    scale: float = 1.0
    shift: float = 0.0
    bound: int = 0


def settled(activation: str) -> Fill | None:
    """Where an activation function (`silu`, `LeakyReLU`) written over its input leaves it as it is; None where anywhere."""
    function = activation.rstrip("_").replace("_", "").lower()
    if function in _IDENTITY_WHEN_LARGE:
        return Fill("positive", shift=_LARGE)
    if function in _IDENTITY_WHEN_POSITIVE:
        return Fill("positive")
    return None


def adding_nothing(target: TensorSpec) -> Fill:
    """An addend so small that hardly any sum with ``target`` moves; float16 has no room for less."""
    bits = MANTISSA_BITS.get(target.dtype, 10)
    return Fill(scale=2.0 ** -(bits + 3) if target.dtype == "float16" else 2.0**-40)


def beyond(addend: float, target: TensorSpec) -> Fill:
    """Where a sum with a number no longer moves ``target``."""
    return Fill("positive", shift=min(abs(addend) * 2.0 ** (MANTISSA_BITS.get(target.dtype, 10) + 2), 2.0**14))


def fill(base: torch.Tensor, tensor: TensorSpec, how: Fill, generator: torch.Generator) -> None:
    """Fills ``base``, the memory behind ``tensor``, in place."""
    if base.numel() == 0:
        return
    if how.form == "boolean":
        base.bernoulli_(0.5, generator=generator)
    elif how.form == "ends":
        base.copy_(
            torch.arange(1, base.numel() + 1, device=base.device)
            .mul_(how.bound)
            .div_(base.numel(), rounding_mode="floor")
        )
    elif how.form == "index":
        if how.bound <= 1:
            base.zero_()
        else:
            largest = torch.iinfo(base.dtype).max
            first = int(how.shift)
            base.copy_(
                torch.randint(
                    first, min(first + how.bound, largest), base.shape, device=base.device, generator=generator
                )
            )
    elif base.dtype.itemsize == 1:  # eight-bit floats: few kernels take them
        wider = torch.empty(base.shape, device=base.device)
        fill(wider, tensor, how, generator)
        base.copy_(wider)
    else:
        _fill_numbers(base, how, generator)
        if tensor.zeros > 0:
            mask = torch.rand(base.shape, device=base.device, generator=generator) < tensor.zeros
            base.masked_fill_(mask, 0)


def impose(
    base: torch.Tensor,
    zeros: float,
    positive: bool,
    channels: float,
    generator: torch.Generator,
) -> None:
    """Give standard normal values a share of the variance between channels, of zeros, and no negative ones.

    Zeros lie where a ReLU leaves them if nothing is negative, else at random places.
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
        base.masked_fill_(torch.rand(base.shape, device=base.device, generator=generator) < zeros, 0)


def channel_dimension(tensor: torch.Tensor) -> int | None:
    """Where the channels of an activation are: second for images and rows, last for tokens; None where nowhere."""
    if tensor.dim() in (2, 4, 5):
        return 1
    return 2 if tensor.dim() == 3 else None


def _fill_numbers(base: torch.Tensor, how: Fill, generator: torch.Generator) -> None:
    base.normal_(generator=generator)
    if how.form == "sign":
        base.sign_()
        base.masked_fill_(base == 0, 1)
        return
    if how.form == "positive":
        base.abs_()
    if how.scale != 1:
        base.mul_(how.scale)
    if how.shift:
        base.add_(how.shift)
