"""One subject under one protocol on one card: the reading.

`Bench` is what a benchmark process holds for its card: the device, its idle and base power, the processes that are its
own. `Bench.measure` is the whole of a measurement, the same for a tuple and for a whole model. How long a window is,
where it begins and what the intervals mean is in docs/method.md.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from farm.benchmark import statistics
from farm.benchmark.context import Others, read_context
from farm.benchmark.protocol import Protocol, Reading, Stopping, Subject
from farm.benchmark.sampler import Sampler, Window
from farm.benchmark.workload import Round, Workload, grad_mode, numeric_flags, prepare, prepare_canary, why_it_raised
from farm.devices.device import Device
from farm.errors import Unmeasurable

OnPhase = Callable[[str, dict[str, Any]], None]

FLOOR_TICKS = 5  # steps of the energy counter that a window holds at least
CHECK_S = 0.02  # how often the stopping rule is asked
QUEUED_S = 0.012  # work kept in flight on a GPU, so that a busy host never starves it
RAMP = 0.02  # a first step whose power is further than this from the others' median is still warm-up
DISAGREE = 0.02
THROTTLED_SHARE = 0.05  # of the samples
REPEATS = 2  # of a reading that was taken hot, shared or drifting
DRIFT = 0.03  # difference of power between the halves of a window


@dataclasses.dataclass(frozen=True)
class Gate:
    """No window opens while the chip still warms up or cools down faster than this.

    Leakage grows with temperature: a window opened too early reads another power than a long run has. A whole model
    is what every sum is held against, so it waits longer than a tuple, of which there are hundreds.
    """

    slope_c_per_s: float
    span_s: float  # over which the slope is taken: cards tell whole degrees, ten times a second
    ceiling_s: float  # of warm-up and waiting together

    def ceiling(self, stopping: Stopping) -> float:
        """Whoever asks for short windows gets short waits."""
        return min(self.ceiling_s, 1.5 * stopping.maximum_s)


GATES = {"operator": Gate(4.5, 0.35, 0.8), "variant": Gate(1.0, 1.0, 4.0)}
WHOLE_WINDOW_S = 1.0  # the least for a whole model, where the request's ceiling allows it

BURST_S = 0.004
BURST_DUTIES = (0.6, 0.3)
BURST_WINDOW_S = 0.8
LEVEL_WINDOW_S = 0.5
LEVELS_AGE_S = 1800.0

CANARY_EVERY = 25  # tuples between two readings of the canary
CANARY_SIZE = 2048  # of the square matrices that it multiplies
CANARY_OFF = 0.03  # a change of the canary's power or time that makes the readings around it doubtful
CANARY_STOPPING = Stopping(warm_up_s=0.2, minimum_s=0.6, maximum_s=0.8)
CANARY_FIRST_WARM_UP_S = 2.0  # the others come after tuples; against one read on a cold card all would seem off

THERMAL = ("thermal", "hardware_thermal")
OTHER_SLOWDOWNS = ("hardware_slowdown", "power_brake", "sync_boost")


def silent(phase: str, details: dict[str, Any]) -> None:
    """An `on_phase` that says nothing."""


@dataclasses.dataclass(frozen=True)
class Levels:
    """Power of the card with nothing to do. Units: W."""

    idle_power_w: float | None = None  # at rest, before any work
    base_power_w: float | None = None  # at full clocks


class _Clock:
    """Launches rounds and times them: by events on a GPU with a few rounds in flight, by the clock on a CPU.

    On a GPU one event stands between two rounds, so the durations add up to the whole time: a gap between rounds is
    part of them, and energy (power times time) stays whole.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.cuda = workload.device.type == "cuda"
        self.done: list[tuple[float, float, int]] = []  # (host time when done, seconds, passes)
        self.in_flight = max(2, min(64, math.ceil(QUEUED_S / max(workload.round_s, 1e-6))))
        self._waiting: collections.deque[tuple[torch.cuda.Event, int]] = collections.deque()
        self._last: torch.cuda.Event | None = None

    def step(self) -> None:
        """Launch a round; wait until no more than `in_flight` are queued."""
        current = self.workload.next_round()
        if not self.cuda:
            begin_s = time.perf_counter()
            current.launch()
            now_s = time.perf_counter()
            self.done.append((now_s, now_s - begin_s, current.passes))
            return
        if self._last is None:
            self._last = _event()
        current.launch()
        self._waiting.append((_event(), current.passes))
        while len(self._waiting) > self.in_flight:
            self._collect()

    def finish(self) -> None:
        """Wait for all that is queued."""
        while self._waiting:
            self._collect()
        self._last = None  # what comes next begins anew: the pause is not a round

    def _collect(self) -> None:
        event, passes = self._waiting.popleft()
        event.synchronize()
        assert self._last is not None
        self.done.append((time.perf_counter(), self._last.elapsed_time(event) / 1e3, passes))
        self._last = event

    def between(self, begin_s: float, end_s: float) -> list[tuple[float, float, int]]:
        return [entry for entry in self.done if begin_s < entry[0] <= end_s]


def _event() -> torch.cuda.Event:
    # blocking: a waiting host sleeps; with rounds in flight the wake-up's delay costs nothing.
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record()
    return event


@dataclasses.dataclass(frozen=True)
class _Power:
    power_w: float | None
    half_width_w: float | None
    source: str
    begin_s: float
    end_s: float
    details: dict[str, Any]
    drift: float = 0.0

    @property
    def relative(self) -> float:
        if self.power_w is None:
            return 0.0
        return math.inf if self.half_width_w is None else statistics.relative(self.half_width_w, self.power_w)


class Bench:
    """A card made ready for measuring in this process.

    Make it before anything touches CUDA: the processes that appear on the card while the context is made are this
    one (in a container NVML names it by its id on the host).
    """

    def __init__(
        self,
        device: Device,
        torch_device: torch.device | str,
        idle_power_w: float | None = None,
        threads: int = 0,
        canary_every: int | None = None,
    ) -> None:
        self.device = device
        self.torch_device = torch.device(torch_device)
        self.cuda = self.torch_device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None
        before = device.compute_processes() or frozenset()
        if self.cuda:
            if idle_power_w is None:
                idle_power_w = _average_power_w(device, LEVEL_WINDOW_S)
            torch.cuda.set_device(self.torch_device)
            torch.zeros(1, device=self.torch_device).add_(1)
            torch.cuda.synchronize()
            self._stream = torch.cuda.Stream(self.torch_device)
        else:
            torch.set_num_threads(threads or _physical_cores())
            if idle_power_w is None and device.capabilities:
                idle_power_w = _average_power_w(device, LEVEL_WINDOW_S)
        after = device.compute_processes() or frozenset()
        self.own_processes = (after - before) | {os.getpid()}
        self.levels = Levels(idle_power_w=idle_power_w)
        self._levels_s = -math.inf
        self._canary_every = (CANARY_EVERY if self.cuda else 0) if canary_every is None else canary_every
        self._canary_due = 0  # tuples until the next one; the first tuple comes with one
        self._canaries: list[dict[str, Any]] = []
        self._others: Others | None = None

    def measure(self, subject: Subject, protocol: Protocol, stopping: Stopping, on_phase: OnPhase = silent) -> Reading:
        """Measure a subject. Half-widths in the reading are absolute.

        Raises:
            Unmeasurable: out_of_memory, raised, rejected, not_capturable or not_available.
        """
        begin_s = time.perf_counter()
        with contextlib.ExitStack() as stack:
            stack.enter_context(numeric_flags(protocol))
            stack.enter_context(grad_mode(protocol))
            if self._stream is not None:
                stack.enter_context(torch.cuda.stream(self._stream))
            workload: Workload | None = None
            try:
                self._refresh_levels()
                canary = self._read_canary(on_phase) if subject.kind == "operator" else None
                on_phase("rebuild", {})
                started_s = time.perf_counter()
                workload = prepare(subject, protocol, self.torch_device)
                rebuild_s = time.perf_counter() - started_s
                reading = self._steady_until_good(workload, _for_kind(stopping, subject), GATES[subject.kind], on_phase)
                burst_s = 0.0
                # A whole is what it is: only a tuple runs otherwise alone than among its neighbours.
                limited = subject.kind == "operator" and "throttled_power" in reading.flags
                if limited and "energy_counter_mj" in self.device.capabilities:
                    on_phase("burst", {})
                    started_s = time.perf_counter()
                    burst = self._burst(workload)
                    burst_s = time.perf_counter() - started_s
                    if burst is not None:
                        reading = dataclasses.replace(reading, details={**reading.details, "burst": burst})
                started_s = time.perf_counter()
                if self.cuda and subject.kind == "operator" and protocol.measures_context:
                    on_phase("context", {})
                    reading = self._with_context(reading, workload)
                context_s = time.perf_counter() - started_s
            except Unmeasurable:
                raise
            except Exception as error:  # whatever PyTorch raises on the card becomes the item's reason
                raise why_it_raised(error) from error
            finally:
                if workload is not None:
                    with contextlib.suppress(RuntimeError):
                        workload.close()
        if canary is not None:
            reading = _with_canary(reading, canary)
        cost_s = {
            **reading.cost_s,
            "rebuild": rebuild_s,
            "burst": burst_s,
            "context": context_s,
            "total": time.perf_counter() - begin_s,
        }
        return dataclasses.replace(reading, cost_s={name: round(value, 4) for name, value in cost_s.items()})

    # ------------------------------------------------------------------------------------------------ canary

    def _read_canary(self, on_phase: OnPhase) -> dict[str, Any] | None:
        """The newest reading of the reference operator, made anew when it is due; None where there is no canary.

        A product of two square matrices, always the same on every card: what changes between two of its readings is
        the card's, not the tuples'.
        """
        if not self._canary_every:
            return None
        if self._canary_due <= 0:
            self._canary_due = self._canary_every
            on_phase("canary", {})
            started_s = time.perf_counter()
            workload = prepare_canary(CANARY_SIZE, self.torch_device)
            try:
                stopping = CANARY_STOPPING
                if self.cuda and not self._canaries:
                    stopping = dataclasses.replace(stopping, warm_up_s=CANARY_FIRST_WARM_UP_S)
                reading = self._steady(workload, stopping, GATES["operator"], silent)
            finally:
                workload.close()
            first = self._canaries[0] if self._canaries else None
            self._canaries.append(
                {
                    "number": len(self._canaries) + 1,
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
        self._canary_due -= 1
        return self._canaries[-1]

    # ------------------------------------------------------------------------------------------ steady window

    def _steady_until_good(self, workload: Workload, stopping: Stopping, gate: Gate, on_phase: OnPhase) -> Reading:
        spent = {"warm_up": 0.0, "window": 0.0}
        for attempt in range(REPEATS + 1):
            reading = self._steady(workload, stopping, gate, on_phase)
            for name in spent:
                spent[name] += reading.cost_s[name]
            poor = {"throttled_thermal", "shared", "drifting"} & set(reading.flags)
            if not poor or not self.cuda:
                break
            if "throttled_thermal" in poor and attempt < REPEATS:
                time.sleep(1.0)  # let it cool a little
        details = {**reading.details, "attempts": attempt + 1} if attempt else reading.details
        return dataclasses.replace(reading, cost_s=spent, details=details)

    def _steady(self, workload: Workload, stopping: Stopping, gate: Gate, on_phase: OnPhase) -> Reading:
        foreign_before = self._foreign_processes()
        clock = _Clock(workload)
        on_phase("warm-up", {})
        with Sampler(self.device) as sampler:
            start_s = time.perf_counter()
            clock.step()
            while time.perf_counter() - start_s < stopping.warm_up_s:
                clock.step()
            settled = self._settle(clock, sampler, gate, start_s, start_s + gate.ceiling(stopping))
            begin_s = self._window_begin(clock, sampler)
            on_phase("window", {})
            converged = self._run_window(clock, sampler, begin_s, stopping)
            end_s = time.perf_counter()
            clock.finish()
        power = self._power(sampler, begin_s, end_s)
        window = sampler.window(power.begin_s, power.end_s)
        rounds = clock.between(power.begin_s, power.end_s) or clock.between(begin_s, math.inf) or clock.done[-1:]
        foreign = foreign_before | self._foreign_processes()
        reading = self._reading(workload, rounds, power, window, sampler, converged, foreign, begin_s - start_s)
        if settled is None:
            return reading
        flags = reading.flags if abs(settled) <= gate.slope_c_per_s else tuple(sorted({*reading.flags, "unsettled"}))
        return dataclasses.replace(
            reading, flags=flags, details={**reading.details, "warm_up_slope_c_per_s": round(settled, 2)}
        )

    def _settle(self, clock: _Clock, sampler: Sampler, gate: Gate, start_s: float, until_s: float) -> float | None:
        """Go on with the work until the temperature holds still; its slope (C/s) when the wait ended."""
        if "temperature_c" not in self.device.capabilities:
            return None
        next_check_s = 0.0
        slope: float | None = None
        while True:
            now_s = time.perf_counter()
            if now_s >= next_check_s:
                next_check_s = now_s + 0.05
                if now_s - start_s >= gate.span_s:
                    slope = sampler.temperature_slope_c_per_s(now_s - gate.span_s, now_s)
                if (slope is not None and abs(slope) <= gate.slope_c_per_s) or now_s >= until_s:
                    return slope
            clock.step()

    def _window_begin(self, clock: _Clock, sampler: Sampler) -> float:
        """Now, or when the energy counter next moves: work goes on until then."""
        now_s = time.perf_counter()
        if not sampler.counts_energy:
            return now_s
        while time.perf_counter() - now_s < 1.0:
            clock.step()
            times, _ = sampler.ticks(now_s)
            if times:
                return times[0]
        return now_s  # the counter does not move: the window will say so

    def _run_window(self, clock: _Clock, sampler: Sampler, begin_s: float, stopping: Stopping) -> bool:
        """Launch rounds until the stopping rule is met (True) or the time is up (False)."""
        next_check_s = begin_s
        while True:
            clock.step()
            now_s = time.perf_counter()
            if now_s < next_check_s:
                continue
            next_check_s = now_s + CHECK_S
            elapsed_s = now_s - begin_s
            if elapsed_s >= stopping.minimum_s and self._good_enough(clock, sampler, begin_s, now_s, stopping):
                return True
            # Passes longer than a window still get three of them, so that there is an interval, within reason.
            if elapsed_s >= stopping.maximum_s and (
                len(clock.between(begin_s, now_s)) >= 3 or elapsed_s >= 5 * stopping.maximum_s
            ):
                return False

    def _good_enough(self, clock: _Clock, sampler: Sampler, begin_s: float, now_s: float, stopping: Stopping) -> bool:
        if sampler.counts_energy and len(sampler.ticks(begin_s)[0]) <= FLOOR_TICKS:
            return False
        power = self._power(sampler, begin_s, now_s)
        values = _pass_times_us(clock.between(power.begin_s, power.end_s))
        if len(values) < 3:
            return False
        figure = statistics.median if power.power_w is None else statistics.mean
        time_share = statistics.relative(statistics.batch_half_width(values, figure), figure(values))
        if time_share > stopping.time_half_width:
            return False
        if power.power_w is None:
            return True
        return math.hypot(time_share, power.relative) <= stopping.energy_half_width and abs(power.drift) <= DRIFT

    def _power(self, sampler: Sampler, begin_s: float, end_s: float) -> _Power:
        """Mean power of a window and where the window, once moved to ticks, begins and ends."""
        times, energies = sampler.ticks(begin_s)
        pairs = [(a, b) for a, b in zip(times, energies, strict=True) if a <= end_s]
        if len(pairs) >= 3:
            dropped = _ramp(pairs)
            pairs = pairs[dropped:]
            times, energies = [a for a, _ in pairs], [b for _, b in pairs]
            rate = statistics.slope(times, energies)
            drift = _drift(times, energies)
            # A power on its way somewhere is known no better than to half the way that it made.
            half_width_mw = math.hypot(rate.half_width, rate.rate * drift / 2)
            window = sampler.window(times[0], times[-1])
            details: dict[str, Any] = {"ticks": len(pairs), "ramp_ticks_dropped": dropped}
            if window.power_w is not None and window.power_source == "power_instant":
                details["power_integral_w"] = round(window.power_w, 3)
            source = "rapl" if self.device.card.kind == "cpu" else "energy_counter"
            return _Power(rate.rate / 1e3, half_width_mw / 1e3, source, times[0], times[-1], details, drift)
        window = sampler.window(begin_s, end_s)
        if window.power_w is None:
            return _Power(None, None, "", begin_s, end_s, {})
        values = sampler.power_values(begin_s, end_s)
        half_width = statistics.batch_half_width(values)
        source = {"power_instant": "instant_power", "power_average": "average_power"}[window.power_source]
        return _Power(window.power_w, half_width, source, begin_s, end_s, {})

    def _reading(
        self,
        workload: Workload,
        rounds: list[tuple[float, float, int]],
        power: _Power,
        window: Window,
        sampler: Sampler,
        converged: bool,
        foreign: frozenset[int],
        warm_up_s: float,
    ) -> Reading:
        values = _pass_times_us(rounds)
        passes = sum(entry[2] for entry in rounds)
        if power.power_w is None:
            # Nothing must agree with an energy, and on a CPU that others use too the mean is mostly theirs.
            time_us, figure = statistics.median(values), statistics.median
        else:
            # Power is the mean over the window, so the time that it is multiplied with is the mean as well.
            time_us, figure = sum(entry[1] for entry in rounds) / passes * 1e6, statistics.mean
        half_width_us = _finite(statistics.batch_half_width(values, figure), time_us)
        flags = set() if converged else {"not_converged"}
        flags |= _throttle_flags(window.throttle_shares)
        details: dict[str, Any] = {
            **workload.details,
            **power.details,
            "rounds": len(rounds),
            "time_figure": "median" if power.power_w is None else "mean",
            "time_mean_us": statistics.mean(values),
            "time_median_half_width_us": _finite(statistics.batch_half_width(values, statistics.median), time_us),
            "time_trimmed_half_width_us": _finite(
                statistics.batch_half_width(values, statistics.trimmed_mean), time_us
            ),
        }
        if len(values) < 3:
            flags.add("few_passes")
        if window.throttle_shares:
            details["throttle_shares"] = {name: round(share, 3) for name, share in window.throttle_shares.items()}
        if foreign:
            flags.add("shared")
            details["foreign_processes"] = sorted(foreign)[:16]
        energy_mj = energy_half_width_mj = None
        power_half_width_w = power.half_width_w
        if power.power_w is None:
            flags.add("no_energy")
        else:
            power_half_width_w = _finite(power.half_width_w or 0.0, power.power_w)
            energy_mj = power.power_w * time_us * 1e-3
            energy_half_width_mj = statistics.ratio_half_width(
                energy_mj, power.power_w, power_half_width_w, time_us, half_width_us
            )
            if power.source not in ("energy_counter", "rapl"):
                flags.add("lesser_power_source")
            integral_w = power.details.get("power_integral_w")
            if integral_w and abs(integral_w / power.power_w - 1) > DISAGREE:
                flags.add("power_disagrees")
            if abs(power.drift) > DRIFT:
                flags.add("drifting")
                details["power_drift"] = round(power.drift, 4)
        if window.temperature_slope_c_per_s is not None:
            details["temperature_slope_c_per_s"] = round(window.temperature_slope_c_per_s, 2)
        if window.memory_temperature_c is not None:
            details["memory_temperature_c"] = window.memory_temperature_c
        if not self.cuda:
            details["threads"] = torch.get_num_threads()
        details["sampler_busy_share"] = round(sampler.busy_s / max(1e-9, time.perf_counter() - sampler.began_s), 4)
        return Reading(
            time_us=time_us,
            time_half_width_us=half_width_us,
            time_median_us=statistics.median(values),
            time_trimmed_us=statistics.trimmed_mean(values),
            passes=passes,
            window_s=power.end_s - power.begin_s,
            warm_up_s=warm_up_s,
            power_w=power.power_w,
            power_half_width_w=power_half_width_w,
            power_source=power.source,
            energy_mj=energy_mj,
            energy_half_width_mj=energy_half_width_mj,
            idle_power_w=self.levels.idle_power_w,
            base_power_w=self.levels.base_power_w,
            sm_clock_mhz=window.sm_clock_mhz,
            memory_clock_mhz=window.memory_clock_mhz,
            temperature_c=window.temperature_c,
            throttle_reasons=tuple(
                name for name, share in window.throttle_shares.items() if share >= THROTTLED_SHARE and name != "idle"
            ),
            flags=tuple(sorted(flags)),
            details=details,
            cost_s={"warm_up": warm_up_s, "window": power.end_s - power.begin_s},
            trace=sampler.trace((power.begin_s, power.end_s)),
        )

    def _with_context(self, reading: Reading, workload: Workload) -> Reading:
        """The reading with what other operators around it change: `details["context"]`."""
        if workload.single is None:
            return reading
        if self._others is None:
            self._others = Others(self.torch_device)
        pass_s = reading.time_us / 1e6
        try:
            found = read_context(workload.single, workload.inputs, self._others, pass_s, self.torch_device)
        except torch.OutOfMemoryError:  # no room for a further graph: the reading is as good without
            return reading
        return dataclasses.replace(reading, details={**reading.details, "context": found.to_json()})

    def _foreign_processes(self) -> frozenset[int]:
        return (self.device.compute_processes() or frozenset()) - self.own_processes

    # ------------------------------------------------------------------------------------------ bursts, levels

    def _burst(self, workload: Workload) -> dict[str, Any] | None:
        """The subject in bursts between pauses, as its model gives it the card: at full clocks.

        Power is linear in the duty f, P = P_pause + f (P_op - P_pause), so that two duties give P_op, what the pauses
        cost subtracted. None where a duty gave no power.
        """
        points: list[tuple[float, float, float]] = []  # duty, power, half-width
        times_us: list[float] = []
        clocks_mhz: list[float] = []
        reasons: dict[str, float] = {}
        for duty in BURST_DUTIES:
            with Sampler(self.device) as sampler:
                clock = _Clock(workload)
                clock.in_flight = 10**6  # a burst is queued whole, then waited for
                count = max(1, round(BURST_S / max(workload.round_s, 1e-6)))
                begin_s = time.perf_counter()
                while time.perf_counter() - begin_s < BURST_WINDOW_S + 0.3:
                    if self.cuda:
                        # The first event would pass at once and the launch that follows be counted as work: have the
                        # card wait (some 25 us) until the burst is queued.
                        torch.cuda._sleep(50_000)
                    for _ in range(count):
                        clock.step()
                    clock.finish()
                    burst_s = sum(entry[1] for entry in clock.done[-count:])
                    time.sleep(burst_s * (1 - duty) / duty)
            ticks_s, ticks_mj = sampler.ticks(begin_s + 0.25)
            if len(ticks_s) < 4:
                return None
            rate = statistics.slope(ticks_s, ticks_mj)
            inside = clock.between(ticks_s[0], ticks_s[-1])
            if not inside:
                return None
            window = sampler.window(ticks_s[0], ticks_s[-1])
            points.append(
                (
                    sum(entry[1] for entry in inside) / (ticks_s[-1] - ticks_s[0]),
                    rate.rate / 1e3,
                    rate.half_width / 1e3,
                )
            )
            times_us += _pass_times_us(inside)
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
        time_us = statistics.mean(times_us)
        time_half_width_us = _finite(statistics.batch_half_width(times_us), time_us)
        energy_mj = power_w * time_us * 1e-3
        return {
            "time_us": time_us,
            "time_half_width_us": time_half_width_us,
            "power_w": power_w,
            "power_half_width_w": power_half_width_w,
            "energy_mj": energy_mj,
            "energy_half_width_mj": statistics.ratio_half_width(
                energy_mj, power_w, power_half_width_w, time_us, time_half_width_us
            ),
            "sm_clock_mhz": statistics.mean(clocks_mhz) if clocks_mhz else None,
            "pause_power_w": low_w - (high_w - low_w) / (high - low) * low,
            "duties": [round(high, 4), round(low, 4)],
            "duty_power_w": [round(high_w, 2), round(low_w, 2)],
            "throttle_shares": {name: round(share, 3) for name, share in reasons.items()},
            "passes": sum(entry[2] for entry in clock.done),
        }

    def _refresh_levels(self) -> None:
        """Take the base power once per process and refresh it rarely: full clocks, next to nothing to do."""
        if not self.cuda or time.perf_counter() - self._levels_s < LEVELS_AGE_S:
            return
        tiny = torch.zeros(1, device=self.torch_device)

        def twitch() -> None:
            # A one-element kernel every 2 ms keeps the clocks up, at a duty of a few thousandths.
            tiny.add_(1)
            torch.cuda.synchronize(self.torch_device)
            time.sleep(0.002)

        base_power_w = _average_power_w(self.device, LEVEL_WINDOW_S, twitch)
        self.levels = dataclasses.replace(self.levels, base_power_w=base_power_w)
        self._levels_s = time.perf_counter()


def measure(
    subject: Subject,
    protocol: Protocol,
    stopping: Stopping,
    device: Device,
    torch_device: torch.device | str,
    on_phase: OnPhase = silent,
) -> Reading:
    """`Bench.measure` on a bench kept for the device.

    Raises:
        Unmeasurable: out_of_memory, raised, rejected, not_capturable or not_available.
    """
    bench = _BENCHES.get(device.card.id)
    if bench is None or bench.device is not device:
        bench = _BENCHES[device.card.id] = Bench(device, torch_device)
    return bench.measure(subject, protocol, stopping, on_phase)


_BENCHES: dict[str, Bench] = {}


def _with_canary(reading: Reading, canary: dict[str, Any]) -> Reading:
    off = max(abs(canary["time_change"]), abs(canary["energy_change"] or 0.0)) > CANARY_OFF
    flags = tuple(sorted({*reading.flags, "canary_off"})) if off else reading.flags
    return dataclasses.replace(reading, flags=flags, details={**reading.details, "canary": canary})


def _for_kind(stopping: Stopping, subject: Subject) -> Stopping:
    if subject.kind == "operator":
        return stopping
    return dataclasses.replace(stopping, minimum_s=max(stopping.minimum_s, min(WHOLE_WINDOW_S, stopping.maximum_s / 2)))


def _pass_times_us(rounds: list[tuple[float, float, int]]) -> list[float]:
    return [seconds / passes * 1e6 for _, seconds, passes in rounds]


def _finite(half_width: float, figure: float) -> float:
    # Too few values for an interval: as wide as the figure itself, which JSON can carry and nobody mistakes.
    return half_width if math.isfinite(half_width) else abs(figure)


def _ramp(pairs: list[tuple[float, float]]) -> int:
    """How many first ticks still belong to the warm-up: power is rising towards what the later steps show."""
    dropped = 0
    while len(pairs) - dropped > FLOOR_TICKS + 1:
        rates = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in zip(pairs[dropped:], pairs[dropped + 1 :], strict=False)]
        usual = statistics.median(rates[1:])
        # Two steps together: one late tick makes a short step and a long one.
        first = (pairs[dropped + 2][1] - pairs[dropped][1]) / (pairs[dropped + 2][0] - pairs[dropped][0])
        if abs(first / usual - 1) <= RAMP:
            break
        dropped += 1
    return dropped


def _drift(times: list[float], energies: list[float]) -> float:
    """Relative difference of power between the second and the first half of the ticks."""
    if len(times) < 5:
        return 0.0
    middle = len(times) // 2
    first = (energies[middle] - energies[0]) / (times[middle] - times[0])
    second = (energies[-1] - energies[middle]) / (times[-1] - times[middle])
    return (second - first) / ((second + first) / 2)


def _throttle_flags(shares: dict[str, float]) -> set[str]:
    flags = set()
    if shares.get("power_cap", 0) >= THROTTLED_SHARE:
        flags.add("throttled_power")
    if any(shares.get(name, 0) >= THROTTLED_SHARE for name in THERMAL):
        flags.add("throttled_thermal")
    if any(shares.get(name, 0) >= THROTTLED_SHARE for name in OTHER_SLOWDOWNS):
        flags.add("throttled_other")
    return flags


def _average_power_w(device: Device, seconds: float, work: Callable[[], None] | None = None) -> float | None:
    """Average power over some seconds, by the counter's ticks where there is one."""
    with Sampler(device) as sampler:
        if not sampler.active:
            return None
        begin_s = time.perf_counter()
        while time.perf_counter() - begin_s < seconds + (0.15 if sampler.counts_energy else 0.0):
            if work is None:
                time.sleep(0.01)
            else:
                work()
        end_s = time.perf_counter()
    times, energies = sampler.ticks(begin_s)
    if len(times) >= 3:
        return statistics.slope(times, energies).rate / 1e3
    return sampler.window(begin_s, end_s).power_w


def _physical_cores() -> int:
    import psutil

    allowed = len(os.sched_getaffinity(0))
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


__all__ = ["Bench", "Levels", "OnPhase", "Round", "measure", "silent"]
