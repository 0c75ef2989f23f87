"""The last cache before the memory: how large it is, and what of a footprint it still holds one pass later."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from farm.benchmark.capture_graph import capture_graph

CPU_LIMIT_BYTES = 64 * 2**20  # shared caches of large servers are not one process's to fill
PIECE_BYTES = 2**20
COLD_TIMES = 3  # a footprint of so many caches is never found again
WARM_SHARE = 8  # and one of a cache's so-manieth part always
WALKS = 3


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


def found_again(footprint_bytes: int, device: torch.device) -> float:
    """The share of a footprint that a GPU's cache still holds when it is walked through once more, 0 to 1.

    Measured, by kernels that read a megabyte each, one after the other: what a cache holds is not what its size says
    (on an H200 with 60 MB of L2, all of 38 MB and nothing of 52 MB).
    """
    cache = cache_bytes(device)
    if footprint_bytes >= COLD_TIMES * cache:
        return 0.0
    memory = torch.zeros(COLD_TIMES * cache // PIECE_BYTES, PIECE_BYTES // 4, device=device)
    pieces = list(memory.unbind())
    wanted = max(1, round(footprint_bytes / PIECE_BYTES))
    warm_us = _piece_us(pieces[: max(1, cache // WARM_SHARE // PIECE_BYTES)], device)
    cold_us = _piece_us(pieces, device)
    if cold_us <= warm_us:
        return 0.0
    return min(1.0, max(0.0, (cold_us - _piece_us(pieces[:wanted], device)) / (cold_us - warm_us)))


def _piece_us(pieces: list[torch.Tensor], device: torch.device) -> float:
    """Time of reading one of the pieces, when they are read in turn."""
    graph = capture_graph([piece.sum for piece in pieces], device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(WALKS):
        graph.replay()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) * 1e3 / (WALKS * len(pieces))
