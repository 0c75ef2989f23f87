"""Gaps of models whose tuples and wholes are measured on different cards, with and without the checks
of these cards (`farm.verdict.checked_cards`).

    python -m benchmarks.card_differences               # simulated models, with known differences
    python -m benchmarks.card_differences farm.db       # the jobs of a farm that the checks restate

The true difference of a kind of work is exact; each operator differs from it by `OPERATORS`, and
each reading by `REPETITION`. All tuples of a kind in a model differ alike, which is the worst
case."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from sqlmodel import select

from farm.store import tables
from farm.store.database import Database
from farm.types.figure import Figure
from farm.verdict.aggregate import aggregate
from farm.verdict.checked_cards import (
    Bound,
    CardFigure,
    CheckedCards,
    Quantity,
    levels_of,
    shares_of,
)
from farm.verdict.cost_line import CostLine, TupleView
from farm.verdict.figures import ReadingView, Whole
from farm.verdict.job_results import JobResults
from farm.verdict.verdict import Comparison

MODELS = 1_000
#: Standard deviations: of the differences between the operators of a kind, and of repeated readings.
OPERATORS: Mapping[Bound, float] = {"memory": 0.003, "compute": 0.005, "launch": 0.01}
REPETITION: Mapping[Bound, float] = {"memory": 0.003, "compute": 0.004, "launch": 0.02}
FIGURES: Mapping[Bound, int] = {"memory": 5, "compute": 6, "launch": 2}
KINDS: tuple[Bound, ...] = ("memory", "compute", "launch")
CARDS = FIRST, SECOND = "card-1", "card-2"
#: The second card draws so much more power; with the standard deviations of operators, and of
#: repeated figures of a check.
HUNGRIER, POWER_OF_OPERATORS, POWER_REPETITION = 0.06, 0.01, 0.012
POWER_W = 500.0
TUPLES = 24
#: The shortest and the longest time of a tuple.
TIMES_US: Mapping[Bound, tuple[float, float]] = {
    "memory": (5.0, 500.0),
    "compute": (5.0, 500.0),
    "launch": (2.0, 6.0),
}
#: Half-widths of a reading, as fractions.
HALF_WIDTH, ENERGY_HALF_WIDTH = 0.002, 0.006

#: How much slower the second card is.
Slower = Mapping[Bound, float]
EQUAL: Slower = {"memory": 0.0, "compute": 0.0, "launch": 0.0}
SLOWER: Slower = {"memory": 0.03, "compute": 0.03, "launch": 0.03}
SLOWER_MEMORY: Slower = {"memory": 0.05, "compute": 0.0, "launch": 0.0}
OPPOSITE: Slower = {"memory": 0.04, "compute": -0.03, "launch": 0.0}
QUANTITIES: tuple[Quantity, ...] = ("time", "energy")

DIFFERENCES: Mapping[str, Slower] = {
    "none": EQUAL,
    "3 % in all": SLOWER,
    "5 % in memory": SLOWER_MEMORY,
    "4 % in memory, -3 % in arithmetic": OPPOSITE,
}

#: Name -> the card of the tuples of each kind ("": half on each card), and the cards of wholes.
PLACES: Mapping[str, tuple[Mapping[Bound, str], Sequence[str]]] = {
    "whole on one card, tuples on the other": (dict.fromkeys(KINDS, SECOND), (FIRST,)),
    "wholes on both, tuples by kind": (
        {"memory": SECOND, "compute": FIRST, "launch": FIRST},
        (FIRST, SECOND),
    ),
    "wholes on both, half of the tuples on each": (dict.fromkeys(KINDS, ""), (FIRST, SECOND)),
}


@dataclass(frozen=True)
class SimulatedJob:
    """The readings of a model, and the checks of its cards."""

    parts: Sequence[CostLine]
    wholes: Sequence[Whole]
    cards: CheckedCards

    def gaps(self, *, checked: bool) -> dict[Quantity, Figure]:
        """The gap of each quantity, with or without the checks."""
        cards = self.cards if checked else None
        verdict = aggregate(self.parts, self.wholes, target=0.95, launch="graph", cards=cards)
        gaps: dict[Quantity, Figure] = {}
        for quantity in QUANTITIES:
            comparison = verdict.comparisons[quantity]
            assert comparison is not None
            assert comparison.gap is not None
            gaps[quantity] = comparison.gap
        return gaps


def simulated_job(
    generator: np.random.Generator, slower: Slower, place: str, spread: float = 1.0
) -> SimulatedJob:
    """Measure a model on two cards, after a check of each. The differences between operators are
    `spread` times as large as `OPERATORS`."""
    of_kind, whole_cards = PLACES[place]
    model: dict[tuple[Bound, str], float] = {}
    power_w: dict[tuple[Bound, str], float] = {}
    for kind in KINDS:
        for card_id in CARDS:
            model[kind, card_id] = _ratio(generator, slower, kind, card_id, spread)
            power_w[kind, card_id] = _power_w(generator, card_id, spread)
    parts, kinds = list[CostLine](), dict[str, Bound]()
    wholes_us = dict.fromkeys(whole_cards, 0.0)
    wholes_mj = dict.fromkeys(whole_cards, 0.0)
    for number in range(TUPLES):
        kind = KINDS[int(generator.choice(3, p=(0.4, 0.4, 0.2)))]
        shortest_us, longest_us = TIMES_US[kind]
        time_us = float(np.exp(generator.uniform(np.log(shortest_us), np.log(longest_us))))
        card_id = of_kind[kind] or CARDS[number % 2]
        repeated = math.exp(0.001 * generator.standard_normal())
        card_us = time_us * model[kind, card_id] * repeated
        view = _view(card_us, card_us * power_w[kind, card_id] * 1e-3, card_id)
        subject = TupleView(f"tuple {number}", kind, kind, estimated_us=time_us)
        parts.append(CostLine.of_reading(subject, 1, view))
        kinds[subject.operator_id] = kind
        for whole_card in whole_cards:
            whole_us = time_us * model[kind, whole_card]
            wholes_us[whole_card] += whole_us
            wholes_mj[whole_card] += whole_us * power_w[kind, whole_card] * 1e-3
    wholes = []
    for whole_card in whole_cards:
        whole = _view(wholes_us[whole_card], wholes_mj[whole_card], whole_card)
        wholes.append(Whole(whole_card, whole))
    views = [whole.reading for whole in wholes if whole.reading]
    cards = CheckedCards(
        levels_of(_checks(generator, slower, spread), CARDS), kinds, shares_of(parts, views)
    )
    return SimulatedJob(parts, wholes, cards)


def _ratio(
    generator: np.random.Generator, slower: Slower, kind: Bound, card_id: str, spread: float
) -> float:
    """The time of an operator on a card, relative to that on the average card."""
    level = 1 + slower[kind] if card_id == SECOND else 1.0
    deviation = spread * OPERATORS[kind] / math.sqrt(2)
    return level * math.exp(deviation * generator.standard_normal())


def _power_w(generator: np.random.Generator, card_id: str, spread: float) -> float:
    level = 1 + HUNGRIER if card_id == SECOND else 1.0
    deviation = spread * POWER_OF_OPERATORS / math.sqrt(2)
    return POWER_W * level * math.exp(deviation * generator.standard_normal())


def _view(time_us: float, energy_mj: float, card_id: str) -> ReadingView:
    time = Figure(time_us, HALF_WIDTH * time_us)
    return ReadingView(time, Figure(energy_mj, ENERGY_HALF_WIDTH * energy_mj), card_id=card_id)


def _checks(generator: np.random.Generator, slower: Slower, spread: float) -> list[CardFigure]:
    figures = []
    for kind, number in FIGURES.items():
        for index in range(number):
            for card_id in CARDS:
                ratio = _ratio(generator, slower, kind, card_id, spread)
                repeated = REPETITION[kind] * generator.standard_normal()
                time = math.log(100 * ratio) + repeated
                repeated_power = POWER_REPETITION * generator.standard_normal()
                power = math.log(_power_w(generator, card_id, spread)) + repeated_power
                figures.append(CardFigure((f"{kind} {index}",), kind, card_id, time, time + power))
    return figures


def summary(gaps: Sequence[Figure]) -> tuple[float, float, float]:
    """Return the median absolute gap, the median half-width, and the share of intervals that
    contain zero."""
    inside = [abs(gap.value) <= gap.half_width for gap in gaps]
    return (
        median(abs(gap.value) for gap in gaps),
        median(gap.half_width for gap in gaps),
        sum(inside) / len(inside),
    )


HEAD = """| difference | readings | checks | time: gap, inside | energy: gap, inside |
| --- | --- | --- | --- | --- |"""


def main() -> None:
    """Print the tables of the design note, or one of a farm's database."""
    parser = argparse.ArgumentParser(description="Gaps with and without the checks of cards.")
    parser.add_argument("database", nargs="?", help="a file of SQLite with the present schema")
    options = parser.parse_args()
    if options.database:
        with contextlib.closing(Database(f"sqlite:///{options.database}")) as database:
            print_jobs(database)
        return
    print(HEAD)
    for difference, slower in DIFFERENCES.items():
        for place in PLACES:
            print_rows(difference, slower, place)
    print(f"\n{HEAD}")
    for spread in (2.0, 4.0, 8.0):
        for place in PLACES:
            print_rows(f"operators {spread:.0f} times", OPPOSITE, place, spread)


def print_jobs(database: Database) -> None:
    """Print the last verdict of each job that checks restate, without and with them."""
    print("| job | model | checks | gap in time | gap in energy | note |")
    print("| --- | --- | --- | --- | --- | --- |")
    with database.read() as session:
        for job in session.exec(select(tables.Job).where(tables.Job.kind == "model")):
            results = JobResults(session, job, job.round)
            if results.checked_cards is None:
                continue
            restated = results.verdict()
            results.checked_cards = None
            for checks, verdict in (("no", results.verdict()), ("yes", restated)):
                gaps = [_gap_text(verdict.time), _gap_text(verdict.energy)]
                cells = [job.id, job.title, checks, *gaps, verdict.systematic_note]
                print(f"| {' | '.join(cells)} |")


def _gap_text(comparison: Comparison | None) -> str:
    gap = comparison.gap if comparison else None
    return f"{100 * gap.value:+.2f} ± {100 * gap.half_width:.2f} %" if gap else "not available"


def print_rows(name: str, slower: Slower, place: str, spread: float = 1.0) -> None:
    """Print a row without and one with checks."""
    generator = np.random.default_rng(1)
    jobs = [simulated_job(generator, slower, place, spread) for _ in range(MODELS)]
    for checked in (False, True):
        cells = [name, place, "yes" if checked else "no"]
        verdicts = [job.gaps(checked=checked) for job in jobs]
        for quantity in QUANTITIES:
            gap, half_width, inside = summary([gaps[quantity] for gaps in verdicts])
            cells.append(f"{100 * gap:.2f} ± {100 * half_width:.2f} %, {inside:.0%}")
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    sys.exit(main())
