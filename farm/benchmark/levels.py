"""Power of a card with nothing to do: at rest, and at full clocks.

Both stand beside each reading, so that energy above idle can be formed without counting idle twice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from farm.benchmark.power import average_power_w
from farm.benchmark.sampler import Sampler
from farm.devices.device import Device

WINDOW_S = 0.5
AGE_S = 1800.0  # from which on a base power is taken again


class Levels:
    """The levels of one benchmark process's card. Units: W; None where the card does not tell or was not asked.

    Make it before anything touches CUDA, so that the card is at rest.

    Args:
        idle_power_w: where it is known already.
    """

    def __init__(self, device: Device, torch_device: torch.device, idle_power_w: float | None = None) -> None:
        self._device = device
        self._torch_device = torch_device
        self._taken_s = -math.inf
        self.idle_power_w = _average_power_w(device) if idle_power_w is None else idle_power_w
        self.base_power_w: float | None = None

    def refresh(self) -> None:
        """Take the base power once per process and refresh it rarely: full clocks, next to nothing to do."""
        if self._torch_device.type != "cuda" or time.perf_counter() - self._taken_s < AGE_S:
            return
        self.base_power_w = _average_power_w(self._device, next_to_nothing(self._torch_device))
        self._taken_s = time.perf_counter()


def next_to_nothing(device: torch.device) -> Callable[[], None]:
    """A one-element kernel every 2 ms: keeps the clocks up, at a duty of a few thousandths."""
    tiny = torch.zeros(1, device=device)

    def twitch() -> None:
        tiny.add_(1)
        torch.cuda.synchronize(device)
        time.sleep(0.002)

    return twitch


def _average_power_w(device: Device, work: Callable[[], None] | None = None) -> float | None:
    """Average power over half a second."""
    with Sampler(device) as sampler:
        if not sampler.active:
            return None
        begin_s = time.perf_counter()
        while time.perf_counter() - begin_s < WINDOW_S + (0.15 if sampler.counts_energy else 0.0):
            if work is None:
                time.sleep(0.01)
            else:
                work()
        end_s = time.perf_counter()
    return average_power_w(sampler, begin_s, end_s)
