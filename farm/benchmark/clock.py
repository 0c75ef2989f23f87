"""Launch and time rounds of a workload. Neither the host's speed nor the clock's resolution affects
the figures.

Windows, bursts, the canary and eager passes all use this clock, so their figures are comparable.
"""

from __future__ import annotations

import bisect
import collections
import itertools
import math
import random
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from farm.benchmark import ranks
from farm.benchmark.passes import Pass
from farm.benchmark.policies import QUEUED_S
from farm.benchmark.sampler import SampledWindow, Sampler
from farm.benchmark.workload import Workload, WorkloadRound
from farm.devices.device import Device
from farm.types import intervals
from farm.types.details import Burst
from farm.types.figure import Figure

PAUSES_PER_S = 8.0  # mean number of pauses between rounds
LONGEST_PAUSE_S = 0.01  # a pause is at most as long as a pass, and as this
CYCLES_PER_S = 2e9  # about the clock of a GPU: events measure how long a pause was
EAGER_S = 0.3  # duration of the eager passes that show the cost of launching
EAGER_LEAST = 4  # least number of eager passes
BURST_S = 0.004  # work between two pauses
DUTIES = (0.6, 0.3)  # the share of the time in which the card works, for each of two windows
BURST_WINDOW_S = 0.8  # length of the window of each duty


class TimedRound(NamedTuple):
    done_s: float  # on the host's clock
    took_s: float
    passes: int
    # the card was idle when the host launched the round: the card waited for the host
    late: bool = False
    sections_s: tuple[float, ...] = ()  # parts of `took_s` (`farm.benchmark.host_clock`)
    paused_s: float = 0.0  # pause before the round, not a part of `took_s`


class Clock:
    """Launches rounds and times them: by CUDA events on a GPU with a few rounds queued, by the
    host's clock on a CPU.

    On a GPU one event separates two rounds, so the durations add up to the total time. They include
    idle time between rounds, so power times duration is the complete energy.

    ``pauses``: a pause of random length precedes some rounds that are launched in time, and is no
    part of their duration. Without pauses, passes can be synchronous with the samples of the power
    sensor (docs/design/pauses.md)."""

    def __init__(self, workload: Workload, queued_s: float = QUEUED_S) -> None:
        self.workload = workload
        self.cuda = workload.device.type == "cuda"
        self.done: list[TimedRound] = []
        self.in_flight = max(2, min(64, math.ceil(queued_s / max(workload.round_s, 1e-6))))
        self._waiting: collections.deque[tuple[torch.cuda.Event, torch.cuda.Event, int, bool]] = (
            collections.deque()
        )
        self._last: torch.cuda.Event | None = None
        self.pauses = False
        self._longest_pause_s = min(workload.round_s / workload.rounds[0].passes, LONGEST_PAUSE_S)
        self._paused_s = [0.0]  # the total of all pauses before each round

    def launch(self) -> None:
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
        begin = self._waiting[-1][1] if self._waiting else self._last
        late = bool(self._waiting) and begin.query()
        if self.pauses and not late and random.random() < PAUSES_PER_S * self.workload.round_s:
            torch.cuda._sleep(round(random.uniform(0, self._longest_pause_s) * CYCLES_PER_S))
            begin = _event()
        current.launch()
        self._waiting.append((begin, _event(), current.passes, late))
        while len(self._waiting) > self.in_flight:
            self._collect()

    def finish(self) -> None:
        """Wait for all queued rounds."""
        while self._waiting:
            self._collect()
        self._last = None  # the next round must not include the pause before it

    def _collect(self) -> None:
        begin, end, passes, late = self._waiting.popleft()
        end.synchronize()
        assert self._last is not None
        took_s, paused_s = begin.elapsed_time(end) / 1e3, self._last.elapsed_time(begin) / 1e3
        self.done.append(TimedRound(time.perf_counter(), took_s, passes, late, paused_s=paused_s))
        self._paused_s.append(self._paused_s[-1] + paused_s)
        self._last = end

    def paused_s(self, until_s: float) -> float:
        """How long the card has paused between rounds until a time. Unit: s."""
        index = bisect.bisect_right(self.done, until_s, key=lambda one: one.done_s)
        if not self.cuda or index == len(self.done):
            return self._paused_s[-1]
        after = self.done[index]
        begin_s = after.done_s - after.took_s - after.paused_s
        return self._paused_s[index] + min(after.paused_s, max(0.0, until_s - begin_s))

    def between(self, begin_s: float, end_s: float) -> list[TimedRound]:
        """The rounds that ended after `begin_s` and not later than `end_s`."""
        return [entry for entry in self.done if begin_s < entry.done_s <= end_s]


def _event() -> torch.cuda.Event:
    # blocking: the host sleeps while it waits. Because more rounds are queued, its slow wake-up
    # costs no GPU time.
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record()
    return event


def pass_times_us(rounds: Sequence[TimedRound]) -> list[float]:
    """The time of one pass in each round. Unit: us."""
    return [entry.took_s / entry.passes * 1e6 for entry in rounds]


def starved_share(rounds: Sequence[TimedRound]) -> float:
    """The share of the total time in which the card waited for the host (0 to 1).

    It is the time that late rounds take longer than others. 1.0 if all rounds were late: the host
    is slower than the card, by an unknown amount."""
    if not any(entry.late for entry in rounds):
        return 0.0
    in_time_s = [entry.took_s / entry.passes for entry in rounds if not entry.late]
    if not in_time_s:
        return 1.0
    usual_s = statistics.median(in_time_s)
    late = [entry for entry in rounds if entry.late]
    lost_s = math.fsum(max(0.0, entry.took_s - entry.passes * usual_s) for entry in late)
    return lost_s / math.fsum(entry.took_s + entry.paused_s for entry in rounds)


def eager_time_us(run: Pass, device: torch.device) -> Figure:
    """Time eagerly launched passes, one directly after the other. Return the median pass time."""
    clock = Clock(Workload([WorkloadRound(run, 1)], device, round_s=EAGER_S))
    begin_s = time.perf_counter()
    while ranks.some(time.perf_counter() - begin_s < EAGER_S or len(clock.done) < EAGER_LEAST):
        clock.launch()
    clock.finish()
    values = pass_times_us(clock.done[1:])  # the first waits for earlier work
    half_width_us = intervals.batch_half_width(values, statistics.median)
    return intervals.finite_figure(statistics.median(values), half_width_us)


def measure_bursts(workload: Workload, device: Device) -> Burst | None:
    """Measure time, power and energy of a pass in short bursts of work. None if the power cannot be
    measured.

    In a loop, a heavy operator keeps the card at its power limit and the clock falls. In a model,
    other operators run in between and the card cools (docs/design/power-limit.md). Bursts
    run at full clocks. Power is linear in the duty f, the share of work: P = P_pause + f (P_op -
    P_pause). So two duties give P_op, the power without pauses."""
    measured: list[_AtDuty] = []
    for duty in DUTIES:
        at_duty = _run_bursts(workload, device, duty)
        if at_duty is None:
            return None
        measured.append(at_duty)
    high, low = (entry.duty for entry in measured)
    powers = [entry.power for entry in measured]
    high_w, low_w = (power.rate for power in powers)
    if high - low < 0.05:
        return None
    # The line through both points has the value P_op at duty 1 and P_pause at duty 0.
    weights = (1 - low) / (high - low), (1 - high) / (high - low)
    half_widths_w = [
        weight * power.half_width for weight, power in zip(weights, powers, strict=True)
    ]
    power_w = Figure(weights[0] * high_w - weights[1] * low_w, math.hypot(*half_widths_w))
    rounds = list(itertools.chain.from_iterable(entry.rounds for entry in measured))
    sampled = [entry.sampled for entry in measured]
    times_us = pass_times_us(rounds)
    time_us = intervals.finite_figure(
        statistics.fmean(times_us), intervals.batch_half_width(times_us)
    )
    clocks_mhz = [window.sm_clock_mhz for window in sampled if window.sm_clock_mhz is not None]
    reasons = [name for window in sampled for name in window.throttle_shares]
    return Burst(
        time_us=time_us,
        energy_mj=intervals.pass_energy(power_w, time_us),
        power_w=power_w,
        sm_clock_mhz=statistics.fmean(clocks_mhz) if clocks_mhz else None,
        pause_power_w=low_w - (high_w - low_w) / (high - low) * low,
        duties=(round(high, 4), round(low, 4)),
        duty_power_w=(round(high_w, 2), round(low_w, 2)),
        throttle_shares={
            name: round(max(window.throttle_shares.get(name, 0.0) for window in sampled), 3)
            for name in reasons
        },
        passes=sum(entry.passes for entry in rounds),
    )


class _AtDuty(NamedTuple):
    """What bursts at one duty showed."""

    duty: float  # share of time with work
    power: intervals.Slope
    rounds: list[TimedRound]
    sampled: SampledWindow


def _run_bursts(workload: Workload, device: Device, duty: float) -> _AtDuty | None:
    """Run bursts with pauses; None if the power cannot be measured."""
    with Sampler(device) as sampler:
        clock = Clock(workload)
        clock.in_flight = 10**6  # the whole burst is queued before the host waits
        count = max(1, round(BURST_S / max(workload.round_s, 1e-6)))
        begin_s = time.perf_counter()
        while ranks.some(time.perf_counter() - begin_s < BURST_WINDOW_S + 0.3):
            if clock.cuda:
                # Keep the card busy (about 25 us) until the burst is queued. Otherwise the first
                # event would complete at once, and the launch that follows would count as work.
                torch.cuda._sleep(50_000)
            for _ in range(count):
                clock.launch()
            clock.finish()
            burst_s = sum(entry.took_s for entry in clock.done[-count:])
            time.sleep(burst_s * (1 - duty) / duty)
    seen_s, ticks_mj = sampler.ticks(begin_s + 0.25)
    ticks_s = sampler.regular(seen_s)
    inside = clock.between(ticks_s[0], ticks_s[-1]) if len(ticks_s) >= 4 else []
    if ranks.some(not inside):
        return None
    return _AtDuty(
        duty=sum(entry.took_s for entry in inside) / (ticks_s[-1] - ticks_s[0]),
        power=intervals.power_of_ticks(ticks_s, ticks_mj),
        rounds=inside,
        sampled=sampler.window(ticks_s[0], ticks_s[-1]),
    )
