"""Checks of a card: a product with a known result, and the canary that shows what changes between
two tuples.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from farm.benchmark import checks
from farm.benchmark.bench import Bench
from farm.benchmark.workload import Workload
from farm.benchmark_process import server
from farm.types.details import CanaryNote
from farm.types.figure import Figure
from farm.types.protocol import Protocol, Stopping
from farm.types.reading import Reading
from tests.benchmark.fake_device import FakeDevice
from tests.benchmark.operators import linear

EAGER = Protocol(launch="eager")
SHORT = Stopping(
    warm_up_s=0.02, minimum_s=0.1, maximum_s=0.2, time_half_width=0.5, energy_half_width=0.5
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "SIZE", 64)
    monkeypatch.setattr(checks, "STOPPING", SHORT)


@pytest.mark.usefixtures("virtual_time", "small")
def test_the_reference_is_read_again_every_few_tuples() -> None:
    bench = Bench(FakeDevice(), "cpu", idle_power_w=80.0, canary_every=2)
    readings = [bench.measure(linear(8, 32, 32), EAGER, SHORT) for _ in range(3)]
    notes = [reading.details.canary for reading in readings]
    assert [note.number for note in notes] == [1, 1, 2]
    assert notes[0].time_change == 0
    change = notes[2].time_us.value / notes[0].time_us.value - 1
    assert notes[2].time_change == pytest.approx(change, abs=1e-4)
    inside = [reading.cost_s.get("canary_window", 0.0) for reading in readings]
    assert inside[0] > 0.1 < inside[2]
    assert inside[1] == 0
    assert all(reading.cost_s["canary"] >= 0 for reading in readings), (
        "its window is not charged twice"
    )


@pytest.mark.usefixtures("virtual_time", "small")
def test_a_reference_that_cannot_be_read_fails_no_tuple_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


@pytest.mark.usefixtures("virtual_time", "small")
def test_the_reference_is_the_same_for_jobs_with_other_numeric_flags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare, seen = checks.prepare_canary, []

    def notes(size: int, device: torch.device) -> Workload:
        seen.append(torch.backends.cuda.matmul.allow_tf32)
        return prepare(size, device)

    monkeypatch.setattr(checks, "prepare_canary", notes)
    bench = Bench(FakeDevice(), "cpu", idle_power_w=80.0, canary_every=1)
    for tf32 in (False, True):
        bench.measure(linear(8, 32, 32), Protocol(launch="eager", tf32=tf32), SHORT)
    assert seen == [False, False]


@pytest.mark.usefixtures("virtual_time", "small")
def test_a_disturbed_reference_is_read_again_and_none_is_held_against_one_that_stays_so() -> None:
    def reading(power_w: float, *flags: str) -> Reading:
        return dataclasses.replace(
            calm, energy_mj=Figure(power_w), power_w=Figure(power_w), flags=flags
        )

    calm = Bench(FakeDevice(), "cpu", idle_power_w=80.0).measure(linear(8, 32, 32), EAGER, SHORT)
    bird = checks.Canary(torch.device("cpu"), 1)
    given = iter([reading(440, "shared"), reading(440, "shared"), reading(550), reading(551)])
    notes = [bird.newest(lambda workload, stopping: next(given), lambda *_: None) for _ in range(3)]
    assert [note.flags for note in notes if note] == [("shared",), (), ()]
    assert notes[2] is not None
    assert notes[2].energy_change == pytest.approx(1 / 550, abs=1e-4)


@pytest.mark.usefixtures("virtual_time", "small")
def test_readings_around_a_changed_reference_are_flagged() -> None:
    reading = Bench(FakeDevice(), "cpu", idle_power_w=80.0).measure(linear(8, 32, 32), EAGER, SHORT)
    assert reading.details.canary is None, "a shared CPU has none"
    note = CanaryNote(Figure(10.0), number=1, time_change=0.0, energy_change=-0.04)
    assert "canary_off" in checks.with_canary(reading, note).flags
    assert (
        "canary_off"
        not in checks.with_canary(reading, dataclasses.replace(note, energy_change=None)).flags
    )


# ------------------------------------------------------------------------------------------ health
# check


def test_this_cpu_is_healthy():
    assert checks.HealthCheck(torch.device("cpu")).run() == ""


def test_a_wrong_product_is_found(monkeypatch):
    left, times = torch.Tensor.to, []

    def flipped(self, *arguments, **options):
        moved = left(self, *arguments, **options)
        if len(arguments) == 2:
            times.append(1)
            moved = moved.clone()
            moved[0, 0] += 1
        return moved

    monkeypatch.setattr(torch.Tensor, "to", flipped)
    assert "is wrong in" in checks.HealthCheck(torch.device("cpu")).run()
    assert times


def test_a_time_that_cannot_be_is_found():
    assert checks.implausible(0.01, "cpu") == ""
    assert "is plausible" in checks.implausible(1e-9, "cpu")
    assert "is plausible" in checks.implausible(60.0, "cpu")


def test_a_gpu_that_takes_as_long_as_a_cpu_crawls():
    assert checks.implausible(1e-5, "cuda") == ""
    assert checks.implausible(1e-3, "cuda") == "", "at the clock it rests at"
    assert "is plausible" in checks.implausible(0.01, "cuda")


def test_a_device_that_begins_to_fail_is_found_when_it_is_asked_again(monkeypatch):
    check = checks.HealthCheck(torch.device("cpu"))
    assert check.run() == ""
    product = torch.Tensor.__matmul__

    def off_by_one(left, right):
        found = product(left, right)
        found[3, 4] += 1
        return found

    monkeypatch.setattr(torch.Tensor, "__matmul__", off_by_one)
    assert "is wrong in 1 of" in check.run()


def test_a_process_checks_before_an_item_once_in_a_while(monkeypatch):
    asked = []

    class Watched(server.Runner):
        def unhealthy(self):
            asked.append(1)
            return ""

    runner = Watched()
    assert runner.check_due
    assert runner.check() == ""
    assert not runner.check_due
    later = server.time.monotonic() + server.CHECK_EVERY_S
    monkeypatch.setattr(server.time, "monotonic", lambda: later)
    assert runner.check_due
    assert asked == [1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_is_healthy_also_if_it_is_asked_again():
    check = checks.HealthCheck(torch.device("cuda:0"))
    assert check.run() == ""
    assert check.run() == ""
