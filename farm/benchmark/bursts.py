"""A subject at the power limit, in bursts between pauses: as its model gives it the card, at full clocks.

Alone in a loop a heavy operator holds the card at its limit and its clock falls; in a model its neighbours let it cool
(docs/method.md, "At the power limit").
"""

from __future__ import annotations

import math
import statistics
import time

import torch

from farm.benchmark import intervals
from farm.benchmark.clock import Clock, pass_times_us
from farm.benchmark.power import power_of_ticks
from farm.benchmark.sampler import Sampler
from farm.benchmark.workload import Workload
from farm.devices.device import Device
from farm.types.reading import Burst

BURST_S = 0.004  # of work between two pauses
DUTIES = (0.6, 0.3)  # shares of the time that are work
WINDOW_S = 0.8  # of each duty


def read_bursts(workload: Workload, device: Device) -> Burst | None:
    """Time, power and energy of a pass at the clocks that bursts leave it; None where a duty gave no power.

    Power is linear in the duty f, P = P_pause + f (P_op - P_pause), so that two duties give P_op, what the pauses
    cost subtracted.
    """
    points: list[tuple[float, float, float]] = []  # duty, power, half-width
    times_us: list[float] = []
    passes = 0
    clocks_mhz: list[float] = []
    reasons: dict[str, float] = {}
    for duty in DUTIES:
        with Sampler(device) as sampler:
            clock = Clock(workload)
            clock.in_flight = 10**6  # a burst is queued whole, then waited for
            count = max(1, round(BURST_S / max(workload.round_s, 1e-6)))
            begin_s = time.perf_counter()
            while time.perf_counter() - begin_s < WINDOW_S + 0.3:
                if clock.cuda:
                    # The first event would pass at once and the launch that follows be counted as work: have the
                    # card wait (some 25 us) until the burst is queued.
                    torch.cuda._sleep(50_000)
                for _ in range(count):
                    clock.step()
                clock.finish()
                burst_s = sum(entry.took_s for entry in clock.done[-count:])
                time.sleep(burst_s * (1 - duty) / duty)
        ticks_s, ticks_mj = sampler.ticks(begin_s + 0.25)
        if len(ticks_s) < 4:
            return None
        power = power_of_ticks(ticks_s, ticks_mj)
        inside = clock.between(ticks_s[0], ticks_s[-1])
        if not inside:
            return None
        window = sampler.window(ticks_s[0], ticks_s[-1])
        worked_s = sum(entry.took_s for entry in inside)
        points.append((worked_s / (ticks_s[-1] - ticks_s[0]), power.rate, power.half_width))
        times_us += pass_times_us(inside)
        passes += sum(entry.passes for entry in inside)
        if window.sm_clock_mhz is not None:
            clocks_mhz.append(window.sm_clock_mhz)
        for name, share in window.throttle_shares.items():
            reasons[name] = max(share, reasons.get(name, 0.0))
    (high, high_w, high_hw), (low, low_w, low_hw) = points
    if high - low < 0.05:
        return None
    # P_op lies on the line through both points, at duty 1; P_pause at duty 0.
    weight_high, weight_low = (1 - low) / (high - low), (1 - high) / (high - low)
    power_w = weight_high * high_w - weight_low * low_w
    power_half_width_w = math.hypot(weight_high * high_hw, weight_low * low_hw)
    time_us = statistics.fmean(times_us)
    time_half_width_us = intervals.finite(intervals.batch_half_width(times_us), time_us)
    energy_mj = power_w * time_us * 1e-3
    return Burst(
        time_us=time_us,
        time_half_width_us=time_half_width_us,
        power_w=power_w,
        power_half_width_w=power_half_width_w,
        energy_mj=energy_mj,
        energy_half_width_mj=intervals.ratio_half_width(
            energy_mj, power_w, power_half_width_w, time_us, time_half_width_us
        ),
        sm_clock_mhz=statistics.fmean(clocks_mhz) if clocks_mhz else None,
        pause_power_w=low_w - (high_w - low_w) / (high - low) * low,
        duties=(round(high, 4), round(low, 4)),
        duty_power_w=(round(high_w, 2), round(low_w, 2)),
        throttle_shares={name: round(share, 3) for name, share in reasons.items()},
        passes=passes,
    )
