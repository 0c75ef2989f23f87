"""Predict one card model from another: the source card's readings and predictor, and a few readings
of the target card.

    log t_target = log t_source + log ratio of the cards' properties + a Gaussian process of the
    target's readings

`t_source` is the source card's reading of the same tuple, else its prediction. The ratio weights
the bandwidths, peak rates and launch times of both cards by what bounds the call on the source
card. Tensors that fit into the last cache of one card only are read from the memory of the other.
The process learns how far the target's readings differ from that. Its kernel has few constants,
chosen with pairs of readings of two card models. Power is predicted in the same way. Readings of
one card share an offset."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from farm.addons.predict.calibration import Calibration
from farm.addons.predict.call_features import CallDescription
from farm.addons.predict.dataset import TrainingRow
from farm.addons.predict.kernel_rules import constants
from farm.addons.predict.predictors import CallCosts
from farm.addons.predict.regressors import Floats, Names
from farm.addons.predict.stored_predictor import Predictions, StoredPredictor
from farm.addons.predict.tile_roofline import CardRates, card_rates
from farm.types.format import plural
from farm.types.tuple import NeededTuple

NORMAL_90 = 1.645  # half-width of a 90 % interval / standard deviation


@dataclass(frozen=True)
class Points:
    """What the kernel compares, for each call."""

    bound: Floats  # calls x shares
    at: Floats  # calls x coordinates
    families: Names
    cards: Names  # "": unknown
    source_cards: Names

    @classmethod
    def of(
        cls,
        card: CardRates,
        calls: Sequence[CallDescription],
        costs: CallCosts,
        cards: Names,
        source_cards: Names,
    ) -> Self:
        """``costs``: of the calls on the source ``card``."""
        traffic = Traffic.on(card, calls, _cache_rate(card))
        memory, compute, launch = _bounds(card, calls, costs.time_us, traffic)
        half = np.array(
            [call.itemsize_bytes < 4 and call.compute_us > 0 for call in calls], dtype=float
        )
        bound = np.column_stack([memory, compute, compute * half, launch])
        moved = np.array([max(call.bytes_moved, 1) for call in calls], dtype=float)
        sizes = (
            np.log(np.maximum(moved / card.l2_bytes, 1e-2)),
            np.log(np.maximum(costs.time_us, 0.5)) / 2,
        )
        shares = np.where(np.isfinite(costs.power_w), costs.power_w / card.power_limit_w, 0.5)
        families = np.array([call.operator_family for call in calls], dtype=np.str_)
        return cls(
            bound,
            np.column_stack([2 * bound, *sizes, 2 * np.log(shares)]),
            families,
            cards,
            source_cards,
        )

    def where(self, chosen: npt.NDArray[np.bool_]) -> Self:
        return type(self)(*(part[chosen] for part in vars(self).values()))


@dataclass(frozen=True)
class CovarianceKernel:
    """Standard deviations of the parts of log(target / source), and two length scales."""

    constant: float  # all calls
    bound: float  # linear in what bounds the call
    smooth: float  # smooth in what bounds the call, its size and its duration
    family: float  # the same, but of one operator family alone
    card: float  # one card of the model
    noise: float
    scale: float  # length scale of `smooth`
    family_scale: float

    def times(self, factor: float) -> CovarianceKernel:
        """For cards that are less alike: all parts but those of one card and of noise are `factor`
        times as large.
        """
        return replace(
            self,
            constant=factor * self.constant,
            bound=factor * self.bound,
            smooth=factor * self.smooth,
            family=factor * self.family,
        )

    def covariance(self, one: Points, other: Points) -> Floats:
        apart = ((one.at[:, None, :] - other.at[None, :, :]) ** 2).sum(axis=-1)
        same_family = one.families[:, None] == other.families[None, :]
        covariance = self.constant**2 + self.bound**2 * one.bound @ other.bound.T
        covariance += self.smooth**2 * np.exp(-apart / self.scale**2 / 2)
        covariance += self.family**2 * same_family * np.exp(-apart / self.family_scale**2 / 2)
        for cards, others in ((one.cards, other.cards), (one.source_cards, other.source_cards)):
            covariance += self.card**2 * (
                (cards[:, None] == others[None, :]) & (cards != "")[:, None]
            )
        return covariance  # type: ignore[no-any-return]

    def variance(self, one: Points) -> Floats:
        """Variance of each value before any reading of the target. An unknown card adds the
        variance of cards.
        """
        variance = (
            self.constant**2
            + self.bound**2 * (one.bound**2).sum(axis=1)
            + self.smooth**2
            + self.family**2
        )
        return variance + 2 * self.card**2 + self.noise**2  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Posterior:
    """The posterior of a Gaussian process: what to add to a logarithm, and its standard
    deviation.
    """

    kernel: CovarianceKernel
    points: Points
    factor: Floats  # inverse of the lower Cholesky factor
    coefficients: Floats

    @classmethod
    def fit(
        cls, kernel: CovarianceKernel, points: Points, values: Floats, deviations: Floats
    ) -> Posterior:
        """``deviations``: of each value, beside the noise of the kernel. Values that are NaN are
        left out.
        """
        is_known = np.isfinite(values)
        points, values = points.where(is_known), values[is_known]
        covariance = kernel.covariance(points, points) + np.diag(
            deviations[is_known] ** 2 + kernel.noise**2
        )
        factor = np.linalg.inv(np.linalg.cholesky(covariance)) if len(values) else np.zeros((0, 0))
        return cls(kernel, points, factor, factor.T @ (factor @ values))

    def at(self, points: Points) -> tuple[Floats, Floats]:
        towards = self.kernel.covariance(points, self.points)
        explained = ((towards @ self.factor.T) ** 2).sum(axis=1)
        variance = np.maximum(self.kernel.variance(points) - explained, self.kernel.noise**2)
        return towards @ self.coefficients, np.sqrt(variance)


#: Chosen by maximum likelihood and by leaving out a family, with readings of six families on an
#: H200 and an H100.
TIME = CovarianceKernel(0.02, 0.025, 0.08, 0.03, 0.02, 0.013, 1.1, 0.07)
POWER = CovarianceKernel(0.03, 0.02, 0.05, 0.035, 0.03, 0.011, 1.0, 0.85)
#: Rate of the last cache of an H200 or an H100 / the bandwidth of its memory.
CACHE_RATE = constants("tile_roofline").l2_rate
#: Largest logarithm of a ratio of properties between these two cards. Cards that differ more are
#: more uncertain.
USUAL_DISTANCE = 0.35
#: Factor of the constants for two cards of one model, chosen with half of the 24 H200s in
#: `benchmarks/across_cards.py`.
ALIKE = 0.3
#: The spreads of a transfer are half-widths; those of sums are too large, because errors of types
#: differ in sign. With 0.7, the intervals of 11 of 14 blind sums on an H100 held in time, and 11 in
#: energy (`benchmarks/blind_predictions.py`).
WIDTHS = Calibration(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, sum_time=0.8, sum_energy=0.8)


def distance(source: CardRates, target: CardRates) -> float:
    """Return how many times less alike two card models are than those of the constants; at least
    1.
    """
    ratios = [
        target.bytes_per_s / source.bytes_per_s,
        target.launch_floor_us / source.launch_floor_us,
        target.multiprocessors / source.multiprocessors,
        target.l2_bytes / source.l2_bytes,
        target.power_limit_w / source.power_limit_w,
        target.base_power_w / source.base_power_w,
    ]
    ratios += [rate / source.flops_per_s[dtype] for dtype, rate in target.flops_per_s.items()]
    return max(1.0, max(abs(math.log(ratio)) for ratio in ratios) / USUAL_DISTANCE)


def data_sheet_model(source: CardRates, name: str) -> CardRates:
    """Build a card model without measured rates: those of the source x the ratio of the data
    sheets.
    """
    target = card_rates(source.kind, name)
    sheet = card_rates(source.kind, source.model)
    rates = {
        dtype: rate * source.flops_per_s[dtype] / sheet.flops_per_s[dtype]
        for dtype, rate in target.flops_per_s.items()
    }
    return replace(
        target,
        flops_per_s=rates,
        bytes_per_s=target.bytes_per_s * source.bytes_per_s / sheet.bytes_per_s,
        launch_floor_us=target.launch_floor_us * source.launch_floor_us / sheet.launch_floor_us,
        base_power_w=target.base_power_w * source.base_power_w / sheet.base_power_w,
    )


@dataclass(frozen=True)
class Traffic:
    """How calls move their bytes on a card.

    A loop of calls fetches weights from memory. Other operands stay in the last cache, until they
    are larger than it.

    Attributes:
        memory_us: the time of the bytes that come from memory, at its bandwidth.
        cache_us: the time of the others, at the rate of the last cache.
    """

    memory_us: Floats
    cache_us: Floats

    @classmethod
    def on(cls, card: CardRates, calls: Sequence[CallDescription], cache_rate: float) -> Self:
        """``cache_rate``: of the last cache, in bytes/s."""
        moved = np.array([call.bytes_moved for call in calls], dtype=float)
        cold = np.minimum([call.parameter_bytes for call in calls], moved)
        uncached = np.clip((moved - cold) / card.l2_bytes - 1, 0.0, 1.0)
        memory = cold + uncached * (moved - cold)
        return cls(memory / card.bytes_per_s * 1e6, (moved - memory) / cache_rate * 1e6)


def _cache_rate(card: CardRates) -> float:
    """Return the rate of the last cache of a measured card, in bytes/s."""
    return CACHE_RATE * card.bytes_per_s


def _bounds(
    card: CardRates, calls: Sequence[CallDescription], times_us: Floats, traffic: Traffic
) -> tuple[Floats, ...]:
    """Return what bounds each call on a card, at most 1: times of memory, computation and launch /
    its time. ``traffic``: of the calls on the card.
    """
    compute_us = np.array([call.compute_us for call in calls])
    parts_us = traffic.memory_us, compute_us, card.launch_floor_us
    return tuple(np.minimum(part_us / times_us, 1.0) for part_us in parts_us)


def _log_ratio(
    source: CardRates, target: CardRates, calls: Sequence[CallDescription], times_us: Floats
) -> Floats:
    """Return log(time on the target / time on the source) from the properties of the cards
    alone.

    The rate of the last cache is in no data sheet. It is assumed to be proportional to the number
    of multiprocessors. Data may be in the cache of one card, and too large for that of the other.
    """
    cache_rate = _cache_rate(source)
    on_source = Traffic.on(source, calls, cache_rate)
    memory, compute, launch = _bounds(source, calls, times_us, on_source)
    source_peaks = np.array([source.roofline(call.dtype).flops_per_s for call in calls])
    target_peaks = np.array([target.roofline(call.dtype).flops_per_s for call in calls])
    rest = np.maximum(0.0, 1 - np.maximum(memory, compute) - launch)

    multiprocessors = target.multiprocessors / source.multiprocessors
    on_target = Traffic.on(target, calls, multiprocessors * cache_rate)
    cache = np.minimum(on_source.cache_us / times_us, rest)
    # A part that takes longer than the whole call counts as the whole call.
    limited = np.divide(
        memory + cache,
        (on_source.memory_us + on_source.cache_us) / times_us,
        out=np.ones_like(memory),
        where=on_source.memory_us + on_source.cache_us > 0,
    )

    parts = limited * (on_target.memory_us + on_target.cache_us) / times_us
    parts += compute * (source_peaks / target_peaks) + (rest - cache)
    parts += launch * (target.launch_floor_us / source.launch_floor_us)
    return np.log(parts / (memory + compute + launch + rest))  # type: ignore[no-any-return]


def _powers_of_properties(
    source: CardRates, target: CardRates, powers_w: Floats, log_ratio: Floats
) -> Floats:
    """Return powers on the target: the middle between the same power and the same energy above that
    of an idle card.
    """
    energy = np.maximum(powers_w - source.base_power_w, 1.0) * np.exp(-log_ratio)
    same = powers_w * target.power_limit_w / source.power_limit_w
    return np.minimum(np.sqrt(same * (target.base_power_w + energy)), target.power_limit_w)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class SourceCosts:
    """The costs of calls on the source card: its readings, else its predictions."""

    source: StoredPredictor
    #: Returns readings of tuples by id, under the conditions of the predictor.
    readings_of: Callable[[set[str]], Iterable[TrainingRow]]

    def at(self, calls: Sequence[CallDescription]) -> tuple[CallCosts, Names]:
        """Return costs with standard deviations (0 for a reading), and the card of each reading."""
        costs = self.source.fitted.predict(calls)
        for name, spread in (("time", costs.time_spread), ("power", costs.power_spread)):
            half_widths = self.source.calibration.half_widths(name, spread, costs.known)
            spread[:] = np.nan_to_num(half_widths / NORMAL_90, nan=1.0)
        cards = np.full(len(calls), "", dtype=object)
        readings = defaultdict[tuple[str, str], list[TrainingRow]](list)
        for row in self.readings_of({call.operator_id for call in calls}):
            for data in {row.call.data_class, ""}:  # "": a call whose class of data is unknown
                readings[row.call.operator_id, data].append(row)
        for position, call in enumerate(calls):
            of_any_data = readings.get((call.operator_id, ""))
            rows = readings.get((call.operator_id, call.data_class)) or of_any_data
            if not rows:
                continue
            cards[position] = rows[0].card_id
            costs.time_us[position] = np.mean([row.cost.time_us.value for row in rows])
            costs.neighbours_us[position] = np.mean([row.neighbours_us for row in rows])
            costs.fetching_us[position] = np.mean([row.fetching_us for row in rows])
            costs.time_spread[position] = 0.0
            costs.known[position] = True
            costs.distance[position] = 0.0
            powers_w = [row.cost.mean_power_w for row in rows]
            known_powers_w = [power_w for power_w in powers_w if power_w is not None]
            if known_powers_w:
                costs.power_w[position] = np.mean(known_powers_w)
            if powers_w[0]:
                costs.power_spread[position] = 0.0
        return costs, cards.astype(np.str_)


@dataclass(frozen=True, kw_only=True)
class TransferredPredictor(StoredPredictor):
    """Predicts a card model from another one, whose predictor is `fitted`."""

    source: SourceCosts
    time: Posterior
    power: Posterior
    families: frozenset[str]  # operator families with a reading of the target
    card_id: str  # predict for this card; "": any card of the model
    # source of the data sheet, if nothing is measured on the card model; else ""
    data_sheet: str = ""

    @classmethod
    def fit(
        cls, source: SourceCosts, target: CardRates, rows: Sequence[TrainingRow], card_id: str = ""
    ) -> Self:
        """``rows``: readings of the target, described for the source card.

        If both are of one model, only the power is corrected: the times of these cards do not
        differ measurably."""
        stored = source.source
        calls = [row.call for row in rows]
        costs, source_cards = source.at(calls)
        cards = np.array([row.card_id for row in rows], dtype=np.str_)
        points = Points.of(stored.card, calls, costs, cards, source_cards)

        log_times = np.log([row.cost.time_us.value for row in rows]) - np.log(costs.time_us)
        priors = _log_ratio(stored.card, target, calls, costs.time_us)
        powers_w = np.array([row.cost.mean_power_w or np.nan for row in rows])
        expected_w = _powers_of_properties(stored.card, target, costs.power_w, log_times)
        log_powers = np.log(powers_w / expected_w)
        if stored.card.model == target.model:
            apart = ALIKE
            log_times = np.full(len(rows), np.nan)
        else:
            apart = distance(stored.card, target)
        return cls(
            fitted=stored.fitted,
            calibration=WIDTHS,
            card=target,
            conditions=replace(stored.conditions, card_model=target.model),
            key=stored.key,
            rows=len(rows),
            learned=stored.learned,
            source=source,
            time=Posterior.fit(TIME.times(apart), points, log_times - priors, costs.time_spread),
            power=Posterior.fit(POWER.times(apart), points, log_powers, costs.power_spread),
            families=frozenset(call.operator_family for call in calls),
            card_id=card_id,
        )

    @property
    def name(self) -> str:
        source = self.source.source.card.model
        return (
            f"{self.fitted.name} of {source}, "
            f"{'corrected' if source == self.card.model else 'transferred'}"
        )

    def described(self, wanted: Sequence[NeededTuple]) -> list[CallDescription]:
        return self.source.source.described(wanted)

    def costs(self, calls: Sequence[CallDescription]) -> CallCosts:
        """Spreads are half-widths of 90 % intervals."""
        card = self.source.source.card
        costs, source_cards = self.source.at(calls)
        points = Points.of(card, calls, costs, np.full(len(calls), self.card_id), source_cards)
        correction, time_deviation = self.time.at(points)
        log_ratio = _log_ratio(card, self.card, calls, costs.time_us) + correction
        correction, power_deviation = self.power.at(points)
        powers = _powers_of_properties(card, self.card, costs.power_w, log_ratio) * np.exp(
            correction
        )
        ratio = np.exp(log_ratio)
        return replace(
            costs,
            time_us=costs.time_us * ratio,
            neighbours_us=costs.neighbours_us * ratio,
            fetching_us=costs.fetching_us * ratio,
            time_spread=NORMAL_90 * np.hypot(time_deviation, costs.time_spread),
            power_w=np.minimum(powers, self.card.power_limit_w),
            power_spread=NORMAL_90 * np.hypot(power_deviation, costs.power_spread),
            waiting_w=self.card.base_power_w,
        )

    def predict(self, wanted: Sequence[NeededTuple], model: Sequence[NeededTuple]) -> Predictions:
        source, card = self.source.source.card.model, self.card.model
        missing = sorted({call.operator_family for call in self.described(wanted)} - self.families)
        notes = [f"The predictions are not readings of {card}: they are transferred from {source}"]
        if self.data_sheet:
            notes = [
                f"{card}: from a data sheet ({self.data_sheet}), nothing measured on this card. "
                f"The predictions are transferred from {source}"
            ]
        if source == card:
            notes = [
                f"The predicted powers are corrected by {self.rows} "
                f"{plural('reading', self.rows)} of the card "
                f"{self.card_id}; the predicted times are those of any {card}."
            ]
        elif self.rows:
            of = f"the card {self.card_id}" if self.card_id else f"any {card}"
            notes[0] += (
                f" and calibrated with {self.rows} {plural('reading', self.rows)} of {card}, for "
                f"{of}."
            )
        else:
            notes[0] += (
                " by the properties of the cards alone. `farm calibrate` on the card narrows the "
                "intervals."
            )
        if self.data_sheet:
            notes.append(
                "The rate of the last cache is in no data sheet: it is assumed to grow with the "
                "number of multiprocessors. Calls whose tensors fit into it are less certain."
            )
        if self.rows and missing and source != card:
            notes.append(
                f"Wider intervals, because {card} has no reading of these families: "
                f"{', '.join(missing)}."
            )
        basis = {
            "source_card": source,
            "readings": self.rows,
            "card": self.card_id,
            "families_without": missing,
            "data_sheet": self.data_sheet,
        }
        return replace(super().predict(wanted, model), transfer=basis, notes=tuple(notes))
