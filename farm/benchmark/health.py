"""Is the card fit to measure? A known operator with a known result, in a plausible time, before the first item and again.

A card that computes wrongly, or crawls, gives readings that look like any other's. So each benchmark process starts
with a product of whole numbers, whose result is exact in every precision that a card may choose, and which is worked
out beside it in double precision on the CPU. It asks the card again before an item now and then, which takes about a
millisecond. What fails is quarantined until a person releases it.
"""

from __future__ import annotations

import time
from typing import Any

SIZE = 512
#: The shortest of these counts: a process beside this one, or a clock that rests, may hold one up.
ROUNDS = 5

#: A product of this size takes some 10 µs on a data-centre GPU, well below 1 ms on any, also at the clock it rests at, and
#: some ms on one CPU core. Outside of these bounds the device did not compute it, or something is badly wrong. Unit: s.
PLAUSIBLE_S = {"cuda": (5e-7, 5e-3), "cpu": (5e-7, 5.0)}
#: How long after a check the next item is preceded by another. Unit: s.
AGAIN_AFTER_S = 60.0


class HealthCheck:
    """The product, ready to be asked for: its factors are on the device, its result is known."""

    def __init__(self, torch: Any, device: Any) -> None:
        """
        Args:
            torch: the module; this file is imported where there may be none.
            device: a ``torch.device``.
        """
        self._torch = torch
        self._device = device
        left = (torch.arange(SIZE * SIZE, dtype=torch.float64) % 7 - 3).reshape(SIZE, SIZE)
        right = (torch.arange(SIZE * SIZE, dtype=torch.float64) % 5 - 2).reshape(SIZE, SIZE).t()
        # Sums of 512 products of at most 6: far below 2 ** 24, and the factors fit into the mantissas of bfloat16 and
        # TF32.
        self._wanted = (left @ right).to(torch.float32)
        self._factors = left.to(device, torch.float32), right.to(device, torch.float32)

    def run(self) -> str:
        """What is wrong with the device, or "" for a healthy one."""
        got = self._factors[0] @ self._factors[1]  # not timed: the first one of a process loads libraries
        shortest_s = float("inf")
        for _ in range(ROUNDS):
            self._wait()
            begin_s = time.perf_counter()
            again = self._factors[0] @ self._factors[1]
            self._wait()
            shortest_s = min(shortest_s, time.perf_counter() - begin_s)
        for product in (got, again):
            if wrong := int((product.cpu() != self._wanted).sum()):
                return f"A product of whole numbers came out wrong in {wrong} of {SIZE * SIZE} places."
        return implausible(shortest_s, self._device.type)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            self._torch.cuda.synchronize(self._device)


def implausible(took_s: float, device_type: str) -> str:
    """Why a product cannot have taken that long on a "cuda" or "cpu" device, or ""."""
    low_s, high_s = PLAUSIBLE_S[device_type]
    if low_s <= took_s <= high_s:
        return ""
    return f"A product of {SIZE} x {SIZE} took {took_s:.3g} s; between {low_s:g} and {high_s:g} s is plausible."
