"""The reference operator that shows what changes on a card between two tuples."""

from __future__ import annotations

import pytest

from farm.benchmark import canary
from farm.benchmark.measure import Bench
from farm.benchmark.protocol import Protocol, Stopping
from tests.benchmark.fake_device import FakeDevice
from tests.benchmark.operators import linear

EAGER = Protocol(launch="eager")
SHORT = Stopping(warm_up_s=0.02, minimum_s=0.1, maximum_s=0.2, time_half_width=0.5, energy_half_width=0.5)


def test_the_reference_is_read_again_every_few_tuples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "SIZE", 64)
    monkeypatch.setattr(canary, "STOPPING", SHORT)
    bench = Bench(FakeDevice(), "cpu", idle_power_w=80.0, canary_every=2)
    readings = [bench.measure(linear(8, 32, 32), EAGER, SHORT) for _ in range(3)]
    notes = [reading.details["canary"] for reading in readings]
    assert [note["number"] for note in notes] == [1, 1, 2]
    assert notes[0]["time_change"] == 0
    assert notes[2]["time_change"] == pytest.approx(notes[2]["time_us"] / notes[0]["time_us"] - 1, abs=1e-4)
    inside = [reading.cost_s.get("canary_window", 0.0) for reading in readings]
    assert inside[0] > 0.1 < inside[2]
    assert inside[1] == 0
    assert all(reading.cost_s["canary"] >= 0 for reading in readings), "its window is not charged twice"


def test_readings_around_a_changed_reference_are_flagged() -> None:
    reading = Bench(FakeDevice(), "cpu", idle_power_w=80.0).measure(linear(8, 32, 32), EAGER, SHORT)
    assert "canary" not in reading.details, "a shared CPU has none"
    note = {"time_change": 0.0, "energy_change": -0.04}
    assert "canary_off" in canary.with_canary(reading, note).flags
    assert "canary_off" not in canary.with_canary(reading, {**note, "energy_change": None}).flags
