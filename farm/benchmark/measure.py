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
from farm.benchmark.cache import OtherOperators, time_among_others
from farm.benchmark.call_context import time_in_order
from farm.benchmark.checks import Canary, with_canary
from farm.benchmark.clock import Clock, eager_time_us, measure_bursts, pass_times_us
from farm.benchmark.cuda_graph import one_stream
from farm.benchmark.fingerprinting import PowerLevels
from farm.benchmark.passes import Offload, grad_mode, numeric_flags
from farm.benchmark.sampler import Sampler
from farm.benchmark.window import (
    DRIFT,
    FLOOR_TICKS,
    Energy,
    PassTimes,
    SteadyWindow,
    WindowPower,
    passes_of,
    window_power,
)
from farm.benchmark.workload import Workload, prepare, why_it_raised
from farm.devices.device import Device
from farm.errors import Unmeasurable
from farm.types.protocol import OnPhase, Protocol, Stopping, Subject
from farm.types.reading import REPEATED, Reading

CHECK_S = 0.02  # how often the stopping rule is asked
REPEATS = 2  # of a reading that was taken hot, shared, drifting or starved
MOVED = 2.0  # times that the values of what an operator writes may grow or shrink
NOTHING = 1e-6  # as large as what began at zero may become: weights do, by a learning rate that is next to nothing


@dataclasses.dataclass(frozen=True)
class Gate:
    """No window opens while the chip still warms up or cools down faster than this.

    Leakage grows with temperature: a window opened too early reads another power than a long run has. A whole model
    is what every sum is held against, so it waits longer than a tuple, of which there are hundreds.
    """

    slope_c_per_s: float
    span_s: float  # over which the slope is taken: cards tell whole degrees, ten times a second
    ceiling_s: float  # of warm-up and waiting together
    energy: bool = True  # whether a window is long enough for the energy counter

    def ceiling(self, stopping: Stopping) -> float:
        """Whoever asks for short windows gets short waits."""
        return min(self.ceiling_s, 1.5 * stopping.maximum_s)

    def power(self, sampler: Sampler, begin_s: float, end_s: float) -> WindowPower:
        return window_power(sampler, begin_s, end_s) if self.energy else WindowPower(None, None, "", begin_s, end_s)


GATES = {"operator": Gate(4.5, 0.35, 0.8), "variant": Gate(1.0, 1.0, 4.0)}
#: A tuple with tensors in slow memory has many configurations, and is asked for its time: a wire does not warm up.
TIMED = Gate(math.inf, 0.0, 0.0, energy=False)
TIMED_WINDOW_S = 0.1  # the least, where no counter has to move
WHOLE_WINDOW_S = 1.0  # the least for a whole model, where the request's ceiling allows it

# What a card should tell so that a reading is known to be good; power has sources and flags of its own.
SENSORS = frozenset({"power_instant_w", "sm_clock_mhz", "temperature_c", "throttle_reasons", "compute_processes"})


def silent(phase: str, details: dict[str, Any]) -> None:
    """An `on_phase` that says nothing."""


class Ledger:
    """Where the time went: what lies within a charged block is charged once, to the innermost name."""

    def __init__(self) -> None:
        self.cost_s: dict[str, float] = {}
        self._inner_s = 0.0  # of the block that is open now, what was charged within it

    def charge(self, name: str, seconds: float) -> None:
        """Charge so much of the open block to a name."""
        self.cost_s[name] = self.cost_s.get(name, 0.0) + seconds
        self._inner_s += seconds

    @contextlib.contextmanager
    def charged(self, name: str) -> Iterator[None]:
        """Charge what the block takes, less what is charged within it."""
        outer_s, self._inner_s = self._inner_s, 0.0
        began_s = time.perf_counter()
        try:
            yield
        finally:
            took_s = time.perf_counter() - began_s
            self.charge(name, took_s - self._inner_s)
            self._inner_s = outer_s + took_s


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
        offload: Offload | None = None,
    ) -> None:
        """
        Args:
            idle_power_w: where it is known already.
            threads: of a CPU; 0 for one per physical core that the process may use.
            canary_every: tuples between two canaries, see `Canary`.
            repeats: of a reading that was taken hot, shared, drifting or starved; without it two on a GPU and none on
                a CPU, which others use as they please.
            offload: puts the tensors of a placement in slow memory; without it, protocols with one are refused.
        """
        self.device = device
        self.torch_device = torch.device(torch_device)
        self.cuda = self.torch_device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None
        before = device.compute_processes() or frozenset()
        index = self.torch_device.index or 0
        if self.cuda and torch.cuda.is_initialized() and torch._C._cuda_hasPrimaryContext(index):  # type: ignore[attr-defined]
            before = frozenset()  # a program that measures in its own process is among them already
        self.levels = PowerLevels(device, self.torch_device, idle_power_w)
        if self.cuda:
            torch.cuda.set_device(self.torch_device)
            self._stream = one_stream(self.torch_device)
            torch.zeros(1, device=self.torch_device).add_(1)
            torch.cuda.synchronize()
        else:
            torch.set_num_threads(threads or _physical_cores())
        self.own_processes, known = own_processes(before, device.compute_processes() or frozenset(), os.getpid())
        self._knows_processes = known or not self.cuda
        self._canary = Canary(self.torch_device, canary_every)
        self._repeats = (REPEATS if self.cuda else 0) if repeats is None else repeats
        self._offload = offload
        self._others: OtherOperators | None = None

    def measure(self, subject: Subject, protocol: Protocol, stopping: Stopping, on_phase: OnPhase = silent) -> Reading:
        """Measure a subject. Half-widths in the reading are absolute.

        Raises:
            Unmeasurable: out_of_memory, raised, rejected, not_capturable or not_available.
        """
        begin_s = time.perf_counter()
        ledger = Ledger()
        with contextlib.ExitStack() as stack:
            stack.enter_context(numeric_flags(protocol))
            stack.enter_context(grad_mode(protocol))
            if self._stream is not None:
                stack.enter_context(torch.cuda.stream(self._stream))
            workload: Workload | None = None
            canary = None

            def read_canary(reference: Workload, wanted: Stopping) -> Reading:
                reading = self._steady(reference, wanted, GATES["operator"], silent)
                ledger.charge("canary_window", math.fsum(reading.cost_s.values()))
                return reading

            try:
                with ledger.charged("canary"):
                    self.levels.refresh()
                    if subject.kind == "operator":
                        canary = self._canary.newest(read_canary, on_phase)
                on_phase("rebuild", {})
                with ledger.charged("rebuild"):
                    workload = prepare(subject, protocol, self.torch_device, self._offload)
                with ledger.charged("around"):
                    before = workload.written_sizes()
                    gate = TIMED if protocol.placement else GATES[subject.kind]
                    reading = self._steady_until_good(workload, _for_kind(stopping, subject), gate, on_phase, ledger)
                    if _moved(before, workload.written_sizes()):
                        reading = reading.flagged("values_moved")
                reading = self._in_other_states(reading, subject, protocol, workload, on_phase, ledger)
            except Unmeasurable:
                raise
            except Exception as error:  # whatever PyTorch raises on the card becomes the item's reason
                raise why_it_raised(error) from error
            finally:
                if workload is not None:
                    with ledger.charged("close"), contextlib.suppress(RuntimeError):
                        workload.close()
        if canary is not None:
            reading = with_canary(reading, canary)
        cost_s = {**ledger.cost_s, "total": time.perf_counter() - begin_s}
        return dataclasses.replace(reading, cost_s={name: round(value, 4) for name, value in cost_s.items()})

    def _in_other_states(
        self,
        reading: Reading,
        subject: Subject,
        protocol: Protocol,
        workload: Workload,
        on_phase: OnPhase,
        ledger: Ledger,
    ) -> Reading:
        """With what the subject takes in bursts, launched eagerly, among others: what of these says something of it."""
        # A whole is what it is: only a tuple runs otherwise alone than among its neighbours.
        limited = subject.kind == "operator" and "throttled_power" in reading.flags
        with ledger.charged("burst"):
            if limited and "energy_counter_mj" in self.device.capabilities:
                on_phase("burst", {})
                reading = reading.noting(burst=measure_bursts(workload, self.device))
        with ledger.charged("eager"):
            if self.cuda and subject.kind == "variant" and workload.replayed:
                on_phase("eager", {})
                reading = self._with_opinion(reading, "eager_time", lambda: _eager_time(reading, workload))
        with ledger.charged("places"):
            if self.cuda and subject.kind == "variant" and protocol.measures_context:
                on_phase("places", {})
                reading = self._with_opinion(reading, "places", lambda: self._places(reading, workload))
        with ledger.charged("context"):
            if self.cuda and subject.kind == "operator" and protocol.measures_context:
                on_phase("context", {})
                reading = self._with_opinion(reading, "context", lambda: self._context(reading, workload))
        return reading

    # ------------------------------------------------------------------------------------------ steady window

    def _steady_until_good(
        self, workload: Workload, stopping: Stopping, gate: Gate, on_phase: OnPhase, ledger: Ledger
    ) -> Reading:
        for attempt in itertools.count():
            reading = self._steady(workload, stopping, gate, on_phase)
            for name, seconds in reading.cost_s.items():
                ledger.charge(name, seconds)
            poor = REPEATED & set(reading.flags)
            if not poor or attempt == self._repeats:
                break
            if "throttled_thermal" in poor:
                time.sleep(1.0)  # let it cool a little
        return reading.noting(attempts=attempt + 1 if attempt else None)

    def _steady(self, workload: Workload, stopping: Stopping, gate: Gate, on_phase: OnPhase) -> Reading:
        foreign_before = self._foreign_processes()
        clock = Clock(workload)
        on_phase("warm-up", {})
        with Sampler(self.device, self.own_processes) as sampler:
            start_s = time.perf_counter()
            clock.step()
            while time.perf_counter() - start_s < stopping.warm_up_s:
                clock.step()
            slope_c_per_s = self._settle(clock, sampler, gate, start_s, start_s + gate.ceiling(stopping))
            begin_s = self._window_begin(clock, sampler, gate)
            on_phase("window", {})
            others_s = self.device.foreign_cpu_s()
            converged = self._run_window(clock, sampler, begin_s, stopping, gate)
            end_s = time.perf_counter()
            others_until_s = self.device.foreign_cpu_s()
            clock.finish()
        power = gate.power(sampler, begin_s, end_s)
        seen = sampler.window(power.begin_s, power.end_s)
        rounds = clock.between(power.begin_s, power.end_s) or clock.between(begin_s, math.inf) or clock.done[-1:]
        foreign = foreign_before | seen.foreign_processes | self._foreign_processes()
        share = None
        if others_s is not None and others_until_s is not None:
            share = max(0.0, (others_until_s - others_s) / (end_s - begin_s))
        tells = "temperature_c" in self.device.capabilities
        steady = SteadyWindow(
            workload=workload,
            rounds=rounds,
            power=power,
            seen=seen,
            converged=converged,
            ceiling_s=stopping.maximum_s,
            warm_up_s=begin_s - start_s,
            warm_up_slope_c_per_s=slope_c_per_s,
            unsettled=tells and gate.energy and (slope_c_per_s is None or abs(slope_c_per_s) > gate.slope_c_per_s),
            foreign=foreign,
            foreign_cpu_share=share,
            lacking=self._lacking(),
        )
        return self._reading(steady, sampler)

    def _lacking(self) -> tuple[str, ...]:
        """What the card does not tell of `SENSORS`; of a CPU nobody asks for them."""
        if self.device.card.kind != "cuda":
            return ()
        told = self.device.capabilities - (frozenset() if self._knows_processes else {"compute_processes"})
        return tuple(sorted(SENSORS - told))

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

    def _window_begin(self, clock: Clock, sampler: Sampler, gate: Gate) -> float:
        """Now, or when the energy counter next moves: work goes on until then."""
        now_s = time.perf_counter()
        if not sampler.counts_energy or not gate.energy:
            return now_s
        while time.perf_counter() - now_s < 1.0:
            clock.step()
            times, _ = sampler.ticks(now_s)
            if times:
                return times[0]
        sampler.do_without_counter()  # it does not move: a window need not wait for it
        return now_s

    def _run_window(self, clock: Clock, sampler: Sampler, begin_s: float, stopping: Stopping, gate: Gate) -> bool:
        """Launch rounds until the stopping rule is met (True) or the time is up (False)."""
        next_check_s = begin_s
        minimum_s = stopping.minimum_s if gate.energy else min(TIMED_WINDOW_S, stopping.minimum_s)
        while True:
            clock.step()
            now_s = time.perf_counter()
            if now_s < next_check_s:
                continue
            next_check_s = now_s + CHECK_S
            elapsed_s = now_s - begin_s
            if elapsed_s >= minimum_s and self._good_enough(clock, sampler, begin_s, now_s, stopping, gate):
                return True
            # Passes longer than a window still get three of them, so that there is an interval, within reason.
            if elapsed_s >= stopping.maximum_s and (
                len(clock.between(begin_s, now_s)) >= 3 or elapsed_s >= 5 * stopping.maximum_s
            ):
                return False

    def _good_enough(
        self, clock: Clock, sampler: Sampler, begin_s: float, now_s: float, stopping: Stopping, gate: Gate
    ) -> bool:
        if gate.energy and sampler.counts_energy and len(sampler.ticks(begin_s)[0]) <= FLOOR_TICKS:
            return False
        power = gate.power(sampler, begin_s, now_s)
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

    def _reading(self, steady: SteadyWindow, sampler: Sampler) -> Reading:
        power, seen = steady.power, steady.seen
        times = PassTimes.of(steady.rounds, with_power=power.power_w is not None)
        energy = Energy.of(power, times)
        window_s = power.end_s - power.begin_s
        details = dataclasses.replace(
            steady.details(times),
            threads=None if self.cuda else torch.get_num_threads(),
            sampler_busy_share=round(sampler.busy_s / max(1e-9, time.perf_counter() - sampler.began_s), 4),
        )
        return Reading(
            time_us=times.time_us,
            time_half_width_us=times.half_width_us,
            time_median_us=times.median_us,
            time_trimmed_us=times.trimmed_us,
            passes=passes_of(steady.rounds),
            window_s=window_s,
            warm_up_s=steady.warm_up_s,
            power_w=power.power_w,
            power_half_width_w=energy.power_half_width_w if energy else None,
            power_source=power.source,
            energy_mj=energy.energy_mj if energy else None,
            energy_half_width_mj=energy.half_width_mj if energy else None,
            idle_power_w=self.levels.idle_power_w,
            base_power_w=self.levels.base_power_w,
            sm_clock_mhz=seen.sm_clock_mhz,
            memory_clock_mhz=seen.memory_clock_mhz,
            temperature_c=seen.temperature_c,
            throttle_reasons=steady.throttle_reasons,
            flags=steady.flags,
            details=details,
            cost_s={"warm_up": steady.warm_up_s, "window": window_s},
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
            self._others = OtherOperators(self.torch_device)
        pass_s = reading.time_us / 1e6
        found = time_among_others(workload.single, workload.inputs, self._others, pass_s, self.torch_device)
        return reading.noting(context=found)

    def _places(self, reading: Reading, workload: Workload) -> Reading:
        """What the model's own order of calls adds to each of its tuples."""
        if workload.order is None:
            return reading
        return reading.noting(places=time_in_order(workload.order(), reading.time_us / 1e6, self.torch_device))

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
        not math.isfinite(late) or not early / MOVED <= late <= max(early * MOVED, NOTHING)
        for early, late in zip(before, after, strict=True)
    )


def _physical_cores() -> int:
    import psutil

    allowed = len(os.sched_getaffinity(0))
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))
