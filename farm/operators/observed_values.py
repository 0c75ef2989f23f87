"""What stands in the tensors when a model really runs: mean, spread, zeros and signs, call by call.

Of buffers and parameters that a call is given as arguments, caches above all, the share of zeros, the part that is used and
whether they hold one value: where they are not as the random weights that a tuple is read with.

One pass of the model on the CPU, with the same seeded weights that it has on the card and two samples of its input. Only what is cheap: very large models are not run at submit time, and their calls go by standard normal data.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from farm.models.catalog import meta_inputs
from farm.operators.capture import capture, predict
from farm.operators.input_values import channel_dimension
from farm.types.protocol import Variant
from farm.types.value_profiles import NORMAL, class_of

MOST_PARAMETERS = 250_000_000  # 1 GB in single precision
MOST_FLOPS = 400e9  # of the pass: a few seconds on a few cores
SAMPLE = 250_000  # values looked at per tensor

HELD_SHARE = 1 / 8  # of the bytes that a call is given: smaller buffers are not looked at
#: Per call, an entry per activation: {"mean", "spread", "zeros", "least", "channels"}, or None where nothing can be said;
#: then, unless all are as random weights are, one per buffer or parameter it was given, see `describe_held`.
Seen = list[dict[str, float] | None]
#: (module path, operator) -> what each call there saw, in order.
Shown = Sequence[tuple[torch.Tensor, bool]]  # tensors, each with whether the call wrote to it
SeenCalls = dict[tuple[str, str], list[Seen]]


def seen_values(variant: Variant, flops: int = 0) -> SeenCalls | None:
    """What the calls of a variant see; None where running it would cost too much, or it does not run on a CPU.

    Args:
        flops: of one pass of the variant, as far as known.
    """
    batch = 2  # so that what is common to all samples can be told
    with contextlib.redirect_stdout(sys.stderr):  # what a person's own model prints is no result of ours
        # In single precision whatever the variant's: a CPU is slow in others, and the shares are the same.
        plain = dataclasses.replace(variant, dtype="float32", memory_format="contiguous")
        on_meta = catalog.build(plain, real_buffers=True)
        large = sum(tensor.numel() for tensor in on_meta.parameters()) > MOST_PARAMETERS
        if large or flops * batch / variant.batch > MOST_FLOPS:
            return _held_alone(on_meta, plain)
        two = dataclasses.replace(plain, batch=batch)
        model, arguments = catalog.build(two, device="cpu"), catalog.example_inputs(two, device="cpu")
        try:
            return watch(model, arguments)
        except FarmError:  # a model with a cache takes the batch that the cache is for
            return _held_alone(on_meta, plain)


def _held_alone(model: nn.Module, variant: Variant) -> SeenCalls | None:
    """Of a model that is not run: what its buffers hold as they are made. None where that tells nothing."""
    found: SeenCalls = defaultdict(list)

    def look(path: str, operator: str, activations: Shown, held: Shown) -> None:
        with _disable_current_modes(), torch.no_grad():
            known = _held_entries(activations, held)
        unknown: Seen = [None] * len(activations)
        found[path, operator].append(unknown + known if known else [])

    try:
        predict(model, meta_inputs(variant), watch=look)
    except FarmError:
        return None
    return dict(found) if any(entry for calls in found.values() for entry in calls) else None


def watch(model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any] | None = None) -> SeenCalls:
    """Run the model once and look at the activations of every call."""
    found: SeenCalls = defaultdict(list)

    def look(path: str, operator: str, activations: Shown, held: Shown) -> None:
        with _disable_current_modes(), torch.no_grad():
            entries = [None if written else describe(tensor) for tensor, written in activations]
            found[path, operator].append(entries + _held_entries(activations, held))

    capture(model, arguments, named, watch=look)
    return dict(found)


def _held_entries(activations: Shown, held: Shown) -> Seen:
    """One entry for each that is held; none at all where all are as random weights are, or too small to matter."""
    read_bytes = sum(tensor.nbytes for tensor, _ in (*activations, *held))
    entries = [
        {"held": 1.0}
        if written or tensor.is_meta or tensor.nbytes < HELD_SHARE * read_bytes
        else {"held": 1.0, **describe_held(tensor)}
        for tensor, written in held
    ]
    return list(entries) if class_of(list(entries)) != NORMAL else []


def describe_held(tensor: torch.Tensor) -> dict[str, float]:
    """Of a buffer or a parameter: `zeros`, `same` (it holds one value), and `used` of `used_dimension` where all values lie in a
    first part along that dimension; {} for integers and nothing."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return {}
    flat = tensor.detach().reshape(-1)
    values = flat[:: max(1, flat.numel() // SAMPLE) | 1].double()
    found = {"zeros": float(f"{(values == 0).double().mean().item():.4g}")}
    if 0 < found["zeros"] < 1:
        found |= _used(tensor.detach())
    elif not found["zeros"] and bool((values == values[0]).all()):
        found["same"] = 1.0
    return found


def _used(tensor: torch.Tensor) -> dict[str, float]:
    """The part of some dimension but the first (the samples) behind which all is zero, if most of what is before is not."""
    there = tensor[:1] != 0
    for dimension in range(1, tensor.dim()):
        positions = there.any(tuple(index for index in range(tensor.dim()) if index != dimension)).nonzero()
        end = int(positions.max()) + 1 if len(positions) else 0
        if 0 < end < tensor.shape[dimension] and there.narrow(dimension, 0, end).double().mean() > 0.5:
            return {"used": end / tensor.shape[dimension], "used_dimension": dimension}
    return {}


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
    """What `farm.types.value_profiles.class_of` goes by; None for integers, nothing, and what is not finite."""
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
