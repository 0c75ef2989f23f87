"""What the sources make their models and example inputs with: random tensors, images, modules that hold no memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from farm.types.protocol import Variant


class EmptyOnMeta(TorchFunctionMode):
    """While active, ``torch.empty`` makes meta tensors.

    That is where modules get their parameters from; everything else (the stochastic-depth schedules that read
    values back, index buffers) is computed for real and moved afterwards. ``torch.device("meta")`` as a context
    fails on 15 of 80 models of torchvision, this on none.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            kwargs = kwargs | {"device": "meta"}
        elif func is torch.Tensor.normal_ and args[0].is_meta:
            return args[0]  # fills nothing, and takes torch a millisecond: half of the time to build a model
        return func(*args, **kwargs)


def random_normal(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """Standard normal by the seed; on meta, shape alone."""
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(shape, dtype=torch.float32, device=device, generator=generator).to(dtype)


def images(variant: Variant, device: torch.device, seed: int) -> torch.Tensor:
    """Standard normal images of shape (batch, 3, size, size), in the variant's dtype and memory format."""
    shape = (variant.batch, 3, variant.input_size, variant.input_size)
    tensor = random_normal(shape, dtype_of(variant), device, seed)
    return tensor.contiguous(memory_format=memory_format_of(variant))


def dtype_of(variant: Variant) -> torch.dtype:
    return getattr(torch, variant.dtype)  # of the choices that a variant has


def memory_format_of(variant: Variant) -> torch.memory_format:
    return torch.channels_last if variant.memory_format == "channels_last" else torch.contiguous_format
