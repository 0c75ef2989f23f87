"""What a model is trained for: a loss by what it gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from farm.errors import UnsupportedModel
from farm.operators.encoding import tensors_in

IGNORED = -100  # PyTorch's: a position that is no target
AUXILIARY_WEIGHT = 0.3  # of the outputs halfway (GoogLeNet's; Inception's reference training takes 0.4)
MASKED_SHARE = 0.15  # of the tokens that BERT's training asks for


@dataclass(frozen=True)
class Loss:
    """``of(output, targets)`` is a scalar; ``targets`` are tensors that are there before the step."""

    name: str
    targets: tuple[torch.Tensor, ...]
    of: Callable[[Any, tuple[torch.Tensor, ...]], torch.Tensor]


def loss_of(output: Any, *, causal: bool, masked: bool, device: torch.device) -> Loss:
    """The loss for what a model gave.

    Args:
        causal: each position's logits are for the next token.
        masked: for the token that stands there, at some of the positions.

    Raises:
        UnsupportedModel: it gave nothing that a gradient comes from.
    """
    if not any(tensor.is_floating_point() and tensor.requires_grad for tensor in tensors_in(_plain(output))):
        raise UnsupportedModel(
            "The model's output has no tensor that a gradient comes from: no loss can be formed.",
            'Register a loss beside it: FARM_LOSSES=\'{"my_net": "my_package.models:my_loss"}\'.',
        )
    logits = getattr(output, "logits", None)
    if isinstance(logits, torch.Tensor) and logits.dim() == 3 and (causal or masked):
        return _of_tokens(logits, causal, device)
    heads = [one for one in (logits, *(output if type(output).__name__.endswith("Outputs") else ())) if one is not None]
    if isinstance(output, torch.Tensor):
        heads = [output]
    if heads and all(isinstance(one, torch.Tensor) and one.dim() == 2 for one in heads):
        return _of_classes(heads, device)
    return Loss("mean of squares of its outputs", (), _mean_of_squares)


def _of_tokens(logits: torch.Tensor, causal: bool, device: torch.device) -> Loss:
    rows, length, classes = logits.shape
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(classes, (rows, length), generator=generator)
    if not causal:
        labels[torch.rand(rows, length, generator=generator) >= MASKED_SHARE] = IGNORED

    def next_token(output: Any, targets: tuple[torch.Tensor, ...]) -> torch.Tensor:
        kept = output.logits[:, :-1] if causal else output.logits
        wanted = targets[0][:, 1:] if causal else targets[0]
        return functional.cross_entropy(kept.reshape(-1, classes), wanted.reshape(-1), ignore_index=IGNORED)

    return Loss(
        "cross-entropy of the next token" if causal else "cross-entropy of masked tokens",
        (labels.to(device),),
        next_token,
    )


def _of_classes(heads: list[torch.Tensor], device: torch.device) -> Loss:
    rows, classes = heads[0].shape
    labels = torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(2)).to(device)

    def cross_entropy(output: Any, targets: tuple[torch.Tensor, ...]) -> torch.Tensor:
        given = getattr(output, "logits", output)
        loss = functional.cross_entropy(given, targets[0])
        for head in output[1:] if type(output).__name__.endswith("Outputs") else ():
            if head is not None:
                loss = loss + AUXILIARY_WEIGHT * functional.cross_entropy(head, targets[0])
        return loss

    return Loss("cross-entropy", (labels,), cross_entropy)


def _plain(output: Any) -> Any:
    return dict(output) if hasattr(output, "items") else output


def _mean_of_squares(output: Any, targets: tuple[torch.Tensor, ...]) -> torch.Tensor:
    total: torch.Tensor | None = None
    for tensor in tensors_in(_plain(output)):
        if tensor.is_floating_point() and tensor.requires_grad:
            one = tensor.float().square().mean()
            total = one if total is None else total + one
    assert total is not None
    return total
