"""The whole of a measurement, with real operators on the CPU, sensors that say what a test wants,
and time that passes as it says (`tests.benchmark.virtual_time`). In real time:
`test_measure_in_real_time.py`."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
import torch

from farm.benchmark.bench import Bench, own_processes
from farm.benchmark.clock import DUTIES
from farm.benchmark.phases.base import with_figures
from farm.benchmark.policies import FLOOR_TICKS
from farm.benchmark.window import FIRST_STEP
from farm.devices.lock import register_process
from farm.errors import Unmeasurable
from farm.settings import settings
from farm.types.details import Details
from farm.types.protocol import Protocol, Stopping
from farm.types.reading import Reading
from farm.types.subject import Subject
from farm.types.tuple import OperatorTuple, TensorSpec
from farm.types.variant import Variant
from tests.benchmark.fake_device import FakeDevice
from tests.benchmark.operators import (
    linear,
    product_that_does_not_fit,
    product_with_no_room,
    relu_in_place,
    subject,
)
from tests.benchmark.virtual_time import VirtualTime

EAGER = Protocol(launch="eager")
pytestmark = pytest.mark.usefixtures("virtual_time")
SHORT = Stopping(
    warm_up_s=0.05, minimum_s=0.1, maximum_s=0.4, time_half_width=0.5, energy_half_width=0.5
)


def read(device: FakeDevice, what: Subject | None = None, stopping: Stopping = SHORT) -> Reading:
    return Bench(device, "cpu", idle_power_w=80.0).measure(
        what or linear(16, 64, 64), EAGER, stopping
    )


def test_a_reading_has_figures_intervals_units_and_where_the_time_went(
    virtual_time: VirtualTime,
) -> None:
    reading = read(FakeDevice())
    assert reading.time_us.value == pytest.approx(virtual_time.pass_s * 1e6, rel=0.002)
    assert 0 < reading.time_us.relative < 0.01
    assert reading.power_source == "energy_counter"
    assert reading.power_w.value == pytest.approx(300, rel=0.01)
    energy_mj = reading.power_w.value * reading.time_us.value * 1e-3
    assert reading.energy_mj.value == pytest.approx(energy_mj)
    assert reading.energy_mj.half_width > 0
    assert reading.idle_power_w == 80.0
    assert reading.sm_clock_mhz == 1980
    parts = {
        "canary",
        "rebuild",
        "warm_up",
        "window",
        "around",
        "burst",
        "eager",
        "places",
        "added",
        "in_order",
        "context",
        "close",
    }
    assert set(reading.cost_s) == parts | {"total"}
    assert sum(reading.cost_s[part] for part in parts) == pytest.approx(
        reading.cost_s["total"], rel=0.05
    )
    assert (
        Reading.from_json(json.loads(json.dumps(reading.to_json()))).to_json() == reading.to_json()
    )


def test_the_window_begins_and_ends_on_ticks_of_the_counter() -> None:
    reading = read(FakeDevice(tick_s=0.03))
    assert reading.trace is not None
    begin_s, end_s = reading.trace.window_s
    ticks_s = reading.trace.series["energy_mj"][0]
    assert min(abs(begin_s - tick_s) for tick_s in ticks_s) < 1e-3
    assert min(abs(end_s - tick_s) for tick_s in ticks_s) < 1e-3
    assert reading.details.powering.ticks > FLOOR_TICKS


def test_a_rough_reading_ends_with_the_first_step_of_the_counter_that_is_precise_enough() -> None:
    wanted, device = Stopping().allowing(0.05), FakeDevice(tick_s=0.1)
    unknown = read(device, stopping=wanted)
    assert unknown.details.powering.ticks > 2, "the period of the counter is not known yet"
    read(device, stopping=Stopping())
    reading = read(device, stopping=wanted)
    assert "rough" in reading.flags
    assert (reading.details.powering.ticks, reading.details.canary) == (2, None)
    assert reading.window_s < 0.15
    assert reading.energy_mj.relative == pytest.approx(FIRST_STEP, rel=0.02)
    narrower = read(FakeDevice(tick_s=0.1), stopping=Stopping().allowing(0.02))
    assert narrower.details.powering.ticks > 2
    assert "rough" not in read(FakeDevice(tick_s=0.1), stopping=Stopping().allowing(0.01)).flags


def test_the_window_is_as_short_as_the_interval_allows_and_flagged_at_the_ceiling() -> None:
    impossible = Stopping(
        warm_up_s=0.05, minimum_s=0.1, maximum_s=0.4, time_half_width=1e-9, energy_half_width=1e-9
    )
    easy, hard = read(FakeDevice()), read(FakeDevice(), stopping=impossible)
    tick_s = 0.02
    assert easy.window_s < 0.1 + FLOOR_TICKS * tick_s
    assert "not_converged" not in easy.flags
    assert abs(hard.window_s - 0.4) <= 2 * tick_s
    assert "not_converged" in hard.flags


def test_a_window_goes_on_until_times_that_scatter_are_known_well_enough(
    virtual_time: VirtualTime,
) -> None:
    stopping = Stopping(
        warm_up_s=0.05, minimum_s=0.1, maximum_s=20.0, time_half_width=0.01, energy_half_width=0.05
    )
    steady = read(FakeDevice(), stopping=stopping)
    virtual_time.jitter = 0.9
    scattered = read(FakeDevice(), stopping=stopping)
    assert scattered.window_s > 2 * steady.window_s
    assert scattered.time_us.relative <= 0.0101
    assert "not_converged" not in scattered.flags


def test_the_ramp_of_the_power_is_left_out_of_the_window(virtual_time: VirtualTime) -> None:
    stopping = Stopping(
        warm_up_s=0.02, minimum_s=0.4, maximum_s=0.6, time_half_width=0.5, energy_half_width=0.5
    )
    began_s = virtual_time.now_s
    window_s = float("inf")
    device = FakeDevice(power_w=lambda now_s: 100.0 if began_s + now_s < window_s + 0.05 else 300.0)

    def on_phase(phase: str, details: object) -> None:
        nonlocal window_s
        if phase == "window":
            window_s = virtual_time.now_s

    bench = Bench(device, "cpu", idle_power_w=80.0)
    reading = bench.measure(linear(16, 64, 64), EAGER, stopping, on_phase)
    assert reading.details.powering.ramp_ticks_dropped >= 2
    assert reading.power_w.value == pytest.approx(300, rel=0.01)


def test_a_window_does_not_contain_the_time_in_which_the_temperature_rises(
    virtual_time: VirtualTime,
) -> None:
    device = FakeDevice()
    hot_s = virtual_time.now_s + 0.5
    device.temperature_c = lambda: float(int(40 + 30 * (min(virtual_time.now_s, hot_s) - hot_s)))  # type: ignore[method-assign]
    reading = read(device, stopping=Stopping(**{**SHORT.to_json(), "maximum_s": 2.0}))
    assert reading.warm_up_s > 0.4
    assert abs(reading.details.conditions.warm_up_slope_c_per_s) < 4.5


def test_a_window_that_had_to_open_while_it_warmed_up_is_flagged(virtual_time: VirtualTime) -> None:
    device = FakeDevice()
    device.temperature_c = lambda: 40 + 30 * virtual_time.now_s  # type: ignore[method-assign]
    reading = read(device)
    assert "unsettled" in reading.flags
    assert reading.details.conditions.warm_up_slope_c_per_s == pytest.approx(30, rel=0.01)
    assert "unsettled" not in read(FakeDevice(lacks=frozenset({"temperature_c"}))).flags


def test_a_wait_too_short_to_tell_the_slope_by_its_span_goes_by_what_there_is(
    virtual_time: VirtualTime,
) -> None:
    device = FakeDevice()
    device.temperature_c = lambda: 40 + 30 * virtual_time.now_s  # type: ignore[method-assign]
    reading = read(
        device, stopping=Stopping(**{**SHORT.to_json(), "maximum_s": 0.15})
    )  # a wait of 0.225 s
    assert "unsettled" in reading.flags
    assert reading.details.conditions.warm_up_slope_c_per_s == pytest.approx(30, rel=0.01)


def test_a_power_on_its_way_somewhere_has_a_wide_interval() -> None:
    still, rising = FakeDevice(), FakeDevice(power_w=lambda now_s: 300 * (1 + 0.2 * now_s))
    narrow, wide = read(still), read(rising)
    assert wide.power_w.relative > narrow.power_w.relative


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
def test_a_card_that_lacks_a_sensor_gives_a_lesser_source_and_a_flag(
    lacks: set[str], source: str, flag: str
) -> None:
    reading = read(FakeDevice(lacks=frozenset(lacks)))
    assert reading.power_source == source
    assert flag in reading.flags
    if flag == "no_energy":
        assert (reading.power_w, reading.energy_mj) == (None, None)
    else:
        assert reading.power_w.value == pytest.approx(300, rel=0.02)


@pytest.mark.parametrize(
    ("reason", "flag"),
    [
        ("thermal", "throttled_thermal"),
        ("hardware_thermal", "throttled_thermal"),
        ("power_brake", "throttled_other"),
    ],
)
def test_throttling_is_in_the_reading(reason: str, flag: str) -> None:
    device = FakeDevice()
    device.reasons = (reason,)
    reading = read(device)
    assert flag in reading.flags
    assert reading.throttle_reasons == (reason,)


def test_at_the_power_limit_the_subject_is_read_in_bursts_too_and_the_pauses_are_subtracted(
    virtual_time: VirtualTime,
) -> None:
    began_s = virtual_time.now_s
    device = FakeDevice(
        power_w=lambda now_s: 600.0 if virtual_time.working(began_s + now_s) else 120.0
    )
    device.reasons = ("power_cap",)
    reading = read(device)
    assert "throttled_power" in reading.flags
    burst = reading.details.burst
    assert burst.duties == pytest.approx(DUTIES, rel=0.02)
    assert burst.power_w.value == pytest.approx(600, rel=0.02)
    assert burst.pause_power_w == pytest.approx(120, rel=0.1)
    assert burst.time_us.value == pytest.approx(virtual_time.pass_s * 1e6, rel=0.01)
    assert burst.energy_mj.value == pytest.approx(burst.power_w.value * burst.time_us.value * 1e-3)


def test_foreign_processes_are_flagged_and_our_own_is_not() -> None:
    device = FakeDevice()
    # Asked before the context is made, after it, before the window, after it.
    device.processes = [frozenset({5}), frozenset({5, 77}), frozenset({77}), frozenset({77})]
    assert "shared" not in read(device).flags
    device = FakeDevice()
    device.processes = [frozenset(), frozenset({77}), frozenset({77}), frozenset({77, 99})]
    reading = read(device)
    assert "shared" in reading.flags
    assert reading.details.conditions.foreign_processes == (99,)


def test_idle_processes_of_the_farm_on_the_card_are_not_foreign() -> None:
    device, other = FakeDevice(), FakeDevice()
    other.processes, other.card = (
        [frozenset(), frozenset({99})],
        dataclasses.replace(other.card, id="GPU-other"),
    )
    bench = Bench(other, "cpu", idle_power_w=80.0)
    register_process(other.card.id, bench.own_processes, settings().lock_dir)
    device.processes = [frozenset({99}), frozenset({77, 99}), frozenset({77, 99})]
    assert "shared" not in read(device).flags


def test_a_foreign_process_that_comes_and_goes_within_a_window_is_seen(
    virtual_time: VirtualTime,
) -> None:
    device = FakeDevice()
    begin_s = virtual_time.now_s
    # The window is open from a tenth of a second on, for half a second.
    inside = lambda: frozenset({99}) if 0.25 < virtual_time.now_s - begin_s < 0.55 else frozenset()  # noqa: E731
    device.compute_processes = inside  # type: ignore[method-assign]
    reading = read(
        device, stopping=Stopping(**{**SHORT.to_json(), "minimum_s": 0.8, "maximum_s": 1.0})
    )
    assert "shared" in reading.flags
    assert reading.trace is not None
    assert max(reading.trace.series["foreign_processes"][1]) == 1


def test_who_is_this_process_is_known_where_the_driver_shows_it_and_said_not_to_be_where_not() -> (
    None
):
    assert own_processes(frozenset({5}), frozenset({5, 77}), 1) == ({1, 77}, True), (
        "a container: an id of the host"
    )
    assert own_processes(frozenset(), frozenset({1, 99}), 1) == ({1}, True), (
        "99 came at the same moment"
    )
    assert own_processes(frozenset({1}), frozenset({1, 77}), 1) == ({1, 77}, True), (
        "the host has a process of our id"
    )
    assert own_processes(frozenset(), frozenset(), 1) == ({1}, False), (
        "a list that shows nobody shows no other either"
    )
    assert own_processes(frozenset(), frozenset({77, 99}), 1)[1] is False


def test_a_counter_that_stands_still_is_done_without() -> None:
    stopping = Stopping(**{**SHORT.to_json(), "maximum_s": 1.0})
    reading = read(FakeDevice(tick_s=1e9), stopping=stopping)
    assert reading.power_source == "instant_power"
    assert "not_converged" not in reading.flags


@pytest.mark.parametrize(("divisor", "moved"), [(0.9, True), (1.0, False)])
def test_values_that_grow_from_pass_to_pass_are_flagged(divisor: float, moved: bool) -> None:
    spec = OperatorTuple(
        operator="torch.Tensor.div_",
        kind="function",
        arguments=({"tensor": 0}, divisor),
        tensors=(TensorSpec("activation", "", (64, 64), "float32"),),
    )
    assert ("values_moved" in read(FakeDevice(), subject(spec)).flags) is moved


def test_a_poor_reading_is_taken_again_and_the_number_of_attempts_is_told() -> None:
    device = FakeDevice()
    calls = 0

    def processes() -> frozenset[int]:
        nonlocal calls
        calls += 1
        return (
            frozenset({99}) if calls in (3, 4) else frozenset()
        )  # before and within the first window

    device.compute_processes = processes  # type: ignore[method-assign]
    bench = Bench(device, "cpu", idle_power_w=80.0, repeats=2)
    reading = bench.measure(linear(16, 64, 64), EAGER, SHORT)
    assert reading.details.timing.attempts == 2
    assert "shared" not in reading.flags
    device.compute_processes = lambda: frozenset({99})  # type: ignore[method-assign]
    reading = bench.measure(linear(16, 64, 64), EAGER, SHORT)
    assert reading.details.timing.attempts == 3
    assert "shared" in reading.flags


@pytest.mark.parametrize(
    "lacks",
    ["compute_processes", "throttle_reasons", "temperature_c", "sm_clock_mhz", "power_instant_w"],
)
def test_a_card_that_lacks_a_sensor_for_judging_a_reading_gives_a_flag_that_says_so(
    lacks: str,
) -> None:
    reading = read(FakeDevice(lacks=frozenset({lacks})))
    assert "lacks_sensors" in reading.flags
    assert reading.details.conditions.lacks == (lacks,)
    assert "lacks_sensors" not in read(FakeDevice()).flags


def test_copies_that_do_not_exceed_the_cache_are_not_cold_and_said_not_to_be() -> None:
    stream = Protocol(launch="eager", residency="stream")
    reading = Bench(FakeDevice(), "cpu", idle_power_w=80.0).measure(linear(4, 8, 8), stream, SHORT)
    assert "not_cold" in reading.flags
    assert "not_cold" not in read(FakeDevice()).flags


def test_what_fails_beside_a_good_reading_costs_no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(FakeDevice(), "cpu", idle_power_w=80.0)
    reading = bench.measure(linear(16, 64, 64), EAGER, SHORT)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def fails() -> Details:
        raise torch.OutOfMemoryError("no room\nand more")

    kept = with_figures(reading, fails, "eager_time", bench.torch_device)
    assert kept.details.missing == {"eager_time": "OutOfMemoryError: no room"}
    assert kept.time_us == reading.time_us


def test_an_operator_that_writes_its_input_stays_tame() -> None:
    assert read(FakeDevice(), relu_in_place(64, 1024)).time_us.value > 0


@pytest.mark.parametrize("residency", ["resident", "reuse", "stream"])
def test_every_residency_can_be_read(residency: str) -> None:
    protocol = Protocol(launch="eager", residency=residency)  # type: ignore[arg-type]
    reading = Bench(FakeDevice(), "cpu", 80.0).measure(linear(8, 512, 2048), protocol, SHORT)
    copies = reading.details.launching.copies
    assert copies == 1 if residency == "reuse" else copies > 4


def test_a_whole_model_goes_through_the_same_code(virtual_time: VirtualTime) -> None:
    virtual_time.pass_s = 0.02
    variant = Variant("squeezenet1_1", 1, 64)
    reading = read(FakeDevice(), Subject("variant", variant.id, variant.to_json()))
    assert reading.power_source == "energy_counter"
    assert reading.details.launching.copies == 1


def test_what_raises_is_unmeasurable_with_pytorchs_words() -> None:
    with pytest.raises(Unmeasurable, match="RuntimeError") as caught:
        read(FakeDevice(), product_that_does_not_fit())
    assert caught.value.reason == "raised"


def test_what_the_cpu_has_no_memory_for_is_out_of_memory() -> None:
    with pytest.raises(Unmeasurable) as caught:
        read(FakeDevice(), product_with_no_room())
    assert caught.value.reason == "out_of_memory"


def test_what_cannot_fit_is_refused_before_it_is_allocated() -> None:
    with pytest.raises(Unmeasurable) as caught:
        read(FakeDevice(), relu_in_place(2**20, 2**16))
    assert caught.value.reason == "out_of_memory"


def test_what_is_no_tuple_is_rejected() -> None:
    with pytest.raises(Unmeasurable) as caught:
        read(FakeDevice(), Subject("operator", "0" * 32, {"operator": "os.system"}))
    assert caught.value.reason == "rejected"


def test_numeric_flags_are_set_for_the_measurement_and_put_back() -> None:
    from farm.benchmark.passes import numeric_flags

    before = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    with numeric_flags(Protocol(tf32=True, cudnn_deterministic=True)):
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cudnn.allow_tf32
        assert torch.backends.cudnn.deterministic
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before


def test_the_window_of_a_whole_goes_on_until_half_of_the_requested_interval_of_the_energy(
    virtual_time: VirtualTime,
) -> None:
    virtual_time.pass_s = 0.02
    variant = Variant("squeezenet1_1", 1, 64)
    whole = Subject("variant", variant.id, variant.to_json())

    def noisy(what: Subject | None, maximum_s: float) -> Reading:
        noise = random.Random(0)
        device = FakeDevice(lambda _: 300.0 + 150.0 * noise.uniform(-1.0, 1.0), tick_s=0.1)
        stopping = Stopping(
            warm_up_s=0.05, minimum_s=0.1, maximum_s=maximum_s, energy_half_width=0.04
        )
        return read(device, what, stopping)

    long = noisy(whole, 30.0)
    assert long.energy_mj.relative < 0.02
    tuple_ = noisy(None, 30.0)
    assert 0.02 < tuple_.energy_mj.relative < 0.04
    cut = noisy(whole, 2.5)
    assert 0.02 < cut.energy_mj.relative < 0.04
    assert "not_converged" not in cut.flags, "what was requested is enough"
