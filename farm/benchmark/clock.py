"""Rounds launched and timed, so that neither the host nor the clock is what is measured.

A window, a reading in bursts and the canary all run a workload through this one clock, so that two of their figures
never differ by the way of timing.
"""

from __future__ import annotations

import collections
import math
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from farm.benchmark import intervals
from farm.benchmark.passes import Pass
from farm.benchmark.workload import Round, Workload

QUEUED_S = 0.024  # work kept in flight on a GPU, so that a busy host never starves it
EAGER_S = 0.3  # of eager passes, for what launching costs
EAGER_LEAST = 4


class TimedRound(NamedTuple):
    """A round that is done."""

    done_s: float  # on the host's clock
    took_s: float
    passes: int
    late: bool = False  # launched when the card had nothing left to do: it waited for the host


class Clock:
    """Launches rounds and times them: by events on a GPU with a few rounds in flight, by the clock on a CPU.

    On a GPU one event stands between two rounds, so the durations add up to the whole time: a gap between rounds is
    part of them, and energy (power times time) stays whole.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.cuda = workload.device.type == "cuda"
        self.done: list[TimedRound] = []
        self.in_flight = max(2, min(64, math.ceil(QUEUED_S / max(workload.round_s, 1e-6))))
        self._waiting: collections.deque[tuple[torch.cuda.Event, int, bool]] = collections.deque()
        self._last: torch.cuda.Event | None = None

    def step(self) -> None:
        """Launch a round; wait until no more than `in_flight` are queued."""
        current = self.workload.next_round()
        if not self.cuda:
            begin_s = time.perf_counter()
            current.launch()
            now_s = time.perf_counter()
            self.done.append(TimedRound(now_s, now_s - begin_s, current.passes))
            return
        if self._last is None:
            self._last = _event()
        late = bool(self._waiting) and self._waiting[-1][0].query()
        current.launch()
        self._waiting.append((_event(), current.passes, late))
        while len(self._waiting) > self.in_flight:
            self._collect()

    def finish(self) -> None:
        """Wait for all that is queued."""
        while self._waiting:
            self._collect()
        self._last = None  # what comes next begins anew: the pause is not a round

    def _collect(self) -> None:
        event, passes, late = self._waiting.popleft()
        event.synchronize()
        assert self._last is not None
        self.done.append(TimedRound(time.perf_counter(), self._last.elapsed_time(event) / 1e3, passes, late))
        self._last = event

    def between(self, begin_s: float, end_s: float) -> list[TimedRound]:
        """The rounds that were done after the begin and by the end."""
        return [entry for entry in self.done if begin_s < entry.done_s <= end_s]


def _event() -> torch.cuda.Event:
    # blocking: a waiting host sleeps; with rounds in flight the wake-up's delay costs nothing.
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record()
    return event


def pass_times_us(rounds: Sequence[TimedRound]) -> list[float]:
    """Time of one pass in each round."""
    return [entry.took_s / entry.passes * 1e6 for entry in rounds]


def starved_share(rounds: Sequence[TimedRound]) -> float:
    """The share of the time in which the card waited for the host: what late rounds took beyond those in time.

    1.0 where none was in time: the host is slower than the card, and nothing tells by how much.
    """
    if not any(entry.late for entry in rounds):
        return 0.0
    in_time_s = [entry.took_s / entry.passes for entry in rounds if not entry.late]
    if not in_time_s:
        return 1.0
    usual_s = statistics.median(in_time_s)
    lost_s = math.fsum(max(0.0, entry.took_s - entry.passes * usual_s) for entry in rounds if entry.late)
    return lost_s / math.fsum(entry.took_s for entry in rounds)


def eager_time_us(run: Pass, device: torch.device) -> tuple[float, float]:
    """What one pass takes when it is launched eagerly, one after the other: the median, and its half-width."""

    def launch() -> None:
        run()

    clock = Clock(Workload([Round(launch, 1)], device, round_s=EAGER_S))
    begin_s = time.perf_counter()
    while time.perf_counter() - begin_s < EAGER_S or len(clock.done) < EAGER_LEAST:
        clock.step()
    clock.finish()
    values = pass_times_us(clock.done[1:])  # the first waits for what was queued before it
    half_width_us = intervals.batch_half_width(values, statistics.median)
    return statistics.median(values), intervals.finite(half_width_us, statistics.median(values))
