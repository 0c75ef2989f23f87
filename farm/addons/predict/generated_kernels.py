"""Predicts compiled models: the kernels that the compiler generates, and the calls of libraries
between them.

A generated kernel moves its bytes once, and computes beside that. So its time is that of its
traffic (`farm.addons.predict.tile_roofline`: the bytes at the rate of the memory or the cache, and
a launch), times a factor of its kind. The factor is the median of the measured kernels of that
kind. Its power above that of an idle card at full clocks is proportional to the rate at which it
moves bytes. Nothing else is learned, and nothing is fitted to whole models.

Calls of libraries cost what their readings, or the predictor of operators, say.

The intervals come from families of models that were left out, one at a time: the errors of calls,
and the errors of the sums of the kernels of a model."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import sqlalchemy
from sqlmodel import Session

from farm.addons.predict.calibration import SHARE, UNSEEN
from farm.addons.predict.estimate import sum_of
from farm.addons.predict.families import model_family
from farm.addons.predict.kernel_rules import KernelPlan
from farm.addons.predict.stored_predictor import (
    CallPrediction,
    PredictedCost,
    PredictedValue,
    Predictions,
    StoredPredictor,
)
from farm.addons.predict.tile_roofline import CardModel, tile_roofline
from farm.store.columns import CALL, CAPTURE, OF_TUPLES, OPERATOR, VARIANT
from farm.store.reuse import sound_readings
from farm.types.details import Details
from farm.types.protocol import Software
from farm.types.tuple import NeededTuple

#: The kind of the tuples that this module predicts.
KERNEL = "kernel"
#: Fewer families than this give no quantile: the largest error counts, times `UNSEEN`.
LEAST_FAMILIES = 3
_COLUMNS = ("subject_id", "time_us", "energy_mj", "details", "flags")


@dataclass(frozen=True)
class KernelReading:
    """A measured kernel.

    Attributes:
        kind: ``pointwise``, ``reduction``, ``persistent_reduction``, ...
        bytes_moved: that it reads and writes.
        time_us: of one call within its model.
        power_w: None: not measured.
        calls: family of models -> its calls in one pass of the models of the family.
    """

    operator_id: str
    kind: str
    bytes_moved: int
    time_us: float
    power_w: float | None
    calls: Mapping[str, int]


def kernel_readings(session: Session, card_model: str) -> list[KernelReading]:
    """The newest usable readings of generated kernels on a card model (stored name)."""
    operators = {
        row.id: row
        for row in session.execute(
            sqlalchemy.select(OPERATOR.id, OPERATOR.short_name, OPERATOR.bytes_moved).where(
                OPERATOR.kind == KERNEL
            )
        )
    }
    calls: dict[str, dict[str, int]] = defaultdict(dict)
    counted = (
        sqlalchemy.select(CALL.operator_id, VARIANT.model, sqlalchemy.func.count())
        .where(CAPTURE.id == CALL.capture_id, VARIANT.id == CAPTURE.variant_id)
        .where(OPERATOR.id == CALL.operator_id, OPERATOR.kind == KERNEL)
        .group_by(CALL.operator_id, CAPTURE.id)
    )
    for operator_id, model, number in session.execute(counted):
        calls[operator_id][model_family(model)] = number
    newest = {
        row.subject_id: row
        for row in sound_readings(session, card_model, _COLUMNS, OF_TUPLES)
        if row.subject_id in operators and row.time_us > 0
    }
    readings = []
    for operator_id, row in newest.items():
        context = Details.from_json(row.details).context
        effect_us = max(context.effect_us.value, -0.5 * row.time_us) if context else 0.0
        power_w = row.energy_mj / row.time_us * 1e3 if row.energy_mj else None
        readings.append(
            KernelReading(
                operator_id,
                operators[operator_id].short_name,
                operators[operator_id].bytes_moved,
                row.time_us + effect_us,
                power_w,
                dict(calls[operator_id]),
            )
        )
    return readings


@dataclass(frozen=True)
class LearnedKernels:
    """What measured kernels show.

    Attributes:
        factors: kind -> time / time of the traffic; "": all kinds.
        power_share: (power - power of the idle card at full clocks) / (limit - the same), for a
            kernel that moves bytes at the full rate of the memory.
        time_error, energy_error: 90 % of the errors of calls are smaller (of the logarithm).
        sum_time_error, sum_energy_error: the same of the sums of the kernels of a model.
        families: of models, from which this was learned.
    """

    factors: Mapping[str, float]
    power_share: float
    families: tuple[str, ...]
    time_error: float = math.inf
    energy_error: float = math.inf
    sum_time_error: float = math.inf
    sum_energy_error: float = math.inf

    @classmethod
    def of(cls, readings: Sequence[KernelReading], card: CardModel) -> LearnedKernels | None:
        """Learn from readings on one card model; None if there are none."""
        families = sorted(set().union(*(reading.calls for reading in readings)))
        if not readings:
            return None
        learned = cls._without_errors(readings, card, families)
        errors: dict[str, list[float]] = defaultdict(list)
        for family in families:
            training = without_family(readings, family)
            if not training:
                continue
            test = [reading for reading in readings if family in reading.calls]
            predictor = cls._without_errors(training, card, families)
            for name, values in predictor._errors(test, card, family).items():
                errors[name] += values
        return replace(
            learned,
            time_error=_quantile(errors["time_error"]),
            energy_error=_quantile(errors["energy_error"]),
            sum_time_error=_quantile(errors["sum_time_error"]),
            sum_energy_error=_quantile(errors["sum_energy_error"]),
        )

    @classmethod
    def _without_errors(
        cls, readings: Sequence[KernelReading], card: CardModel, families: Iterable[str]
    ) -> LearnedKernels:
        ratios: dict[str, list[tuple[float, float]]] = defaultdict(list)
        shares: list[tuple[float, float]] = []
        number_of = {
            family: sum(family in reading.calls for reading in readings) for family in families
        }
        for reading in readings:
            # Each family has the same weight.
            weight = sum(1 / number_of[family] for family in reading.calls)
            ratio = reading.time_us / traffic_us(card, reading.bytes_moved)
            for kind in ("", reading.kind):
                ratios[kind].append((ratio, weight))
            rate = _rate_share(card, reading.bytes_moved, reading.time_us)
            if reading.power_w is not None and rate > 0:
                above = (reading.power_w - card.base_power_w) / _power_range_w(card)
                shares.append((above / rate, weight * rate))
        factors = {kind: _median(values) for kind, values in ratios.items()}
        return cls(factors, _median(shares) if shares else math.nan, tuple(families))

    def _errors(
        self, readings: Sequence[KernelReading], card: CardModel, family: str
    ) -> dict[str, list[float]]:
        """Absolute errors of the logarithms for the kernels of a family that was left out."""
        errors: dict[str, list[float]] = defaultdict(list)
        times: list[tuple[float, float]] = []
        energies: list[tuple[float, float]] = []
        for reading in readings:
            predicted_us = self.time_us(card, reading.kind, reading.bytes_moved)
            number = reading.calls[family]
            times.append((number * predicted_us, number * reading.time_us))
            errors["time_error"].append(abs(math.log(predicted_us / reading.time_us)))
            if reading.power_w is None or math.isnan(self.power_share):
                continue
            energy = predicted_us * self.power_w(card, reading.bytes_moved, predicted_us)
            measured = reading.time_us * reading.power_w
            energies.append((number * energy, number * measured))
            errors["energy_error"].append(abs(math.log(energy / measured)))
        for name, pairs in (("sum_time_error", times), ("sum_energy_error", energies)):
            if pairs:
                predicted, measured = map(math.fsum, zip(*pairs, strict=True))
                errors[name].append(abs(math.log(predicted / measured)))
        return errors

    def for_another_card(self) -> LearnedKernels:
        """What this says about kernels on another card model: the same, with wider intervals."""
        return replace(
            self,
            time_error=UNSEEN * self.time_error,
            energy_error=UNSEEN * self.energy_error,
            sum_time_error=UNSEEN * self.sum_time_error,
            sum_energy_error=UNSEEN * self.sum_energy_error,
        )

    def time_us(self, card: CardModel, kind: str, bytes_moved: float) -> float:
        """The time of one call within a model."""
        factor = self.factors.get(kind, self.factors[""])
        return factor * traffic_us(card, bytes_moved)

    def power_w(self, card: CardModel, bytes_moved: float, time_us: float) -> float:
        rate = _rate_share(card, bytes_moved, time_us)
        power_w = card.base_power_w + self.power_share * rate * _power_range_w(card)
        return min(card.power_limit_w, power_w)


def traffic_us(card: CardModel, bytes_moved: float) -> float:
    """The time of a kernel that only moves bytes, with its launch."""
    return tile_roofline(card, KernelPlan("float32", 0.0, bytes_moved), None).time_us


def _rate_share(card: CardModel, bytes_moved: float, time_us: float) -> float:
    """The rate at which a kernel moves bytes, as a share of that of the memory; at most 1."""
    return min(1.0, bytes_moved / (time_us * 1e-6) / card.bytes_per_s)


def _power_range_w(card: CardModel) -> float:
    return card.power_limit_w - card.base_power_w


def _median(values: Sequence[tuple[float, float]]) -> float:
    """The weighted median of (value, weight)."""
    numbers, weights = np.array(values, dtype=float).T
    return float(np.quantile(numbers, 0.5, weights=weights, method="inverted_cdf"))


def _quantile(errors: Sequence[float]) -> float:
    """The error that `SHARE` of all errors do not exceed; wider if there are few."""
    if len(errors) < LEAST_FAMILIES:
        return UNSEEN * max(errors, default=math.inf)
    # One more error is assumed, which is the largest: the next family may be worse than all.
    share = min(1.0, SHARE * (len(errors) + 1) / len(errors))
    return float(np.quantile(errors, share, method="inverted_cdf"))


@dataclass(frozen=True)
class CompiledPredictor:
    """Predicts the parts of a compiled model on one card.

    Attributes:
        operators: the predictor of the calls of libraries.
        learned: from measured kernels.
        card: whose cost is predicted.
        notes: about both, in words.
    """

    operators: StoredPredictor
    learned: LearnedKernels
    card: CardModel
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.operators.name

    @property
    def software(self) -> Software | None:
        return self.operators.software

    @property
    def method(self) -> int:
        return self.operators.method

    def predict(self, wanted: Sequence[NeededTuple], model: Sequence[NeededTuple]) -> Predictions:
        """See `StoredPredictor.predict`."""
        of_libraries = [entry for entry in wanted if not is_kernel(entry)]
        libraries = self.operators.predict(
            of_libraries, [entry for entry in model if not is_kernel(entry)]
        )
        kernels = [entry for entry in wanted if is_kernel(entry)]
        costs = [self._kernel(entry) for entry in kernels]

        of_library = iter(libraries.calls)
        of_kernel = iter(costs)
        calls = [next(of_kernel if is_kernel(entry) else of_library) for entry in wanted]
        parts = [*([libraries.total] if of_libraries else []), *self._sums(kernels, costs)]
        time_us = sum_of([part.time_us for part in parts])
        assert time_us is not None
        widths = [
            _width_us(call) * entry.all_calls for call, entry in zip(calls, wanted, strict=True)
        ]
        return Predictions(
            calls=tuple(calls),
            total=PredictedCost(time_us, sum_of([part.energy_mj for part in parts])),
            narrowing=tuple(map(int, np.argsort(-np.array(widths), kind="stable"))),
            transfer=libraries.transfer,
            notes=(*self.notes, *libraries.notes),
        )

    def _kernel(self, entry: NeededTuple) -> CallPrediction:
        learned, card = self.learned, self.card
        time_us = learned.time_us(card, entry.short_name, entry.bytes_moved)
        energy_mj = None
        if math.isfinite(learned.power_share):
            power_w = learned.power_w(card, entry.bytes_moved, time_us)
            energy_mj = PredictedValue.around(time_us * power_w * 1e-3, learned.energy_error)
        time = PredictedValue.around(time_us, learned.time_error)
        return CallPrediction(time, energy_mj, known=entry.short_name in learned.factors)

    def _sums(
        self, kernels: Sequence[NeededTuple], costs: Sequence[CallPrediction]
    ) -> list[PredictedCost]:
        """The cost of all calls of the kernels; [] if there are none."""
        if not kernels:
            return []
        pairs = list(zip(kernels, costs, strict=True))
        time_us = math.fsum(entry.all_calls * cost.time_us.value for entry, cost in pairs)
        time = PredictedValue.around(time_us, self.learned.sum_time_error)
        if any(cost.energy_mj is None for cost in costs):
            return [PredictedCost(time)]
        energy_mj = math.fsum(
            entry.all_calls * cost.energy_mj.value for entry, cost in pairs if cost.energy_mj
        )
        return [
            PredictedCost(time, PredictedValue.around(energy_mj, self.learned.sum_energy_error))
        ]


def is_kernel(entry: NeededTuple) -> bool:
    """True for a generated kernel; False for a call of a library."""
    return entry.spec.get("kind") == KERNEL


def _width_us(call: CallPrediction) -> float:
    low, high = call.time_us.low, call.time_us.high
    return 0.0 if low is None or high is None else high - low


def without_family(readings: Iterable[KernelReading], family: str) -> list[KernelReading]:
    """The readings of kernels that no model of a family has."""
    return [reading for reading in readings if family not in reading.calls]
