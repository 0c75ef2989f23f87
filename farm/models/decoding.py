"""One token of each sequence beside a filled cache: what a decoder does again and again while it generates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


class Decoding(nn.Module):
    """A decoder of transformers with a static cache of its own, called with the ids of one token each: (batch, 1).

    The cache has room for ``size`` tokens, at least as many as the model has layers, and holds standard normal keys and
    values. They are buffers, so that they go where the model goes, and what watches a model sees them.

    A layer of the cache counts its tokens in a tensor of its own, in place. Here all count in the same, so that one call makes
    it anew before a pass, and the layers' calls are alike: layer by layer the token goes one place further, in a model of
    ``depth`` layers to end in the last; one that is cut to fewer makes the same calls. What runs is the same; with a tensor
    each, setting them back would be a kernel a layer that no one else has. A layer with a window copies the number of its last
    place from the host at each token, which no CUDA graph can hold; here it is on the card from the beginning, as it is once such
    a model is compiled.
    """

    def __init__(self, model: Any, batch: int, size: int, depth: int = 0) -> None:
        from transformers import StaticCache

        super().__init__()
        self.model = model
        self.cache: Any = StaticCache(config=model.config, max_cache_len=size)
        self.before = size - max(depth, len(self.cache.layers))
        heads, width = _heads_and_width(model.config)
        # For the shapes alone: this would fill with zeros, and on the host where the model is to be on meta.
        self.cache.early_initialization(batch, heads, width, model.dtype, torch.device("meta"))
        for index, layer in enumerate(self.cache.layers):
            for name in ("keys", "values"):
                shape = getattr(layer, name).shape
                self.register_buffer(
                    f"cached_{name}_{index}", torch.empty(shape, dtype=model.dtype).normal_(), persistent=False
                )
        self.register_buffer("last", torch.tensor([-1]), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        counter = torch.full((), self.before, device=ids.device)
        for index, layer in enumerate(self.cache.layers):
            layer.keys, layer.values = getattr(self, f"cached_keys_{index}"), getattr(self, f"cached_values_{index}")
            layer.cumulative_length, layer.device = counter, ids.device
            if layer.is_sliding:
                layer.cumulative_length_int = self.before
        with self._last_place_known():
            return self.model(input_ids=ids, past_key_values=self.cache, use_cache=True).logits

    @contextlib.contextmanager
    def _last_place_known(self) -> Iterator[None]:
        made = torch.tensor

        def tensor(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            return self.get_buffer("last") if isinstance(data, list) and data == [-1] else made(data, *args, **kwargs)

        torch.tensor = tensor
        try:
            yield
        finally:
            torch.tensor = made


def _heads_and_width(config: Any) -> tuple[int, int]:
    """Of the keys and values that one token adds in one layer."""
    config = config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1, width
    return getattr(config, "num_key_value_heads", None) or heads, width
