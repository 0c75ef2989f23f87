"""The canary: a reference operator read again every few tuples, to see whether the card still reads as it did.

A product of two square matrices, always the same on every card: what changes between two of its readings is the card's,
not the tuples'.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable

import torch

from farm.benchmark.passes import numeric_flags
from farm.benchmark.workload import Workload, prepare_canary
from farm.types.protocol import OnPhase, Protocol, Stopping
from farm.types.reading import REPEATED, CanaryNote, Reading

_log = logging.getLogger(__name__)

EVERY = 25  # tuples between two readings of the canary
SIZE = 2048  # of the square matrices that it multiplies
OFF = 0.03  # a change of the canary's power or time that makes the readings around it doubtful
STOPPING = Stopping(warm_up_s=0.2, minimum_s=0.6, maximum_s=0.8)
FIRST_WARM_UP_S = 2.0  # the others come after tuples; against one read on a cold card all would seem off


class Canary:
    """The canary of one benchmark process.

    Args:
        every: tuples between two readings; 0 for no canary. Left out, a GPU has one and a CPU none.
    """

    def __init__(self, torch_device: torch.device, every: int | None = None) -> None:
        self._torch_device = torch_device
        self._every = (EVERY if torch_device.type == "cuda" else 0) if every is None else every
        self._due = 0  # tuples until the next one; the first tuple comes with one
        self._notes: list[CanaryNote] = []

    def newest(self, read: Callable[[Workload, Stopping], Reading], on_phase: OnPhase) -> CanaryNote | None:
        """What the newest reading gave, made anew by `read` when it is due; None where there is no canary."""
        if not self._every:
            return None
        if self._due <= 0:
            on_phase("canary", {})
            started_s = time.perf_counter()
            first = next((note for note in self._notes if not REPEATED & set(note.flags)), None)
            try:
                with numeric_flags(Protocol()):  # the same on this card for every job, whatever its own flags
                    reading = self._read(read, first)
            except Exception as error:
                # A lack of memory, say: no reason to fail the tuple. Before the next one it is tried again.
                _log.warning("The canary could not be read: %s", error)
                return self._notes[-1] if self._notes else None
            self._due = self._every
            time_change, energy_change = _changes(reading, first)
            self._notes.append(
                CanaryNote(
                    number=len(self._notes) + 1,
                    process=os.getpid(),
                    time_us=reading.time_us,
                    power_w=reading.power_w,
                    energy_mj=reading.energy_mj,
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

    def _read(self, read: Callable[[Workload, Stopping], Reading], first: CanaryNote | None) -> Reading:
        workload = prepare_canary(SIZE, self._torch_device)
        stopping = STOPPING
        if self._torch_device.type == "cuda" and not self._notes:
            stopping = dataclasses.replace(stopping, warm_up_s=FIRST_WARM_UP_S)
        try:
            reading = read(workload, stopping)
            # Once more, before what follows is doubted, or held against a canary that was itself disturbed.
            if REPEATED & set(reading.flags) or (first is not None and _off(*_changes(reading, first))):
                reading = read(workload, STOPPING)
            return reading
        finally:
            workload.close()


def _changes(reading: Reading, first: CanaryNote | None) -> tuple[float, float | None]:
    """Of time and of energy, against the process's first canary that was not disturbed."""
    if first is None:
        return 0.0, None
    energy = reading.energy_mj / first.energy_mj - 1 if reading.energy_mj and first.energy_mj else None
    return round(reading.time_us / first.time_us - 1, 5), None if energy is None else round(energy, 5)


def _off(time_change: float | None, energy_change: float | None) -> bool:
    return max(abs(time_change or 0.0), abs(energy_change or 0.0)) > OFF


def with_canary(reading: Reading, canary: CanaryNote) -> Reading:
    """The reading with the canary beside it, flagged where that had changed."""
    changed = _off(canary.time_change, canary.energy_change)
    return (reading.flagged("canary_off") if changed else reading).noting(canary=canary)
