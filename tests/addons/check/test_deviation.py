"""The statistics of a card check: the limit holds for all comparisons together."""

from __future__ import annotations

import math

import numpy as np
import pytest

from farm.addons.check import deviation
from farm.addons.check.deviation import FALSE_ALARMS, Reference, limit_of, smallest_found
from tests import slow
from tests.addons.check.healthy_cards import check_of


def test_a_further_value_of_the_same_kind_has_a_standard_normal_score():
    generator = np.random.default_rng(1)
    scores = deviation.simulated_scores(generator, 20_000, 10)
    assert abs(scores.mean()) < 0.05
    assert scores.std() == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    "counts", [(5,), (10,) * 24, pytest.param((5,) * 12 + (60,) * 24, marks=slow.ALIKE)]
)
def test_at_most_one_healthy_check_in_a_hundred_is_outside(counts):
    generator = np.random.default_rng(2)
    limit = limit_of(counts)
    checks = 5000
    largest = np.max(
        [deviation.simulated_scores(generator, checks, count) for count in counts], axis=0
    )
    outside = np.mean(largest > limit)
    # four standard deviations of this rate and of the simulated limit
    assert outside < FALSE_ALARMS + 4 * math.sqrt(FALSE_ALARMS / checks + FALSE_ALARMS / 20_000)


def test_the_stated_slowdown_is_found_in_95_percent():
    values = np.random.default_rng(3).standard_normal(20) * 0.003
    reference = Reference(tuple(values), prior=0.003)
    limit = limit_of((20,) * 24)
    slowdown = math.log1p(smallest_found(20, reference.spread, limit))
    further = np.random.default_rng(4).standard_normal(2000) * reference.spread
    found = [
        reference.score(float(value)) > limit for value in reference.center + slowdown + further
    ]
    assert np.mean(found) == pytest.approx(0.95, abs=0.02)


def test_without_comparisons_nothing_is_outside():
    assert limit_of(()) == math.inf


def test_a_damaged_card_in_the_population_does_not_widen_it():
    healthy = tuple(np.random.default_rng(5).standard_normal(20) * 0.003)
    with_damaged = Reference((*healthy, 0.3), prior=0.003)
    assert with_damaged.spread < 1.5 * Reference(healthy, prior=0.003).spread


def test_two_groups_of_healthy_cards_are_a_wide_population():
    """Seven of ten H200s have the same time in a batch norm; three need 1.7 % more."""
    times = (0.0, 0.001, 0.002, -0.001, 0.0, 0.003, -0.002, 0.017, 0.018)
    assert Reference(times, prior=0.003).score(0.017) < limit_of((9,) * 10)


def test_200_healthy_cards_cause_at_most_the_promised_alarms():
    generator = np.random.default_rng(6)
    outside = 0
    for _ in range(200):
        judged = check_of(generator, cards=10, earlier=5, slower={})
        outside += any(figure.is_outside for figure in judged)
    assert outside <= 6  # 99.5 % of the binomial distribution of 200 checks with 1 %


def test_a_figure_that_is_3_percent_slower_than_before_is_found():
    generator = np.random.default_rng(7)
    found = 0
    for _ in range(100):
        judged = check_of(generator, cards=10, earlier=20, slower={"convolution": 1.03})
        found += any(figure.is_outside for figure in judged if figure.name == "convolution")
    assert found >= 90
