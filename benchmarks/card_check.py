"""How often a card check is wrong, from the packaged readings.

    python benchmarks/card_check.py            # 20,000 checks of each kind, about two minutes

It prints these tables:

1. how much the figures of the check differ between cards and between repeated readings;
2. whether the temperature explains differences of power;
3. the packaged cards, each compared with the others as if it were checked;
4. simulated cards with known differences: false alarms, and slow-downs that are found. Their
   differences are drawn from stored readings: each figure gets those of a random tuple, scaled from
   the expected spread of its class to that of the figure. The intervals are those of the
   simulation; the stored readings are of few cards;
5. false alarms for the differences between cards of one model alone, and for other tails.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, stdev
from typing import Any

import numpy as np
import sqlalchemy

from farm.addons.check import deviation
from farm.addons.check.card_check import DISTURBED, LEAST_CARDS, LEAST_EARLIER, QUANTITIES
from farm.addons.check.deviation import (
    Reference,
    limit_of,
    scores_of,
    smallest_found,
    spreads_of,
)
from farm.addons.check.figures import CheckFigure, Quantity, check_figures
from farm.addons.check.population import Comparable
from farm.exchange.packaged import packaged_database
from farm.store.columns import OPERATOR, READING
from farm.store.reuse import tells_others
from farm.types.protocol import Protocol

FIGURES = {figure.subject(Protocol()): figure for figure in check_figures()}
SLOWER = 1.03
SHORT_US = 4.0
#: Expected spread of the time of other tuples by class: convolutions and matrix products in fp32,
#: short kernels, the others.
COMPUTE, SHORT, OTHER = 0.003, 0.03, 0.007
POWER_SPREAD, POWER_REPETITION, TIME_REPETITION = 0.03, 0.012, 0.003


@dataclass(frozen=True)
class StoredTuple:
    """The sound readings of one tuple on cards of one model, with one software and protocol."""

    operator: str
    protocol_id: str
    label: str
    card_model: str
    by_card: Mapping[str, Sequence[Comparable]]

    @property
    def figure(self) -> CheckFigure | None:
        """The figure of the check that the tuple is; None if it is none."""
        return FIGURES.get((self.operator, self.protocol_id))

    def values(self, quantity: Quantity) -> dict[str, list[float]]:
        """Card -> natural logarithms of its times or powers."""
        values: dict[str, list[float]] = defaultdict(list)
        for card_id, readings in self.by_card.items():
            for reading in readings:
                value = reading.time_us if quantity == "time" else reading.power_w
                if value:
                    values[card_id].append(math.log(value))
        return dict(values)

    def spread(self, quantity: Quantity) -> float:
        """The expected spread of this tuple between cards."""
        if self.figure is not None:
            return self.figure.spread(quantity) or POWER_SPREAD
        if quantity == "power":
            return POWER_SPREAD
        times_us = [reading.time_us for readings in self.by_card.values() for reading in readings]
        if median(times_us) < SHORT_US:
            return SHORT
        return COMPUTE if self.label.startswith(("Conv", "Linear")) else OTHER


def stored_tuples() -> list[StoredTuple]:
    """The tuples of the package on at least two cards."""
    key = (READING.card_model, READING.software_id, READING.protocol_id, READING.method)
    columns = (READING.subject_id, OPERATOR.label, READING.card_id, READING.time_us)
    columns += (READING.power_w, READING.temperature_c, READING.created_at_s, READING.flags)
    query = sqlalchemy.select(*key, *columns).where(OPERATOR.id == READING.subject_id)
    groups: dict[Any, list[Any]] = defaultdict(list)
    with packaged_database().read() as session:
        for row in session.execute(query):
            if tells_others(row.flags) and not DISTURBED.intersection(row.flags):
                groups[row[:4], row.subject_id].append(row)
    stored = []
    for (about, operator), rows in groups.items():
        by_card: dict[str, list[Comparable]] = defaultdict(list)
        for row in rows:
            by_card[row.card_id].append(
                Comparable(
                    row.card_id, row.time_us, row.power_w, row.temperature_c, row.created_at_s
                )
            )
        if len(by_card) > 1:
            model, _, protocol_id, _ = about
            stored.append(StoredTuple(operator, protocol_id, rows[0].label, model, by_card))
    return stored


# ---- 1. and 2.: what differs


def print_spreads(stored: Sequence[StoredTuple]) -> None:
    print("figure | card model | cards | time between cards | repeated | power between cards")
    print("--- | --- | --- | --- | --- | ---")
    for one in stored:
        if one.figure is None or len(one.by_card) < 3:
            continue
        time = one.values("time")
        power = one.values("power")
        repeated = [stdev(values) for values in time.values() if len(values) > 1]
        cells = (
            one.figure.label,
            one.card_model,
            str(len(time)),
            f"{_between(time):.2%}",
            f"{median(repeated):.2%} ({len(repeated)} cards)" if repeated else "-",
            f"{_between(power):.1%}" if len(power) > 2 else "-",
        )
        print(" | ".join(cells))


def _between(values: Mapping[str, Sequence[float]]) -> float:
    return stdev([median(of_card) for of_card in values.values()])


def print_temperature(stored: Sequence[StoredTuple]) -> None:
    """The spread of power between cards, and what is left of it after a common slope over
    temperature."""
    warmth, deviations = [], []
    for one in stored:
        rows = []
        for readings in one.by_card.values():
            last = readings[-1]
            if last.power_w and last.temperature_c and last.time_us > SHORT_US:
                rows.append((last.temperature_c, math.log(last.power_w)))
        if len(rows) >= LEAST_CARDS:
            columns = np.array(rows)
            columns -= columns.mean(axis=0)
            warmth += list(columns[:, 0])
            deviations += list(columns[:, 1])
    x, y = np.array(warmth), np.array(deviations)
    slope = float(x @ y / (x @ x))
    left = y - slope * x
    print(
        f"\npower over temperature: {slope:.2%} per °C; the spread between cards is "
        f"{y.std():.1%}, without the slope {left.std():.1%} ({len(y)} readings)"
    )


# ---- 3.: the packaged cards


def print_left_out(stored: Sequence[StoredTuple], only_figures: bool) -> None:
    """Compare each packaged card with the others, as in a check of all its tuples."""
    scores: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for one in stored:
        if only_figures and one.figure is None:
            continue
        for quantity in QUANTITIES:
            values = one.values(quantity)
            if quantity == "power" and one.spread("time") >= SHORT:
                continue
            medians = {card_id: median(of_card) for card_id, of_card in values.items()}
            for card_id in medians if len(medians) > LEAST_CARDS else ():
                others = [value for other, value in medians.items() if other != card_id]
                reference = Reference(tuple(others), one.spread(quantity))
                scores[card_id].append((reference.score(medians[card_id]), len(others)))
    outside = []
    for card_id, of_card in scores.items():
        limit = limit_of(count for _, count in of_card)
        if max(score for score, _ in of_card) > limit:
            outside.append(card_id)
    every = [score for of_card in scores.values() for score, _ in of_card]
    print(
        f"{'figures of the check' if only_figures else 'all tuples'}: {len(every)} comparisons of "
        f"{len(scores)} cards; scores above 2: {np.mean(np.array(every) > 2):.1%} (2.3 % if "
        f"normal), above 3: {np.mean(np.array(every) > 3):.2%} (0.13 %); outside: "
        f"{_rate(len(outside), len(scores))} {' '.join(outside)}"
    )


# ---- 4.: simulated cards


class StoredDifferences:
    """Draws relative differences between cards, and between repeated readings, as stored.

    Args:
        card_model: draw differences between cards of this model only.
    """

    def __init__(self, stored: Sequence[StoredTuple], card_model: str = "") -> None:
        self._between: dict[Quantity, list[np.ndarray]] = {"time": [], "power": []}
        self._repeated: dict[Quantity, list[np.ndarray]] = {"time": [], "power": []}
        for one in stored:
            for quantity in QUANTITIES:
                values = one.values(quantity)
                if len(values) > LEAST_CARDS and card_model in ("", one.card_model):
                    medians = np.array([median(of_card) for of_card in values.values()])
                    differences = medians - np.median(medians)
                    self._between[quantity].append(differences / one.spread(quantity))
                repetition = TIME_REPETITION if quantity == "time" else POWER_REPETITION
                if quantity == "time" and one.spread("time") >= SHORT:
                    repetition = SHORT
                for of_card in values.values():
                    if len(of_card) > 2:
                        readings = np.array(of_card)
                        widened = math.sqrt(len(readings) / (len(readings) - 1))
                        differences = (readings - readings.mean()) * widened
                        self._repeated[quantity].append(differences / repetition)

    def between(
        self, generator: np.random.Generator, quantity: Quantity, checks: int, count: int
    ) -> np.ndarray:
        """Differences of cards from their median, in expected spreads, of one stored tuple for each
        check."""
        return _drawn(generator, self._between[quantity], checks, count)

    def repeated(
        self, generator: np.random.Generator, quantity: Quantity, checks: int, count: int
    ) -> np.ndarray:
        """Differences between repeated readings, of one stored tuple and card for each check."""
        return _drawn(generator, self._repeated[quantity], checks, count)


def _drawn(
    generator: np.random.Generator, groups: Sequence[np.ndarray], checks: int, count: int
) -> np.ndarray:
    """``count`` values of one random group for each check."""
    lengths = np.array([len(group) for group in groups])
    table = np.zeros((len(groups), lengths.max()))
    for row, group in zip(table, groups, strict=True):
        row[: len(group)] = group
    chosen = generator.integers(len(groups), size=checks)
    places = (generator.random((checks, count)) * lengths[chosen][:, None]).astype(int)
    return table[chosen[:, None], places]


@dataclass(frozen=True)
class SimulatedComparison:
    """One comparison in all simulated checks."""

    figure: CheckFigure
    quantity: Quantity
    reference: str
    count: int
    scores: np.ndarray
    spreads: np.ndarray


def simulated_checks(
    generator: np.random.Generator,
    differences: StoredDifferences,
    checks: int,
    *,
    cards: int,
    earlier: int,
    slower: str = "",
) -> Iterator[SimulatedComparison]:
    """The comparisons of checks of healthy cards, or of cards with a figure that is slower than
    before."""
    for figure in check_figures():
        for quantity in QUANTITIES:
            if not figure.spread(quantity):
                continue
            between = figure.spread(quantity) * differences.between(
                generator, quantity, checks, cards + 1
            )
            repeated = figure.repetition(quantity) * differences.repeated(
                generator, quantity, checks, cards + earlier + 1
            )
            card = between[:, -1]
            now = card + repeated[:, -1]
            if figure.name == slower and quantity == "time":
                now = now + math.log(SLOWER)
            others = between[:, :cards] + repeated[:, :cards]
            before = card[:, None] + repeated[:, cards:-1]
            references = (
                ("cards", others, figure.spread(quantity), LEAST_CARDS),
                ("earlier", before, figure.repetition(quantity), LEAST_EARLIER),
            )
            for name, values, prior, least in references:
                if values.shape[1] >= least:
                    yield SimulatedComparison(
                        figure,
                        quantity,
                        name,
                        values.shape[1],
                        scores_of(values, prior, now),
                        spreads_of(values, prior),
                    )


def _limit(comparisons: Sequence[SimulatedComparison]) -> float:
    return limit_of(one.count for one in comparisons)


def false_alarms(
    differences: StoredDifferences, checks: int, *, cards: int, earlier: int, seed: int = 1
) -> int:
    """The number of checks of healthy cards that are outside."""
    generator = np.random.default_rng(seed)
    comparisons = list(
        simulated_checks(generator, differences, checks, cards=cards, earlier=earlier)
    )
    largest = np.max([one.scores for one in comparisons], axis=0)
    return int(np.sum(largest > _limit(comparisons)))


def print_rates(differences: StoredDifferences, checks: int) -> None:
    print("\nother cards | earlier checks | healthy cards outside")
    print("--- | --- | ---")
    for cards, earlier in (
        (5, 0),
        (10, 0),
        (10, 5),
        (10, 10),
        (30, 0),
        (60, 0),
        (60, 10),
        (60, 60),
    ):
        outside = false_alarms(differences, checks, cards=cards, earlier=earlier)
        print(f"{cards} | {earlier} | {_rate(outside, checks)}")

    print(f"\nfigure that is {SLOWER - 1:.0%} slower | found, 5 earlier checks | 10 earlier checks")
    print("--- | --- | ---")
    each = max(50, checks // len(check_figures()))
    for figure in check_figures():
        cells = []
        for earlier in (5, 10):
            generator = np.random.default_rng(2)
            comparisons = list(
                simulated_checks(
                    generator, differences, each, cards=10, earlier=earlier, slower=figure.name
                )
            )
            of_figure = [one.scores for one in comparisons if one.figure is figure]
            detected = np.max(of_figure, axis=0) > _limit(comparisons)
            cells.append(_rate(int(np.sum(detected)), each))
        print(f"{figure.label} | {' | '.join(cells)}")


def print_smallest(differences: StoredDifferences) -> None:
    """The smallest slow-down that is found in 95 %, median over simulated checks."""
    print("\nfigure | against 10 other cards | 60 other cards | 10 earlier checks")
    print("--- | --- | --- | ---")
    smallest: dict[tuple[str, int, str], float] = {}
    for cards in (10, 60):
        generator = np.random.default_rng(3)
        comparisons = list(simulated_checks(generator, differences, 1000, cards=cards, earlier=10))
        limit = _limit(comparisons)
        for one in comparisons:
            if one.quantity == "time":
                spread = float(np.median(one.spreads))
                about = (one.figure.name, cards, one.reference)
                smallest[about] = smallest_found(one.count, spread, limit)
    for figure in check_figures():
        cells = []
        for cards, reference in ((10, "cards"), (60, "cards"), (10, "earlier")):
            cells.append(f"{smallest[figure.name, cards, reference]:.1%}")
        print(f"{figure.label} | {' | '.join(cells)}")


def print_other_tails(stored: Sequence[StoredTuple], checks: int) -> None:
    """The rate for cards of each model alone, with other tails than `TAIL_DEGREES`: whether the
    choice depends on the readings with which it was made."""
    models = sorted({one.card_model for one in stored})
    print(f"\nhealthy cards outside, 60 other cards, 10 earlier | {' | '.join(models)}")
    print("--- | " + " | ".join("---" for _ in models))
    usual = deviation.TAIL_DEGREES
    for tail in (4, 5, 6, 8):
        deviation.TAIL_DEGREES = tail
        deviation._largest_scores.cache_clear()
        cells = []
        for model in models:
            differences = StoredDifferences(stored, model)
            outside = false_alarms(differences, checks, cards=60, earlier=10)
            cells.append(_rate(outside, checks))
        print(f"{tail} degrees of freedom | {' | '.join(cells)}")
    deviation.TAIL_DEGREES = usual
    deviation._largest_scores.cache_clear()


def _rate(count: int, of: int) -> str:
    """A share with its 95 % interval (Wilson)."""
    z = 1.96
    share = count / of
    center = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of)) / (1 + z * z / of)
    return f"{share:.1%} ({max(0.0, center - half):.1%} to {center + half:.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--checks", type=int, default=20_000)
    options = parser.parse_args()
    stored = stored_tuples()
    print_spreads(stored)
    print_temperature(stored)
    print()
    print_left_out(stored, only_figures=True)
    print_left_out(stored, only_figures=False)
    differences = StoredDifferences(stored)
    print_rates(differences, options.checks)
    print_smallest(differences)
    print_other_tails(stored, options.checks)


if __name__ == "__main__":
    main()
