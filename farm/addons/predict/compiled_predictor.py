"""Predicts compiled models: generated kernels, and the calls of libraries between them.

Generated kernels: see `farm.addons.predict.generated_kernels`. Calls of libraries cost what their
readings, or the predictor of operators, say. This predictor has learned from eager models. What a
call costs beside that in a compiled model is a factor of its group, for the time and the power: the
median over the families of models whose calls were measured within compiled models. One family more
is assumed, for which the predictor is right."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import sqlalchemy
from sqlmodel import Session

from farm.addons.predict.estimate import sum_of_costs
from farm.addons.predict.families import model_family, operator_family
from farm.addons.predict.generated_kernels import KernelWork, LearnedKernels
from farm.addons.predict.stored_predictor import (
    CallPrediction,
    PredictedCost,
    PredictedValue,
    Predictions,
    StoredPredictor,
)
from farm.addons.predict.tile_roofline import CardRates
from farm.store.columns import (
    CALL,
    CAPTURE,
    GENERATE_KERNELS,
    OF_TUPLES,
    OPERATOR,
    READING,
    VARIANT,
)
from farm.store.reuse import sound_readings
from farm.types.figure import Figure, PassCost, figure_of
from farm.types.software import Software
from farm.types.tuple import NeededTuple

_COLUMNS = ("subject_id", "time_us", "energy_mj", "flags")


@dataclass(frozen=True)
class LibraryReading:
    """A measured call of a library within a compiled model.

    Attributes:
        families: of the models that have this call.
    """

    call: NeededTuple
    families: frozenset[str]
    cost: PassCost


def library_readings(session: Session, card_model: str) -> list[LibraryReading]:
    """The newest usable readings of calls of libraries in compiled models, on a card model."""
    families: dict[str, set[str]] = defaultdict(set)
    calls = (
        sqlalchemy.select(CALL.operator_id, VARIANT.model)
        .where(CAPTURE.id == CALL.capture_id, VARIANT.id == CAPTURE.variant_id)
        .where(OPERATOR.id == CALL.operator_id, OPERATOR.kind == "aten", GENERATE_KERNELS)
        .distinct()
    )
    for operator_id, model in session.execute(calls):
        families[operator_id].add(model_family(model))
    operators = session.execute(
        sqlalchemy.select(*OPERATOR).where(OPERATOR.id.in_(sorted(families)))
    )
    of_id = {row.id: row for row in operators}
    chosen = (OF_TUPLES, READING.subject_id.in_(sorted(families)))
    newest = {row.subject_id: row for row in sound_readings(session, card_model, _COLUMNS, *chosen)}
    return [
        LibraryReading(
            _needed(of_id[operator_id]),
            frozenset(families[operator_id]),
            PassCost(Figure(row.time_us), figure_of(row.energy_mj, None)),
        )
        for operator_id, row in newest.items()
        if row.time_us > 0
    ]


def _needed(row: Any) -> NeededTuple:
    costs = row.flops, row.bytes_moved
    return NeededTuple(
        row.id, row.short_name, row.label, *costs, {"": 1}, row.spec, row.output_shapes
    )


@dataclass(frozen=True)
class Factor:
    """What calls of a group cost in compiled models, over what the predictor says."""

    time: float = 1.0
    power: float = 1.0


def library_factors(
    readings: Sequence[LibraryReading], operators: StoredPredictor
) -> dict[str, Factor]:
    """The factor of each group of library calls."""
    if not readings:
        return {}
    calls = [reading.call for reading in readings]
    times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    powers: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for reading, predicted in zip(readings, operators.predict(calls, calls).calls, strict=True):
        group = library_group(reading.call)
        longer = reading.cost.time_us.value / predicted.time_us.value
        power_w = reading.cost.mean_power_w
        predicted_w = predicted.without_intervals.mean_power_w
        for family in reading.families:
            times[group][family].append(math.log(longer))
            if power_w and predicted_w:
                powers[group][family].append(math.log(power_w / predicted_w))
    return {group: Factor(_factor(times[group]), _factor(powers[group])) for group in times}


def _factor(logarithms: Mapping[str, Sequence[float]]) -> float:
    """The factor of the median family, with one family more whose factor is 1."""
    if not logarithms:
        return 1.0
    number = len(logarithms)
    middle = float(np.median([np.median(values) for values in logarithms.values()]))
    return math.exp(middle * number / (number + 1))


def library_group(call: NeededTuple) -> str:
    """The family of an operator; convolutions with channels last are a group of their own."""
    family = operator_family(call.short_name)
    tensors = call.spec.get("tensors") or [{}]
    stride: Sequence[int] = tensors[0].get("stride") or []
    is_channels_last = len(stride) == 4 and stride[1] == 1
    return f"{family} channels last" if family == "convolution" and is_channels_last else family


@dataclass(frozen=True)
class CompiledPredictor:
    """Predicts the parts of a compiled model on one card.

    Attributes:
        operators: the predictor of the calls of libraries.
        learned: from measured kernels.
        factors: see `library_factors`.
        card: whose cost is predicted.
        notes: about both, in words.
    """

    operators: StoredPredictor
    learned: LearnedKernels
    card: CardRates
    factors: Mapping[str, Factor] = field(default_factory=dict)
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

    def predict(self, tuples: Sequence[NeededTuple], model: Sequence[NeededTuple]) -> Predictions:
        """See `StoredPredictor.predict`."""
        of_libraries = [entry for entry in tuples if not entry.is_kernel]
        libraries = self._libraries(of_libraries, [entry for entry in model if not entry.is_kernel])
        kernels = [entry for entry in tuples if entry.is_kernel]
        costs = [self._kernel(entry) for entry in kernels]

        of_library = iter(libraries.calls)
        of_kernel = iter(costs)
        calls = [next(of_kernel if entry.is_kernel else of_library) for entry in tuples]
        parts = [*([libraries.total] if of_libraries else []), *self._sums(kernels, costs)]
        widths = [
            _width_us(call) * entry.all_calls for call, entry in zip(calls, tuples, strict=True)
        ]
        return Predictions(
            calls=tuple(calls),
            total=sum_of_costs(parts),
            narrowing=tuple(map(int, np.argsort(-np.array(widths), kind="stable"))),
            transfer=libraries.transfer,
            notes=(*self.notes, *libraries.notes),
        )

    def _libraries(
        self, tuples: Sequence[NeededTuple], model: Sequence[NeededTuple]
    ) -> Predictions:
        predicted = self.operators.predict(tuples, model)
        calls = [
            self._in_compiled(call, library_group(entry))
            for call, entry in zip(predicted.calls, tuples, strict=True)
        ]
        longer = _ratio(_total_us(calls, tuples), _total_us(predicted.calls, tuples))
        more = _ratio(_total_mj(calls, tuples), _total_mj(predicted.calls, tuples))
        total = predicted.total.scaled(longer, more)
        return replace(predicted, calls=tuple(calls), total=total)

    def _in_compiled(self, call: CallPrediction, group: str) -> CallPrediction:
        factor = self.factors.get(group, Factor())
        return call.scaled(factor.time, factor.time * factor.power)

    def _kernel(self, entry: NeededTuple) -> CallPrediction:
        learned, card = self.learned, self.card
        work = KernelWork.of(entry.short_name, entry.bytes_moved, entry.spec)
        time_us = learned.time_us(card, work)
        energy_mj = None
        if learned.knows_power:
            power_w = learned.power_w(card, work, time_us)
            energy_mj = PredictedValue.around(time_us * power_w * 1e-3, learned.energy_error)
        time = PredictedValue.around(time_us, learned.time_error)
        return CallPrediction(time, energy_mj, known=entry.short_name in learned.factors)

    def _sums(
        self, kernels: Sequence[NeededTuple], costs: Sequence[CallPrediction]
    ) -> list[PredictedCost]:
        """The cost of all calls of the kernels; [] if there are none."""
        if not kernels:
            return []
        time = PredictedValue.around(_total_us(costs, kernels), self.learned.sum_time_error)
        if any(cost.energy_mj is None for cost in costs):
            return [PredictedCost(time)]
        energy = PredictedValue.around(_total_mj(costs, kernels), self.learned.sum_energy_error)
        return [PredictedCost(time, energy)]


def _width_us(call: CallPrediction) -> float:
    low, high = call.time_us.low, call.time_us.high
    return 0.0 if low is None or high is None else high - low


def _total_us(calls: Sequence[CallPrediction], tuples: Sequence[NeededTuple]) -> float:
    """The time of all calls."""
    pairs = zip(calls, tuples, strict=True)
    return math.fsum(entry.all_calls * call.time_us.value for call, entry in pairs)


def _total_mj(calls: Sequence[CallPrediction], tuples: Sequence[NeededTuple]) -> float:
    """The energy of all calls whose energy is known."""
    pairs = zip(calls, tuples, strict=True)
    energies = (entry.all_calls * call.energy_mj.value for call, entry in pairs if call.energy_mj)
    return math.fsum(energies)


def _ratio(after: float, before: float) -> float:
    """after / before; 1 if there was nothing before."""
    return after / before if before else 1.0
