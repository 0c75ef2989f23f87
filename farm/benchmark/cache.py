"""The last cache before the memory: how large it is, and what of a footprint it still holds one pass later."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from statistics import median

import torch

from farm.benchmark.cuda_graph import capture_graph

CPU_LIMIT_BYTES = 64 * 2**20  # shared caches of large servers are not one process's to fill
PIECES = 64  # a cache is walked through in so many
LEAST_PIECE_BYTES = 2**16
COLD_TIMES = 3  # a footprint of so many caches is never found again
WARM_SHARE = 8  # and one of a cache's so-manieth part always
READS = 200  # of a piece, at least, in one graph, so that launching the graph does not count
REPLAYS = 5


def cache_bytes(device: torch.device) -> int:
    """Size of the last cache before the memory: the L2 of a GPU, the largest cache of one CPU."""
    if device.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or 64 * 2**20
    largest = 0
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        scale = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 1)
        with contextlib.suppress(ValueError):
            largest = max(largest, int(text.rstrip("KMG")) * scale)
    return min(largest or 32 * 2**20, CPU_LIMIT_BYTES)


def found_again(footprint_bytes: int, device: torch.device) -> float | None:
    """The share of a footprint that a GPU's cache still holds when it is walked through once more, 0 to 1.

    Measured, by kernels that read about a megabyte each, one after the other: what a cache holds is not what its size
    says (on an H200 with 60 MB of L2, all of 38 MB and nothing of 52 MB). None where it cannot be told.
    """
    cache = cache_bytes(device)
    if footprint_bytes >= COLD_TIMES * cache:
        return 0.0
    piece_bytes = max(LEAST_PIECE_BYTES, cache // PIECES)
    try:
        memory = torch.zeros(COLD_TIMES * cache // piece_bytes, piece_bytes // 4, device=device)
        pieces = list(memory.unbind())
        wanted = max(1, round(footprint_bytes / piece_bytes))
        warm_us = _piece_us(pieces[: max(1, cache // WARM_SHARE // piece_bytes)], device)
        cold_us = _piece_us(pieces, device)
        here_us = _piece_us(pieces[:wanted], device)
    except torch.OutOfMemoryError:  # no room beside the model
        return None
    if cold_us <= 1.02 * warm_us:  # the cache makes no difference to this kernel
        return None
    return min(1.0, max(0.0, (cold_us - here_us) / (cold_us - warm_us)))


def _piece_us(pieces: list[torch.Tensor], device: torch.device) -> float:
    """Time of reading one of the pieces, when they are read in turn."""
    walks = math.ceil(READS / len(pieces))
    graph = capture_graph([piece.sum for piece in pieces] * walks, device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times_us: list[float] = []
    for replay in range(REPLAYS + 1):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize(device)
        if replay:  # the first finds what others left
            times_us.append(begin.elapsed_time(end) * 1e3 / (walks * len(pieces)))
    return median(times_us)
