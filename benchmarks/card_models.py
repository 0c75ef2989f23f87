"""Models outside of the farm's catalog, for `benchmarks/card_results.py`: of transformers and timm,
and a hand-written decoder.

All are built from their configurations, with random weights; nothing is downloaded. Register them
as user models:

    export FARM_MODELS="$(python benchmarks/card_models.py)" PYTHONPATH=benchmarks
    python benchmarks/card_results.py --database farm.db bert:8 llama_decode_32:32:bfloat16

The decoder has four layers of a Llama-like stack: width 4,096, 32 heads, RMSNorm, rotary positions
and a gated product of 11,008. Its caches are buffers of 2,048 positions, filled with standard
normal values like a cache in use."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional

WIDTH, HEADS, HIDDEN, LAYERS, POSITIONS = 4096, 32, 11008, 4, 2048


def bert() -> Any:
    from transformers import BertConfig, BertModel

    return _tokens(BertModel(BertConfig()), 8, 128)


def distilbert() -> Any:
    from transformers import DistilBertConfig, DistilBertModel

    return _tokens(DistilBertModel(DistilBertConfig()), 8, 128)


def t5_encoder() -> Any:
    from transformers import T5Config, T5EncoderModel

    return _tokens(T5EncoderModel(T5Config()), 8, 128)


def mobilevit_s() -> nn.Module:
    return _timm("mobilevit_s")


def eva02_small() -> nn.Module:
    return _timm("eva02_small_patch14_224")


def llama_prefill() -> Any:
    return Llama(0), torch.randn(1, POSITIONS, WIDTH)


def llama_decode_1() -> Any:
    return Llama(1), torch.randn(1, 1, WIDTH)


def llama_decode_32() -> Any:
    return Llama(32), torch.randn(32, 1, WIDTH)


def llama_decode_32_empty() -> Any:
    return Llama(32, filled=False), torch.randn(32, 1, WIDTH)


MODELS = (
    bert,
    distilbert,
    t5_encoder,
    mobilevit_s,
    eva02_small,
    llama_prefill,
    llama_decode_1,
    llama_decode_32,
    llama_decode_32_empty,
)


def _timm(name: str) -> nn.Module:
    import timm

    return timm.create_model(name, pretrained=False)


def _tokens(model: nn.Module, batch: int, length: int) -> tuple[nn.Module, torch.Tensor]:
    return LastState(model), torch.randint(0, 30000, (batch, length))


class LastState(nn.Module):
    """A model of transformers that returns its last hidden state as a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids).last_hidden_state


class Layer(nn.Module):
    def __init__(self, batch: int, filled: bool) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        if batch:
            shape = (1, 1, POSITIONS, WIDTH // HEADS)
            for name in ("keys", "values"):
                one = torch.randn(shape) if filled else torch.zeros(shape)
                self.register_buffer(name, one.repeat(batch, HEADS, 1, 1))
            self.register_buffer("position", torch.tensor([POSITIONS - 1]))

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        normal = self.before(x)

        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)

        query = _rotated(heads(self.query(normal)), cosine, sine)
        key = _rotated(heads(self.key(normal)), cosine, sine)
        value = heads(self.value(normal))
        if hasattr(self, "keys"):
            self.keys.index_copy_(2, self.position, key)
            self.values.index_copy_(2, self.position, value)
            seen = functional.scaled_dot_product_attention(query, self.keys, self.values)
        else:
            seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        normal = self.between(x)
        return x + self.down(functional.silu(self.gate(normal)) * self.up(normal))


def _rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-right, left), dim=-1) * sine


class Llama(nn.Module):
    """Four layers of a Llama-like decoder: `batch` sequences with a cache of all positions except
    one, or without a cache (0)."""

    def __init__(self, batch: int, filled: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(batch, filled) for _ in range(LAYERS))
        self.last = nn.RMSNorm(WIDTH)
        positions = torch.arange(POSITIONS)[:, None] / 10000 ** (
            torch.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS)
        )
        angles = torch.cat((positions, positions), dim=-1)
        if batch:
            angles = angles[-1:]
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        return self.last(x)


if __name__ == "__main__":
    json.dump({model.__name__: f"card_models:{model.__name__}" for model in MODELS}, sys.stdout)
