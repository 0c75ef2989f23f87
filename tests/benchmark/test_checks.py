"""The reference operator that shows what changes on a card between two tuples."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from farm.benchmark import checks
from farm.benchmark.measure import Bench
from farm.benchmark.workload import Workload
from farm.types.protocol import Protocol, Stopping
from farm.types.reading import CanaryNote, Reading
from tests.benchmark.fake_device import FakeDevice
from tests.benchmark.operators import linear

pytestmark = pytest.mark.usefixtures("virtual_time", "small")

EAGER = Protocol(launch="eager")
SHORT = Stopping(warm_up_s=0.02, minimum_s=0.1, maximum_s=0.2, time_half_width=0.5, energy_half_width=0.5)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "SIZE", 64)
    monkeypatch.setattr(checks, "STOPPING", SHORT)


def test_the_reference_is_read_again_every_few_tuples() -> None:
    bench = Bench(FakeDevice(), "cpu", idle_power_w=80.0, canary_every=2)
    readings = [bench.measure(linear(8, 32, 32), EAGER, SHORT) for _ in range(3)]
    notes = [reading.details.canary for reading in readings]
    assert [note.number for note in notes] == [1, 1, 2]
    assert notes[0].time_change == 0
    assert notes[2].time_change == pytest.approx(notes[2].time_us / notes[0].time_us - 1, abs=1e-4)
    inside = [reading.cost_s.get("canary_window", 0.0) for reading in readings]
    assert inside[0] > 0.1 < inside[2]
    assert inside[1] == 0
    assert all(reading.cost_s["canary"] >= 0 for reading in readings), "its window is not charged twice"


def test_a_reference_that_cannot_be_read_fails_no_tuple_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, calls = checks.prepare_canary, 0

    def fails_at_first(size: int, device: torch.device) -> Workload:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise torch.OutOfMemoryError("another process has all of it")
        return prepare(size, device)

    monkeypatch.setattr(checks, "prepare_canary", fails_at_first)
    bench = Bench(FakeDevice(), "cpu", idle_power_w=80.0, canary_every=2)
    readings = [bench.measure(linear(8, 32, 32), EAGER, SHORT) for _ in range(2)]
    assert readings[0].details.canary is None
    assert readings[1].details.canary.number == 1


def test_the_reference_is_the_same_for_jobs_with_other_numeric_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, seen = checks.prepare_canary, []

    def notes(size: int, device: torch.device) -> Workload:
        seen.append(torch.backends.cuda.matmul.allow_tf32)
        return prepare(size, device)

    monkeypatch.setattr(checks, "prepare_canary", notes)
    bench = Bench(FakeDevice(), "cpu", idle_power_w=80.0, canary_every=1)
    for tf32 in (False, True):
        bench.measure(linear(8, 32, 32), Protocol(launch="eager", tf32=tf32), SHORT)
    assert seen == [False, False]


def test_a_disturbed_reference_is_read_again_and_none_is_held_against_one_that_stays_so() -> None:
    def reading(power_w: float, *flags: str) -> Reading:
        return dataclasses.replace(calm, energy_mj=power_w, power_w=power_w, flags=flags)

    calm = Bench(FakeDevice(), "cpu", idle_power_w=80.0).measure(linear(8, 32, 32), EAGER, SHORT)
    bird = checks.Canary(torch.device("cpu"), 1)
    given = iter([reading(440, "shared"), reading(440, "shared"), reading(550), reading(551)])
    notes = [bird.newest(lambda workload, stopping: next(given), lambda *_: None) for _ in range(3)]
    assert [note.flags for note in notes if note] == [("shared",), (), ()]
    assert notes[2] is not None
    assert notes[2].energy_change == pytest.approx(1 / 550, abs=1e-4)


def test_readings_around_a_changed_reference_are_flagged() -> None:
    reading = Bench(FakeDevice(), "cpu", idle_power_w=80.0).measure(linear(8, 32, 32), EAGER, SHORT)
    assert reading.details.canary is None, "a shared CPU has none"
    note = CanaryNote(1, 10.0, time_change=0.0, energy_change=-0.04)
    assert "canary_off" in checks.with_canary(reading, note).flags
    assert "canary_off" not in checks.with_canary(reading, dataclasses.replace(note, energy_change=None)).flags
