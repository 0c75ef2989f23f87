"""Checks of simulated cards with known differences, without a farm."""

from __future__ import annotations

import numpy as np

from farm.addons.check.card_check import (
    QUANTITIES,
    CheckedFigure,
    compared,
    judged_figures,
    references,
)
from farm.addons.check.figures import CheckFigure, check_figures
from farm.addons.check.population import Comparable
from farm.types.figure import Figure

TIME_US, POWER_W = 100.0, 500.0


def check_of(
    generator: np.random.Generator, *, cards: int, earlier: int, slower: dict[str, float]
) -> tuple[CheckedFigure, ...]:
    """The judged figures of a healthy card among ``cards`` others, with ``earlier`` checks.
    ``slower``: figure -> factor of its time in this check."""
    figures = []
    for figure in check_figures():
        readings = [*_card(generator, figure, "card", earlier + 1)]
        last = readings.pop()
        for number in range(cards):
            readings += _card(generator, figure, f"other {number}", 1)
        for quantity in QUANTITIES:
            if not figure.spread(quantity):
                continue
            value = last.power_w
            if quantity == "time":
                value = last.time_us * slower.get(figure.name, 1.0)
            comparisons = []
            for name, reference in references(figure, quantity, "card", readings):
                comparisons.append(compared(name, reference, float(np.log(value))))
            checked = CheckedFigure(figure.name, figure.label, quantity, Figure(value))
            figures.append(CheckedFigure(**{**vars(checked), "comparisons": tuple(comparisons)}))
    judged, _ = judged_figures(figures)
    return judged


def _card(
    generator: np.random.Generator, figure: CheckFigure, card_id: str, count: int
) -> list[Comparable]:
    """Readings of one figure on one card."""
    between = generator.standard_normal(2) * (figure.spread_time, figure.spread_power)
    readings = []
    for number in range(count):
        repeated = generator.standard_normal(2) * (figure.repetition_time, figure.repetition_power)
        time_us, power_w = np.exp(between + repeated) * (TIME_US, POWER_W)
        readings.append(Comparable(card_id, float(time_us), float(power_w), None, float(number)))
    return readings
