"""Idle power and base power of a card: at rest, and at full clocks with almost no work."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from farm.benchmark.sampler import Sampler
from farm.devices.device import Device

LEVEL_S = 0.5  # window of an idle or base power
LEVEL_AGE_S = 1800.0  # an older base power is measured again


class PowerLevels:
    """Idle power and base power (full clocks, almost no work) of a process's card. Unit: W; None if unknown.

    Readings have both, so that energy above idle can be computed. Create it before the process uses CUDA, so that the
    card is idle; or give its idle power if it is known.
    """

    def __init__(self, device: Device, torch_device: torch.device, idle_power_w: float | None = None) -> None:
        self._device = device
        self._torch_device = torch_device
        self._taken_s = -math.inf
        self.idle_power_w = _average_power_w(device) if idle_power_w is None else idle_power_w
        self.base_power_w: float | None = None

    def refresh(self) -> None:
        """Measure the base power once per process, and again if it is older than `LEVEL_AGE_S`."""
        if self._torch_device.type != "cuda" or time.perf_counter() - self._taken_s < LEVEL_AGE_S:
            return
        self.base_power_w = _average_power_w(self._device, tiny_kernels(self._torch_device))
        self._taken_s = time.perf_counter()


def tiny_kernels(device: torch.device) -> Callable[[], None]:
    """A function that runs a one-element kernel and waits 2 ms: full clocks at a duty of a few thousandths."""
    tiny = torch.zeros(1, device=device)

    def run() -> None:
        tiny.add_(1)
        torch.cuda.synchronize(device)
        time.sleep(0.002)

    return run


def _average_power_w(device: Device, work: Callable[[], None] = lambda: time.sleep(0.01)) -> float | None:
    """Average power over `LEVEL_S`; None if the device has no sensors."""
    with Sampler(device) as sampler:
        if not sampler.active:
            return None
        begin_s = time.perf_counter()
        while time.perf_counter() - begin_s < LEVEL_S + (0.15 if sampler.counts_energy else 0.0):
            work()
        end_s = time.perf_counter()
    return sampler.average_power_w(begin_s, end_s)
