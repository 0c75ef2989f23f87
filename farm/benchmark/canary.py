"""The canary: a reference operator read again every few tuples, to see whether the card still reads as it did.

A product of two square matrices, always the same on every card: what changes between two of its readings is the card's,
not the tuples'.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from farm.benchmark.protocol import OnPhase, Reading, Stopping
from farm.benchmark.workload import Workload, prepare_canary

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
        self._notes: list[dict[str, Any]] = []

    def newest(self, read: Callable[[Workload, Stopping], Reading], on_phase: OnPhase) -> dict[str, Any] | None:
        """What the newest reading gave, made anew by `read` when it is due; None where there is no canary."""
        if not self._every:
            return None
        if self._due <= 0:
            self._due = self._every
            on_phase("canary", {})
            started_s = time.perf_counter()
            workload = prepare_canary(SIZE, self._torch_device)
            try:
                stopping = STOPPING
                if self._torch_device.type == "cuda" and not self._notes:
                    stopping = dataclasses.replace(stopping, warm_up_s=FIRST_WARM_UP_S)
                reading = read(workload, stopping)
            finally:
                workload.close()
            first = self._notes[0] if self._notes else None
            self._notes.append(
                {
                    "number": len(self._notes) + 1,
                    "process": os.getpid(),
                    "time_us": reading.time_us,
                    "power_w": reading.power_w,
                    "energy_mj": reading.energy_mj,
                    "temperature_c": reading.temperature_c,
                    "sm_clock_mhz": reading.sm_clock_mhz,
                    "time_change": round(reading.time_us / first["time_us"] - 1, 5) if first else 0.0,
                    "energy_change": round(reading.energy_mj / first["energy_mj"] - 1, 5)
                    if first and reading.energy_mj and first["energy_mj"]
                    else None,
                    "cost_s": round(time.perf_counter() - started_s, 3),
                }
            )
        self._due -= 1
        return self._notes[-1]


def with_canary(reading: Reading, canary: dict[str, Any]) -> Reading:
    """The reading with the canary beside it, flagged where that had changed."""
    off = max(abs(canary["time_change"]), abs(canary["energy_change"] or 0.0)) > OFF
    flags = tuple(sorted({*reading.flags, "canary_off"})) if off else reading.flags
    return dataclasses.replace(reading, flags=flags, details={**reading.details, "canary": canary})
