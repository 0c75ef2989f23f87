"""The sampling thread: what it sees, and what it costs."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable

import pytest

from farm.benchmark.counter_period import CounterPeriod
from farm.benchmark.sampler import SampledWindow, Sampler
from farm.benchmark.window import Pauses, window_power
from farm.devices.cpu import CpuDevice
from farm.types.intervals import power_by_step, slope
from farm.types.reading import Trace
from tests.benchmark.fake_device import FakeDevice
from tests.benchmark.virtual_time import VirtualTime


def test_the_counters_ticks_are_seen_within_milliseconds_and_give_the_power(
    virtual_time: VirtualTime,
) -> None:
    device = FakeDevice(tick_s=0.05)
    with virtual_time.sampler(device) as sampler:
        virtual_time.sleep(0.6)
    times, energies = sampler.ticks()
    assert len(times) >= 10
    phases_s = [(moment - device.began_s + 0.025) % 0.05 - 0.025 for moment in times]
    assert (
        max(abs(phase_s) for phase_s in phases_s[:2]) < 0.005
    )  # not known yet when the next is due
    assert max(abs(phase_s) for phase_s in phases_s[2:]) < 0.002
    assert slope(times, energies).rate / 1e3 == pytest.approx(300, rel=0.01)
    assert sampler.tick_s == pytest.approx(0.05, rel=0.02)


def test_a_window_holds_what_lies_in_it(virtual_time: VirtualTime) -> None:
    device = FakeDevice(power_w=lambda s: 200.0 if s < 0.3 else 400.0)
    device.reasons = ("power_cap",)
    with virtual_time.sampler(device) as sampler:
        virtual_time.sleep(0.6)
    window = sampler.window(device.began_s + 0.35, device.began_s + 0.6)
    assert window.power_w == pytest.approx(400)
    assert window.power_source == "power_instant"
    assert window.sm_clock_mhz == 1980
    assert window.memory_clock_mhz is None
    assert window.throttle_shares == {"power_cap": 1.0}
    assert window.temperature_slope_c_per_s == pytest.approx(1.0, rel=0.001)


def test_a_long_window_drifts_only_by_what_the_scatter_of_its_steps_does_not_explain(
    virtual_time: VirtualTime,
) -> None:
    def seen(power_w: Callable[[float], float]) -> float:
        device = FakeDevice(power_w=power_w, tick_s=0.05)
        with virtual_time.sampler(device) as sampler:
            virtual_time.sleep(3.0)
        return window_power(sampler, device.began_s, device.began_s + 3.0).drift

    assert 0.005 < seen(lambda s: 300 + 3 * s) < 0.016
    scattered = random.Random(2).choices((250.0, 450.0), k=100)
    scattered[:30], scattered[30:60] = [250.0, 450.0] * 15, [250.0, 450.0, 450.0] * 10
    assert abs(seen(lambda s: scattered[int(s / 0.05)])) < 0.03


def test_what_limited_the_card_before_a_window_is_none_of_the_windows(
    virtual_time: VirtualTime,
) -> None:
    device = FakeDevice()
    device.reasons = ("power_cap",)
    with virtual_time.sampler(device) as sampler:
        virtual_time.sleep(0.34)
        device.reasons = ()
        begin_s = virtual_time.now_s
        virtual_time.sleep(0.5)
    assert sampler.window(begin_s, begin_s + 0.5).throttle_shares == {}
    assert sampler.window(begin_s, begin_s + 0.01).throttle_shares == {"power_cap": 1.0}, (
        "not asked within: the last known"
    )


def test_its_thread_reads_while_others_work() -> None:
    with Sampler(FakeDevice()) as sampler:
        deadline_s = time.monotonic() + 30
        while len(sampler.ticks()[0]) < 4 and time.monotonic() < deadline_s:
            sum(range(10_000))
    times, energies = sampler.ticks()
    assert len(times) == len(energies) >= 4
    assert times == sorted(times)
    count = len(times)
    time.sleep(0.05)
    assert len(sampler.ticks()[0]) == count, "it has ended"


def test_without_instant_power_the_averaged_one_is_the_source(virtual_time: VirtualTime) -> None:
    with virtual_time.sampler(FakeDevice(lacks=frozenset({"power_instant_w"}))) as sampler:
        virtual_time.sleep(0.05)
    assert sampler.window(0, float("inf")).power_source == "power_average"


def test_a_card_that_tells_nothing_gets_no_thread_and_no_trace() -> None:
    with Sampler(FakeDevice(lacks=FakeDevice().capabilities)) as sampler:
        assert not sampler.active
    assert sampler.trace((0.0, 1.0)) is None
    assert sampler.ticks() == ([], [])


def test_the_trace_survives_storage_with_its_window_marked(virtual_time: VirtualTime) -> None:
    with virtual_time.sampler(FakeDevice()) as sampler:
        virtual_time.sleep(0.15)
    trace = sampler.trace((sampler.began_s + 0.05, sampler.began_s + 0.1))
    assert trace is not None
    again = Trace.unpack(trace.pack())
    assert again.window_s == pytest.approx((0.05, 0.1))
    assert set(again.series) == {
        "energy_mj",
        "power_instant_w",
        "sm_clock_mhz",
        "temperature_c",
        "throttle_reasons",
    }
    times, values = again.series["power_instant_w"]
    assert len(times) == len(values) > 5


def test_it_asks_seldom_while_no_tick_is_due(virtual_time: VirtualTime) -> None:
    device = FakeDevice(tick_s=0.1)
    with virtual_time.sampler(device):
        virtual_time.sleep(1.0)
    assert device.calls < 450


class Paused:
    """A card that draws 500 W, but 100 W in pauses. The counter changes every 0.1 s."""

    def __init__(self, *pauses_s: tuple[float, float]) -> None:
        self._pauses_s = pauses_s
        self.device = FakeDevice(tick_s=0.1)
        self.period = CounterPeriod()

    def until_s(self, at_s: float) -> float:
        return sum(max(0.0, min(at_s, end_s) - begin_s) for begin_s, end_s in self._pauses_s)

    def energy_mj(self, at_s: float) -> float:
        return 1e3 * (500 * at_s - 400 * self.until_s(at_s))

    def ticks(self, since_s: float) -> tuple[list[float], list[float]]:
        times_s = [since_s + number / 10 for number in range(11)]
        return times_s, list(map(self.energy_mj, times_s))

    def regular(self, times_s: list[float]) -> list[float]:
        return times_s

    def window(self, begin_s: float, end_s: float) -> SampledWindow:
        mean_w = (self.energy_mj(end_s) - self.energy_mj(begin_s)) / (end_s - begin_s) / 1e3
        return SampledWindow(power_w=mean_w, power_source="power_instant")

    def power_values(self, begin_s: float, end_s: float) -> list[float]:
        return [499.0, 500.0, 501.0] * 10


def test_the_power_of_the_passes_is_without_the_pauses_wherever_they_fall():
    card = Paused((0.03, 0.041), (0.42, 0.425), (0.495, 0.506), (0.93, 0.94))
    power = window_power(card, 0.0, 1.0, pauses=Pauses(card.until_s, 100.0))
    assert power.power_w.value == pytest.approx(500)
    assert power.power_w.half_width == pytest.approx(0, abs=1e-6)
    assert (power.begin_s, power.end_s, power.ticks) == (0.0, 1.0, 11)
    with_pauses = window_power(card, 0.0, 1.0)
    assert with_pauses.power_w.value < 495
    assert with_pauses.power_w.half_width > 5


def test_the_power_of_a_sensor_is_without_the_pauses():
    card = Paused((0.03, 0.041), (0.42, 0.425), (0.495, 0.506), (0.93, 0.94))
    power = window_power(
        card, 0.0, 0.15, pauses=Pauses(card.until_s, 100.0)
    )  # too short for three steps
    assert (power.source, power.power_w.value) == ("instant_power", pytest.approx(500))


def test_a_step_of_the_counter_in_which_the_card_only_paused_does_not_count():
    card = Paused((0.38, 0.62))
    power = window_power(card, 0.0, 1.0, pauses=Pauses(card.until_s, 100.0))
    assert (power.power_w.value, power.ticks) == (pytest.approx(500), 9)


Changes = tuple[list[float], list[float], set[float]]


def changes(
    late_s: Callable[[random.Random], float], count: int, *, real: bool = False, seed: int = 0
) -> Changes:
    """Changes of a counter at 500 W, every 0.1 s, as queries see them: times in s, values in mJ,
    sharp times.

    real: the counter itself changes at these times, so longer steps have more energy.
    """
    chance = random.Random(f"{count} {seed}")
    late = [late_s(chance) for _ in range(count)]
    times_s = [1e6 + number * 0.1 + one_s for number, one_s in enumerate(late)]
    energies_mj = [
        500e3 * (moment_s if real else 1e6 + number * 0.1)
        for number, moment_s in enumerate(times_s)
    ]
    return (
        times_s,
        energies_mj,
        {at for at, one_s in zip(times_s, late, strict=True) if real or one_s < 0.008},
    )


def powers_w(period: CounterPeriod, seen: Changes) -> list[float]:
    times_s, energies_mj, sharp_s = seen
    return [
        power_w
        for *_, power_w in power_by_step(period.regular(times_s, sorted(sharp_s)), energies_mj)
    ]


def late_s(chance: random.Random) -> float:
    return chance.choice([0.02, 0.045]) if chance.random() < 0.05 else chance.uniform(0, 0.009)


def test_queries_that_see_the_changes_late_do_not_blur_the_power() -> None:
    period, few = CounterPeriod(), changes(late_s, 3)
    assert (
        max(abs(power_w / 500 - 1) for power_w in powers_w(period, few)) > 0.01
    )  # the period is not known yet
    for count in range(20, 60):
        period.learn(*changes(late_s, count))
    assert period.period_s == 0.1
    for seed in range(200):
        seen = changes(late_s, 8, seed=seed)
        assert powers_w(period, seen) == pytest.approx([500] * 7, rel=0.001)
        without = (
            *(values[:4] + values[5:] for values in seen[:2]),
            seen[2],
        )  # no query came between two changes
        assert powers_w(period, without) == pytest.approx([500] * 6, rel=0.001)
    times_s, energies_mj, sharp_s = changes(lambda _: 0.001, 8)
    much_later = (
        [at + 0.095 * (number == 3) for number, at in enumerate(times_s)],
        energies_mj,
        sharp_s,
    )
    assert powers_w(period, much_later) == pytest.approx([500] * 7, rel=0.001)


def test_a_few_changes_tell_the_period_and_jumps_of_the_power_do_not_hide_it() -> None:
    known = 0
    for seed in range(100):
        period = CounterPeriod()
        times_s, energies_mj, sharp_s = changes(
            lambda chance: chance.uniform(0, 0.007), 12, seed=seed
        )
        jumps = [
            energy_mj - 400e3 * min(0.0, at - 1e6 - 0.55)
            for at, energy_mj in zip(times_s, energies_mj, strict=True)
        ]
        period.learn(times_s, jumps, sharp_s)
        assert period.period_s in (0.1, None)
        known += period.period_s == 0.1
    assert known > 80


def test_a_counter_that_changes_at_irregular_times_keeps_the_times_of_the_queries() -> None:
    period = CounterPeriod()
    for count in range(20, 60):
        period.learn(*changes(lambda chance: chance.uniform(0, 0.05), count, real=True))
    assert period.period_s is None
    seen = changes(lambda chance: chance.uniform(0, 0.05), 5, real=True)
    assert period.regular(seen[0], sorted(seen[2])) == seen[0]


@pytest.mark.parametrize("seed", range(8))
def test_a_driver_that_other_programs_use_does_not_blur_the_power(
    virtual_time: VirtualTime, seed: int
) -> None:
    chance = random.Random(seed)

    class Used(FakeDevice):
        def energy_counter_mj(self) -> float | None:
            before_s = (
                chance.choice([0.0, 0.04, 0.09])
                if chance.random() < 0.01
                else chance.uniform(0.0, 0.002)
            )
            virtual_time.now_s += before_s
            value_mj = super().energy_counter_mj()
            virtual_time.now_s += 0.06 if chance.random() < 0.003 else chance.uniform(0.0, 0.002)
            return value_mj

        def power_instant_w(self) -> float | None:
            virtual_time.now_s += 0.43 if chance.random() < 0.003 else chance.uniform(0.0, 0.002)
            return super().power_instant_w()

    device = Used(tick_s=0.1)
    for _ in range(4):
        with virtual_time.sampler(device) as sampler:
            virtual_time.sleep(3.0)
    times_s, _ = sampler.ticks()
    assert len(times_s) >= 17
    seen = [
        slope(*(values[k : k + 2] for values in sampler.ticks())).rate / 1e3
        for k in range(len(times_s) - 1)
    ]
    steps = [window_power(sampler, a, b, least_steps=1) for a, b in itertools.pairwise(times_s)]
    used = [
        step.power_w.value for step in steps if step.ticks == 2
    ]  # others wait for a further step
    assert max(abs(power_w / 300 - 1) for power_w in seen) > 0.02
    assert len(used) >= len(steps) - 7
    assert used == pytest.approx([300] * len(used), rel=0.002)
    assert window_power(sampler, times_s[0], times_s[-1]).power_w.value == pytest.approx(
        300, rel=0.001
    )


def test_all_samplers_of_a_card_learn_the_period_of_its_counter(virtual_time: VirtualTime) -> None:
    device = FakeDevice(tick_s=0.1)
    for _ in range(4):
        with virtual_time.sampler(device):
            virtual_time.sleep(2.0)
    assert virtual_time.sampler(device).period.period_s == pytest.approx(0.1, rel=0.001)
    assert virtual_time.sampler(FakeDevice()).period.period_s is None
    fast = FakeDevice(tick_s=0.02)  # late queries would not tell to which period a change belongs
    for _ in range(4):
        with virtual_time.sampler(fast):
            virtual_time.sleep(2.0)
    assert virtual_time.sampler(fast).period.period_s is None


def test_a_power_from_the_counter_names_the_counter_of_its_device(
    virtual_time: VirtualTime,
) -> None:
    class Processor(FakeDevice):
        counter_source = CpuDevice.counter_source

    for kind, source in ((FakeDevice, "energy_counter"), (Processor, "rapl")):
        device = kind(tick_s=0.1)
        for _ in range(4):
            with virtual_time.sampler(device) as sampler:
                virtual_time.sleep(3.0)
        times_s, _ = sampler.ticks()
        first_step = window_power(sampler, times_s[0], times_s[1], least_steps=1)
        window = window_power(sampler, times_s[0], times_s[-1])
        assert (first_step.ticks, first_step.source, window.source) == (2, source, source)
