"""Checks of the card: is it healthy, and does it still measure what it measured before?

The health check is a product of integers: its result is exact in every precision that a card may choose, and a CPU
computes it in double precision for comparison. It finds cards that compute wrong results, or very slowly. The process
runs it at its start and before an item now and then; it takes about a millisecond. A card that fails is quarantined
until a person releases it.

The canary is a reference operator that is measured again every few tuples: a product of two square matrices, the same
on every card. A difference between two of its readings comes from the card, not from the tuples.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from farm.benchmark.passes import numeric_flags
from farm.benchmark.torch_device import synchronize
from farm.benchmark.workload import Workload, prepare_canary
from farm.types.protocol import OnPhase, Protocol, Stopping
from farm.types.reading import REPEATED, CanaryNote, Reading

if TYPE_CHECKING:
    pass

_log = logging.getLogger(__name__)

HEALTH_SIZE = 512  # of the square matrices of integers
#: The shortest of so many counts: another process, or an idle clock, may delay one.
HEALTH_ROUNDS = 5
#: The product takes about 10 us on a data-centre GPU, well below 1 ms on any, even at its idle clock, and some ms on
#: one CPU core. Outside of these bounds the device did not compute it, or something is badly wrong. Unit: s.
PLAUSIBLE_S = {"cuda": (5e-7, 5e-3), "cpu": (5e-7, 5.0)}

EVERY = 25  # tuples between two readings of the canary
SIZE = 2048  # of the square matrices that the canary multiplies
OFF = 0.03  # a change of the canary's power or time that makes the readings around it doubtful
NOTED = ("time_us", "power_w", "energy_mj", "temperature_c", "sm_clock_mhz", "flags")  # of a canary's reading
STOPPING = Stopping(warm_up_s=0.2, minimum_s=0.6, maximum_s=0.8)
FIRST_WARM_UP_S = 2.0  # the others follow tuples; compared with a canary on a cold card they would all seem off


class HealthCheck:
    """The product, ready to run: its factors are on the device, its result is known."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        size = HEALTH_SIZE
        left = (torch.arange(size * size, dtype=torch.float64) % 7 - 3).reshape(size, size)
        right = (torch.arange(size * size, dtype=torch.float64) % 5 - 2).reshape(size, size).t()
        # Sums of 512 products of at most 6: far below 2 ** 24. The factors fit into the mantissas of bfloat16 and TF32.
        self._wanted = (left @ right).to(torch.float32)
        self._factors = left.to(device, torch.float32), right.to(device, torch.float32)

    def run(self) -> str:
        """What is wrong with the device; "" if it is healthy."""
        first = self._factors[0] @ self._factors[1]  # not timed: the first product of a process loads libraries
        shortest_s = float("inf")
        for _ in range(HEALTH_ROUNDS):
            synchronize(self._device)
            begin_s = time.perf_counter()
            last = self._factors[0] @ self._factors[1]
            synchronize(self._device)
            shortest_s = min(shortest_s, time.perf_counter() - begin_s)
        for product in (first, last):
            if wrong := int((product.cpu() != self._wanted).sum()):
                return f"A matrix product of integers is wrong in {wrong} of {HEALTH_SIZE**2} elements."
        return implausible(shortest_s, self._device.type)


def implausible(took_s: float, device_type: str) -> str:
    """Why the product cannot have taken that long on a "cuda" or "cpu" device; "" if it can."""
    low_s, high_s = PLAUSIBLE_S[device_type]
    if low_s <= took_s <= high_s:
        return ""
    return f"A product of {HEALTH_SIZE} x {HEALTH_SIZE} took {took_s:.3g} s; {low_s:g} to {high_s:g} s is plausible."


class Canary:
    """The canary of one benchmark process.

    Args:
        every: tuples between two readings; 0 for no canary. The default is `EVERY` on a GPU and 0 on a CPU.
    """

    def __init__(self, torch_device: torch.device, every: int | None = None) -> None:
        self._torch_device = torch_device
        self._every = (EVERY if torch_device.type == "cuda" else 0) if every is None else every
        self._due = 0  # tuples until the next reading; the first tuple has one
        self._notes: list[CanaryNote] = []

    def newest(self, measure: Callable[[Workload, Stopping], Reading], on_phase: OnPhase) -> CanaryNote | None:
        """The newest reading; `measure` takes a new one if it is due. None if there is no canary."""
        if not self._every:
            return None
        if self._due <= 0:
            on_phase("canary", {})
            started_s = time.perf_counter()
            first = next((note for note in self._notes if not REPEATED & set(note.flags)), None)
            try:
                with numeric_flags(Protocol()):  # the same on this card for every job, whatever its own flags
                    reading = self._read(measure, first)
            except Exception as error:
                # Lack of memory, for example: that is no reason to fail the tuple. The next tuple tries again.
                _log.warning("The canary could not be measured: %s", error)
                return self._notes[-1] if self._notes else None
            self._due = self._every
            time_change, energy_change = _changes(reading, first)
            self._notes.append(
                CanaryNote(
                    number=len(self._notes) + 1,
                    process=os.getpid(),
                    **{name: getattr(reading, name) for name in NOTED},
                    time_change=time_change,
                    energy_change=energy_change,
                    cost_s=round(time.perf_counter() - started_s, 3),
                )
            )
        self._due -= 1
        return self._notes[-1]

    def _read(self, measure: Callable[[Workload, Stopping], Reading], first: CanaryNote | None) -> Reading:
        workload = prepare_canary(SIZE, self._torch_device)
        stopping = STOPPING
        if self._torch_device.type == "cuda" and not self._notes:
            stopping = dataclasses.replace(stopping, warm_up_s=FIRST_WARM_UP_S)
        try:
            reading = measure(workload, stopping)
            # Once more, before the next readings are doubted, or compared with a canary that was itself disturbed.
            if REPEATED & set(reading.flags) or (first is not None and _off(*_changes(reading, first))):
                reading = measure(workload, STOPPING)
            return reading
        finally:
            workload.close()


def _changes(reading: Reading, first: CanaryNote | None) -> tuple[float, float | None]:
    """Relative changes of time and energy since the process's first undisturbed canary."""
    if first is None:
        return 0.0, None
    energy = reading.energy_mj / first.energy_mj - 1 if reading.energy_mj and first.energy_mj else None
    return round(reading.time_us / first.time_us - 1, 5), None if energy is None else round(energy, 5)


def _off(time_change: float | None, energy_change: float | None) -> bool:
    return max(abs(time_change or 0.0), abs(energy_change or 0.0)) > OFF


def with_canary(reading: Reading, canary: CanaryNote) -> Reading:
    """The reading with the canary, flagged if the canary has changed."""
    changed = _off(canary.time_change, canary.energy_change)
    return (reading.flagged("canary_off") if changed else reading).noting(canary=canary)
