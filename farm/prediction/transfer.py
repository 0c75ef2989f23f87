"""Predict one card model from another: the source card's readings and predictor, and a few readings of the target card.

    log t_target = log t_source + log ratio of the card's properties + a Gaussian process of the target's readings

`t_source` is the source card's reading of the same tuple, else its prediction. The ratio weights the bandwidths, peak
rates and launch times of both cards by what bounds the call on the source card. The process learns how far the target's
readings differ from that. Its kernel has few constants: the most likely ones for pairs of readings of two card models
(`benchmarks/across_cards.py`). Power is predicted in the same way. Readings of one card share an offset.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from farm.prediction.calibration import Calibration
from farm.prediction.call_features import CallDescription
from farm.prediction.dataset import TrainingRow
from farm.prediction.families import operator_family
from farm.prediction.predictors import CallCosts
from farm.prediction.regressors import Floats, Names
from farm.prediction.stored_predictor import NeededTuple, StoredPredictor
from farm.prediction.tile_roofline import CardModel, card_model
from farm.types.format import plural
from farm.types.tuple import OperatorTuple, parse


@dataclass(frozen=True)
class Kernel:
    """Standard deviations of the parts of log(target / source), and two length scales."""

    constant: float  # all calls
    bound: float  # linear in what bounds the call
    smooth: float  # smooth in what bounds the call, its size and its duration
    family: float  # the same, but of one operator family alone
    card: float  # one card of the model
    noise: float
    scale: float = 1.0  # length scale of `smooth`
    family_scale: float = 1.0

    def times(self, factor: float) -> Kernel:
        """For cards that are less alike: all parts but those of one card and of noise are `factor` times as large."""
        parts = {name: factor * getattr(self, name) for name in ("constant", "bound", "smooth", "family")}
        return dataclasses.replace(self, **parts)

    def covariance(self, one: Points, other: Points) -> Floats:
        apart = ((one.at[:, None, :] - other.at[None, :, :]) ** 2).sum(axis=-1)
        same_family = one.families[:, None] == other.families[None, :]
        covariance = self.constant**2 + self.bound**2 * one.bound @ other.bound.T
        covariance += self.smooth**2 * np.exp(-apart / self.scale**2 / 2)
        covariance += self.family**2 * same_family * np.exp(-apart / self.family_scale**2 / 2)
        for cards, others in ((one.cards, other.cards), (one.source_cards, other.source_cards)):
            covariance += self.card**2 * ((cards[:, None] == others[None, :]) & (cards != "")[:, None])
        return covariance  # type: ignore[no-any-return]

    def variance(self, one: Points) -> Floats:
        """Variance of each value before any reading of the target. An unknown card adds the variance of cards."""
        variance = self.constant**2 + self.bound**2 * (one.bound**2).sum(axis=1) + self.smooth**2 + self.family**2
        return variance + 2 * self.card**2 + self.noise**2  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Points:
    """What the kernel compares, for each call."""

    bound: Floats  # calls x shares
    at: Floats  # calls x coordinates
    families: Names
    cards: Names  # "": unknown
    source_cards: Names

    def where(self, chosen: npt.NDArray[np.bool_]) -> Points:
        return Points(*(part[chosen] for part in vars(self).values()))


@dataclass(frozen=True)
class Correction:
    """The posterior of a Gaussian process: what to add to a logarithm, and its standard deviation."""

    kernel: Kernel
    points: Points
    factor: Floats  # inverse of the lower Cholesky factor
    coefficients: Floats

    @classmethod
    def fit(cls, kernel: Kernel, points: Points, values: Floats, variances: Floats) -> Correction:
        """``variances``: of each value, beside the noise of the kernel."""
        covariance = kernel.covariance(points, points) + np.diag(variances + kernel.noise**2)
        factor = np.linalg.inv(np.linalg.cholesky(covariance)) if len(values) else np.zeros((0, 0))
        return cls(kernel, points, factor, factor.T @ (factor @ values))

    def at(self, points: Points) -> tuple[Floats, Floats]:
        towards = self.kernel.covariance(points, self.points)
        explained = ((towards @ self.factor.T) ** 2).sum(axis=1)
        variance = np.maximum(self.kernel.variance(points) - explained, self.kernel.noise**2)
        return towards @ self.coefficients, np.sqrt(variance)


@dataclass(frozen=True)
class Boundness:
    """What bounds each call on a card: the times of its parts / its time, at most 1."""

    memory: Floats
    compute: Floats
    launch: Floats

    @classmethod
    def of(cls, card: CardModel, calls: Sequence[CallDescription], times_us: Floats) -> Boundness:
        moved, weights, compute_us = (
            np.array([getattr(call, name) for call in calls], dtype=float)
            for name in ("bytes_moved", "parameter_bytes", "compute_us")
        )
        cold = np.minimum(weights, moved)  # a loop of calls fetches weights from memory, and finds the rest in L2
        uncached = np.clip((moved - cold) / card.l2_bytes - 1, 0.0, 1.0)
        memory_us = (cold + uncached * (moved - cold)) / card.bytes_per_s * 1e6
        return cls(*(np.minimum(part / times_us, 1.0) for part in (memory_us, compute_us, card.launch_floor_us)))

    def log_ratio(self, source: CardModel, target: CardModel, calls: Sequence[CallDescription]) -> Floats:
        """Logarithm of time on the target / time on the source, from the properties of the cards alone."""

        def rate(card: CardModel, call: CallDescription) -> float:
            return card.flops_per_s.get(call.dtype, card.flops_per_s["float32"])

        rates = np.array([rate(source, call) / rate(target, call) for call in calls])
        bandwidths = source.bytes_per_s / target.bytes_per_s
        launches = target.launch_floor_us / source.launch_floor_us
        rest = np.maximum(0.0, 1 - np.maximum(self.memory, self.compute) - self.launch)
        parts = self.memory * bandwidths + self.compute * rates + self.launch * launches + rest
        return np.log(parts / (self.memory + self.compute + self.launch + rest))  # type: ignore[no-any-return]


def _points(
    card: CardModel, calls: Sequence[CallDescription], costs: CallCosts, cards: Names, source_cards: Names
) -> Points:
    """``costs``: of the calls on the source ``card``."""
    bounds = Boundness.of(card, calls, costs.time_us)
    half = np.array([call.itemsize_bytes < 4 and call.compute_us > 0 for call in calls], dtype=float)
    moved = np.array([max(call.bytes_moved, 1) for call in calls], dtype=float)
    bound = np.column_stack([bounds.memory, bounds.compute, bounds.compute * half, bounds.launch])
    sizes = np.log(np.maximum(moved / card.l2_bytes, 1e-2)), np.log(np.maximum(costs.time_us, 0.5)) / 2
    shares = np.where(np.isfinite(costs.power_w), costs.power_w / card.power_limit_w, 0.5)
    families = np.array([call.operator_family for call in calls], dtype=np.str_)
    return Points(bound, np.column_stack([2 * bound, *sizes, 2 * np.log(shares)]), families, cards, source_cards)


#: Most likely for the time and power of readings on an H200 and an H100, of families outside the evaluation.
TIME = Kernel(0.02, 0.025, 0.08, 0.03, 0.02, 0.013, 1.1, 0.07)
POWER = Kernel(0.03, 0.02, 0.05, 0.035, 0.02, 0.011, 1.0, 0.85)
#: Largest logarithm of a ratio of properties between these two cards. Cards that differ more are more uncertain.
USUAL_DISTANCE = 0.35
#: Half-widths of 90 % intervals in standard deviations; of sums, also of the least error of `SUM_FLOOR`.
NORMAL_90 = 1.645
TIME_WIDTH, POWER_WIDTH, SUM_WIDTH = NORMAL_90, NORMAL_90, 0.7
WIDTHS = Calibration(*[1.0] * 6, SUM_WIDTH, SUM_WIDTH)  # the spreads of a transfer are half-widths


def distance(source: CardModel, target: CardModel) -> float:
    """Return how many times less alike two card models are than those of the constants; at least 1."""
    names = ("bytes_per_s", "launch_floor_us", "multiprocessors", "l2_bytes", "power_limit_w", "base_power_w")
    ratios = [getattr(target, name) / getattr(source, name) for name in names]
    ratios += [rate / source.flops_per_s[name] for name, rate in target.flops_per_s.items()]
    return max(1.0, max(abs(math.log(ratio)) for ratio in ratios) / USUAL_DISTANCE)


@dataclass(frozen=True)
class SourceCosts:
    """The costs of calls on the source card: its readings, else its predictions."""

    source: StoredPredictor
    readings_of: Callable[[set[str]], Iterable[TrainingRow]]  # of tuples by id, under the conditions of the predictor

    def at(self, calls: Sequence[CallDescription]) -> tuple[CallCosts, Names]:
        """Return costs with standard deviations (0 for a reading), and the card of each reading."""
        predicted, wide = self.source.fitted.predict(calls), self.source.calibration
        scale = [
            np.where(predicted.known, known, unseen) / NORMAL_90
            for known, unseen in ((wide.time, wide.unseen_time), (wide.power, wide.unseen_power))
        ]
        costs = dataclasses.replace(
            predicted,
            time_spread=np.nan_to_num(predicted.time_spread * scale[0], nan=1.0),
            power_spread=np.nan_to_num(predicted.power_spread * scale[1], nan=1.0),
            known=predicted.known.copy(),
        )
        cards = np.full(len(calls), "", dtype=object)
        readings = defaultdict[tuple[str, str], list[TrainingRow]](list)
        for row in self.readings_of({call.operator_id for call in calls}):
            for data in {row.call.data_class, ""}:  # "": a call whose class of data is unknown
                readings[row.call.operator_id, data].append(row)
        for place, call in enumerate(calls):
            rows = readings.get((call.operator_id, call.data_class)) or readings.get((call.operator_id, ""))
            if not rows:
                continue
            for name in ("time_us", "neighbours_us", "fetching_us", "power_w"):
                values = [value for row in rows if (value := getattr(row, name)) is not None]
                if values:
                    getattr(costs, name)[place] = np.mean(values)
            costs.time_spread[place], costs.known[place], cards[place] = 0.0, True, rows[0].card_id
            costs.power_spread[place] = 0.0 if rows[0].power_w else costs.power_spread[place]
        return costs, cards.astype(np.str_)


@dataclass(frozen=True)
class Transfer:
    """Predicts calls on a target card. It has the interface of `FittedPredictor` that `StoredPredictor` uses."""

    source: SourceCosts
    target: CardModel
    time: Correction
    power: Correction
    families: frozenset[str]  # operator families with a reading of the target
    card_id: str  # predict for this card; "": any card of the model

    @classmethod
    def fit(cls, source: SourceCosts, target: CardModel, rows: Sequence[TrainingRow], card_id: str = "") -> Transfer:
        """``rows``: readings of the target, described for the source card."""
        card, calls = source.source.card, [row.call for row in rows]
        apart = distance(card, target)
        costs, source_cards = source.at(calls)
        points = _points(card, calls, costs, np.array([row.card_id for row in rows], dtype=np.str_), source_cards)
        log_times = np.log([row.time_us for row in rows]) - np.log(costs.time_us)
        priors = Boundness.of(card, calls, costs.time_us).log_ratio(card, target, calls)
        time = Correction.fit(TIME.times(apart), points, log_times - priors, costs.time_spread**2)
        watts = np.array([row.power_w or np.nan for row in rows], dtype=float)
        values = np.log(watts / _powers_of_properties(card, target, costs.power_w, log_times))
        known = np.isfinite(values)
        power = Correction.fit(POWER.times(apart), points.where(known), values[known], costs.power_spread[known] ** 2)
        return cls(source, target, time, power, frozenset(call.operator_family for call in calls), card_id)

    def predict(self, calls: Sequence[CallDescription]) -> CallCosts:
        """Spreads are half-widths of 90 % intervals."""
        if not calls:
            return CallCosts.empty(0)
        card = self.source.source.card
        costs, source_cards = self.source.at(calls)
        points = _points(card, calls, costs, np.full(len(calls), self.card_id), source_cards)
        log_ratio = Boundness.of(card, calls, costs.time_us).log_ratio(card, self.target, calls)
        correction, time_deviation = self.time.at(points)
        log_ratio = log_ratio + correction
        powers = _powers_of_properties(card, self.target, costs.power_w, log_ratio)
        correction, power_deviation = self.power.at(points)
        return dataclasses.replace(
            costs,
            time_us=costs.time_us * np.exp(log_ratio),
            time_spread=TIME_WIDTH * np.hypot(time_deviation, costs.time_spread),
            power_w=np.minimum(powers * np.exp(correction), self.target.power_limit_w),
            power_spread=POWER_WIDTH * np.hypot(power_deviation, costs.power_spread),
            neighbours_us=costs.neighbours_us * np.exp(log_ratio),
            fetching_us=costs.fetching_us * np.exp(log_ratio),
            waiting_w=self.target.base_power_w,
        )


def _powers_of_properties(source: CardModel, target: CardModel, powers_w: Floats, log_ratio: Floats) -> Floats:
    """Return powers on the target: the middle between the same power and the same energy above that of an idle card."""
    energy = np.maximum(powers_w - source.base_power_w, 1.0) * np.exp(-log_ratio)
    same = powers_w * target.power_limit_w / source.power_limit_w
    return np.minimum(np.sqrt(same * (target.base_power_w + energy)), target.power_limit_w)  # type: ignore[no-any-return]


CALIBRATION = Path(__file__).parent.parent / "data" / "calibration.json"


def calibration_tuples() -> list[OperatorTuple]:
    """Return the operator tuples whose readings calibrate predictions for a card, the most useful one first.

    `farm.api.measure.measure_tuples` measures them, with standard normal values.
    """
    return [parse(spec) for spec in json.loads(CALIBRATION.read_text())]


def data_sheet_model(source: CardModel, name: str) -> CardModel:
    """Build a card model without measured rates: those of the source x the ratio of the data sheets."""
    target, sheet = card_model(source.kind, name), card_model(source.kind, source.model)
    measured = {
        key: getattr(target, key) * getattr(source, key) / getattr(sheet, key)
        for key in ("bytes_per_s", "launch_floor_us", "base_power_w")
    }
    rates = {key: rate * source.flops_per_s[key] / sheet.flops_per_s[key] for key, rate in target.flops_per_s.items()}
    return dataclasses.replace(target, flops_per_s=rates, **measured)


@dataclass(frozen=True)
class TransferredPredictor(StoredPredictor):
    """Predicts a card model from another one: the predictor's `fitted` is a `Transfer`."""

    @classmethod
    def fit(
        cls,
        source: SourceCosts,
        target: CardModel,
        rows: Sequence[TrainingRow],
        card_id: str = "",
    ) -> Self:
        """For the arguments see `Transfer.fit`."""
        fitted: Any = Transfer.fit(source, target, rows, card_id)
        conditions = dataclasses.replace(source.source.conditions, card_model=target.model)
        learned = np.zeros(0, dtype=np.uint64)
        return cls(fitted, WIDTHS, target, conditions, source.source.key, len(rows), learned)

    @property
    def transfer(self) -> Transfer:
        found: Any = self.fitted
        return found  # type: ignore[no-any-return]

    @property
    def source(self) -> StoredPredictor:
        return self.transfer.source.source

    @property
    def name(self) -> str:
        return f"{self.source.name} of {self.source.card.model}, transferred"

    def described(self, wanted: Sequence[NeededTuple]) -> list[CallDescription]:
        return self.source.described(wanted)

    def about(self, wanted: Iterable[NeededTuple]) -> list[str]:
        """Say what predictions of some tuples are based on."""
        card, number = self.card.model, f"{self.rows} {plural('reading', self.rows)}"
        based = f"Predictions are transferred from {self.source.card.model} to {card}"
        if not self.rows:
            return [f"{based} by the properties of the cards alone: no reading of {card} calibrates them."]
        lines = [f"{based} and calibrated with {number} of {card}."]
        if missing := sorted({operator_family(one.short_name) for one in wanted} - self.transfer.families):
            lines.append(f"Wider intervals, because {card} has no reading of these families: {', '.join(missing)}.")
        return lines
