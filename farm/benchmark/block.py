"""The time and energy of a block of code on a card of this process."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from farm.devices.device import Card
from farm.devices.host import open_device
from farm.types.figure import Figure, value_of
from farm.types.format import ENERGY, POWER, TIME, quantity


@dataclass
class Window:
    """What a block cost. The values are None inside the block, and if the card does not report
    them.

    Energy is the mean power of the card, idle power included, times the duration. With three or
    more updates of the card's energy counter (an H200: every 0.1 s) the power comes from the
    counter, else from the power sensor.

    Attributes:
        power_source: "energy_counter", "instant_power", "average_power", "rapl", or "" without
            power.
        shared: True if other processes used the card; None if the card does not report its
            processes.
    """

    card: Card
    time_s: float | None = None
    power: Figure | None = None  # mean power of the card, in W
    power_source: str = ""
    shared: bool | None = None

    @property
    def power_w(self) -> float | None:
        return value_of(self.power)

    @property
    def power_half_width_w(self) -> float | None:
        """Half-width of the 95 % interval of `power_w`."""
        return self.power.half_width if self.power else None

    @property
    def energy_mj(self) -> float | None:
        if self.power is None or self.time_s is None:
            return None
        return self.power.value * self.time_s * 1e3

    def __repr__(self) -> str:
        if self.time_s is None:
            return f"<Window on {self.card.model}: open>"
        time = quantity(self.time_s * 1e6, TIME)
        cost = (
            f"{quantity(self.energy_mj, ENERGY)}, {quantity(self.power_w, POWER)}"
            if self.power_w
            else "no energy"
        )
        return f"<Window on {self.card.model}: {time}, {cost}>"


@contextlib.contextmanager
def measured_block(card: Card) -> Iterator[Window]:
    """Measure the time and energy of a block of code on a card, once. The GPU is synchronized at
    the begin and the end."""
    from farm.benchmark.sampler import Sampler
    from farm.benchmark.window import window_power

    window = Window(card)
    with (
        contextlib.closing(open_device(card)) as device,
        Sampler(device, frozenset({os.getpid()})) as sampler,
    ):
        _synchronize()
        begin_s = time.perf_counter()
        try:
            yield window
        finally:
            _synchronize()
            end_s = time.perf_counter()
            window.time_s = end_s - begin_s
            power = window_power(sampler, begin_s, end_s)
            window.power, window.power_source = power.power_w, power.source
            if "compute_processes" in device.capabilities:
                window.shared = bool(sampler.window(begin_s, end_s).foreign_processes)


def _synchronize() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
