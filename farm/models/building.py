"""Functions and classes with which the sources build models and example inputs; needs torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from farm.errors import UnsupportedModel
from farm.types.replacement import replaced
from farm.types.variant import Variant

_log = logging.getLogger(__name__)

Made = TypeVar("Made")

MOST_FILLED_BYTES = 4 * 2**30  # of a tensor with values that a model creates on meta
_FILLING = frozenset(
    (torch.ones, torch.zeros, torch.full, torch.arange, torch.eye, torch.rand, torch.randn)
)


class EmptyOnMeta(TorchFunctionMode):
    """While active, ``torch.empty`` makes meta tensors.

    Modules create their parameters with it. Everything else (stochastic-depth schedules that read
    values, index buffers) is computed on the CPU and moved later. ``torch.device("meta")`` fails on
    15 of 80 models of torchvision. Raises `UnsupportedModel` for a tensor with values that is
    larger than any model needs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            # A tensor without elements takes no memory. A class that is imported now may keep it.
            if _planned_bytes(func, args, kwargs):
                kwargs = kwargs | {"device": "meta"}
        elif func is torch.Tensor.normal_ and args[0].is_meta:
            # It fills nothing, but takes torch a millisecond: half of the time to build a model.
            return args[0]
        elif func in _FILLING:
            _check_filled(func, args, kwargs)
        return func(*args, **kwargs)


def _check_filled(func: Any, args: Any, kwargs: Any) -> None:
    planned_bytes = _planned_bytes(func, args, kwargs)
    if planned_bytes > MOST_FILLED_BYTES:
        raise UnsupportedModel(
            f"The model creates a tensor of {planned_bytes / 2**30:,.0f} GiB with values while "
            f"it is built; the limit is {MOST_FILLED_BYTES / 2**30:.0f} GiB.",
            "Choose smaller sizes, such as fewer positions.",
        )


def _planned_bytes(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """The size of the tensor that a constructor would make."""
    sizes = kwargs | {"device": "meta"}
    for name in ("out", "generator", "pin_memory"):
        sizes.pop(name, None)
    planned: torch.Tensor = func(*args, **sizes)
    return planned.nbytes


def built_on_meta(
    make: Callable[[], Made], accepts: Callable[[Made], bool] = lambda _: True
) -> Made:
    """What ``make`` returns if modules create their parameters on meta.

    Some models cannot be built so, because they read their weights: a calibration, a fused batch
    norm, a dry run in a constructor. If ``make`` raises, or ``accepts`` is false for what it
    returns, it runs again with real memory (`built_on_cpu`). Raises as the second run."""
    try:
        with EmptyOnMeta():
            model = make()
        if accepts(model):
            return model
    except UnsupportedModel:
        raise
    except Exception:
        _log.debug("The model cannot be built on meta", exc_info=True)
    return built_on_cpu(make)


def built_on_cpu(make: Callable[[], Made]) -> Made:
    """What ``make`` returns if its parameters have values. Raises `UnsupportedModel` if they do not
    fit into the memory of this host.
    """
    with CountedMemory(free_memory_bytes()):
        return make()


class CountedMemory(TorchFunctionMode):
    """While active, tensors that PyTorch's constructors make take at most ``limit_bytes`` together.

    Raises `UnsupportedModel` before the tensor beyond the limit is made. Tensors that were freed
    count, too."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self.made_bytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty or func in _FILLING:
            self.made_bytes += _planned_bytes(func, args, kwargs)
            if self.made_bytes > self.limit_bytes:
                raise UnsupportedModel(
                    "The model reads its weights while it is built, and they take more than the "
                    f"{self.limit_bytes / 2**30:,.1f} GiB of memory that this host has free.",
                    "Choose a smaller model, or build it without reading its weights.",
                )
        return func(*args, **kwargs)


def free_memory_bytes() -> int:
    """The memory of this host that a new tensor can take."""
    import psutil

    return psutil.virtual_memory().available


def random_normal(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A standard normal tensor, always with the same values; on meta a tensor of that shape."""
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    generator = torch.Generator(device=device).manual_seed(0)
    return torch.randn(shape, dtype=torch.float32, device=device, generator=generator).to(dtype)


def images(variant: Variant, device: torch.device) -> torch.Tensor:
    """Standard normal images of shape (batch, 3, size, size), in the variant's dtype and memory
    format.
    """
    shape = (variant.batch, 3, variant.input_size, variant.input_size)
    tensor = random_normal(shape, dtype_of(variant), device)
    return tensor.contiguous(memory_format=memory_format_of(variant))


def dtype_of(variant: Variant) -> torch.dtype:
    return getattr(torch, variant.dtype)  # one of the choices of a variant


def memory_format_of(variant: Variant) -> torch.memory_format:
    if variant.memory_format == "channels_last":
        return torch.channels_last
    return torch.contiguous_format


class ByPosition(nn.Module):
    """Wraps a model to take all arguments by position: ``positional`` ones, then the keyword
    arguments ``names``.
    """

    def __init__(self, model: nn.Module, positional: int, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.positional = positional
        self.names = names
        self.training = model.training

    def forward(self, *values: Any) -> Any:
        named = dict(zip(self.names, values[self.positional :], strict=True))
        return self.model(*values[: self.positional], **named)


class Decoding(nn.Module):
    """A decoder of transformers with a filled static cache, called with the ids of one token per
    sequence: (batch, 1).

    The cache has room for ``size`` tokens, at least as many as the model has layers, and contains
    standard normal keys and values. They are buffers: they move with the model, and a recorder sees
    them.

    In transformers each layer of the cache counts its tokens in its own tensor. Here all layers
    share one counter, which one call creates before each pass: separate counters would need an
    extra kernel per layer to reset them. Each layer increments it, so the token's position grows by
    one per layer; after ``depth`` layers it is the last position. The calls of all layers are
    equal, even if the model is cut to fewer layers. A layer with a window copies the number of its
    last position from the host at each token, which a CUDA graph cannot record. Here the number is
    on the card from the start, as in a compiled model. If `cards` share the model, the cache has
    one card's heads.

    A `growing` cache is for models that cannot use a static one. It contains all tokens but the
    last: each layer copies it to append the new token."""

    def __init__(
        self,
        model: Any,
        batch: int,
        size: int,
        depth: int = 0,
        cards: int = 1,
        *,
        growing: bool = False,
    ) -> None:
        from transformers import DynamicCache, StaticCache

        super().__init__()
        self.model = model
        self.growing = growing
        config = model.config
        self.cache: Any
        if growing:
            self.cache = DynamicCache(config=config)
        else:
            self.cache = StaticCache(config=config, max_cache_len=size)
        self.before = size - max(depth, len(self.cache.layers))
        heads, width = _heads_and_width(config)
        shape = (batch, max(1, heads // cards), size - 1, width)
        if not growing:  # this call fills the cache with zeros; on meta it only sets the shapes
            self.cache.early_initialization(*shape[:2], width, model.dtype, torch.device("meta"))
        for index, layer in enumerate(self.cache.layers):
            keys = shape if growing else layer.keys.shape
            values = shape if growing else layer.values.shape
            self._cache_normal(f"cached_keys_{index}", keys)
            self._cache_normal(f"cached_values_{index}", values)
        self.register_buffer("last", torch.tensor([-1]), persistent=False)

    def _cache_normal(self, name: str, shape: tuple[int, ...]) -> None:
        """Create a buffer with standard normal numbers."""
        filled = torch.empty(shape, dtype=self.model.dtype).normal_()
        self.register_buffer(name, filled, persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        counter = None if self.growing else torch.full((), self.before, device=ids.device)
        for index, layer in enumerate(self.cache.layers):
            layer.keys = getattr(self, f"cached_keys_{index}")
            layer.values = getattr(self, f"cached_values_{index}")
            layer.cumulative_length = counter
            layer.device = ids.device
            layer.is_initialized = True
            if layer.is_sliding:
                layer.cumulative_length_int = self.before
        original = torch.tensor

        def tensor(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            is_last = isinstance(data, list) and data == [-1]
            return self.get_buffer("last") if is_last else original(data, *args, **kwargs)

        with replaced(torch, "tensor", tensor):
            return self.model(input_ids=ids, past_key_values=self.cache, use_cache=True).logits


def _heads_and_width(config: Any) -> tuple[int, int]:
    """The number of key and value heads in one layer, and the number of features per head."""
    config = config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    is_new = getattr(config, "new_decoder_architecture", False)
    if getattr(config, "multi_query", False) and not is_new:
        return 1, width
    return getattr(config, "num_key_value_heads", None) or heads, width
