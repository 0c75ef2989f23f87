"""Predicts the kernels that the compiler generates.

A generated kernel moves its bytes once, and computes beside that. So its time is that of its
traffic (`farm.addons.predict.tile_roofline`: the bytes at the rate of the memory or the cache, and
a launch), times a factor. The factor is the median of the measured kernels of its group: of its
kind, and with or without functions that take many instructions. A kernel that works in place reads
from the memory. The power above that of an idle card at full clocks is proportional to the rate at
which a kernel moves bytes, and larger for bytes of the memory than of the cache. Nothing else is
learned, and nothing is fitted to whole models.

The intervals come from families of models that were left out, one at a time: the errors of calls,
and the errors of the sums of the kernels of a model."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import sqlalchemy
from sqlmodel import Session

from farm.addons.predict.calibration import SHARE, UNSEEN
from farm.addons.predict.families import model_family
from farm.addons.predict.kernel_rules import KernelPlan
from farm.addons.predict.tile_roofline import CardRates, tile_roofline
from farm.store.columns import CALL, CAPTURE, OF_TUPLES, OPERATOR, VARIANT
from farm.store.reuse import sound_readings
from farm.subjects.label import fused_names
from farm.types.details import Details
from farm.types.figure import Figure, PassCost, figure_of

#: The kind of the tuples of generated kernels.
KERNEL = "kernel"
#: Operators whose arithmetic takes longer than the traffic of their numbers.
_LONG_ARITHMETIC = frozenset({"gelu", "tanh", "erf"})
#: A group of kernels needs readings of so many families of models.
LEAST_OF_GROUP = 2
#: Fewer families than this give no quantile: the largest error counts, times `UNSEEN`.
LEAST_FAMILIES = 3
_COLUMNS = ("subject_id", "time_us", "energy_mj", "details", "flags")


@dataclass(frozen=True)
class KernelReading:
    """A measured kernel.

    Attributes:
        cost: of one call within its model.
        calls: family of models -> its calls in one pass of the models of the family.
    """

    work: KernelWork
    cost: PassCost
    calls: Mapping[str, int]


@dataclass(frozen=True)
class KernelWork:
    """What decides the cost of a generated kernel.

    Attributes:
        kind: ``pointwise``, ``reduction``, ``persistent_reduction``, ...
        bytes_moved: that it reads and writes.
        in_place: whether it writes what it reads.
        has_long_arithmetic: whether it computes functions that take many instructions.
    """

    kind: str
    bytes_moved: int
    in_place: bool = False
    has_long_arithmetic: bool = False

    @classmethod
    def of(cls, kind: str, bytes_moved: int, spec: Mapping[str, Any]) -> KernelWork:
        """The work of a kernel with this description."""
        parameters = spec["parameters"]
        in_place = set(parameters["writes"]) > set(parameters["outputs"])
        words = fused_names(parameters["fused"])
        return cls(kind, bytes_moved, in_place, not _LONG_ARITHMETIC.isdisjoint(words))

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of kernels with equal factors, the smallest one first; "" is all kernels."""
        if self.has_long_arithmetic:
            return f"{self.kind} with long arithmetic", self.kind, ""
        return self.kind, ""

    def traffic_us(self, card: CardRates) -> float:
        """The time of a kernel that only moves these bytes, with its launch."""
        cold_bytes = self.bytes_moved if self.in_place else 0.0
        plan = KernelPlan("float32", 0.0, self.bytes_moved, cold_bytes=cold_bytes)
        return tile_roofline(card, plan, None).time_us

    def cached_share(self, card: CardRates) -> float:
        """The share of the bytes that the last cache serves: all up to half of its size, because
        both halves of it may have a copy; none beyond its size."""
        return min(1.0, max(0.0, 2 - 2 * self.bytes_moved / card.l2_bytes))

    def rate_share(self, card: CardRates, time_us: float) -> float:
        """The rate at which it moves bytes, as a share of that of the memory; at most 1."""
        return min(1.0, self.bytes_moved / (time_us * 1e-6) / card.bytes_per_s)


def kernel_readings(session: Session, card_model: str) -> list[KernelReading]:
    """The newest usable readings of generated kernels on a card model (stored name)."""
    columns = (OPERATOR.id, OPERATOR.short_name, OPERATOR.bytes_moved, OPERATOR.spec)
    # Templates are products of matrices, which only max-autotune generates.
    is_predicted = (OPERATOR.kind == KERNEL, OPERATOR.short_name != "template")
    query = sqlalchemy.select(*columns).where(*is_predicted)
    operators = {row.id: row for row in session.execute(query)}
    calls: dict[str, dict[str, int]] = defaultdict(dict)
    counted = (
        sqlalchemy.select(CALL.operator_id, VARIANT.model, sqlalchemy.func.count())
        .where(CAPTURE.id == CALL.capture_id, VARIANT.id == CAPTURE.variant_id)
        .where(OPERATOR.id == CALL.operator_id, OPERATOR.kind == KERNEL)
        .group_by(CALL.operator_id, CAPTURE.id, VARIANT.model)
        .order_by(CAPTURE.id)  # the newest capture of a family counts
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
        operator, context = operators[operator_id], Details.from_json(row.details).context
        effect_us = max(context.effect_us.value, -0.5 * row.time_us) if context else 0.0
        # Within its model it has the power of its loop.
        time_us, energy_mj = row.time_us + effect_us, figure_of(row.energy_mj, None)
        energy_mj = energy_mj and energy_mj.times(time_us / row.time_us)
        readings.append(
            KernelReading(
                KernelWork.of(operator.short_name, operator.bytes_moved, operator.spec),
                PassCost(Figure(time_us), energy_mj),
                dict(calls[operator_id]),
            )
        )
    return readings


@dataclass(frozen=True)
class LearnedKernels:
    """What measured kernels show.

    Attributes:
        factors: group of kernels -> time / time of the traffic; "": all kernels.
        cache_power, memory_power: (power - power of the idle card at full clocks) / (limit - the
            same), for a kernel that moves bytes of the cache, or of the memory, at the full rate of
            the memory; NaN: unknown.
        time_error, energy_error: 90 % of the errors of calls are smaller (of the logarithm).
        sum_time_error, sum_energy_error: the same of the sums of the kernels of a model.
        families: of models, from which this was learned.
    """

    factors: Mapping[str, float]
    cache_power: float
    memory_power: float
    families: tuple[str, ...]
    time_error: float = math.inf
    energy_error: float = math.inf
    sum_time_error: float = math.inf
    sum_energy_error: float = math.inf

    @classmethod
    def of(cls, readings: Sequence[KernelReading], card: CardRates) -> LearnedKernels | None:
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
        cls, readings: Sequence[KernelReading], card: CardRates, families: Iterable[str]
    ) -> LearnedKernels:
        ratios: dict[str, list[tuple[float, float]]] = defaultdict(list)
        families_of: dict[str, set[str]] = defaultdict(set)
        powers: dict[float, list[tuple[float, float]]] = defaultdict(list)
        number_of = {
            family: sum(family in reading.calls for reading in readings) for family in families
        }
        for reading in readings:
            # Each family has the same weight.
            weight = sum(1 / number_of[family] for family in reading.calls)
            time_us, power_w = reading.cost.time_us.value, reading.cost.mean_power_w
            ratio = time_us / reading.work.traffic_us(card)
            for group in reading.work.groups:
                ratios[group].append((ratio, weight))
                families_of[group].update(reading.calls)
            rate = reading.work.rate_share(card, time_us)
            if power_w is not None and rate > 0:
                above = (power_w - card.base_power_w) / _power_range_w(card)
                powers[reading.work.cached_share(card)].append((above / rate, weight * rate))
        factors = {
            group: _median(values)
            for group, values in ratios.items()
            if not group or len(families_of[group]) >= LEAST_OF_GROUP
        }
        cache_power, memory_power = (_median(powers[share]) for share in (1.0, 0.0))
        return cls(factors, cache_power, memory_power, tuple(families))

    def _errors(
        self, readings: Sequence[KernelReading], card: CardRates, family: str
    ) -> dict[str, list[float]]:
        """Absolute errors of the logarithms for the kernels of a family that was left out."""
        errors: dict[str, list[float]] = defaultdict(list)
        times: list[tuple[float, float]] = []
        energies: list[tuple[float, float]] = []
        for reading in readings:
            predicted_us = self.time_us(card, reading.work)
            measured_us, energy = reading.cost.time_us.value, reading.cost.energy_mj
            number = reading.calls[family]
            times.append((number * predicted_us, number * measured_us))
            errors["time_error"].append(abs(math.log(predicted_us / measured_us)))
            if energy is None or not self.knows_power:
                continue
            predicted_w = self.power_w(card, reading.work, predicted_us)
            predicted_mj = predicted_us * predicted_w * 1e-3
            energies.append((number * predicted_mj, number * energy.value))
            errors["energy_error"].append(abs(math.log(predicted_mj / energy.value)))
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

    @property
    def knows_power(self) -> bool:
        """Whether the readings had a power, of small kernels and of large ones."""
        return math.isfinite(self.cache_power) and math.isfinite(self.memory_power)

    def time_us(self, card: CardRates, work: KernelWork) -> float:
        """The time of one call within a model."""
        group = next(name for name in work.groups if name in self.factors)
        return self.factors[group] * work.traffic_us(card)

    def power_w(self, card: CardRates, work: KernelWork, time_us: float) -> float:
        """The power during a call that takes ``time_us``."""
        cached = work.cached_share(card)
        of_bytes = cached * self.cache_power + (1 - cached) * self.memory_power
        share = of_bytes * work.rate_share(card, time_us)
        return min(card.power_limit_w, card.base_power_w + share * _power_range_w(card))


def _power_range_w(card: CardRates) -> float:
    return card.power_limit_w - card.base_power_w


def _median(values: Sequence[tuple[float, float]]) -> float:
    """The weighted median of (value, weight); NaN if there is none."""
    if not values:
        return math.nan
    numbers, weights = np.array(values, dtype=float).T
    return float(np.quantile(numbers, 0.5, weights=weights, method="inverted_cdf"))


def _quantile(errors: Sequence[float]) -> float:
    """The error that `SHARE` of all errors do not exceed; wider if there are few."""
    if len(errors) < LEAST_FAMILIES:
        return UNSEEN * max(errors, default=math.inf)
    # One more error is assumed, which is the largest: the next family may be worse than all.
    share = min(1.0, SHARE * (len(errors) + 1) / len(errors))
    return float(np.quantile(errors, share, method="inverted_cdf"))


def without_family(readings: Iterable[KernelReading], family: str) -> list[KernelReading]:
    """The readings of kernels that no model of a family has."""
    return [reading for reading in readings if family not in reading.calls]
