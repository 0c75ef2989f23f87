"""The sums over all calls of a model, compared with the means of its wholes: time, energy and
power.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from farm.types.figure import Figure, PassCost, total_of
from farm.types.intervals import paired_half_width
from farm.verdict.canaries import Systematic
from farm.verdict.checked_cards import CheckedCards
from farm.verdict.corrections import weights_in_cache
from farm.verdict.cost_line import CostLine
from farm.verdict.expectation import Quantity
from farm.verdict.figures import CallCost, ReadingView
from farm.verdict.gap_errors import ErrorSources, GapErrors, errors_of_gap
from farm.verdict.verdict import Comparison, Verdict


class SumAndWhole:
    """The sums over all calls, compared with the means of the wholes."""

    def __init__(
        self,
        measured: Sequence[CostLine],
        wholes: Sequence[ReadingView],
        systematic: Systematic,
        replay: PassCost | None,
        cards: CheckedCards | None = None,
    ) -> None:
        self.measured, self.wholes, self.replay, self.cards = measured, wholes, replay, cards
        self.with_context = any(line.measured[0].details.context is not None for line in measured)
        #: True if the effect of the neighbours on a CPU was measured.
        has_places = any(whole.details.order.places for whole in wholes)
        has_warm = any(line.measured[0].details.timing.warm_us is not None for line in measured)
        self.with_places = has_places and has_warm
        self.weights = _weights(measured, wholes)

        layouts_us = wholes[0].details.order.layouts_half_width_us if replay else None
        self.sources = ErrorSources(
            among_others=self.with_context,
            addresses=None if layouts_us is None else layouts_us / wholes[0].time_us.value,
            canaries=systematic.relative,
        )

    def total(self, of: Callable[[CallCost], float]) -> float:
        """Return the sum over all calls of one quantity of their costs."""
        return math.fsum(of(line.measured[1]) * line.count for line in self.measured)

    def with_neighbours(self, verdict: Verdict) -> Verdict:
        """Return the verdict with the effect of the neighbours, if it was measured."""
        if not (self.with_context or self.with_places):
            return verdict
        context_mj = self.total(lambda cost: cost.context_mj) if verdict.energy else None
        return replace(
            verdict,
            context_time_us=self.total(lambda cost: cost.context_us),
            context_energy_mj=context_mj,
            weights_in_cache=weights_in_cache(self.wholes),
        )

    def time(self) -> Comparison:
        """Compare the times. Unit: us."""
        total = total_of((line.time_us, line.count) for line in self.measured)
        assert total is not None
        comparison = self._compared(
            "time",
            total,
            [whole.time_us for whole in self.wholes],
            common=self.total(lambda cost: cost.unsure_us),
            of_replay=self.replay.time_us if self.replay else None,
        )
        return replace(comparison, gap_half_width=_timed_in_turn(self.measured, self.wholes))

    def energy(self) -> Comparison | None:
        """Compare the energies; None if a part has none. Unit: mJ."""
        total = total_of((line.energy_mj, line.count) for line in self.measured)
        if not self.measured or total is None:
            return None
        return self._compared(
            "energy",
            total,
            [whole.energy_mj for whole in self.wholes],
            common=self.total(lambda cost: cost.unsure_mj),
            of_replay=self.replay.energy_mj if self.replay else None,
        )

    def energy_above_idle(self) -> Comparison | None:
        """Compare the energies minus those of the idle card; None if an idle power is unknown."""
        terms = []
        for line in self.measured:
            reading, cost = line.measured
            terms.append((_above_idle(cost.energy_mj, cost.time_us, reading), line.count))
        total = total_of(terms)
        if total is None:
            return None
        return self._compared(
            "energy",
            total,
            [_above_idle(whole.energy_mj, whole.time_us, whole) for whole in self.wholes],
            common=self.total(lambda cost: cost.unsure_mj),
        )

    def power(self, time: Comparison, energy: Comparison) -> Comparison:
        """Compare the mean powers. Unit: W."""
        whole = None
        if energy.whole and time.whole:
            whole = mean_power(energy.whole, time.whole)
        # With a replay, the sums of time and energy already contain the effect of the addresses.
        between_jobs = 0.0
        if self.sources.addresses is None:
            between_jobs = self.sources.between_jobs("power")
        return Comparison(mean_power(energy.total, time.total), whole, between_jobs=between_jobs)

    def _compared(
        self,
        quantity: Quantity,
        total: Figure,
        of_wholes: Sequence[Figure | None],
        *,
        common: float,
        of_replay: Figure | None = None,
    ) -> Comparison:
        """Compare a sum with the mean of the wholes.

        Args:
            total: the sum, with the scatter of the tuples.
            common: half-width of the errors that all tuples share.
            of_replay: the same quantity of the replay; None if it does not count here.
        """
        expected = [1.0] * len(self.wholes)
        if self.cards is not None:
            costs = self._costs(quantity)
            common = math.hypot(common, self.cards.half_width(quantity, costs))
            expected = [
                self.cards.of_model(quantity, costs, whole.card_id) for whole in self.wholes
            ]
        independent = math.hypot(total.half_width, common)
        errors = errors_of_gap(
            GapErrors(quantity, total.value, of_replay, independent), self.sources
        )
        return Comparison(
            total=replace(total, half_width=errors.half_width),
            whole=_mean(of_wholes, self.weights, expected),
            common=min(errors.half_width, common),
            between_jobs=errors.between_jobs,
            replay_difference=errors.replay_difference,
        )

    def _costs(self, quantity: Quantity) -> list[tuple[CostLine, float]]:
        """Each line with the cost of all its calls."""
        costs = []
        for line in self.measured:
            figure = line.time_us if quantity == "time" else line.energy_mj
            costs.append((line, line.count * figure.value if figure else 0.0))
        return costs


def _timed_in_turn(measured: Sequence[CostLine], wholes: Sequence[ReadingView]) -> float | None:
    """Return the half-width of the time gap if all readings were timed in the same turns of a CPU,
    else None. The speed of a CPU drifts, but in each turn it is about the same for the tuples and
    the whole. The errors of the calls' places in the model add to it."""
    if len(wholes) != 1 or not measured:
        return None

    whole = wholes[0].details.timing
    of_whole = whole.without_turn_us or ()
    places = wholes[0].details.order.places or {}
    terms, of_places = [], []
    for line in measured:
        timing = line.measured[0].details.timing
        turns_us = timing.without_turn_us or ()
        place = places.get(line.subject.operator_id)
        if place is not None and timing.warm_without_turn_us:
            turns_us = timing.warm_without_turn_us
            of_places.append(line.count * place.effect_us.half_width)
        if timing.turns_group != whole.turns_group or len(turns_us) != len(of_whole):
            return None
        terms.append((line.count, turns_us))
    if len(of_whole) < 3:
        return None
    half_width = paired_half_width(terms, of_whole)
    return math.hypot(half_width, math.hypot(*of_places) / wholes[0].time_us.value)


def _weights(measured: Iterable[CostLine], wholes: Sequence[ReadingView]) -> list[float]:
    """Return the weight of each card's whole: the card's share of the sum, or equal weights if it
    is unknown.
    """
    of_card_us: dict[str, float] = defaultdict(float)
    for line in measured:
        of_card_us[line.card_id] += line.total_us
    number = Counter(whole.card_id for whole in wholes)
    weights = [of_card_us[whole.card_id] / number[whole.card_id] for whole in wholes]
    total = math.fsum(weights)
    return [weight / total if total else 1 / len(wholes) for weight in weights]


def _mean(
    figures: Sequence[Figure | None], weights: Sequence[float], expected: Sequence[float]
) -> Figure | None:
    """Return the weighted mean over cards; its half-width includes their spread that is not
    expected. None if a figure is missing.

    Args:
        expected: the cost on the card of each figure, relative to the mean.
    """
    counted, unexplained = [], []
    for figure, weight, ratio in zip(figures, weights, expected, strict=True):
        if figure is None:
            return None
        if weight:
            counted.append((figure, weight))
            unexplained.append(figure.value / ratio)
    if not counted:
        return None
    mean = math.fsum(weight * figure.value for figure, weight in counted)
    scatter = math.hypot(*(weight * figure.half_width for figure, weight in counted))
    return Figure(mean, scatter + max(abs(value - mean) for value in unexplained))


def mean_power(energy_mj: Figure, time_us: Figure) -> Figure:
    """Return the mean power in W. Energy is measured as power times time, so the errors count as
    independent.
    """
    if not time_us.value:
        return Figure(0.0)
    return energy_mj.divided_by(time_us).times(1e3)


def _above_idle(energy: Figure | None, time: Figure, reading: ReadingView) -> Figure | None:
    """Return the energy in mJ minus the energy of the idle card in the same time."""
    if energy is None or reading.idle_power_w is None:
        return None
    return Figure(energy.value - reading.idle_power_w * time.value * 1e-3, energy.half_width)
