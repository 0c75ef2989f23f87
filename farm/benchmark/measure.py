"""Measure one subject under one protocol on one card.

`Bench` is a card that is ready for measuring: the device, its idle and base power, the process ids
of the benchmark. `Bench.measure` makes a complete measurement, of a tuple or of a whole model.
docs/method.md describes when a window begins, how long it is and what the intervals mean."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from farm.benchmark import ranks, window
from farm.benchmark.cache import InPlacePass, other_operators, time_among_others
from farm.benchmark.call_context import Player, time_added, time_in_order, time_layouts, time_loops
from farm.benchmark.checks import Canary, with_canary
from farm.benchmark.clock import QUEUED_S, Clock, eager_time_us, measure_bursts
from farm.benchmark.host_clock import HostTimer, keep_memory, take_turns
from farm.benchmark.host_steps import HostSteps
from farm.benchmark.passes import Offload, Passes, applied, free_bytes, operator_passes
from farm.benchmark.sampler import PowerLevels, Sampler
from farm.benchmark.torch_device import one_stream
from farm.benchmark.workload import Workload, arrange, prepare, why_it_raised
from farm.devices.device import Device
from farm.devices.lock import registered_processes
from farm.errors import Unmeasurable, error_text
from farm.subjects.collective_calls import alone, product_beside
from farm.subjects.parsing import parse
from farm.types import intervals
from farm.types.fields import names_of
from farm.types.protocol import OnPhase, Protocol, Stopping, Subject
from farm.types.reading import CPU_METHOD, REPEATED, InOrder, Overlap, Reading

# how often to repeat a reading that a hot card, other processes, drift or a slow host disturbed
REPEATS = 2
MOST_QUEUES = 4  # a starved reading doubles the work that is queued from then on, up to this factor
#: Flags of a replay in order that has another power than the whole model.
UNLIKE_WHOLE = REPEATED | {"throttled_power", "unsettled", "no_energy"}
MOVED = 2.0  # factor by which the values that an operator writes may grow or shrink
# values that began at zero may grow to this, for example weights at a tiny learning rate
NOTHING = 1e-6


@dataclasses.dataclass(frozen=True)
class Gate:
    """The condition for a window: the highest allowed rate of change of the chip's temperature.

    Leakage grows with temperature, so a window that opens too early measures another power than a
    long run. The gate of a whole model is stricter, and opens only when the condition holds: every
    sum is compared with that reading. Tuples number in the hundreds: their windows open after the
    warm-up, and the condition must hold when they end."""

    slope_c_per_s: float
    # the slope is computed over this time: cards report whole degrees, ten times a second
    span_s: float
    ceiling_s: float  # longest total time of warm-up and waiting
    ahead: bool = True  # the condition must hold before the window opens, not at its end
    energy: bool = True  # False if the window measures time only
    shortest_s: float = (
        math.inf
    )  # a window may be as short as this, also if the request wants a longer one
    least_steps: int = window.FLOOR_TICKS  # of the energy counter in a window
    #: A window shorter than the longest goes on until the half-width of the energy is this share of
    #: the requested one.
    energy_share: float = 1.0
    # between the rounds of the window, below the power limit (`farm.benchmark.clock.Clock`)
    pauses: bool = False
    queued_s: float = QUEUED_S  # duration of the work that is queued on a GPU

    def power(
        self, sampler: Sampler, begin_s: float, end_s: float, pauses: window.Pauses
    ) -> window.WindowPower:
        if not self.energy:
            return window.WindowPower(None, None, "", begin_s, end_s)
        return window.window_power(sampler, begin_s, end_s, rough=self is ROUGH, pauses=pauses)


GATES = {
    "operator": Gate(4.5, 0.35, 0.8, ahead=False),
    "variant": Gate(1.0, 1.0, 4.0, energy_share=0.5, pauses=True),
}
#: For the replay of a whole model: its interval is a part of the interval of the sum.
REPLAY = dataclasses.replace(GATES["operator"], span_s=0.5, energy_share=0.5, pauses=True)
#: For tuples of which a rough figure is enough (`Stopping.rough`): the end of a window waits for
#: little queued work.
ROUGH = Gate(math.inf, 0.0, 0.0, least_steps=1, queued_s=QUEUED_S / 3)
#: For tuples with tensors in slow memory: they have many configurations, so the farm measures only
#: time, without waits.
TIMED = Gate(math.inf, 0.0, 0.0, energy=False, shortest_s=0.1)
WHOLE_WINDOW_S = 1.0  # the shortest window of a whole model, if the request allows it
#: The window of a whole model on several cards may be so many times longer: its power alternates
#: between products and waits, and the sensor samples it ten times a second. Steps of a decoding on
#: two H100s scattered by 14 %.
GROUP_WINDOWS = 4
TURNS_S = 60.0  # on a CPU: longest expected time of subjects that are timed in turn
# after this time without a request for its reading, a timed subject is timed again
TIMED_FOR_S = 600.0

# Sensors that a good reading needs, except for energy: the reading has a power source and flags for
# it.
SENSORS = frozenset(
    {"power_instant_w", "sm_clock_mhz", "temperature_c", "throttle_reasons", "compute_processes"}
)


def silent(phase: str, details: dict[str, Any]) -> None:
    """An `on_phase` that does nothing."""


class CostLedger:
    """The seconds that each phase of a measurement took. If blocks are nested, time counts for the
    innermost name.
    """

    def __init__(self) -> None:
        self.cost_s: dict[str, float] = {}
        self._inner_s = 0.0  # time in the open block that other names were charged with

    def charge(self, name: str, seconds: float) -> None:
        """Add seconds of the open block to a name."""
        self.cost_s[name] = self.cost_s.get(name, 0.0) + seconds
        self._inner_s += seconds

    @contextlib.contextmanager
    def charged(self, name: str) -> Iterator[None]:
        """Add the time of the block to a name, without the time that the block itself charges to
        other names.
        """
        outer_s, self._inner_s = self._inner_s, 0.0
        began_s = time.perf_counter()
        try:
            yield
        finally:
            took_s = time.perf_counter() - began_s
            self.charge(name, took_s - self._inner_s)
            self._inner_s = outer_s + took_s


class Bench:
    """A card that is ready for measuring in this process.

    Create it before the process uses CUDA. The bench then creates the CUDA context, and a process
    id that appears on the card meanwhile is this process's (in a container NVML reports the id on
    the host). On a GPU the creating thread uses one stream from then on."""

    def __init__(
        self,
        device: Device,
        torch_device: torch.device | str,
        idle_power_w: float | None = None,
        canary_every: int | None = None,
        repeats: int | None = None,
        offload: Offload | None = None,
    ) -> None:
        """
        Args:
            idle_power_w: the idle power, if it is known.
            canary_every: tuples between two canaries, see `Canary`.
            repeats: how often to repeat a disturbed reading (`REPEATED`). The default is two on a
                GPU and none on a CPU, because its clock stands still while other processes use the
                core.
            offload: puts the tensors of a placement in slow memory; without it, protocols with a
                placement are refused.
        """
        self.device = device
        self.torch_device = torch.device(torch_device)
        self.cuda = self.torch_device.type == "cuda"
        self._stream = None
        before = device.compute_processes() or frozenset()
        index = self.torch_device.index or 0
        if self.cuda and torch.cuda.is_initialized() and torch._C._cuda_hasPrimaryContext(index):  # type: ignore[attr-defined]
            before = (
                frozenset()
            )  # this process already has a context, so its id is already on the card
        self.levels = PowerLevels(device, self.torch_device, idle_power_w)
        if self.cuda:
            torch.cuda.set_device(self.torch_device)
            self._stream = one_stream(self.torch_device)
            torch.zeros(1, device=self.torch_device).add_(1)
            torch.cuda.synchronize()
        else:
            torch.set_num_threads(
                1
            )  # a second thread would wait for a core whenever another program uses it
        self._host = device.card.kind == "cpu"
        self._timed: dict[
            tuple[str, str], HostTimer
        ] = {}  # by subject and protocol: timed in turn, not yet read
        if self._host:
            keep_memory()
        self.own_processes, known = own_processes(
            before, device.compute_processes() or frozenset(), os.getpid()
        )
        self.knows_processes = known or not self.cuda
        self._canary = Canary(self.torch_device, canary_every)
        self._queues = 1  # factor of the queued work: it grows if the host is slow
        self._repeats = (REPEATS if self.cuda else 0) if repeats is None else repeats
        self._offload = offload

    def load_libraries(self) -> None:
        """On a GPU, run a few operators: their libraries load and compile now, and not during the
        first items.
        """
        if self._stream is None:
            return
        with torch.cuda.stream(self._stream):
            other_operators(self.torch_device)
            image = torch.zeros(1, 8, 16, 16, device=self.torch_device)
            weight = torch.zeros(8, 8, 3, 3, device=self.torch_device)
            for dtype in (torch.float32, torch.bfloat16):
                torch.nn.functional.conv2d(image.to(dtype), weight.to(dtype), padding=1)
            torch.cuda.synchronize(self.torch_device)

    def measure(
        self, subject: Subject, protocol: Protocol, stopping: Stopping, on_phase: OnPhase = silent
    ) -> Reading:
        """Measure a subject. Half-widths in the reading are absolute. Raises `Unmeasurable`:
        out_of_memory, raised, rejected, not_capturable or not_available."""
        if self._host and ranks.world() == 1:
            return self._measure_on_host(subject, protocol, stopping, on_phase)
        begin_s = time.perf_counter()
        ledger = CostLedger()
        with contextlib.ExitStack() as stack:
            stack.enter_context(applied(protocol))
            if self._stream is not None:
                stack.enter_context(torch.cuda.stream(self._stream))
            workload: Workload | None = None
            canary = None

            def measure_canary(reference: Workload, wanted: Stopping) -> Reading:
                reading = self._steady(reference, wanted, GATES["operator"], silent)
                ledger.charge("canary_window", math.fsum(reading.cost_s.values()))
                return reading

            try:
                with ledger.charged("canary"):
                    self.levels.refresh()
                    if subject.kind == "operator" and not stopping.rough:
                        canary = self._canary.newest(measure_canary, on_phase)
                on_phase("rebuild", {})
                with ledger.charged("rebuild"):
                    workload = prepare(subject, protocol, self.torch_device, self._offload)
                if subject.kind == "variant":
                    minimum_s = max(stopping.minimum_s, min(WHOLE_WINDOW_S, stopping.maximum_s / 2))
                    maximum_s = stopping.maximum_s * (GROUP_WINDOWS if ranks.world() > 1 else 1)
                    stopping = dataclasses.replace(
                        stopping, minimum_s=minimum_s, maximum_s=maximum_s
                    )
                with ledger.charged("around"):
                    before = workload.written_sizes()
                    gate = (
                        ROUGH
                        if stopping.rough and subject.kind == "operator"
                        else GATES[subject.kind]
                    )
                    gate = TIMED if protocol.placement else gate
                    reading = self._steady_until_good(workload, stopping, gate, on_phase, ledger)
                    if _moved(before, workload.written_sizes()):
                        reading = reading.flagged("values_moved")
                reading = self._in_other_states(
                    reading, subject, protocol, stopping, workload, on_phase, ledger
                )
                if workload.passes is not None and isinstance(workload.passes.first, InPlacePass):
                    with ledger.charged("restoring"):
                        reading = reading.without(
                            self._restoring(workload.passes.first, protocol, stopping, gate)
                        )
                if subject.kind == "operator" and subject.spec.get("parameters", {}).get("beside"):
                    with ledger.charged("overlap"):
                        reading = self._with_overlap(reading, subject, protocol, stopping)
            except Unmeasurable:
                raise
            except Exception as error:  # any exception of PyTorch becomes the item's reason
                raise why_it_raised(error) from error
            finally:
                if workload is not None:
                    with ledger.charged("close"), contextlib.suppress(RuntimeError):
                        workload.close()
        if canary is not None:
            reading = with_canary(reading, canary)
        if self._host:
            reading = reading.noting(method=CPU_METHOD)
        cost_s = {**ledger.cost_s, "total": time.perf_counter() - begin_s}
        return dataclasses.replace(
            reading, cost_s={name: round(value, 4) for name, value in cost_s.items()}
        )

    def time_in_turn(
        self,
        subjects: Sequence[tuple[Subject, Protocol]],
        stopping: Stopping,
        calls: Sequence[int] = (),
        on_phase: OnPhase = silent,
    ) -> list[int]:
        """Time subjects on a CPU in turn. `measure` then returns their readings without timing them
        again.

        The first subjects that fit into half of the memory and the time (`TURNS_S`) are timed,
        without those that fail: `measure` raises their errors. Returns the positions of the timed
        subjects. If there is a whole model among the subjects, ``calls`` has the calls of each
        subject in it."""
        self._timed.clear()
        timers: dict[int, HostTimer] = {}
        on_phase("rebuild", {})
        least_free_bytes = free_bytes(self.torch_device) / 2  # at the end of the preparation
        for position, (subject, protocol) in enumerate(subjects):
            try:
                timers[position] = self._host_timer(subject, protocol, stopping)
            except Unmeasurable:
                continue
            timers[position].calls = calls[position] if calls else 1
            expected_s = math.fsum(timer.least_s for timer in timers.values())
            if expected_s > TURNS_S or free_bytes(self.torch_device) < least_free_bytes:
                break
        self._visit(list(timers.values()), on_phase)
        for position, timer in timers.items():
            subject, protocol = subjects[position]
            self._timed[subject.id, protocol.id] = timer
        return list(timers)

    def _host_timer(self, subject: Subject, protocol: Protocol, stopping: Stopping) -> HostTimer:
        begin_s = time.perf_counter()
        try:
            with applied(protocol):
                workload = prepare(subject, protocol, self.torch_device, self._offload)
        except Unmeasurable:
            raise
        except Exception as error:  # any exception of PyTorch becomes the item's reason
            raise why_it_raised(error) from error
        prepare_s = time.perf_counter() - begin_s
        return HostTimer(
            workload, protocol, stopping, subject.kind == "variant", prepare_s=prepare_s
        )

    def _visit(self, timers: Sequence[HostTimer], on_phase: OnPhase) -> None:
        """Time the subjects in turn, then free their tensors."""
        try:
            before = [timer.workload.written_sizes() for timer in timers]
            take_turns(timers, lambda: on_phase("window", {}))
            for timer, sizes in zip(timers, before, strict=True):
                timer.moved = _moved(sizes, timer.workload.written_sizes())
        finally:
            for timer in timers:
                timer.workload.close()

    def _measure_on_host(
        self, subject: Subject, protocol: Protocol, stopping: Stopping, on_phase: OnPhase
    ) -> Reading:
        """Measure on a CPU: the time by a `HostTimer`; then the power in a window, if the CPU has
        an energy counter.
        """
        begin_s = time.perf_counter()
        timer = self._timed.pop((subject.id, protocol.id), None)
        if timer is None or timer.stopping != stopping or begin_s - timer.ended_s > TIMED_FOR_S:
            on_phase("rebuild", {})
            timer = self._host_timer(subject, protocol, stopping)
            try:
                self._visit([timer], on_phase)
            except Exception as error:
                raise why_it_raised(error) from error
        reading = self._timed_reading(timer)
        gate = TIMED if protocol.placement else GATES[subject.kind]
        if gate.energy and "energy_counter_mj" in self.device.capabilities:
            self.levels.refresh()
            with (
                applied(protocol),
                contextlib.closing(prepare(subject, protocol, self.torch_device)) as workload,
            ):
                reading = window.with_power(
                    reading, self._steady(workload, stopping, gate, on_phase)
                )
        cost_s = {"rebuild": timer.prepare_s, **reading.cost_s}
        cost_s["total"] = math.fsum(cost_s.values())
        return dataclasses.replace(
            reading, cost_s={name: round(value, 4) for name, value in cost_s.items()}
        )

    def _timed_reading(self, timer: HostTimer) -> Reading:
        reading = window.SteadyWindow(
            workload=timer.workload,
            rounds=timer.rounds,
            power=window.WindowPower(None, None, "", 0.0, timer.elapsed_s),
            converged=timer.converged(),
            ceiling_s=timer.longest_s,
            waited_share=timer.waited_share,
            fastest_us=timer.time_us(),
        ).reading(
            self.levels,
            None,
            threads=torch.get_num_threads(),
            turns_group=timer.group,
            without_turn_us=tuple(timer.without_turn_us()),
        )
        return reading.flagged("values_moved") if timer.moved else reading

    def _in_other_states(
        self,
        reading: Reading,
        subject: Subject,
        protocol: Protocol,
        stopping: Stopping,
        workload: Workload,
        on_phase: OnPhase,
        ledger: CostLedger,
    ) -> Reading:
        """Add the further figures that apply: in bursts, launched eagerly, in the model's order,
        after other operators.

        A tuple that runs alone has other clocks and caches than in its model. The reading is valid
        without the figures: if one fails, the details say why. Bursts that fail, or an unusable
        CUDA context, raise."""
        assert workload.passes is not None
        device, passes = self.torch_device, workload.passes
        whole, pass_s = subject.kind == "variant", ranks.largest(reading.time_us / 1e6)
        in_context = self.cuda and protocol.measures_context
        counts_energy = "energy_counter_mj" in self.device.capabilities
        limited = bool(ranks.largest("throttled_power" in reading.flags and counts_energy))
        ordered = in_context and whole and passes.order is not None
        players: list[Player] = []

        def eager() -> dict[str, Any]:
            eager_us, half_width_us = eager_time_us(passes.first, device)
            return {"eager_time_us": eager_us, "eager_time_half_width_us": half_width_us}

        def places() -> dict[str, Any]:
            assert passes.order is not None
            capture = passes.order()
            players.append(ranks.together(lambda: Player(capture, device)))
            return {"places": time_in_order(players[0], pass_s)}

        def added() -> dict[str, Any]:
            if not players:
                return {}
            return {
                "added": time_added(players[0], pass_s),
                "looped_us": time_loops(players[0], pass_s),
            }

        def in_order() -> dict[str, Any]:  # if the places are missing, their reason tells why
            return self._replayed(players[0], protocol, stopping, pass_s) if players else {}

        def context() -> dict[str, Any]:
            others = other_operators(device)
            found = time_among_others(
                passes.first, passes.inputs, others, pass_s, device, rough=stopping.rough
            )
            return {"context": found}

        for phase, applies, figures, missing in (
            (
                "burst",
                limited and not whole,
                lambda: {"burst": measure_bursts(workload, self.device)},
                None,
            ),
            ("eager", self.cuda and whole and workload.replayed, eager, "eager_time_missing"),
            ("places", ordered, places, "places_missing"),
            ("added", ordered and ranks.world() > 1, added, "added_missing"),
            ("in_order", ordered and counts_energy and not limited, in_order, "in_order_missing"),
            ("context", in_context and not whole, context, "context_missing"),
        ):
            with ledger.charged(phase):
                if applies:
                    on_phase(phase, {})
                    reading = self._with_figures(reading, figures, missing)
        return reading

    def _replayed(
        self, player: Player, protocol: Protocol, stopping: Stopping, pass_s: float
    ) -> dict[str, Any]:
        """Measure the replay of a whole model's calls, and how much it depends on the addresses of
        the data.
        """
        steps = HostSteps.of(player.once, self.torch_device)
        with contextlib.closing(
            arrange(Passes(steps.around(player.once)), protocol, self.torch_device)
        ) as replay:
            one = self._steady_until_good(replay, stopping, REPLAY, silent, CostLedger())
        if one.energy_mj is None or UNLIKE_WHOLE & set(one.flags):
            return {"in_order_missing": f"flags of the replay: {', '.join(one.flags)}"}
        found = InOrder(**{name: getattr(one, name) for name in names_of(InOrder)})
        layouts = time_layouts(player, steps, pass_s) if ranks.world() == 1 else None
        return {"in_order": found, "layouts_half_width_us": layouts}

    def _with_overlap(
        self, reading: Reading, subject: Subject, protocol: Protocol, stopping: Stopping
    ) -> Reading:
        """Time a collective and the matrix product that runs beside it, each alone."""
        spec = parse(subject.spec)
        found: list[float] = []
        product = product_beside(spec, self.torch_device)
        assert product is not None
        for passes in (
            operator_passes(
                dataclasses.replace(subject, spec=alone(spec).to_json()),
                protocol,
                self.torch_device,
            ),
            Passes(product, None, 0, 0),
        ):
            with contextlib.closing(arrange(passes, protocol, self.torch_device)) as workload:
                one = self._steady(workload, stopping, TIMED, silent)
                if isinstance(passes.first, InPlacePass):
                    one = one.without(self._restoring(passes.first, protocol, stopping, TIMED))
                found.append(one.time_us)
        return reading.noting(overlap=Overlap.of(found[0], found[1], reading.time_us))

    def _restoring(
        self, call: InPlacePass, protocol: Protocol, stopping: Stopping, gate: Gate
    ) -> Reading:
        """Measure the copies that restore the inputs of a kernel or a collective.

        Copies on a card are much faster than those between cards, so a rough figure is enough for a
        collective."""
        if ranks.world() > 1 and gate.energy:
            stopping, gate = stopping.allowing(0.025), ROUGH
        workload = arrange(Passes(call.restore), protocol, self.torch_device)
        with contextlib.closing(workload):
            reading = self._steady(workload, stopping, gate, silent)
        return dataclasses.replace(
            reading, flags=tuple(flag for flag in reading.flags if flag != "rough")
        )

    def _with_figures(
        self, reading: Reading, figures: Callable[[], dict[str, Any]], missing: str | None
    ) -> Reading:
        """Add figures to the details. If they fail, add the error as `missing`; raise it if
        `missing` is None, or if other ranks do not fail."""
        try:
            return reading.noting(**figures())
        except Exception as error:
            if missing is None or not ranks.failed_everywhere():
                raise
            torch.cuda.synchronize(self.torch_device)
            return reading.noting(
                **{missing: f"{type(error).__name__}: {error_text(error)}".split("\n")[0][:200]}
            )

    def _steady_until_good(
        self,
        workload: Workload,
        stopping: Stopping,
        gate: Gate,
        on_phase: OnPhase,
        ledger: CostLedger,
    ) -> Reading:
        for attempt in itertools.count():
            reading = self._steady(workload, stopping, gate, on_phase)
            for name, seconds in reading.cost_s.items():
                ledger.charge(name, seconds)
            poor = REPEATED & set(reading.flags)
            if not ranks.largest(bool(poor)) or attempt == self._repeats:
                break
            if "throttled_thermal" in poor:
                time.sleep(1.0)  # let the card cool
            if ranks.largest("starved" in poor):
                self._queues = min(MOST_QUEUES, 2 * self._queues)
        return reading.noting(attempts=attempt + 1 if attempt else None)

    def _steady(
        self, workload: Workload, stopping: Stopping, gate: Gate, on_phase: OnPhase
    ) -> Reading:
        # The farm's other processes on the card are idle: the processes of its worker and of a
        # group take turns.
        farms = self.own_processes | registered_processes()
        clock = Clock(workload, self._queues * gate.queued_s)
        on_phase("warm-up", {})
        with Sampler(self.device, farms) as sampler:
            start_s = time.perf_counter()
            clock.step()
            while ranks.largest(time.perf_counter() - start_s < stopping.warm_up_s):
                clock.step()
            until_s = start_s + min(
                gate.ceiling_s, 1.5 * stopping.maximum_s
            )  # short windows have short waits
            if gate.pauses and sampler.counts_energy and self._may_pause(workload):
                clock.pauses = not sampler.window(start_s, time.perf_counter()).throttled(
                    "power_cap"
                )
            slope_c_per_s = (
                self._settle(clock, sampler, gate, start_s, until_s) if gate.ahead else None
            )
            clock.pauses &= not sampler.window(start_s, time.perf_counter()).throttled("power_cap")
            begin_s = self._window_begin(clock, sampler, gate)
            on_phase("window", {})
            settled_s = until_s + stopping.minimum_s
            converged, begin_s = self._run_window(
                clock, sampler, begin_s, stopping, gate, settled_s
            )
            end_s = time.perf_counter()
            if not gate.ahead:
                slope_c_per_s = sampler.temperature_slope_c_per_s(
                    max(start_s, end_s - gate.span_s), end_s
                )
            clock.finish()
            pauses = self._pauses(clock)
            power = gate.power(sampler, begin_s, end_s, pauses)
        rounds = (
            clock.between(power.begin_s, power.end_s)
            or clock.between(begin_s, math.inf)
            or clock.done[-1:]
        )
        seen = sampler.window(power.begin_s, power.end_s)
        capabilities = self.device.capabilities
        known = capabilities - (frozenset() if self.knows_processes else {"compute_processes"})
        steady = window.SteadyWindow(
            workload=workload,
            rounds=rounds,
            power=power,
            seen=seen,
            converged=converged,
            ceiling_s=stopping.maximum_s,
            warm_up_s=begin_s - start_s,
            warm_up_slope_c_per_s=slope_c_per_s,
            unsettled="temperature_c" in capabilities
            and gate.energy
            and gate is not ROUGH
            and (slope_c_per_s is None or abs(slope_c_per_s) > gate.slope_c_per_s),
            rough=gate is ROUGH,
            foreign=sampler.foreign_processes(start_s, math.inf)
            | ((self.device.compute_processes() or frozenset()) - farms),
            lacking=tuple(sorted(SENSORS - known)) if self.device.card.kind == "cuda" else (),
        )
        return steady.reading(
            self.levels,
            sampler.trace((power.begin_s, power.end_s)),
            threads=None if self.cuda else torch.get_num_threads(),
            paused_share=round(pauses.share(power.begin_s, power.end_s), 4) or None,
            sampler_busy_share=round(
                sampler.busy_s / max(1e-9, time.perf_counter() - sampler.began_s), 4
            ),
        )

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
        self, clock: Clock, sampler: Sampler, gate: Gate, start_s: float, until_s: float
    ) -> float | None:
        """Run rounds until the temperature is stable. Return its rate of change at the end (C/s);
        None if unknown.
        """
        if not ranks.largest("temperature_c" in self.device.capabilities):
            return None
        next_check_s = 0.0
        slope: float | None = None
        settled = False
        while True:
            now_s = time.perf_counter()
            if now_s >= next_check_s:
                next_check_s = now_s + 0.05
                if now_s - start_s >= gate.span_s:
                    slope = sampler.temperature_slope_c_per_s(now_s - gate.span_s, now_s)
                settled = (
                    slope is not None and abs(slope) <= gate.slope_c_per_s
                ) or now_s >= until_s
            if not ranks.largest(not settled):
                break
            clock.step()
        # If the wait was shorter than the span, use all of its samples.
        return sampler.temperature_slope_c_per_s(start_s, now_s) if slope is None else slope

    def _window_begin(self, clock: Clock, sampler: Sampler, gate: Gate) -> float:
        """Run rounds until the energy counter changes. Return that time; without a counter, return
        the present time.
        """
        now_s = time.perf_counter()
        if not ranks.largest(sampler.counts_energy and gate.energy):
            return now_s
        begin_s: float | None = None
        while ranks.largest(begin_s is None and time.perf_counter() - now_s < 1.0):
            clock.step()
            seen, _ = sampler.ticks(now_s)
            begin_s = next(
                (
                    one_s
                    for one_s, at in zip(seen, sampler.regular(seen), strict=True)
                    if at > now_s
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
        gate: Gate,
        settled_s: float,
    ) -> tuple[bool, float]:
        """Run rounds. Return True as soon as the stopping rule is met, False if the time is up
        before; and the begin of the window. It moves forward, until `settled_s` at the latest,
        while the chip's temperature changes too fast."""
        next_check_s = opened_s = begin_s
        minimum_s = min(gate.shortest_s, stopping.minimum_s)
        narrow = dataclasses.replace(
            stopping, energy_half_width=gate.energy_share * stopping.energy_half_width
        )
        waits = not gate.ahead and "temperature_c" in self.device.capabilities
        good = over = False
        while True:
            clock.step()
            now_s = time.perf_counter()
            if now_s >= next_check_s:
                next_check_s = now_s + 0.02
                over = self._is_over(clock, begin_s, opened_s, now_s, stopping)
                wanted = stopping if over or ranks.world() > 1 else narrow
                good = now_s - begin_s >= minimum_s and self._good_enough(
                    clock, sampler, begin_s, now_s, wanted, gate
                )
                if good and waits and now_s < settled_s:
                    slope = sampler.temperature_slope_c_per_s(now_s - gate.span_s, now_s)
                    good = slope is not None and abs(slope) <= gate.slope_c_per_s
                    begin_s = begin_s if good else max(begin_s, now_s - minimum_s)
            if not ranks.largest(not (good or over)):
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
        gate: Gate,
    ) -> bool:
        counts = gate.energy and sampler.counts_energy
        if counts and len(sampler.ticks(begin_s)[0]) <= gate.least_steps:
            return False
        power = gate.power(sampler, begin_s, now_s, self._pauses(clock))
        if counts and power.ticks is None:  # the steps of the counter do not suffice
            return False
        rounds = clock.between(power.begin_s, power.end_s)
        if len(rounds) < 3:
            return False
        time_us, half_width_us, _ = window.figure_of(rounds, power)
        time_share = intervals.relative(half_width_us, time_us)
        if time_share > stopping.time_half_width:
            return False
        if power.power_w is None:
            return True
        # The energy of a group is the sum over its n cards. The scatter of a sum grows with the
        # root of n, so the interval of each card may be wider by the root of n.
        enough = stopping.energy_half_width * math.sqrt(ranks.world())
        return math.hypot(time_share, power.relative) <= enough and abs(power.drift) <= window.DRIFT


def own_processes(
    before: frozenset[int], after: frozenset[int], pid: int
) -> tuple[frozenset[int], bool]:
    """The ids that NVML may report for this process, and True if they are certain.

    They are the ids that appeared while the process created its context: in a container NVML
    reports ids of the host."""
    appeared = after - before
    if pid in appeared:
        return frozenset({pid}), True
    return appeared | {pid}, len(appeared) == 1


def _moved(before: Sequence[float], after: Sequence[float]) -> bool:
    """True if the values of a written input have grown or shrunk too much, or are no longer
    finite.
    """
    return any(
        not math.isfinite(late) or not early / MOVED <= late <= max(early * MOVED, NOTHING)
        for early, late in zip(before, after, strict=True)
    )
