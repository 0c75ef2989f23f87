"""Figures and intervals: against known answers, and against simulations of what they claim."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from statistics import fmean, stdev

import pytest

from farm.types.figure import Figure
from farm.types.intervals import (
    batch_half_width,
    fastest,
    jackknife_half_width,
    midmean,
    pass_energy,
    slope,
    student_t_95,
    time_average,
    trimmed_mean,
)
from farm.verdict.sum_and_whole import mean_power


def test_the_mean_of_the_middle_half_is_blind_to_outliers() -> None:
    assert midmean([-1000, 1, 2, 3, 4, 5, 6, 1000]) == 3.5
    assert midmean([7]) == 7


def test_a_rare_outlier_is_trimmed_and_equal_values_are_not() -> None:
    assert trimmed_mean([10.0] * 50 + [1000.0]) == 10.0
    assert trimmed_mean([7.0, 7.0, 7.0]) == 7.0
    assert trimmed_mean([7.0]) == 7.0


def test_the_quantile_errs_to_the_wide_side() -> None:
    assert student_t_95(1) == 12.706
    assert student_t_95(11) == student_t_95(10)
    assert student_t_95(10_000) >= 1.96
    assert math.isinf(student_t_95(0))


def test_too_few_values_have_no_interval() -> None:
    assert math.isinf(batch_half_width([1.0, 1.1]))
    assert math.isinf(slope([0.0, 1.0], [0.0, 5.0]).half_width)
    with pytest.raises(ValueError, match="two points"):
        slope([1.0, 1.0], [2.0, 3.0])


def coverage(values: list[list[float]], truth: float) -> float:
    return fmean([abs(fmean(window) - truth) <= batch_half_width(window) for window in values])


def test_the_interval_covers_the_truth_for_independent_values() -> None:
    source = random.Random(1)
    windows = [[source.gauss(100, 5) for _ in range(200)] for _ in range(400)]
    assert 0.92 <= coverage(windows, 100) <= 0.98


def test_the_interval_holds_for_correlated_values_where_the_plain_one_fails() -> None:
    source = random.Random(2)

    def window() -> list[float]:
        drift, values = source.gauss(0, 1) * 2.3, []
        for _ in range(300):
            drift = 0.9 * drift + source.gauss(0, 1)
            values.append(100 + drift)
        return values

    windows = [window() for _ in range(400)]
    plain = fmean(
        [abs(fmean(values) - 100) <= 1.96 * stdev(values) / math.sqrt(300) for values in windows]
    )
    assert plain < 0.5
    assert coverage(windows, 100) > 0.75


def test_a_slope_over_ticks_seen_late_is_right_within_its_interval() -> None:
    source = random.Random(3)
    inside = 0
    for _ in range(300):
        times = [0.1 * tick + source.uniform(0, 0.002) for tick in range(9)]
        energies = [0.1 * tick * 300_000.0 for tick in range(9)]
        found = slope(times, energies)
        inside += abs(found.rate - 300_000) <= found.half_width
        assert found.half_width / found.rate < 0.03
    assert inside / 300 >= 0.9


def test_a_slope_over_a_fluctuating_power_is_not_too_sure() -> None:
    source = random.Random(4)
    inside = 0
    for _ in range(300):
        steps = [source.gauss(30_000, 1_500) for _ in range(12)]
        energies = list(itertools.accumulate(steps, initial=0.0))
        found = slope([0.1 * tick for tick in range(13)], energies)
        inside += abs(found.rate - 300_000) <= found.half_width
    assert inside / 300 >= 0.85


def test_the_average_over_time_weighs_uneven_samples() -> None:
    assert time_average([0.0, 1.0, 4.0], [10.0, 10.0, 40.0], 0.0, 4.0) == pytest.approx(
        (10 + 75) / 4
    )
    assert time_average([0.0, 9.0], [1.0, 2.0], 3.0, 5.0) is None
    assert time_average([4.0], [2.0], 3.0, 5.0) == 2.0


def test_relative_widths_of_a_product_add_in_quadrature() -> None:
    energy_mj = pass_energy(Figure(10, 0.3), Figure(20e3, 800))
    assert (energy_mj.value, energy_mj.half_width) == pytest.approx((200, 200 * 0.05))


def test_leaving_out_groups_gives_a_mean_the_interval_of_batches_and_the_fastest_values_a_narrow_one():
    values = [1.0 + (index * 37 % 41) / 100 for index in range(40)]

    def without_each_tenth(
        values: list[float], figure: Callable[[Sequence[float]], float]
    ) -> list[float]:
        return [figure([*values[:low], *values[low + 4 :]]) for low in range(0, 40, 4)]

    assert jackknife_half_width(without_each_tenth(values, fmean)) == pytest.approx(
        batch_half_width(values)
    )
    slowed = [5.0 if index % 2 else 1.0 for index in range(40)]
    assert jackknife_half_width(without_each_tenth(slowed, fastest)) == 0
    assert jackknife_half_width([1.0, 2.0]) == math.inf


@pytest.mark.parametrize(
    ("power_w", "time_us", "half_width_mj"),
    [
        (Figure(100.0, 3.0), Figure(2_000.0, 80.0), 10.0),
        (Figure(0.0, 3.0), Figure(2_000.0, 80.0), 6.0),
        (Figure(100.0, 3.0), Figure(0.0, 80.0), 8.0),
    ],
)
def test_the_energy_of_a_pass_and_its_power_have_finite_intervals_also_at_zero(
    power_w: Figure, time_us: Figure, half_width_mj: float
) -> None:
    energy_mj = pass_energy(power_w, time_us)
    assert energy_mj.value == power_w.value * time_us.value * 1e-3
    assert energy_mj.half_width == pytest.approx(half_width_mj)
    if time_us.value:
        again_w = mean_power(energy_mj, Figure(time_us.value))
        assert again_w.value == pytest.approx(power_w.value)
        assert again_w.half_width == pytest.approx(half_width_mj / time_us.value * 1e3)


def test_the_relative_width_of_zero_is_infinite() -> None:
    assert Figure(0.0, 2.0).relative == math.inf
    assert Figure(-4.0, 2.0).relative == 0.5
    assert Figure(0.0, 2.0).deviation_from(Figure(4.0)) == Figure(-1.0, 0.5)
