"""Is the card fit to measure? A known operator with a known result, in a plausible time, before the first item.

A card that computes wrongly, or crawls, gives readings that look like any other's. So each benchmark process starts
with a product of whole numbers, whose result is exact in every precision that a card may choose, and which is worked
out beside it in double precision on the CPU. What fails is quarantined until a person releases it.
"""

from __future__ import annotations

import time
from typing import Any

SIZE = 512
ROUNDS = 3

#: A product of this size takes some 10 µs on a data-centre GPU and some ms on one CPU core. Outside of these bounds the
#: card did not compute it, or something is badly wrong with it. Unit: s.
PLAUSIBLE_S = (5e-7, 5.0)


def check(torch: Any, device: Any) -> str:
    """What is wrong with the device, or "" for a healthy one.

    Args:
        torch: the module; this file is imported where there may be none.
        device: a ``torch.device``.
    """
    left = (torch.arange(SIZE * SIZE, dtype=torch.float64) % 7 - 3).reshape(SIZE, SIZE)
    right = (torch.arange(SIZE * SIZE, dtype=torch.float64) % 5 - 2).reshape(SIZE, SIZE).t()
    # Sums of 512 products of at most 6: far below 2 ** 24, and the factors fit into the mantissas of bfloat16 and TF32.
    wanted = (left @ right).to(torch.float32)
    on_card = left.to(device, torch.float32), right.to(device, torch.float32)
    shortest_s = float("inf")
    for _ in range(ROUNDS):
        _wait(torch, device)
        begin_s = time.perf_counter()
        got = on_card[0] @ on_card[1]
        _wait(torch, device)
        shortest_s = min(shortest_s, time.perf_counter() - begin_s)
        wrong = int((got.cpu() != wanted).sum())
        if wrong:
            return f"A product of whole numbers came out wrong in {wrong} of {SIZE * SIZE} places."
    return implausible(shortest_s)


def implausible(took_s: float) -> str:
    """Why a product cannot have taken that long, or ""."""
    low_s, high_s = PLAUSIBLE_S
    if low_s <= took_s <= high_s:
        return ""
    return f"A product of {SIZE} x {SIZE} took {took_s:.3g} s; between {low_s:g} and {high_s:g} s is plausible."


def _wait(torch: Any, device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
