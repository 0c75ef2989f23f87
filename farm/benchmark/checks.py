"""Checks of the card: is it healthy, and does a repeated measurement still give the same result?

The health check multiplies two matrices of integers. The result is exact in every precision that a
card may use, and a CPU computes it in double precision for comparison. The check finds cards that
compute wrong results or are very slow. The benchmark process runs the check at its start and before
an item if the last check is a minute old; it takes about a millisecond. The farm quarantines a card
that fails the check until a person releases the card.

The canary is a reference operator: a product of two square matrices, the same on every card. The
farm measures it again every few tuples. If two readings of the canary differ, the card has changed,
not the tuples."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable

import torch

from farm.benchmark import ranks
from farm.benchmark.passes import numeric_flags
from farm.benchmark.torch_device import synchronize
from farm.benchmark.workload import Workload, prepare_canary
from farm.types.details import CanaryNote
from farm.types.figure import Figure, exact, value_of
from farm.types.protocol import OnPhase, Protocol, Stopping
from farm.types.reading import REPEATED, Reading

_log = logging.getLogger(__name__)

HEALTH_SIZE = 512  # rows and columns of the matrices of integers
#: The check times this many products and uses the shortest time: other processes or idle clocks may
#: delay some.
HEALTH_ROUNDS = 5
#: The product takes about 10 us on a data-centre GPU, well below 1 ms on any GPU at its idle clock,
#: and a few ms on one CPU core. Outside of these bounds the device did not compute it, or is badly
#: broken. Unit: s.
PLAUSIBLE_S = {"cuda": (5e-7, 5e-3), "cpu": (5e-7, 5.0)}

EVERY = 25  # tuples between two readings of the canary
SIZE = 2048  # rows and columns of the matrices that the canary multiplies
# a larger relative change of the canary's energy or time makes the readings after it doubtful
OFF = 0.03
STOPPING = Stopping(warm_up_s=0.2, minimum_s=0.6, maximum_s=0.8)
# later canaries run on a card that tuples have warmed: the first one must be warm, too
FIRST_WARM_UP_S = 2.0


class HealthCheck:
    """The matrix product of the health check. The factors are on the device, and the correct result
    is known.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        size = HEALTH_SIZE
        left = (torch.arange(size * size, dtype=torch.float64) % 7 - 3).reshape(size, size)
        right = (torch.arange(size * size, dtype=torch.float64) % 5 - 2).reshape(size, size).t()
        # Sums of 512 products of at most 6: far below 2 ** 24. The factors fit into the mantissas
        # of bfloat16 and TF32.
        self._wanted = (left @ right).to(torch.float32)
        self._factors = left.to(device, torch.float32), right.to(device, torch.float32)

    def run(self) -> str:
        """Run the check. Return a description of the fault; "" if the device is healthy."""
        # not timed: the first product of a process loads libraries
        first = self._factors[0] @ self._factors[1]
        shortest_s = float("inf")
        for _ in range(HEALTH_ROUNDS):
            synchronize(self._device)
            begin_s = time.perf_counter()
            last = self._factors[0] @ self._factors[1]
            synchronize(self._device)
            shortest_s = min(shortest_s, time.perf_counter() - begin_s)
        for product in (first, last):
            if wrong := int((product.cpu() != self._wanted).sum()):
                return (
                    f"A matrix product of integers is wrong in {wrong} of {HEALTH_SIZE**2} "
                    "elements."
                )
        return implausible(shortest_s, self._device.type)


def implausible(took_s: float, device_type: str) -> str:
    """A description of the fault if the product's time is implausible for a "cuda" or "cpu" device;
    "" if plausible.
    """
    low_s, high_s = PLAUSIBLE_S[device_type]
    if low_s <= took_s <= high_s:
        return ""
    matrices = f"two {HEALTH_SIZE} x {HEALTH_SIZE} matrices"
    return f"The product of {matrices} took {took_s:.3g} s; {low_s:g} to {high_s:g} s is plausible."


class Canary:
    """The canary of one benchmark process: a reading every `every` tuples (0: none; default:
    `EVERY` on a GPU, 0 on a CPU)."""

    def __init__(self, torch_device: torch.device, every: int | None = None) -> None:
        self._torch_device = torch_device
        if every is None:
            every = EVERY if torch_device.type == "cuda" else 0
        self._every = every
        self._due = 0  # tuples until the next reading; 0: the first tuple starts with a reading
        self._notes: list[CanaryNote] = []

    def newest(
        self, measure: Callable[[Workload, Stopping], Reading], on_phase: OnPhase
    ) -> CanaryNote | None:
        """The newest reading of the canary; `measure` makes it if it is due. None if there is no
        canary.
        """
        if not self._every:
            return None
        if self._due <= 0:
            on_phase("canary", {})
            started_s = time.perf_counter()
            first = next((note for note in self._notes if not REPEATED & set(note.flags)), None)
            try:
                with numeric_flags(Protocol()):  # the canary uses the same flags for every job
                    reading = self._read(measure, first)
            except Exception as error:
                # For example out of memory. The tuple can still be measured; the next tuple tries
                # the canary again.
                _log.warning("The canary could not be measured: %s", error)
                return self._notes[-1] if self._notes else None
            self._due = self._every
            time_change, energy_change = _changes(reading, first)
            self._notes.append(
                CanaryNote(
                    time_us=Figure(reading.time_us.value),
                    energy_mj=exact(reading.energy_mj),
                    number=len(self._notes) + 1,
                    process=os.getpid(),
                    power_w=value_of(reading.power_w),
                    temperature_c=reading.temperature_c,
                    sm_clock_mhz=reading.sm_clock_mhz,
                    flags=reading.flags,
                    time_change=time_change,
                    energy_change=energy_change,
                    cost_s=round(time.perf_counter() - started_s, 3),
                )
            )
        self._due -= 1
        return self._notes[-1]

    def _read(
        self, measure: Callable[[Workload, Stopping], Reading], first: CanaryNote | None
    ) -> Reading:
        workload = prepare_canary(SIZE, self._torch_device)
        stopping = STOPPING
        if self._torch_device.type == "cuda" and not self._notes:
            stopping = dataclasses.replace(stopping, warm_up_s=FIRST_WARM_UP_S)
        try:
            reading = measure(workload, stopping)
            # Repeat a disturbed or changed canary: a single outlier must not make the next readings
            # doubtful.
            disturbed = REPEATED & set(reading.flags) or (
                first is not None and _off(*_changes(reading, first))
            )
            if ranks.some(bool(disturbed)):
                reading = measure(workload, STOPPING)
            return reading
        finally:
            workload.close()


def _changes(reading: Reading, first: CanaryNote | None) -> tuple[float, float | None]:
    """Relative changes of time and energy since the process's first undisturbed canary."""
    if first is None:
        return 0.0, None
    time_change = round(reading.time_us.value / first.time_us.value - 1, 5)
    energy_mj, first_mj = value_of(reading.energy_mj), value_of(first.energy_mj)
    if not energy_mj or not first_mj:
        return time_change, None
    return time_change, round(energy_mj / first_mj - 1, 5)


def _off(time_change: float | None, energy_change: float | None) -> bool:
    return max(abs(time_change or 0.0), abs(energy_change or 0.0)) > OFF


def with_canary(reading: Reading, canary: CanaryNote) -> Reading:
    """The reading with the canary in its details. It has the flag `canary_off` if the canary has
    changed.
    """
    changed = _off(canary.time_change, canary.energy_change)
    return (reading.flagged("canary_off") if changed else reading).noting(canary=canary)
