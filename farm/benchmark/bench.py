"""Measure one subject under one protocol on one card.

`Bench` is a card that is ready for measuring: the device, its idle and base power, the process ids
of the benchmark. `Bench.measure` makes a complete measurement, of a tuple or of a whole model: the
canary, the window (`farm.benchmark.steady`) by its policy (`farm.benchmark.policies`), then the
phases that apply (`farm.benchmark.phases`). A CPU has its own runner (`farm.benchmark.cpu_runner`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Sequence

import torch

from farm.benchmark import ranks, window
from farm.benchmark.cache import other_operators
from farm.benchmark.checks import Canary, with_canary
from farm.benchmark.cost_ledger import CostLedger
from farm.benchmark.cpu_runner import CpuRunner
from farm.benchmark.passes import Offload, applied
from farm.benchmark.phases.base import Measurement
from farm.benchmark.policies import POLICIES
from farm.benchmark.sampler import PowerLevels
from farm.benchmark.steady import Windows, silent
from farm.benchmark.subjects import kind_of_subject, passes_of, prepare
from farm.benchmark.subjects.base import SubjectKind
from farm.benchmark.torch_device import one_stream
from farm.benchmark.workload import Workload, why_it_raised
from farm.devices.device import Device
from farm.errors import Unmeasurable
from farm.types.details import CanaryNote
from farm.types.protocol import OnPhase, Protocol, Stopping
from farm.types.reading import CPU_METHOD, Reading
from farm.types.subject import Subject

# how often to repeat a reading that a hot card, other processes, drift or a slow host disturbed
REPEATS = 2

# `Reading.cost_s` names these phases even if they do not apply
IN_EVERY_COST = ("burst", "eager", "places", "added", "in_order", "context")


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
            offload: puts tensors in slow memory; without it, protocols with slow tensors are
                refused.
        """
        self.device = device
        self.torch_device = torch.device(torch_device)
        self.cuda = self.torch_device.type == "cuda"
        self._stream = None
        before = device.compute_processes() or frozenset()
        if self.cuda and has_context(self.torch_device.index or 0):
            before = frozenset()  # the id of this process is already on the card
        self.levels = PowerLevels(device, self.torch_device, idle_power_w)
        if self.cuda:
            torch.cuda.set_device(self.torch_device)
            self._stream = one_stream(self.torch_device)
            torch.zeros(1, device=self.torch_device).add_(1)
            torch.cuda.synchronize()
        else:
            # a second thread would wait for a core whenever another program uses it
            torch.set_num_threads(1)
        self._host = device.card.is_cpu
        self.own_processes, certain = own_processes(
            before, device.compute_processes() or frozenset(), os.getpid()
        )
        self.knows_processes = certain or not self.cuda
        self._canary = Canary(self.torch_device, canary_every)
        self._offload = offload
        if repeats is None:
            repeats = REPEATS if self.cuda else 0
        self.windows = Windows(
            device,
            self.torch_device,
            self.levels,
            self.own_processes,
            knows_processes=self.knows_processes,
            repeats=repeats,
        )
        self._cpu = CpuRunner(self.torch_device, self.windows, offload) if self._host else None

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
        """Measure a subject: on a CPU as `CpuRunner` does, else its canary, passes, window and
        phases in this order. Half-widths in the reading are absolute. Raises `Unmeasurable`:
        out_of_memory, raised, rejected, not_capturable or not_available."""
        if self._cpu is not None and ranks.world() == 1:
            return self._cpu.measure(subject, protocol, stopping, on_phase)
        begin_s = time.perf_counter()
        ledger = CostLedger()
        with contextlib.ExitStack() as stack:
            stack.enter_context(applied(protocol))
            if self._stream is not None:
                stack.enter_context(torch.cuda.stream(self._stream))
            workload: Workload | None = None
            try:
                with ledger.charged("canary"):
                    kind = kind_of_subject(subject, protocol)
                    canary = self._newest_canary(kind, stopping, on_phase, ledger)
                on_phase("rebuild", {})
                with ledger.charged("rebuild"):
                    workload = prepare(subject, protocol, self.torch_device, self._offload)
                reading = self._by_phases(workload, subject, protocol, stopping, on_phase, ledger)
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
        ledger.cost_s["total"] = time.perf_counter() - begin_s
        cost_s = {name: round(seconds, 4) for name, seconds in ledger.cost_s.items()}
        return dataclasses.replace(reading, cost_s=cost_s)

    def time_in_turn(
        self,
        subjects: Sequence[tuple[Subject, Protocol]],
        stopping: Stopping,
        calls: Sequence[int] = (),
        on_phase: OnPhase = silent,
    ) -> list[int]:
        """Time subjects on a CPU in turn. `measure` then returns their readings without timing them
        again.

        The first subjects that fit into half of the memory and the time (`cpu_runner.TURNS_S`) are
        timed, without those that fail: `measure` raises their errors. Returns the positions of the
        timed subjects. If there is a whole model among the subjects, ``calls`` has the calls of
        each subject in it."""
        if self._cpu is None:
            raise Unmeasurable(
                "not_available", f"A {self.device.card.kind} card cannot time items in turn."
            )
        return self._cpu.time_in_turn(subjects, stopping, calls, on_phase)

    def _newest_canary(
        self, kind: SubjectKind, stopping: Stopping, on_phase: OnPhase, ledger: CostLedger
    ) -> CanaryNote | None:
        """The newest canary; None if readings of this kind have none."""

        def measure_canary(reference: Workload, rule: Stopping) -> Reading:
            reading = self.windows.measure(reference, rule, POLICIES["operator"], silent)
            ledger.charge("canary_window", math.fsum(reading.cost_s.values()))
            return reading

        self.levels.refresh()
        if not kind.has_canary(stopping):
            return None
        return self._canary.newest(measure_canary, on_phase)

    def _by_phases(
        self,
        workload: Workload,
        subject: Subject,
        protocol: Protocol,
        stopping: Stopping,
        on_phase: OnPhase,
        ledger: CostLedger,
    ) -> Reading:
        """Measure the window, then run the phases that apply."""
        kind = kind_of_subject(subject, protocol)
        phases = kind.phases(subject)
        stopping = kind.stopping(stopping, ranks.world())
        policy = kind.policy(protocol, stopping)
        with ledger.charged("around"):
            before = workload.written_sizes()
            reading = self.windows.measure_until_good(workload, stopping, policy, on_phase, ledger)
            if window.moved(before, workload.written_sizes()):
                reading = reading.flagged("values_moved")

        counts_energy = "energy_counter_mj" in self.device.capabilities
        pass_s = ranks.largest(reading.time_us.value / 1e6)
        limited = ranks.some("throttled_power" in reading.flags and counts_energy)
        measurement = Measurement(
            subject,
            protocol,
            stopping,
            policy,
            workload,
            self.windows,
            pass_s,
            limited,
            build=lambda other: passes_of(other, protocol, self.torch_device),
        )
        for name in IN_EVERY_COST:
            ledger.charge(name, 0.0)
        for phase in phases:
            if not phase.applies(measurement):
                continue
            with ledger.charged(phase.name):
                if phase.announced:
                    on_phase(phase.name, {})
                reading = phase.run(measurement, reading)
        return reading


def has_context(index: int) -> bool:
    """True if this process already has a CUDA context on a card."""
    if not torch.cuda.is_initialized():
        return False
    return bool(torch._C._cuda_hasPrimaryContext(index))  # type: ignore[attr-defined]


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
