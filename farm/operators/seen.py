"""What stands in the tensors when a model really runs: mean, spread, zeros and signs, call by call.

One pass of the model on the CPU, with the same seeded weights that it has on the card and two samples of its input. Only what is cheap: very large models are not run at submit time, and their calls go by standard normal data.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from farm.errors import FarmError
from farm.models import catalog
from farm.operators.capture import capture
from farm.operators.values import channel_dimension
from farm.words.protocol import Variant

MOST_PARAMETERS = 250_000_000  # 1 GB in single precision
MOST_FLOPS = 400e9  # of the pass: a few seconds on a few cores
SAMPLE = 250_000  # values looked at per tensor

#: Per call, an entry per activation: {"mean", "spread", "zeros", "least", "channels"}, or None where nothing can be said.
Seen = list[dict[str, float] | None]
#: (module path, operator) -> what each call there saw, in order.
SeenCalls = dict[tuple[str, str], list[Seen]]


def seen_values(variant: Variant, flops: int = 0) -> SeenCalls | None:
    """What the calls of a variant see; None where running it would cost too much, or it does not run on a CPU.

    Args:
        flops: of one pass of the variant, as far as known.
    """
    batch = 2  # so that what is common to all samples can be told
    if flops * batch / variant.batch > MOST_FLOPS:
        return None
    with contextlib.redirect_stdout(sys.stderr):  # what a person's own model prints is no result of ours
        if sum(tensor.numel() for tensor in catalog.build(variant.model).parameters()) > MOST_PARAMETERS:
            return None
        # In single precision whatever the variant's: a CPU is slow in others, and the shares are the same.
        model = catalog.build(variant.model, device="cpu", mode=variant.mode)
        arguments = catalog.example_inputs(variant.model, batch, variant.input_size, device="cpu")
        try:
            return watch(model, arguments)
        except FarmError:
            return None


def watch(model: nn.Module, arguments: tuple[Any, ...]) -> SeenCalls:
    """Run the model once and look at the activations of every call."""
    found: SeenCalls = defaultdict(list)

    def look(path: str, operator: str, activations: Sequence[tuple[torch.Tensor, bool]]) -> None:
        with _disable_current_modes(), torch.no_grad():
            found[path, operator].append([None if written else describe(tensor) for tensor, written in activations])

    capture(model, arguments, watch=look)
    return dict(found)


def _between_channels(tensor: torch.Tensor, spread: float) -> float:
    """The share of the variance that lies between channels' means."""
    dimension = channel_dimension(tensor)
    if dimension is None or tensor.shape[dimension] < 2 or not spread:
        return 0.0
    others = [index for index in range(tensor.dim()) if index != dimension]
    samples = tensor.numel() // tensor.shape[dimension]
    share = tensor.detach().double().mean(others).var(unbiased=False).item() / spread**2
    # Means over few samples spread by themselves.
    return min(1.0, max(0.0, (share * samples - 1) / (samples - 1))) if samples > 1 else 0.0


def describe(tensor: torch.Tensor) -> dict[str, float] | None:
    """What `farm.words.data_classes.class_of` goes by; None for integers, nothing, and what is not finite."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return None
    flat = tensor.detach().reshape(-1)
    # An odd step meets every channel and position.
    values = flat[:: max(1, flat.numel() // SAMPLE) | 1].double()
    spread = values.std(unbiased=False).item()
    described = {
        "mean": values.mean().item(),
        "spread": spread,
        "zeros": (values == 0).double().mean().item(),
        "least": values.min().item(),
        "channels": _between_channels(tensor, spread),
    }
    if not all(map(math.isfinite, described.values())):
        return None
    return {name: float(f"{value:.4g}") for name, value in described.items()}
