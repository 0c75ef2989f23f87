"""The torch device of a benchmark: its stream, CUDA graphs and the size of its last cache."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

CPU_LIMIT_BYTES = 64 * 2**20  # on large servers, other processes use the rest of the shared cache


def synchronize(device: torch.device) -> None:
    """Wait for all work on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def one_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Make one stream current for all later work of this thread and return it; None on a CPU.

    Health checks and copies use it, too. If a process uses a second stream, memory operations
    inside a graph may take 14 us longer (docs/design/one-stream.md). CUDA cannot capture graphs
    on the default stream, so this is another."""
    if device.type != "cuda":
        return None
    if torch.cuda.current_stream(device) == torch.cuda.default_stream(device):
        torch.cuda.set_stream(torch.cuda.Stream(device))
    return torch.cuda.current_stream(device)


def capture_graph(
    calls: Sequence[Callable[[], object]], device: torch.device, pool: Any = None
) -> torch.cuda.CUDAGraph:
    """Capture one graph of all calls, one after the other.

    The function avoids `torch.cuda.graph`, which collects garbage and empties the allocator's cache
    at each capture: this costs more than the window of a short tuple. Each output is freed at once,
    so later calls may reuse its memory, as in a running model."""
    with capturing(device, pool) as captured:
        run_all(calls)
    return captured


def run_all(calls: Iterable[Callable[[], object]]) -> None:
    for call in calls:
        call()


@contextlib.contextmanager
def capturing(device: torch.device, pool: Any = None) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture a graph of all work that the block launches."""
    captured = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    # thread_local: other threads, such as the sampler, may call the driver during the capture.
    captured.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        yield captured
    except BaseException:
        with contextlib.suppress(RuntimeError):
            captured.capture_end()
        raise
    captured.capture_end()


def cache_bytes(device: torch.device) -> int:
    """Size of the last-level cache: the L2 of a GPU; the largest cache of a CPU, at most
    `CPU_LIMIT_BYTES`.
    """
    if device.type == "cuda":
        return (
            int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or 64 * 2**20
        )
    largest = 0
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        scale = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 1)
        with contextlib.suppress(ValueError):
            largest = max(largest, int(text.rstrip("KMG")) * scale)
    return min(largest or 32 * 2**20, CPU_LIMIT_BYTES)
