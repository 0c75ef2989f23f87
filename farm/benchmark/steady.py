"""Windows of steady work on a card: warm-up, wait for a stable temperature, window, figures.

`Windows.measure` makes one window by a policy (`farm.benchmark.policies`). docs/method.md describes
when a window begins, how long it is and what the intervals mean."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from dataclasses import dataclass
from typing import Any

import torch

from farm.benchmark import ranks, window
from farm.benchmark.clock import Clock, TimedRound
from farm.benchmark.cost_ledger import CostLedger
from farm.benchmark.policies import WindowPolicy
from farm.benchmark.sampler import PowerLevels, Sampler
from farm.benchmark.workload import Workload
from farm.devices.device import Device
from farm.devices.lock import registered_processes
from farm.types.protocol import OnPhase, Stopping
from farm.types.reading import REPEATED, Reading

MOST_QUEUES = 4  # a starved reading doubles the work that is queued from then on, up to this factor

# Sensors that a good reading needs, except for energy: the reading has a power source and flags for
# it.
SENSORS = frozenset(
    {"power_instant_w", "sm_clock_mhz", "temperature_c", "throttle_reasons", "compute_processes"}
)


def silent(phase: str, details: dict[str, Any]) -> None:
    """An `on_phase` that does nothing."""


@dataclass(frozen=True)
class _Opened:
    """What is known of a window when its last round has been queued. Times are of this process."""

    start_s: float  # begin of the warm-up
    begin_s: float  # begin of the window
    slope_c_per_s: float | None
    converged: bool
    pauses: window.Pauses
    power: window.WindowPower


class Windows:
    """Makes windows on a card that is ready for measuring.

    It keeps one fact between windows: how much work to queue. The factor grows if the host is
    slow."""

    def __init__(
        self,
        device: Device,
        torch_device: torch.device,
        levels: PowerLevels,
        own_processes: frozenset[int],
        *,
        knows_processes: bool,
        repeats: int,
    ) -> None:
        """
        Args:
            own_processes: the ids that the card reports for this process.
            knows_processes: False if these ids are uncertain.
            repeats: how often `measure_until_good` repeats a disturbed window (`REPEATED`).
        """
        self.device = device
        self.torch_device = torch_device
        self.cuda = torch_device.type == "cuda"
        self.levels = levels
        self._own_processes = own_processes
        self._knows_processes = knows_processes
        self._repeats = repeats
        self._queues = 1  # factor of the queued work

    def measure_until_good(
        self,
        workload: Workload,
        stopping: Stopping,
        policy: WindowPolicy,
        on_phase: OnPhase,
        ledger: CostLedger,
    ) -> Reading:
        """Measure a window, and repeat it if a hot card, other processes, drift or a slow host
        disturbed it.
        """
        for attempt in itertools.count():
            reading = self.measure(workload, stopping, policy, on_phase)
            for name, seconds in reading.cost_s.items():
                ledger.charge(name, seconds)
            poor = REPEATED & set(reading.flags)
            if ranks.every(not poor) or attempt == self._repeats:
                break
            if "throttled_thermal" in poor:
                time.sleep(1.0)  # let the card cool
            if ranks.some("starved" in poor):
                self._queues = min(MOST_QUEUES, 2 * self._queues)
        attempts = attempt + 1 if attempt else None
        return reading.noting(timing=dataclasses.replace(reading.details.timing, attempts=attempts))

    def measure(
        self, workload: Workload, stopping: Stopping, policy: WindowPolicy, on_phase: OnPhase
    ) -> Reading:
        """Warm up, open a window, and return its reading."""
        # The farm's other processes on the card are idle: the processes of its worker and of a
        # group take turns.
        farm_processes = self._own_processes | registered_processes()
        clock = Clock(workload, self._queues * policy.queued_s)
        on_phase("warm-up", {})
        with Sampler(self.device, farm_processes) as sampler:
            opened = self._warm_up_and_run(clock, sampler, workload, stopping, policy, on_phase)
        power = opened.power
        rounds = _rounds_of(clock, opened)
        sampled = sampler.window(power.begin_s, power.end_s)
        capabilities = self.device.capabilities
        unreliable = frozenset() if self._knows_processes else {"compute_processes"}
        known_sensors = capabilities - unreliable
        steady = window.SteadyWindow(
            workload=workload,
            rounds=rounds,
            power=power,
            sampled=sampled,
            converged=opened.converged,
            ceiling_s=stopping.maximum_s,
            warm_up_s=opened.begin_s - opened.start_s,
            warm_up_slope_c_per_s=opened.slope_c_per_s,
            unsettled=self._is_unsettled(opened.slope_c_per_s, policy),
            policy_flags=policy.flags,
            foreign=sampler.foreign_processes(opened.start_s, math.inf)
            | ((self.device.compute_processes() or frozenset()) - farm_processes),
            lacking=tuple(sorted(SENSORS - known_sensors)) if self.device.card.is_gpu else (),
        )
        paused_share = opened.pauses.share(power.begin_s, power.end_s)
        trace = sampler.trace((power.begin_s, power.end_s))
        reading = steady.reading(self.levels, trace)
        sampled_s = max(1e-9, time.perf_counter() - sampler.began_s)
        powering = dataclasses.replace(
            reading.details.powering,
            paused_share=round(paused_share, 4) or None,
            sampler_busy_share=round(sampler.busy_s / sampled_s, 4),
        )
        threads = None if self.cuda else torch.get_num_threads()
        launching = dataclasses.replace(reading.details.launching, threads=threads)
        return reading.noting(powering=powering, launching=launching)

    def _warm_up_and_run(
        self,
        clock: Clock,
        sampler: Sampler,
        workload: Workload,
        stopping: Stopping,
        policy: WindowPolicy,
        on_phase: OnPhase,
    ) -> _Opened:
        """Run the warm-up and the window, and wait for the work on the card."""
        start_s = time.perf_counter()
        clock.launch()
        while ranks.some(time.perf_counter() - start_s < stopping.warm_up_s):
            clock.launch()
        # short windows have short waits
        until_s = start_s + min(policy.ceiling_s, 1.5 * stopping.maximum_s)

        if policy.pauses and sampler.counts_energy and self._may_pause(workload):
            clock.pauses = not _at_power_limit(sampler, start_s)
        slope_c_per_s: float | None = None
        if policy.ahead:
            slope_c_per_s = self._settle(clock, sampler, policy, start_s, until_s)
        clock.pauses &= not _at_power_limit(sampler, start_s)

        begin_s = self._window_begin(clock, sampler, policy)
        on_phase("window", {})
        settled_s = until_s + stopping.minimum_s
        converged, begin_s = self._run_window(clock, sampler, begin_s, stopping, policy, settled_s)
        end_s = time.perf_counter()
        if not policy.ahead:
            slope_c_per_s = sampler.temperature_slope_c_per_s(
                max(start_s, end_s - policy.span_s), end_s
            )
        clock.finish()

        pauses = self._pauses(clock)
        power = _power_of(policy, sampler, begin_s, end_s, pauses)
        return _Opened(start_s, begin_s, slope_c_per_s, converged, pauses, power)

    def _is_unsettled(self, slope_c_per_s: float | None, policy: WindowPolicy) -> bool:
        """True if the temperature changed too fast for the policy."""
        if "temperature_c" not in self.device.capabilities or not policy.settles:
            return False
        return slope_c_per_s is None or abs(slope_c_per_s) > policy.slope_c_per_s

    def _may_pause(self, workload: Workload) -> bool:
        """True if the windows of a workload may have pauses.

        Graphs queue the pauses on the card, so they do not depend on the host. The power in a pause
        must be known, and whether the card is at its power limit. The ranks of a group make no
        pauses, because they would wait. The clock by which ROCm counts a pause depends on the card.
        """
        tells = (
            "throttle_reasons" in self.device.capabilities and self.levels.base_power_w is not None
        )
        timed = self.cuda and self.device.times_pauses
        return timed and workload.replayed and tells and ranks.world() == 1

    def _pauses(self, clock: Clock) -> window.Pauses:
        base_power_w = self.levels.base_power_w
        return (
            window.NO_PAUSES
            if base_power_w is None
            else window.Pauses(clock.paused_s, base_power_w)
        )

    def _settle(
        self, clock: Clock, sampler: Sampler, policy: WindowPolicy, start_s: float, until_s: float
    ) -> float | None:
        """Run rounds until the temperature is stable. Return its rate of change at the end (C/s);
        None if unknown.
        """
        if not ranks.some("temperature_c" in self.device.capabilities):
            return None
        next_check_s = 0.0
        slope: float | None = None
        settled = False
        while True:
            now_s = time.perf_counter()
            if now_s >= next_check_s:
                next_check_s = now_s + 0.05
                if now_s - start_s >= policy.span_s:
                    slope = sampler.temperature_slope_c_per_s(now_s - policy.span_s, now_s)
                settled = (
                    slope is not None and abs(slope) <= policy.slope_c_per_s
                ) or now_s >= until_s
            if ranks.every(settled):
                break
            clock.launch()
        # If the wait was shorter than the span, use all of its samples.
        return sampler.temperature_slope_c_per_s(start_s, now_s) if slope is None else slope

    def _window_begin(self, clock: Clock, sampler: Sampler, policy: WindowPolicy) -> float:
        """Run rounds until the energy counter changes. Return that time; without a counter, return
        the present time.
        """
        now_s = time.perf_counter()
        if not ranks.some(sampler.counts_energy and policy.energy):
            return now_s
        begin_s: float | None = None
        while ranks.some(begin_s is None and time.perf_counter() - now_s < 1.0):
            clock.launch()
            ticks, _ = sampler.ticks(now_s)
            begin_s = next(
                (
                    tick_s
                    for tick_s, regular_s in zip(ticks, sampler.regular(ticks), strict=True)
                    if regular_s > now_s
                ),
                None,
            )
        if begin_s is not None:
            return begin_s
        sampler.counts_energy = False  # the counter does not change: windows need not wait for it
        return now_s

    def _run_window(
        self,
        clock: Clock,
        sampler: Sampler,
        begin_s: float,
        stopping: Stopping,
        policy: WindowPolicy,
        settled_s: float,
    ) -> tuple[bool, float]:
        """Run rounds. Return True as soon as the stopping rule is met, False if the time is up
        before; and the begin of the window. It moves forward, until `settled_s` at the latest,
        while the chip's temperature changes too fast."""
        next_check_s = opened_s = begin_s
        minimum_s = min(policy.shortest_s, stopping.minimum_s)
        narrow = dataclasses.replace(
            stopping, energy_half_width=policy.energy_share * stopping.energy_half_width
        )
        waits = not policy.ahead and "temperature_c" in self.device.capabilities
        good = over = False
        while True:
            clock.launch()
            now_s = time.perf_counter()
            if now_s >= next_check_s:
                next_check_s = now_s + 0.02
                over = self._is_over(clock, begin_s, opened_s, now_s, stopping)
                rule = stopping if over or ranks.world() > 1 else narrow
                good = now_s - begin_s >= minimum_s and self._good_enough(
                    clock, sampler, begin_s, now_s, rule, policy
                )
                if good and waits and now_s < settled_s:
                    slope = sampler.temperature_slope_c_per_s(now_s - policy.span_s, now_s)
                    good = slope is not None and abs(slope) <= policy.slope_c_per_s
                    begin_s = begin_s if good else max(begin_s, now_s - minimum_s)
            if ranks.every(good or over):
                return good, begin_s

    def _is_over(
        self, clock: Clock, begin_s: float, opened_s: float, now_s: float, stopping: Stopping
    ) -> bool:
        """True if a window is as long as it may be: five times its longest length if it has too few
        passes.
        """
        rounds, elapsed_s = len(clock.between(begin_s, now_s)), now_s - opened_s
        return elapsed_s >= (1 if rounds >= window.LEAST_ROUNDS else 5) * stopping.maximum_s

    def _good_enough(
        self,
        clock: Clock,
        sampler: Sampler,
        begin_s: float,
        now_s: float,
        stopping: Stopping,
        policy: WindowPolicy,
    ) -> bool:
        counts = policy.energy and sampler.counts_energy
        if counts and len(sampler.ticks(begin_s)[0]) <= policy.least_steps:
            return False
        power = _power_of(policy, sampler, begin_s, now_s, self._pauses(clock))
        if counts and power.ticks is None:  # the steps of the counter do not suffice
            return False
        rounds = clock.between(power.begin_s, power.end_s)
        if len(rounds) < 3:
            return False
        time_us, _ = window.figure_of(rounds, power)
        if time_us.relative > stopping.time_half_width:
            return False
        if power.power_w is None:
            return True
        # The energy of a group is the sum over its n cards. The scatter of a sum grows with the
        # root of n, so the interval of each card may be wider by the root of n.
        enough = stopping.energy_half_width * math.sqrt(ranks.world())
        is_narrow = math.hypot(time_us.relative, power.relative) <= enough
        return is_narrow and abs(power.drift) <= window.DRIFT


def _power_of(
    policy: WindowPolicy, sampler: Sampler, begin_s: float, end_s: float, pauses: window.Pauses
) -> window.WindowPower:
    """The power of a window; without figures if the policy measures time only."""
    if not policy.energy:
        return window.WindowPower(None, "", begin_s, end_s)
    return window.window_power(
        sampler, begin_s, end_s, least_steps=policy.least_steps, pauses=pauses
    )


def _at_power_limit(sampler: Sampler, start_s: float) -> bool:
    return sampler.window(start_s, time.perf_counter()).throttled("power_cap")


def _rounds_of(clock: Clock, opened: _Opened) -> list[TimedRound]:
    """The rounds within the window of the power; if there are none, those since its begin, or the
    last one.
    """
    return (
        clock.between(opened.power.begin_s, opened.power.end_s)
        or clock.between(opened.begin_s, math.inf)
        or clock.done[-1:]
    )
