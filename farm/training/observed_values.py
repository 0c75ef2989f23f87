"""Describes the values in the tensors of a running model: mean, spread, zeros and signs of each
call's activations.

For buffers and parameters that a call gets as arguments (mainly caches), and that differ from
random weights: the share of zeros, the used part, and whether all values are equal.

The model runs once on the CPU, with the same seeded weights as on the card and two samples of
input. A very large model is not run at submit time; its calls are measured with standard normal
values."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from farm.errors import FarmError
from farm.models import catalog
from farm.models.resolved import ResolvedModel
from farm.models.user_code import captured_code
from farm.operators.capture import capture, predict
from farm.operators.input_values import channel_dimension
from farm.types.value_profiles import NORMAL, class_of
from farm.types.variant import Variant

MOST_PARAMETERS = 250_000_000  # 1 GB in single precision
MOST_FLOPS = 400e9  # of one run: a few seconds on a few cores
BATCH = 2  # shows what all samples have in common
SAMPLE = 250_000  # values examined per tensor
HELD_SHARE = 1 / 8  # of the bytes of a call's tensors: smaller buffers are not examined

#: The entries of one call: {"mean", "spread", "zeros", "least", "channels"} for each activation, or
#: None if unknown; then the result of `describe_held` for each buffer or parameter argument, unless
#: all are like random weights.
CallValues = list[dict[str, float] | None]
#: (module path, operator) -> the entries of each such call, in order.
ObservedValues = dict[tuple[str, str], list[CallValues]]
_Tensors = Sequence[tuple[torch.Tensor, bool]]  # each with whether the call wrote to it

_log = logging.getLogger(__name__)


def observe_values(
    variant: Variant, flops: int = 0, model: ResolvedModel | None = None
) -> ObservedValues | None:
    """Runs a variant and describes the values of each call. If the run costs too much (by the
    ``flops`` of one pass, if known) or fails on a CPU, logs a warning with the reason, and
    describes only buffers and parameters; None if none of them differs from random weights.

    Args:
        model: the variant's model, if the caller has found it.
    """
    model = model or catalog.resolve(variant.model)
    with captured_code():
        # Always in single precision: a CPU is slow in other dtypes, and the shares are the same.
        plain = dataclasses.replace(variant, dtype="float32", memory_format="contiguous")
        on_meta = model.build(plain, real_buffers=True)
        parameters = sum(tensor.numel() for tensor in on_meta.parameters())
        run_flops = flops * BATCH / variant.batch
        if parameters > MOST_PARAMETERS or run_flops > MOST_FLOPS:
            reason = "it is too large to run once for real values"
        else:
            of_run = dataclasses.replace(plain, batch=BATCH)
            module = model.build(of_run, device="cpu")
            arguments = model.example_inputs(of_run, device="cpu")
            try:
                return watch_values(module, arguments)
            except FarmError as error:  # a model with a cache needs the batch of the cache
                reason = f"its run with batch {BATCH} on the CPU failed: {error.message}"
        _log.warning("Using random normal inputs for %s: %s", variant, reason)
        observed: ObservedValues = defaultdict(list)
        look = functools.partial(_look, observed, has_run=False)
        try:
            predict(on_meta, model.meta_inputs(plain), watch=look)
        except FarmError as error:
            _log.warning("The buffers of %s were not examined: %s", variant, error.message)
            return None
    return dict(observed) if any(map(any, observed.values())) else None


def watch_values(
    model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any] | None = None
) -> ObservedValues:
    observed: ObservedValues = defaultdict(list)
    capture(model, arguments, named, watch=functools.partial(_look, observed, has_run=True))
    return dict(observed)


def _look(
    observed: ObservedValues,
    path: str,
    operator: str,
    activations: _Tensors,
    passed_weights: _Tensors,
    *,
    has_run: bool,
) -> None:
    """Add the entries of a call to `observed`. The activations of a model that has not run have no
    values."""
    entries: CallValues = []
    with _disable_current_modes(), torch.no_grad():
        for tensor, written in activations:
            is_known = has_run and not written
            entries.append(describe_values(tensor) if is_known else None)
        of_weights = _entries_of_weights(activations, passed_weights)
    observed[path, operator].append(entries + of_weights if has_run or of_weights else [])


def _entries_of_weights(activations: _Tensors, passed_weights: _Tensors) -> CallValues:
    """One entry for each buffer or parameter; empty if all are like random weights, or too small to
    matter.
    """
    read_bytes = sum(tensor.nbytes for tensor, _ in (*activations, *passed_weights))
    entries: CallValues = []
    for tensor, written in passed_weights:
        is_examined = not (written or tensor.is_meta) and (tensor.nbytes >= HELD_SHARE * read_bytes)
        entries.append({"held": 1.0, **(describe_held(tensor) if is_examined else {})})
    return entries if class_of(entries) != NORMAL else []


def describe_held(tensor: torch.Tensor) -> dict[str, float]:
    """Describes a buffer or parameter: share of `zeros`, `same` if all values are equal, and `used`
    of `used_dimension` if only a first part along that dimension has values; {} for integers and
    empty tensors."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return {}
    values = _sample(tensor)
    zeros = float(f"{(values == 0).double().mean().item():.4g}")
    entry = {"zeros": zeros}
    if not zeros and bool((values == values[0]).all()):
        entry["same"] = 1.0
    if not 0 < zeros < 1:
        return entry
    is_used = tensor.detach() != 0
    # all values after the used part are zero, most before are not
    for dimension in range(1, tensor.dim()):
        others = tuple(index for index in range(tensor.dim()) if index != dimension)
        positions = is_used.any(others).nonzero()
        end = int(positions.max()) + 1 if len(positions) else 0
        size = tensor.shape[dimension]
        if 0 < end < size and is_used.narrow(dimension, 0, end).double().mean() > 0.5:
            entry["used"] = end / size
            entry["used_dimension"] = dimension
            return entry
    return entry


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """About `SAMPLE` elements of a tensor, from every index of each dimension."""
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // SAMPLE) | 1
    # A step that has no factor in common with a size visits all indices of that dimension.
    while math.gcd(step, flat.numel()) > 1:
        step += 2
    return flat[::step].double()


def _between_channels(tensor: torch.Tensor, spread: float) -> float:
    """The variance of the channels' means, as a share of the total variance."""
    dimension = channel_dimension(tensor)
    if dimension is None or tensor.shape[dimension] < 2 or not spread:
        return 0.0
    others = [index for index in range(tensor.dim()) if index != dimension]
    samples = tensor.numel() // tensor.shape[dimension]
    share = tensor.detach().double().mean(others).var(unbiased=False).item() / spread**2
    # Means over few samples also vary by chance; subtract that part.
    return min(1.0, max(0.0, (share * samples - 1) / (samples - 1))) if samples > 1 else 0.0


def describe_values(tensor: torch.Tensor) -> dict[str, float] | None:
    """Statistics for `value_profiles.class_of`; None for integers, empty tensors and values that
    are not finite.
    """
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return None
    values = _sample(tensor)
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
