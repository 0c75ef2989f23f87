"""The whole of a measurement, with real operators on the CPU and sensors that say what a test wants."""

from __future__ import annotations

import json

import pytest
import torch

from farm.benchmark import measure as measuring
from farm.benchmark.measure import Bench
from farm.benchmark.protocol import Protocol, Reading, Stopping, Subject, Variant
from farm.errors import Unmeasurable
from tests.benchmark.fake_device import FakeDevice
from tests.benchmark.operators import linear, product_that_does_not_fit, relu_in_place

EAGER = Protocol(launch="eager")
# Loose, because two cores are shared with other tests: what is tested is the rule, not this machine.
SHORT = Stopping(warm_up_s=0.05, minimum_s=0.1, maximum_s=0.4, time_half_width=0.5, energy_half_width=0.5)


def read(device: FakeDevice, subject: Subject | None = None, stopping: Stopping = SHORT) -> Reading:
    return Bench(device, "cpu", idle_power_w=80.0).measure(subject or linear(64, 256, 256), EAGER, stopping)


def test_a_reading_has_figures_intervals_units_and_where_the_time_went() -> None:
    reading = read(FakeDevice())
    assert reading.power_source == "energy_counter"
    assert reading.power_w == pytest.approx(300, rel=0.3)
    assert reading.energy_mj == pytest.approx(reading.power_w * reading.time_us * 1e-3)
    assert reading.time_half_width_us > 0
    assert reading.energy_half_width_mj is not None
    assert reading.idle_power_w == 80.0
    assert reading.energy_above_idle_mj == pytest.approx((reading.power_w - 80) * reading.time_us * 1e-3)
    assert reading.sm_clock_mhz == 1980
    assert set(reading.cost_s) == {"rebuild", "warm_up", "window", "burst", "kernels", "total"}
    assert Reading.from_json(json.loads(json.dumps(reading.to_json()))).to_json() == reading.to_json()


def test_the_window_begins_and_ends_on_ticks_of_the_counter() -> None:
    reading = read(FakeDevice(tick_s=0.03))
    assert reading.trace is not None
    begin_s, end_s = reading.trace.window_s
    ticks_s = reading.trace.series["energy_mj"][0]
    assert min(abs(begin_s - tick_s) for tick_s in ticks_s) < 1e-3
    assert min(abs(end_s - tick_s) for tick_s in ticks_s) < 1e-3
    assert reading.details["ticks"] > measuring.FLOOR_TICKS


def test_the_window_is_as_short_as_the_interval_allows_and_flagged_at_the_ceiling() -> None:
    impossible = Stopping(warm_up_s=0.05, minimum_s=0.1, maximum_s=0.4, time_half_width=1e-9, energy_half_width=1e-9)
    easy, hard = read(FakeDevice()), read(FakeDevice(), stopping=impossible)
    assert easy.window_s <= hard.window_s
    assert "not_converged" in hard.flags


def test_the_ramp_of_the_power_is_left_out_of_the_window() -> None:
    stopping = Stopping(warm_up_s=0.02, minimum_s=0.4, maximum_s=0.6, time_half_width=0.5, energy_half_width=0.5)
    device = FakeDevice()
    bench = Bench(device, "cpu", idle_power_w=80.0)
    begin_s = None

    def power_w(now_s: float) -> float:
        return 100.0 if begin_s is None or now_s < begin_s + 0.12 else 300.0

    device._power_w = power_w

    def on_phase(phase: str, details: object) -> None:
        nonlocal begin_s
        if phase == "warm-up":
            begin_s = measuring.time.perf_counter() - device.began_s

    reading = bench.measure(linear(64, 256, 256), EAGER, stopping, on_phase)
    assert reading.details["ramp_ticks_dropped"] >= 1
    assert reading.power_w == pytest.approx(300, rel=0.15)


def test_no_window_opens_before_the_temperature_holds_still() -> None:
    device = FakeDevice()
    moment = measuring.time.perf_counter
    hot_s = moment() + 0.8
    device.temperature_c = lambda: float(int(40 + 30 * (min(moment(), hot_s) - hot_s)))  # type: ignore[method-assign]
    reading = read(device, stopping=Stopping(**{**SHORT.to_json(), "maximum_s": 2.0}))
    assert reading.warm_up_s > 0.4
    assert abs(reading.details["warm_up_slope_c_per_s"]) < 30


def test_a_window_that_had_to_open_while_it_warmed_up_is_flagged() -> None:
    device = FakeDevice()
    device.temperature_c = lambda: 40 + 30 * measuring.time.perf_counter()  # type: ignore[method-assign]
    reading = read(device)
    assert "unsettled" in reading.flags
    assert reading.details["warm_up_slope_c_per_s"] == pytest.approx(30, rel=0.2)
    assert "unsettled" not in read(FakeDevice(lacks=frozenset({"temperature_c"}))).flags


def test_a_power_on_its_way_somewhere_has_a_wide_interval() -> None:
    still, rising = FakeDevice(), FakeDevice(power_w=lambda now_s: 300 * (1 + 0.2 * now_s))
    narrow, wide = read(still), read(rising)
    assert narrow.power_half_width_w is not None
    assert wide.power_half_width_w is not None
    assert wide.power_half_width_w / wide.power_w > narrow.power_half_width_w / narrow.power_w


def test_power_that_the_instant_sensor_does_not_confirm_is_flagged() -> None:
    assert "power_disagrees" in read(FakeDevice(instant_factor=1.1)).flags


@pytest.mark.parametrize(
    ("lacks", "source", "flag"),
    [
        ({"energy_counter_mj"}, "instant_power", "lesser_power_source"),
        ({"energy_counter_mj", "power_instant_w"}, "average_power", "lesser_power_source"),
        ({"energy_counter_mj", "power_instant_w", "power_average_w"}, "", "no_energy"),
    ],
)
def test_a_card_that_lacks_a_sensor_gives_a_lesser_source_and_a_flag(lacks: set[str], source: str, flag: str) -> None:
    reading = read(FakeDevice(lacks=frozenset(lacks)))
    assert reading.power_source == source
    assert flag in reading.flags
    if flag == "no_energy":
        assert (reading.power_w, reading.energy_mj, reading.energy_half_width_mj) == (None, None, None)
    else:
        assert reading.power_w == pytest.approx(300, rel=0.02)


@pytest.mark.parametrize(
    ("reason", "flag"),
    [("thermal", "throttled_thermal"), ("hardware_thermal", "throttled_thermal"), ("power_brake", "throttled_other")],
)
def test_throttling_is_in_the_reading(reason: str, flag: str) -> None:
    device = FakeDevice()
    device.reasons = (reason,)
    reading = read(device)
    assert flag in reading.flags
    assert reading.throttle_reasons == (reason,)


def test_at_the_power_limit_the_subject_is_read_in_bursts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "BURST_WINDOW_S", 0.2)
    device = FakeDevice(power_w=lambda _: 700.0)
    device.reasons = ("power_cap",)
    reading = read(device)
    assert "throttled_power" in reading.flags
    burst = reading.details["burst"]
    high, low = burst["duties"]
    assert high > low + 0.1
    # This device takes 700 W whatever happens, so working and pausing must both come out at that.
    assert burst["power_w"] == pytest.approx(700, rel=0.4)
    assert burst["pause_power_w"] == pytest.approx(700, rel=0.4)


def test_foreign_processes_are_flagged_and_our_own_is_not() -> None:
    device = FakeDevice()
    # Asked before the context is made, after it, before the window, after it.
    device.processes = [frozenset({5}), frozenset({5, 77}), frozenset({77}), frozenset({77})]
    assert "shared" not in read(device).flags
    device = FakeDevice()
    device.processes = [frozenset(), frozenset({77}), frozenset({77}), frozenset({77, 99})]
    reading = read(device)
    assert "shared" in reading.flags
    assert reading.details["foreign_processes"] == [99]


def test_an_operator_that_writes_its_input_stays_tame() -> None:
    assert read(FakeDevice(), relu_in_place(64, 1024)).time_us > 0


@pytest.mark.parametrize("residency", ["resident", "reuse", "stream"])
def test_every_residency_can_be_read(residency: str) -> None:
    protocol = Protocol(launch="eager", residency=residency)  # type: ignore[arg-type]
    reading = Bench(FakeDevice(), "cpu", 80.0).measure(linear(8, 512, 2048), protocol, SHORT)
    copies = reading.details["copies"]
    assert copies == 1 if residency == "reuse" else copies > 4


def test_a_whole_model_goes_through_the_same_code() -> None:
    variant = Variant("squeezenet1_1", 1, 64)
    reading = read(FakeDevice(), Subject("variant", variant.id, variant.to_json()))
    assert reading.power_source == "energy_counter"
    assert reading.details["copies"] == 1


def test_what_raises_is_unmeasurable_with_pytorchs_words() -> None:
    with pytest.raises(Unmeasurable, match="RuntimeError") as caught:
        read(FakeDevice(), product_that_does_not_fit())
    assert caught.value.reason == "raised"


def test_what_cannot_fit_is_refused_before_it_is_allocated() -> None:
    with pytest.raises(Unmeasurable) as caught:
        read(FakeDevice(), relu_in_place(2**20, 2**16))
    assert caught.value.reason == "out_of_memory"


def test_what_is_no_tuple_is_rejected() -> None:
    with pytest.raises(Unmeasurable) as caught:
        read(FakeDevice(), Subject("operator", "0" * 32, {"operator": "os.system"}))
    assert caught.value.reason == "rejected"


def test_numeric_flags_are_set_for_the_measurement_and_put_back() -> None:
    from farm.benchmark.workload import numeric_flags

    before = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    with numeric_flags(Protocol(tf32=True, cudnn_deterministic=True)):
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cudnn.allow_tf32
        assert torch.backends.cudnn.deterministic
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before
