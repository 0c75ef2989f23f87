"""Differences between the cards of a job, from the checks of these cards.

The tuples and the whole of a model may be measured on different cards of one model. A check (`farm
cards check`) measures the same operator tuples on every card. So it shows how much longer each card
needs for a kind of work, and how much more energy: its *level*. A sum restates each tuple from its
card to the cards of the wholes.

The tuples of the job itself do not count in a level: it is measured on other subjects than those
that it corrects. Its interval is that of one further subject, and all tuples of a kind share this
error: the tuples of one model resemble each other more than those of a check.

Evidence: simulated cards with known differences (docs/design/card-check.md). No real card yet."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

from farm.store.database import by_key
from farm.types.intervals import student_t_95
from farm.types.roofline import Bound
from farm.verdict.canaries import CanaryReadings
from farm.verdict.corrections import POWER_PER_C
from farm.verdict.cost_line import CostLine
from farm.verdict.expectation import Quantity
from farm.verdict.figures import ReadingView

#: A check says something about a reading if it is at most so much older or newer. An assumption: no
#: card has been checked for days. Unit: s.
LONGEST_AGE_S = 7 * 86_400.0
#: The expected standard deviation of a repeated figure around the level of its card: that of
#: repeated readings (docs/design/card-check.md). It counts as much as `PRIOR_DEGREES` figures: with
#: four, intervals held too seldom if the operators of a kind differ more
#: (benchmarks/card_differences.py).
REPETITION: Mapping[Bound, Mapping[Quantity, float]] = {
    "memory": {"time": 0.003, "energy": 0.012},
    "compute": {"time": 0.004, "energy": 0.012},
    "launch": {"time": 0.02, "energy": 0.03},
}
PRIOR_DEGREES = 1


@dataclass(frozen=True)
class CardFigure:
    """The readings of one operator tuple in the checks of one card.

    `time` and `energy` are natural logarithms, the energy at 0 °C. None: the card has no power
    sensor.
    """

    figure: tuple[str, ...]  # tuple, protocol, software and method: equal on comparable cards
    kind: Bound
    card_id: str
    time: float
    energy: float | None


@dataclass(frozen=True)
class Level:
    """How much longer the cards need for one kind of work, or how much more energy.

    Attributes:
        of_card: card id -> natural logarithm of the ratio to the mean of the cards.
        half_width: of the 95 % interval of the level of a card, for one further subject.
        figures: the number of the figures from which it comes.
    """

    of_card: Mapping[str, float]
    half_width: float
    figures: int


@dataclass(frozen=True)
class CheckedCards:
    """The levels of all cards of a job.

    Attributes:
        levels: (kind of work, quantity) -> level.
        kinds: operator id -> the kind of its work.
        shares: card id -> the share of its whole in the mean of the wholes.
    """

    levels: Mapping[tuple[Bound, Quantity], Level]
    kinds: Mapping[str, Bound]
    shares: Mapping[str, float]

    def restated(self, lines: Iterable[CostLine], wholes: Sequence[ReadingView]) -> list[CostLine]:
        """Return the lines with their readings restated to the cards of the wholes.

        `farm.verdict.corrections.Temperature` restates the energy of a tuple to the temperature of
        the whole on its own card, if there is one. So the rest to the mean of the wholes is added.
        """
        mean_c = _temperature_c(wholes)
        by_card = by_key(lambda whole: whole.card_id, wholes)
        temperatures_c = {card_id: _temperature_c(views) for card_id, views in by_card.items()}
        restated = []
        for line in lines:
            reading = line.reading
            if reading is not None:
                operator_id, card_id = line.subject.operator_id, reading.card_id
                own_c = temperatures_c.get(card_id)
                warmer_c = 0.0 if own_c is None or mean_c is None else mean_c - own_c
                of_energy = self.ratio("energy", operator_id, card_id)
                reading = reading.restated(
                    1 / self.ratio("time", operator_id, card_id),
                    (1 + POWER_PER_C.value * warmer_c) / of_energy,
                )
            restated.append(replace(line, reading=reading))
        return restated

    def of_canaries(self, canaries: CanaryReadings) -> CanaryReadings:
        """Return the readings of canaries, restated: they differ by what the checks do not explain.
        Those of a card without checks stay.
        """
        restated = {}
        for operator_id, readings in canaries.items():
            restated[operator_id] = [self._of_canary(operator_id, view) for view in readings]
        return restated

    def _of_canary(self, operator_id: str, view: ReadingView) -> ReadingView:
        if operator_id not in self.kinds or view.card_id not in self.card_ids:
            return view
        of_time = self.ratio("time", operator_id, view.card_id)
        return view.restated(1 / of_time, 1 / self.ratio("energy", operator_id, view.card_id))

    @cached_property
    def card_ids(self) -> set[str]:
        ids: set[str] = set()
        for level in self.levels.values():
            ids.update(level.of_card)
        return ids

    def note(self, measured: Sequence[CostLine]) -> str:
        """Return a sentence about the effect on a sum."""
        times_us, before_us = [], []
        for line in measured:
            ratio = self.ratio("time", line.subject.operator_id, line.card_id)
            times_us.append(line.total_us)
            before_us.append(line.total_us * ratio)
        effect = math.fsum(times_us) / (math.fsum(before_us) or 1.0) - 1
        figures = sum(
            level.figures for (_, quantity), level in self.levels.items() if quantity == "time"
        )
        return (
            f"Card checks of {len(self.card_ids)} cards ({figures} figures) restate the tuples to "
            f"the cards of the whole: {effect:+.1%} of the time."
        )

    def ratio(self, quantity: Quantity, operator_id: str, card_id: str) -> float:
        """Return the cost of a tuple on a card, relative to that on the cards of the wholes."""
        of_work = self.kinds[operator_id], quantity
        if of_work not in self.levels:
            return 1.0
        return math.exp(self.levels[of_work].of_card[card_id]) / self._of_wholes[of_work]

    @cached_property
    def _of_wholes(self) -> Mapping[tuple[Bound, Quantity], float]:
        """(kind of work, quantity) -> its cost on the cards of the wholes, relative to the mean of
        the cards."""
        ratios = {}
        for of_work, level in self.levels.items():
            ratios[of_work] = math.fsum(
                share * math.exp(level.of_card[card_id]) for card_id, share in self.shares.items()
            )
        return ratios

    def half_width(self, quantity: Quantity, costs: Iterable[tuple[CostLine, float]]) -> float:
        """Return the half-width of a sum for the errors of the levels, in the unit of the costs.

        If each card measured its share of a kind, the errors cancel, because the wholes have the
        same ones.

        Args:
            costs: the lines of the sum, each with the cost of all its calls.
        """
        of_kind: dict[Bound, dict[str, float]] = {}
        for line, cost in costs:
            kind = self.kinds[line.subject.operator_id]
            of_card = of_kind.setdefault(kind, defaultdict(float))
            of_card[line.card_id] -= cost
            for card_id, share in self.shares.items():
                of_card[card_id] += share * cost
        errors = []
        for kind, of_card in of_kind.items():
            if (kind, quantity) in self.levels:
                half_width = self.levels[kind, quantity].half_width
                errors += [cost * half_width for cost in of_card.values()]
        return math.hypot(*errors)

    def of_model(
        self, quantity: Quantity, costs: Sequence[tuple[CostLine, float]], card_id: str
    ) -> float:
        """Return the cost of the model on a card, relative to the mean of the wholes.

        Args:
            costs: see `half_width`.
        """
        total = math.fsum(cost for _, cost in costs)
        on_card = math.fsum(
            cost * self.ratio(quantity, line.subject.operator_id, card_id) for line, cost in costs
        )
        return on_card / total if total else 1.0


def levels_of(
    figures: Iterable[CardFigure], card_ids: Iterable[str]
) -> dict[tuple[Bound, Quantity], Level]:
    """Return the levels of cards from the figures that all of them have; no level if there are
    none. Of several equal figures of a card, the first one counts."""
    cards = sorted(card_ids)
    readings: dict[tuple[Bound, Quantity, tuple[str, ...]], dict[str, float]] = {}
    for each in figures:
        values: tuple[tuple[Quantity, float | None], ...] = (
            ("time", each.time),
            ("energy", each.energy),
        )
        for quantity, value in values:
            if value is not None:
                of_figure = readings.setdefault((each.kind, quantity, each.figure), {})
                of_figure.setdefault(each.card_id, value)
    rows: dict[tuple[Bound, Quantity], list[list[float]]] = defaultdict(list)
    for (kind, quantity, _), of_card in readings.items():
        if of_card.keys() >= set(cards):
            rows[kind, quantity].append([of_card[card_id] for card_id in cards])
    levels = {}
    for (kind, quantity), of_kind in rows.items():
        levels[kind, quantity] = _level(cards, of_kind, REPETITION[kind][quantity])
    return levels


def _level(cards: Sequence[str], rows: Sequence[Sequence[float]], repetition: float) -> Level:
    """Estimate the level of each card from rows of one value a card.

    A level counts only as far as it is larger than its own error (the positive part of the
    estimator of James and Stein): cards without a difference are not restated by noise."""
    deviations = []
    for row in rows:
        mean = fmean(row)
        deviations.append([value - mean for value in row])
    levels = [fmean(column) for column in zip(*deviations, strict=True)]
    residuals: list[float] = []
    for row in deviations:
        residuals += [value - level for value, level in zip(row, levels, strict=True)]
    degrees = PRIOR_DEGREES + (len(rows) - 1) * (len(cards) - 1)
    squares = PRIOR_DEGREES * repetition**2 + _squares(residuals)
    variance = squares / degrees
    of_mean = variance / len(rows)
    size = _squares(levels)
    certain = max(0.0, 1 - (len(cards) - 1) * of_mean / size) if size else 0.0
    return Level(
        {card_id: certain * level for card_id, level in zip(cards, levels, strict=True)},
        student_t_95(degrees) * math.sqrt(variance + of_mean),
        len(rows),
    )


def _squares(values: Iterable[float]) -> float:
    return math.fsum(value**2 for value in values)


def _temperature_c(readings: Iterable[ReadingView]) -> float | None:
    """The mean temperature; None if it is unknown."""
    temperatures_c = [view.temperature_c for view in readings if view.temperature_c is not None]
    return fmean(temperatures_c) if temperatures_c else None


def shares_of(parts: Iterable[CostLine], wholes: Sequence[ReadingView]) -> Mapping[str, float]:
    """Return the share of the whole on each card in their mean: that of the tuples of the card, by
    their readings before corrections, or equal shares if no tuple was measured on their cards."""
    of_card_us = {whole.card_id: 0.0 for whole in wholes}
    for part in parts:
        if part.reading is not None and part.reading.card_id in of_card_us:
            of_card_us[part.reading.card_id] += part.count * part.reading.time_us.value
    total_us = math.fsum(of_card_us.values())
    equal = 1 / len(of_card_us)
    return {
        card_id: time_us / total_us if total_us else equal
        for card_id, time_us in of_card_us.items()
    }
