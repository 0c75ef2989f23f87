"""A measurement with the machine's own clock and the sampler's own thread, whatever else the
machine does meanwhile.
"""

from __future__ import annotations

import time

import pytest

from farm.benchmark.bench import Bench
from farm.types.protocol import Protocol, Stopping
from farm.types.subject import Subject
from farm.types.variant import Variant
from tests.benchmark.fake_device import FakeDevice
from tests.benchmark.operators import linear

EAGER = Protocol(launch="eager")
SHORT = Stopping(
    warm_up_s=0.05, minimum_s=0.1, maximum_s=0.4, time_half_width=0.5, energy_half_width=0.5
)


@pytest.mark.parametrize(
    "subject",
    [
        linear(64, 256, 256),
        Subject("variant", (variant := Variant("squeezenet1_1", 1, 64)).id, variant.to_json()),
    ],
)
def test_a_reading_tells_what_the_clock_and_the_sensors_told(subject: Subject) -> None:
    device = FakeDevice(power_w=lambda _: 300.0)
    begin_s = time.perf_counter()
    reading = Bench(device, "cpu", idle_power_w=80.0).measure(subject, EAGER, SHORT)
    took_s = time.perf_counter() - begin_s
    assert reading.power_source == "energy_counter"
    assert 0 < reading.time_us.value * reading.passes * 1e-6 <= took_s
    assert 0 < reading.window_s <= took_s
    assert (
        0 < sum(reading.cost_s[name] for name in ("rebuild", "warm_up", "window")) <= took_s + 1e-3
    )
    energy_mj = reading.power_w.value * reading.time_us.value * 1e-3
    assert reading.energy_mj.value == pytest.approx(energy_mj)
    assert reading.trace is not None
    assert len(reading.trace.series["energy_mj"][0]) > 2
