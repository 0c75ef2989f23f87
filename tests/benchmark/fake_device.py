"""A device whose sensors say what a test wants, with the manners of a real one: a counter that
ticks.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from farm.devices.device import Card, Device

STEPS = 20  # in which the power is integrated over one tick of the counter


class FakeDevice(Device):
    """`power_w` gives the power, in W, at a moment in seconds after the device was made."""

    def __init__(
        self,
        power_w: Callable[[float], float] = lambda _: 300.0,
        tick_s: float = 0.02,
        lacks: frozenset[str] = frozenset(),
        instant_factor: float = 1.0,
    ) -> None:
        self.card = Card("GPU-fake", "cuda", "fake card", 0)
        self.began_s = time.perf_counter()
        self.calls = 0
        self.reasons: tuple[str, ...] = ()
        self.processes: list[frozenset[int]] = []
        self._power_w, self._tick_s, self._lacks, self._instant_factor = (
            power_w,
            tick_s,
            lacks,
            instant_factor,
        )
        self._energy_mj, self._ticked_s = 1000.0, self.began_s

    @property
    def capabilities(self) -> frozenset[str]:
        return (
            frozenset(
                {
                    "energy_counter_mj",
                    "power_instant_w",
                    "power_average_w",
                    "sm_clock_mhz",
                    "temperature_c",
                    "throttle_reasons",
                    "compute_processes",
                }
            )
            - self._lacks
        )

    def energy_counter_mj(self) -> float | None:
        self.calls += 1
        now_s = time.perf_counter()
        while now_s - self._ticked_s >= self._tick_s:
            step_s = self._tick_s / STEPS
            for step in range(STEPS):
                moment_s = self._ticked_s - self.began_s + (step + 0.5) * step_s
                self._energy_mj += step_s * self._power_w(moment_s) * 1e3
            self._ticked_s += self._tick_s
        return self._energy_mj

    def power_instant_w(self) -> float | None:
        return self._power_w(time.perf_counter() - self.began_s) * self._instant_factor

    def power_average_w(self) -> float | None:
        return self._power_w(time.perf_counter() - self.began_s)

    def sm_clock_mhz(self) -> float | None:
        return 1980.0

    def temperature_c(self) -> float | None:
        return 40.0 + (time.perf_counter() - self.began_s)

    def throttle_reasons(self) -> tuple[str, ...] | None:
        return self.reasons

    def compute_processes(self) -> frozenset[int] | None:
        if len(self.processes) > 1:
            return self.processes.pop(0)
        return self.processes[0] if self.processes else frozenset()
