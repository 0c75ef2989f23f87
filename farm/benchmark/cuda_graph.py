"""Passes made into a CUDA graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch


def one_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream for all that this process does, the health check and every copy too: the current one from now on.

    Once there is work on a second, memory operations inside a graph may take some 14 us longer (docs/method.md, "One
    stream"). It is not the default one, on which no graph can be captured.
    """
    if torch.cuda.current_stream(device) == torch.cuda.default_stream(device):
        torch.cuda.set_stream(torch.cuda.Stream(device))
    return torch.cuda.current_stream(device)


def capture_graph(
    calls: Sequence[Callable[[], object]], device: torch.device, pool: Any = None
) -> torch.cuda.CUDAGraph:
    """One graph of all calls, one behind the other.

    Not `torch.cuda.graph`: it collects garbage and empties the allocator's cache at each capture, which costs more than
    a short tuple's whole window. Outputs die at once, so the calls of a graph write to the same memory, as the allocator
    does it in a running model.
    """
    with capturing(device, pool) as captured:
        for call in calls:
            call()
    return captured


@contextlib.contextmanager
def capturing(device: torch.device, pool: Any = None) -> Iterator[torch.cuda.CUDAGraph]:
    """A graph of all that is launched inside."""
    captured = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    # thread_local: the sampler and other threads may go on calling the driver.
    captured.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        yield captured
    except BaseException:
        with contextlib.suppress(RuntimeError):
            captured.capture_end()
        raise
    captured.capture_end()
