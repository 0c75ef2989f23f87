"""Time that passes only when work is done, so that what is tested is a rule and not the speed of
this machine.

Under `virtual_time` the benchmark's modules read one clock that stands still, but for sleeping and
for the passes of the measured operator, which last what the test says. The operators themselves are
real; the sampler is real too, except that the clock calls it where otherwise its thread would wake
up."""

from __future__ import annotations

import bisect
import dataclasses
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self

import pytest

from farm.benchmark import (
    bench,
    checks,
    clock,
    cost_ledger,
    fingerprinting,
    sampler,
    steady,
    subjects,
    workload,
)
from farm.devices.device import Device
from tests.benchmark import fake_device

Pass = Callable[[], object]


class VirtualTime:
    """The clock. `pass_s` is how long a pass lasts, give or take a random part of `jitter`
    (seeded).
    """

    def __init__(self, pass_s: float = 0.5e-3, jitter: float = 0.01) -> None:
        self.now_s = 1000.0
        self.pass_s, self.jitter = pass_s, jitter
        self._random = random.Random(0)
        self._due_s: dict[SteppedSampler, float] = {}
        self._work_s: list[tuple[float, float]] = []

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Let time pass; whoever is due meanwhile is called at its moment."""
        end_s = self.now_s + seconds
        while self._due_s:
            first = min(self._due_s, key=self._due_s.__getitem__)
            if self._due_s[first] > end_s:
                break
            self.now_s = max(self.now_s, self._due_s[first])
            self._due_s[first] = self.now_s + first._look()
        self.now_s = max(self.now_s, end_s)

    def timed(self, call: Pass) -> Pass:
        """The same call, lasting `pass_s`."""

        def run() -> object:
            result = call()
            lasts_s = self.pass_s * (1 + self.jitter * self._random.uniform(-1, 1))
            self._work_s.append((self.now_s, self.now_s + lasts_s))
            self.sleep(lasts_s)
            return result

        return run

    def sampler(
        self, device: Device, own_processes: frozenset[int] | None = None
    ) -> SteppedSampler:
        """A sampler on this clock."""
        return SteppedSampler(device, self, own_processes)

    def working(self, moment_s: float) -> bool:
        """Whether a pass ran at that moment."""
        index = bisect.bisect(self._work_s, (moment_s, float("inf"))) - 1
        return index >= 0 and moment_s < self._work_s[index][1]

    def add(self, stepped: SteppedSampler) -> None:
        self._due_s[stepped] = self.now_s

    def remove(self, stepped: SteppedSampler) -> None:
        self._due_s.pop(stepped, None)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put it in the place of `time` in the benchmark's modules and in the fake device."""
        stand_in = SimpleNamespace(perf_counter=self.perf_counter, sleep=self.sleep)
        timed = (bench, checks, clock, cost_ledger, fingerprinting, sampler, steady, workload)
        for module in (*timed, fake_device):
            monkeypatch.setattr(module, "time", stand_in)
        for module in (clock, fingerprinting, steady):
            monkeypatch.setattr(module, "Sampler", self.sampler)
        monkeypatch.setattr(subjects, "passes_of", self._timed_passes(subjects.passes_of))
        # makes those of the canary
        monkeypatch.setattr(workload, "Passes", self._timed_passes(workload.Passes))

    def _timed_passes(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any) -> Any:
            passes = make(*arguments)
            copy = passes.copy
            timed_copy = None if copy is None else lambda index: self.timed(copy(index))
            return dataclasses.replace(passes, first=self.timed(passes.first), copy=timed_copy)

        return made


class SteppedSampler(sampler.Sampler):
    """A sampler without a thread: the clock calls it when it would have woken up."""

    def __init__(
        self, device: Device, clock: VirtualTime, own_processes: frozenset[int] | None = None
    ) -> None:
        super().__init__(device, own_processes)
        self.clock = clock

    def __enter__(self) -> Self:
        self.began_s = self.clock.now_s
        if self.active:
            self.clock.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.clock.remove(self)
        super().__exit__()
