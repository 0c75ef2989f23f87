"""One subject under one protocol on one card: the reading.

`Bench` is what a benchmark process holds for its card: the device, its idle and base power, the processes that are its
own. `Bench.measure` is the whole of a measurement, the same for a tuple and for a whole model. How long a window is,
where it begins and what the intervals mean is in docs/method.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from farm.benchmark import intervals
from farm.benchmark.bursts import read_bursts
from farm.benchmark.canary import Canary, with_canary
from farm.benchmark.clock import Clock, TimedRound, eager_time_us, pass_times_us, starved_share
from farm.benchmark.levels import Levels
from farm.benchmark.neighbours import Others, read_context
from farm.benchmark.passes import grad_mode, numeric_flags
from farm.benchmark.power import FLOOR_TICKS, Power, window_power
from farm.benchmark.sampler import Sampler, Window
from farm.benchmark.workload import Workload, prepare, why_it_raised
from farm.devices.device import Device
from farm.errors import Unmeasurable
from farm.words.protocol import OnPhase, Protocol, Stopping, Subject
from farm.words.reading import METHOD, REPEATED, Reading

CHECK_S = 0.02  # how often the stopping rule is asked
DISAGREE = 0.02
THROTTLED_SHARE = 0.05  # of the samples
REPEATS = 2  # of a reading that was taken hot, shared, drifting or starved
STARVED = 0.005  # of a window's time
MOVED = 2.0  # times that the values of what an operator writes may grow or shrink
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

# What a card should tell so that a reading is known to be good; power has sources and flags of its own.
SENSORS = frozenset({"power_instant_w", "sm_clock_mhz", "temperature_c", "throttle_reasons", "compute_processes"})
THERMAL = ("thermal", "hardware_thermal")
OTHER_SLOWDOWNS = ("hardware_slowdown", "power_brake", "sync_boost")


def _one_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream for all that this process does, the health check and every copy too: the current one from now on.

    Once there is work on a second, memory operations inside a graph may take some 14 us longer (docs/method.md, "One
    stream"). It is not the default one, on which no graph can be captured.
    """
    if torch.cuda.current_stream(device) == torch.cuda.default_stream(device):
        torch.cuda.set_stream(torch.cuda.Stream(device))
    return torch.cuda.current_stream(device)


def silent(phase: str, details: dict[str, Any]) -> None:
    """An `on_phase` that says nothing."""


class Bench:
    """A card made ready for measuring in this process.

    Make it before anything touches CUDA: the processes that appear on the card while the context is made are this
    one (in a container NVML names it by its id on the host). On a GPU the thread that makes it stays on one
    stream from then on.
    """

    def __init__(
        self,
        device: Device,
        torch_device: torch.device | str,
        idle_power_w: float | None = None,
        threads: int = 0,
        canary_every: int | None = None,
        repeats: int | None = None,
    ) -> None:
        """
        Args:
            idle_power_w: where it is known already.
            threads: of a CPU; 0 for one per physical core that the process may use.
            canary_every: tuples between two canaries, see `Canary`.
            repeats: of a reading that was taken hot, shared, drifting or starved; without it two on a GPU and none on
                a CPU, which others use as they please.
        """
        self.device = device
        self.torch_device = torch.device(torch_device)
        self.cuda = self.torch_device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None
        before = device.compute_processes() or frozenset()
        self.levels = Levels(device, self.torch_device, idle_power_w)
        if self.cuda:
            torch.cuda.set_device(self.torch_device)
            self._stream = _one_stream(self.torch_device)
            torch.zeros(1, device=self.torch_device).add_(1)
            torch.cuda.synchronize()
        else:
            torch.set_num_threads(threads or _physical_cores())
        self.own_processes, known = own_processes(before, device.compute_processes() or frozenset(), os.getpid())
        self._knows_processes = known or not self.cuda
        self._canary = Canary(self.torch_device, canary_every)
        self._repeats = (REPEATS if self.cuda else 0) if repeats is None else repeats
        self._others: Others | None = None

    def measure(self, subject: Subject, protocol: Protocol, stopping: Stopping, on_phase: OnPhase = silent) -> Reading:
        """Measure a subject. Half-widths in the reading are absolute.

        Raises:
            Unmeasurable: out_of_memory, raised, rejected, not_capturable or not_available.
        """
        cost_s: dict[str, float] = {}
        begin_s = time.perf_counter()
        with contextlib.ExitStack() as stack:
            stack.enter_context(numeric_flags(protocol))
            stack.enter_context(grad_mode(protocol))
            if self._stream is not None:
                stack.enter_context(torch.cuda.stream(self._stream))
            workload: Workload | None = None
            canary = None

            def read_canary(reference: Workload, wanted: Stopping) -> Reading:
                reading = self._steady(reference, wanted, GATES["operator"], silent)
                cost_s["canary_window"] = cost_s.get("canary_window", 0.0) + math.fsum(reading.cost_s.values())
                return reading

            try:
                with _charged(cost_s, "canary"):
                    self.levels.refresh()
                    if subject.kind == "operator":
                        canary = self._canary.newest(read_canary, on_phase)
                on_phase("rebuild", {})
                with _charged(cost_s, "rebuild"):
                    workload = prepare(subject, protocol, self.torch_device)
                with _charged(cost_s, "around"):
                    before = workload.written_sizes()
                    reading = self._steady_until_good(
                        workload, _for_kind(stopping, subject), GATES[subject.kind], on_phase
                    )
                    if _moved(before, workload.written_sizes()):
                        reading = reading.flagged("values_moved")
                # A whole is what it is: only a tuple runs otherwise alone than among its neighbours.
                limited = subject.kind == "operator" and "throttled_power" in reading.flags
                with _charged(cost_s, "burst"):
                    if limited and "energy_counter_mj" in self.device.capabilities:
                        on_phase("burst", {})
                        reading = reading.noting(burst=read_bursts(workload, self.device))
                with _charged(cost_s, "eager"):
                    if self.cuda and subject.kind == "variant" and workload.replayed:
                        on_phase("eager", {})
                        reading = self._with_opinion(reading, "eager_time", lambda: _eager_time(reading, workload))
                with _charged(cost_s, "context"):
                    if self.cuda and subject.kind == "operator" and protocol.measures_context:
                        on_phase("context", {})
                        reading = self._with_opinion(reading, "context", lambda: self._context(reading, workload))
            except Unmeasurable:
                raise
            except Exception as error:  # whatever PyTorch raises on the card becomes the item's reason
                raise why_it_raised(error) from error
            finally:
                if workload is not None:
                    with _charged(cost_s, "close"), contextlib.suppress(RuntimeError):
                        workload.close()
        if canary is not None:
            reading = with_canary(reading, canary)
            cost_s["canary"] -= cost_s.get("canary_window", 0.0)
        # What a steady reading took beside its warm-up and its window: asking the driver, working out the figures.
        cost_s["around"] -= math.fsum(reading.cost_s.values())
        cost_s |= {**reading.cost_s, "total": time.perf_counter() - begin_s}
        return dataclasses.replace(reading, cost_s={name: round(value, 4) for name, value in cost_s.items()})

    # ------------------------------------------------------------------------------------------ steady window

    def _steady_until_good(self, workload: Workload, stopping: Stopping, gate: Gate, on_phase: OnPhase) -> Reading:
        spent = {"warm_up": 0.0, "window": 0.0}
        for attempt in itertools.count():
            reading = self._steady(workload, stopping, gate, on_phase)
            for name in spent:
                spent[name] += reading.cost_s[name]
            poor = REPEATED & set(reading.flags)
            if not poor or attempt == self._repeats:
                break
            if "throttled_thermal" in poor:
                time.sleep(1.0)  # let it cool a little
        return dataclasses.replace(reading, cost_s=spent).noting(attempts=attempt + 1 if attempt else None)

    def _steady(self, workload: Workload, stopping: Stopping, gate: Gate, on_phase: OnPhase) -> Reading:
        foreign_before = self._foreign_processes()
        clock = Clock(workload)
        on_phase("warm-up", {})
        with Sampler(self.device, self.own_processes) as sampler:
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
        power = window_power(sampler, begin_s, end_s)
        window = sampler.window(power.begin_s, power.end_s)
        rounds = clock.between(power.begin_s, power.end_s) or clock.between(begin_s, math.inf) or clock.done[-1:]
        foreign = foreign_before | window.foreign_processes | self._foreign_processes()
        reading = self._reading(
            workload, rounds, power, window, sampler, converged, foreign, begin_s - start_s, stopping.maximum_s
        )
        if "temperature_c" not in self.device.capabilities:
            return reading
        if settled is None or abs(settled) > gate.slope_c_per_s:
            reading = reading.flagged("unsettled")
        if settled is None:
            return reading
        return reading.noting(warm_up_slope_c_per_s=round(settled, 2))

    def _settle(self, clock: Clock, sampler: Sampler, gate: Gate, start_s: float, until_s: float) -> float | None:
        """Go on with the work until the temperature holds still; its slope (C/s) when the wait ended, None if unknown."""
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
                if slope is not None and abs(slope) <= gate.slope_c_per_s:
                    return slope
                if now_s >= until_s:  # a wait that is shorter than the span: by what there is
                    return sampler.temperature_slope_c_per_s(start_s, now_s) if slope is None else slope
            clock.step()

    def _window_begin(self, clock: Clock, sampler: Sampler) -> float:
        """Now, or when the energy counter next moves: work goes on until then."""
        now_s = time.perf_counter()
        if not sampler.counts_energy:
            return now_s
        while time.perf_counter() - now_s < 1.0:
            clock.step()
            times, _ = sampler.ticks(now_s)
            if times:
                return times[0]
        sampler.do_without_counter()  # it does not move: a window need not wait for it
        return now_s

    def _run_window(self, clock: Clock, sampler: Sampler, begin_s: float, stopping: Stopping) -> bool:
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

    def _good_enough(self, clock: Clock, sampler: Sampler, begin_s: float, now_s: float, stopping: Stopping) -> bool:
        if sampler.counts_energy and len(sampler.ticks(begin_s)[0]) <= FLOOR_TICKS:
            return False
        power = window_power(sampler, begin_s, now_s)
        values = pass_times_us(clock.between(power.begin_s, power.end_s))
        if len(values) < 3:
            return False
        figure = statistics.median if power.power_w is None else statistics.fmean
        time_share = intervals.relative(intervals.batch_half_width(values, figure), figure(values))
        if time_share > stopping.time_half_width:
            return False
        if power.power_w is None:
            return True
        return math.hypot(time_share, power.relative) <= stopping.energy_half_width and abs(power.drift) <= DRIFT

    def _reading(
        self,
        workload: Workload,
        rounds: list[TimedRound],
        power: Power,
        window: Window,
        sampler: Sampler,
        converged: bool,
        foreign: frozenset[int],
        warm_up_s: float,
        ceiling_s: float,
    ) -> Reading:
        values = pass_times_us(rounds)
        passes = sum(entry.passes for entry in rounds)
        figure: Callable[[Sequence[float]], float]
        if power.power_w is None:
            # Nothing must agree with an energy, and on a CPU that others use too the mean is mostly theirs.
            time_us, figure = statistics.median(values), statistics.median
        else:
            # Power is the mean over the window, so the time that it is multiplied with is the mean as well.
            time_us, figure = sum(entry.took_s for entry in rounds) / passes * 1e6, statistics.fmean
        half_width_us = intervals.finite(intervals.batch_half_width(values, figure), time_us)
        flags = set() if converged else {"not_converged"}
        flags |= _throttle_flags(window.throttle_shares)
        if len(values) < 3:
            flags.add("few_passes")
        if workload.not_cold:
            flags.add("not_cold")
        told = self.device.capabilities - (frozenset() if self._knows_processes else {"compute_processes"})
        lacking = sorted(SENSORS - told) if self.device.card.kind == "cuda" else []
        if lacking:
            flags.add("lacks_sensors")
        starved = starved_share(rounds) if workload.replayed else 0.0
        if starved > STARVED:
            flags.add("starved")
        if foreign:
            flags.add("shared")
        energy_mj = energy_half_width_mj = None
        power_half_width_w = power.half_width_w
        if power.power_w is None:
            flags.add("no_energy")
        else:
            power_half_width_w = intervals.finite(power.half_width_w or 0.0, power.power_w)
            energy_mj = power.power_w * time_us * 1e-3
            energy_half_width_mj = intervals.ratio_half_width(
                energy_mj, power.power_w, power_half_width_w, time_us, half_width_us
            )
            if power.source not in ("energy_counter", "rapl"):
                flags.add("lesser_power_source")
            if power.integral_w and abs(power.integral_w / power.power_w - 1) > DISAGREE:
                flags.add("power_disagrees")
            if abs(power.drift) > DRIFT:
                flags.add("drifting")
        slope_c_per_s = window.temperature_slope_c_per_s
        details = dataclasses.replace(
            workload.details,
            method=METHOD,
            rounds=len(rounds),
            late_rounds=sum(entry.late for entry in rounds) or None,
            starved_share=round(starved, 4) if starved > STARVED else None,
            time_figure="median" if power.power_w is None else "mean",
            time_mean_us=statistics.fmean(values),
            time_mean_half_width_us=intervals.finite(intervals.batch_half_width(values), time_us),
            time_median_half_width_us=intervals.finite(intervals.batch_half_width(values, statistics.median), time_us),
            time_trimmed_half_width_us=intervals.finite(
                intervals.batch_half_width(values, intervals.trimmed_mean), time_us
            ),
            ceiling_s=None if converged else ceiling_s,
            ticks=power.ticks,
            ramp_ticks_dropped=power.ramp_ticks_dropped,
            power_integral_w=power.integral_w,
            power_drift=round(power.drift, 4) if "drifting" in flags else None,
            lacks=tuple(lacking) or None,
            throttle_shares={name: round(share, 3) for name, share in window.throttle_shares.items()} or None,
            foreign_processes=tuple(sorted(foreign)[:16]) or None,
            temperature_slope_c_per_s=None if slope_c_per_s is None else round(slope_c_per_s, 2),
            memory_temperature_c=window.memory_temperature_c,
            threads=None if self.cuda else torch.get_num_threads(),
            sampler_busy_share=round(sampler.busy_s / max(1e-9, time.perf_counter() - sampler.began_s), 4),
        )
        return Reading(
            time_us=time_us,
            time_half_width_us=half_width_us,
            time_median_us=statistics.median(values),
            time_trimmed_us=intervals.trimmed_mean(values),
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

    def _with_opinion(self, reading: Reading, name: str, read: Callable[[], Reading]) -> Reading:
        """The reading with something more in its details; good without it, unless the context is beyond use."""
        try:
            return read()
        except Exception as error:
            torch.cuda.synchronize(self.torch_device)
            return reading.noting(**{f"{name}_missing": f"{type(error).__name__}: {error}".split("\n")[0][:200]})

    def _context(self, reading: Reading, workload: Workload) -> Reading:
        """With what other operators around it change."""
        if workload.single is None:
            return reading
        if self._others is None:
            self._others = Others(self.torch_device)
        pass_s = reading.time_us / 1e6
        found = read_context(workload.single, workload.inputs, self._others, pass_s, self.torch_device)
        return reading.noting(context=found)

    def _foreign_processes(self) -> frozenset[int]:
        return (self.device.compute_processes() or frozenset()) - self.own_processes


def own_processes(before: frozenset[int], after: frozenset[int], pid: int) -> tuple[frozenset[int], bool]:
    """The ids under which NVML knows this process, by what appeared while it made its context; and whether that is sure.

    In a container NVML names processes by their ids on the host. Nobody there although there is a context, or several
    at once: then who is on the card is not known.
    """
    appeared = after - before
    if pid in appeared:
        return frozenset({pid}), True
    return appeared | {pid}, len(appeared) == 1


@contextlib.contextmanager
def _charged(cost_s: dict[str, float], name: str) -> Iterator[None]:
    """Charge what the block takes to a name."""
    started_s = time.perf_counter()
    try:
        yield
    finally:
        cost_s[name] = time.perf_counter() - started_s


def _eager_time(reading: Reading, workload: Workload) -> Reading:
    """With the time of one eager pass of a replayed whole: what launching adds is in no other figure."""
    if workload.single is None:
        return reading
    eager_us, half_width_us = eager_time_us(workload.single, workload.device)
    return reading.noting(eager_time_us=eager_us, eager_time_half_width_us=half_width_us)


def _for_kind(stopping: Stopping, subject: Subject) -> Stopping:
    if subject.kind == "operator":
        return stopping
    return dataclasses.replace(stopping, minimum_s=max(stopping.minimum_s, min(WHOLE_WINDOW_S, stopping.maximum_s / 2)))


def _moved(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether an operator that writes its input ran on other values at the end than at the beginning."""
    return any(
        not math.isfinite(late) or not early / MOVED <= late <= early * MOVED
        for early, late in zip(before, after, strict=True)
    )


def _throttle_flags(shares: dict[str, float]) -> set[str]:
    flags = set()
    if shares.get("power_cap", 0) >= THROTTLED_SHARE:
        flags.add("throttled_power")
    if any(shares.get(name, 0) >= THROTTLED_SHARE for name in THERMAL):
        flags.add("throttled_thermal")
    if any(shares.get(name, 0) >= THROTTLED_SHARE for name in OTHER_SLOWDOWNS):
        flags.add("throttled_other")
    return flags


def _physical_cores() -> int:
    import psutil

    allowed = len(os.sched_getaffinity(0))
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))
