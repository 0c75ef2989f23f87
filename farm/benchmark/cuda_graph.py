"""Passes made into a CUDA graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch


def capture_graph(
    calls: Sequence[Callable[[], object]], device: torch.device, pool: Any = None
) -> torch.cuda.CUDAGraph:
    """One graph of all calls, one behind the other.

    Not `torch.cuda.graph`: it collects garbage and empties the allocator's cache at each capture, which costs more than
    a short tuple's whole window. Outputs die at once, so the calls of a graph write to the same memory, as the allocator
    does it in a running model.
    """
    captured = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    # thread_local: the sampler and other threads may go on calling the driver.
    captured.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        for call in calls:
            call()
    except BaseException:
        with contextlib.suppress(RuntimeError):
            captured.capture_end()
        raise
    captured.capture_end()
    return captured
