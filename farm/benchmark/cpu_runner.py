"""Measures the items of a CPU. Its unit of work is a block of items that are timed in turn.

The life of a block: `time_in_turn` times all of its items, replacing the block before; `measure`
then hands out the reading of each item, once. An item that is in no block, or that waited for too
long, is a block of its own. docs/design/cpu-clock.md has the reasons."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Sequence

import torch

from farm.benchmark import window
from farm.benchmark.host_clock import HostTimer, keep_memory, take_turns
from farm.benchmark.host_places import HostPlaces
from farm.benchmark.passes import Offload, applied, free_bytes
from farm.benchmark.steady import Windows
from farm.benchmark.subjects import kind_of_subject, prepare
from farm.benchmark.workload import why_it_raised
from farm.errors import Unmeasurable
from farm.types.details import CallOrder
from farm.types.protocol import OnPhase, Protocol, Stopping
from farm.types.reading import Reading
from farm.types.subject import Subject

TURNS_S = 60.0  # longest expected time of a block
# after this time without a request for its reading, a timed subject is timed again
TIMED_FOR_S = 600.0


class CpuRunner:
    """Times blocks of items on a CPU, and keeps the results until they are asked for."""

    def __init__(
        self, torch_device: torch.device, windows: Windows, offload: Offload | None
    ) -> None:
        self._torch_device = torch_device
        self._windows = windows
        self._offload = offload
        # by subject and protocol: timed in turn, not yet handed out
        self._timed: dict[tuple[str, str], HostTimer] = {}
        keep_memory()

    def time_in_turn(
        self,
        subjects: Sequence[tuple[Subject, Protocol]],
        stopping: Stopping,
        calls: Sequence[int],
        on_phase: OnPhase,
    ) -> list[int]:
        """Time a block of subjects. See `farm.benchmark.bench.Bench.time_in_turn`."""
        self._timed.clear()
        timers: dict[int, HostTimer] = {}
        on_phase("rebuild", {})
        least_free_bytes = free_bytes(self._torch_device) / 2  # at the end of the preparation
        for position, (subject, protocol) in enumerate(subjects):
            try:
                timers[position] = self._timer(subject, protocol, stopping)
            except Unmeasurable:
                continue
            timers[position].calls = calls[position] if calls else 1
            expected_s = math.fsum(timer.least_s for timer in timers.values())
            if expected_s > TURNS_S or free_bytes(self._torch_device) < least_free_bytes:
                break

        _visit(list(timers.values()), on_phase)
        for position, timer in timers.items():
            subject, protocol = subjects[position]
            self._timed[subject.id, protocol.id] = timer
        return list(timers)

    def measure(
        self, subject: Subject, protocol: Protocol, stopping: Stopping, on_phase: OnPhase
    ) -> Reading:
        """The reading of a subject: its time from its block; then its power in a window, if the CPU
        has an energy counter.
        """
        timer = self._taken(subject, protocol, stopping)
        if timer is None:
            timer = self._timed_alone(subject, protocol, stopping, on_phase)
        reading = self._reading(timer)

        policy = kind_of_subject(subject, protocol).policy(protocol, stopping)
        if policy.energy and "energy_counter_mj" in self._windows.device.capabilities:
            self._windows.levels.refresh()
            with (
                applied(protocol),
                contextlib.closing(prepare(subject, protocol, self._torch_device)) as workload,
            ):
                steady = self._windows.measure(workload, stopping, policy, on_phase)
                reading = window.with_power(reading, steady)

        cost_s = {"rebuild": timer.prepare_s, **reading.cost_s}
        cost_s["total"] = math.fsum(cost_s.values())
        rounded_s = {name: round(value, 4) for name, value in cost_s.items()}
        return dataclasses.replace(reading, cost_s=rounded_s)

    def _taken(self, subject: Subject, protocol: Protocol, stopping: Stopping) -> HostTimer | None:
        """Take the result of a subject out of its block; None if there is none for this stopping
        rule, or it is too old.
        """
        asked_s = time.perf_counter()
        timer = self._timed.pop((subject.id, protocol.id), None)
        if timer is None or timer.stopping != stopping or asked_s - timer.ended_s > TIMED_FOR_S:
            return None
        return timer

    def _timed_alone(
        self, subject: Subject, protocol: Protocol, stopping: Stopping, on_phase: OnPhase
    ) -> HostTimer:
        on_phase("rebuild", {})
        timer = self._timer(subject, protocol, stopping)
        try:
            _visit([timer], on_phase)
        except Exception as error:
            raise why_it_raised(error) from error
        return timer

    def _timer(self, subject: Subject, protocol: Protocol, stopping: Stopping) -> HostTimer:
        begin_s = time.perf_counter()
        try:
            with applied(protocol):
                workload = prepare(subject, protocol, self._torch_device, self._offload)
        except Unmeasurable:
            raise
        except Exception as error:  # any exception of PyTorch becomes the item's reason
            raise why_it_raised(error) from error
        timer = HostTimer(
            workload,
            protocol,
            stopping,
            subject.whole,
            marks_modules=kind_of_subject(subject, protocol).marks_modules,
        )
        if subject.whole and protocol.residency == "resident":
            self._add_places(timer)
        timer.prepare_s = time.perf_counter() - begin_s
        return timer

    def _add_places(self, timer: HostTimer) -> None:
        """Prepare a replay of the calls of a whole model in order. The reading is valid without it,
        so a failure becomes a reason."""
        passes = timer.workload.passes
        if passes is None or passes.order is None:
            return
        try:
            with applied(timer.protocol):
                timer.places = HostPlaces(passes.order(), self._torch_device)
        except Exception as error:
            timer.places_missing = str(why_it_raised(error))

    def _reading(self, timer: HostTimer) -> Reading:
        steady = window.SteadyWindow(
            workload=timer.workload,
            rounds=timer.rounds,
            power=window.WindowPower(None, "", 0.0, timer.elapsed_s),
            converged=timer.converged(),
            ceiling_s=timer.longest_s,
            waited_share=timer.waited_share,
            fastest_us=timer.time_us(),
        )
        reading = steady.reading(self._windows.levels, None)
        details = reading.details
        timing = dataclasses.replace(
            details.timing,
            turns_group=timer.group,
            without_turn_us=tuple(timer.without_turn_us()),
            warm_us=timer.warm_us(),
            warm_without_turn_us=tuple(timer.without_turn_us(timer.warm_turns)) or None,
        )
        threads = torch.get_num_threads()
        launching = dataclasses.replace(details.launching, threads=threads)
        reading = reading.noting(timing=timing, launching=launching)
        if timer.places is not None:
            reading = reading.noting(order=CallOrder(places=timer.places.places()))
        elif timer.places_missing:
            reading = reading.lacking("places", timer.places_missing)
        return reading.flagged("values_moved") if timer.moved else reading


def _visit(timers: Sequence[HostTimer], on_phase: OnPhase) -> None:
    """Time the subjects in turn, then free their tensors."""
    try:
        before = [timer.workload.written_sizes() for timer in timers]
        take_turns(timers, lambda: on_phase("window", {}))
        for timer, sizes in zip(timers, before, strict=True):
            timer.moved = window.moved(sizes, timer.workload.written_sizes())
    finally:
        for timer in timers:
            timer.workload.close()
