"""Estimate the cost of a model on a card without running it, from readings and predictions.

If the whole model has a reading, that is the cost. Otherwise the cost is a sum over the model's
tuples: a reading if there is one (as in verdicts, `farm.verdict.aggregate`), else a prediction.
Without a predictor the sum is incomplete."""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlmodel import Session

from farm.addons.predict import collectives
from farm.addons.predict.estimate import (
    PREDICTED_LEVEL,
    SECONDS_A_TUPLE,
    Estimate,
    MissingTuple,
    cost_at,
    sum_of_costs,
)
from farm.addons.predict.floor import (
    IdlePower,
    above_floor,
    idle_energy_mj,
    idle_power,
    sum_of_floors_us,
)
from farm.addons.predict.rank_effects import added_time, rank_effects
from farm.addons.predict.reading_sum import sum_of_readings
from farm.addons.predict.routing import routing_note
from farm.addons.predict.stored_predictor import (
    CallPrediction,
    PredictedCost,
    PredictedValue,
    Predictor,
)
from farm.errors import FarmError, NoReadings
from farm.exchange.packaged import packaged_database
from farm.requests.memory import MemoryNeed, memory_need
from farm.requests.partial_request import default_data, title_of
from farm.store.captures import kernels_unknown, stored_tuples
from farm.store.card_models import card_bytes, peaks_of
from farm.store.content import stored_software
from farm.store.database import read_clock_s
from farm.types.card_kind import device_type_of
from farm.types.collective import COLLECTIVES
from farm.types.data_sheets import data_sheet, sheet_name_of
from farm.types.figure import Figure, PassCost, figure_of
from farm.types.format import TIME, percent, plural, quantity
from farm.types.protocol import Protocol
from farm.types.request import Request
from farm.types.roofline import Roofline
from farm.types.software import Software
from farm.types.tuple import NeededTuple
from farm.types.variant import Variant
from farm.verdict.model_readings import SelectedReadings, left_out, protocols_like, select_for_model
from farm.verdict.token_floor import TokenFloor, has_floor, token_floor


def estimate(
    session: Session,
    variant: Variant,
    card_model: str,
    protocol: Protocol,
    *,
    torch: str = "",
    predictor: Predictor | None = None,
    unfilled: str = "no predictor is given",
    notes: Sequence[str] = (),
    needed: Sequence[NeededTuple] | None = None,
) -> Estimate:
    """Estimate the cost of one pass of a model from the readings of its tuples and from
    predictions. Raises `NoReadings` if no tuple of the model has a reading and there is no
    prediction, and as `_tuples_of`.

    Args:
        card_model: the whole name of a card model; it may be without readings.
        protocol: launch, residency and numeric flags. Its data class is ignored: each call uses a
            reading with its own data class, or with another class if there is none.
        torch: a version or its beginning; "": the version whose readings cover most of the model.
        predictor: predicts tuples without a reading; None: they are left out. If the predictor
            names its software, the model needs no reading at all.
        unfilled: why there is no predictor, for `Estimate.incomplete_reason`.
        notes: notes about the predictor, such as why it cannot be read; used only if tuples are
            missing.
        needed: the tuples of the model; None: see `_tuples_of`.
    """
    kind, roofline = peaks_of(session, card_model, variant.computes_in, protocol.tf32)
    if needed is None:
        needed = _tuples_of(session, variant, device_type_of(kind), protocol.launch, card_model)
    model = _ModelOnCard(session, variant, card_model, kind, protocol, roofline, needed)
    selected, software = model.chosen(torch, predictor, (unfilled, *notes))
    result = model.from_readings(selected, software)
    if result.missing:
        result = replace(result, notes=(*notes, *result.notes))
    if predictor:
        result = model.with_predictions(result, predictor)
    result = model.with_floor(result)
    if result.whole:
        return result
    if variant.cards > 1:
        result = model.in_ranks(result)
    if result.missing and (predictor is None or predictor.software is None):
        bound = "count with a lower bound (the roofline)"
        why = bound if predictor else f"have no reading, and {unfilled}"
        result = replace(result, incomplete_reason=_incomplete_reason(result, why))
    result = replace(result, notes=(*result.notes, *_notes_on_energy(result)))
    return model.with_routing(result)


def _notes_on_energy(result: Estimate) -> Iterator[str]:
    """Say that the low end of the energy is that of an idle card, and where this power is from."""
    energy, idle = result.energy, result.idle_power
    least_mj = idle_energy_mj(result.time, idle.power_w).low
    if least_mj is None or energy is None or energy.low is None or not idle.source:
        return
    if energy.low <= least_mj:
        power = f"{idle.power_w:.0f} W, {idle.source}"
        yield f"The low end of the energy is that of an idle card ({power}) in the shortest time."


def _incomplete_reason(result: Estimate, why: str) -> str:
    share = f"{percent(1 - result.coverage)} of the estimated cost"
    return f"{len(result.missing)} of {result.tuples} tuples ({share}) {why}."


def _tuples_of(
    session: Session, variant: Variant, device_type: str, launch: str, card_model: str
) -> list[NeededTuple]:
    """The tuples of a stored capture, with the data classes of their calls; without one, the
    extracted tuples. Raises `CaptureError` if the model cannot be extracted, and `NoReadings` if no
    card has listed its generated kernels."""
    stored = stored_tuples(session, variant, device_type, launch, card_model)
    if stored:
        return stored
    if variant.generates_kernels:
        raise kernels_unknown(variant, title_of(variant), card_model)
    from farm.training.extract import extract

    return extract(variant, device_type=device_type).needed()


@dataclass(frozen=True)
class _ModelOnCard:
    """The tuples of a model on a card model, and the database with their readings."""

    session: Session
    variant: Variant
    card_model: str
    kind: str  # of the card
    protocol: Protocol  # its data class is ignored
    roofline: Roofline
    needed: Sequence[NeededTuple]

    @functools.cached_property
    def weight(self) -> dict[str, float]:
        """Tuple id -> the estimated cost of all its calls. Unit: µs."""
        return {
            needed.operator_id: self.roofline.call_us(needed) * needed.all_calls
            for needed in self.needed
        }

    def selected(self, torch: str) -> SelectedReadings | None:
        """The readings to add up; None if there are none."""
        return select_for_model(
            self.session,
            self.variant,
            self.needed,
            self.weight,
            self.card_model,
            self.protocol,
            self.roofline,
            torch,
        )

    def doubtful(self, selected: SelectedReadings | None) -> str:
        """The doubtful readings of what has no other reading, as text."""
        read = set(selected.rows) if selected else set()
        if selected and selected.wholes:
            read.add(self.variant.id)
        unread = [id_ for id_ in (*self.weight, self.variant.id) if id_ not in read]
        protocols = list(protocols_like(self.session, self.protocol))
        return left_out(self.session, unread, self.card_model, protocols)

    def no_readings(self, torch: str, why: str) -> NoReadings:
        variant = self.variant
        where = f"{self.card_model} under {self.protocol.launch} launch"
        if torch:
            where += f" and torch {torch}"
        data = default_data(self.kind, variant)
        request = Request(variant=variant, protocol=self.protocol.with_data(data))
        step = (
            f"Measure the model: {request.command().removesuffix(' --reuse none')}; "
            "or import another farm's readings with `farm import`."
        )
        if self.protocol.tf32:
            step = f"Estimate it without --tf32, which needs no card. {step}"
        title = title_of(variant)
        return NoReadings(f"No tuple of {title} has a reading on {where}, and {why}.", step)

    @property
    def _largest_call_bytes(self) -> int:
        """The tensors of the largest call, without its weights."""
        calls = (needed.bytes_moved - needed.held_bytes for needed in self.needed)
        return max(0, *calls)

    def _memory(self) -> MemoryNeed | None:
        """The memory that one pass needs; None if that of the card or the model is unknown."""
        all_calls_bytes = sum(
            needed.all_calls * (needed.bytes_moved + needed.held_bytes) for needed in self.needed
        )
        try:
            size_bytes = card_bytes(self.session, self.card_model)
            if not size_bytes:
                return None
            return memory_need(self.variant, size_bytes, all_calls_bytes, self._largest_call_bytes)
        except FarmError:
            return None

    def chosen(
        self, torch: str, predictor: Predictor | None, why: Sequence[str]
    ) -> tuple[SelectedReadings, Software]:
        """The readings to add up, and their software. If there are none, that of the predictor.

        Args:
            torch, predictor: see `estimate`.
            why: the reasons for `NoReadings`, the first one why there is no predictor.

        Raises:
            NoReadings: there is neither a reading nor a predictor.
        """
        selected = self.selected(torch)
        if selected:
            return selected, stored_software(self.session, selected.software_id)
        if predictor and predictor.software and predictor.software.torch.startswith(torch):
            software = predictor.software
            none = SelectedReadings.none(self.needed, predictor.method, software.id, self.roofline)
            return none, software
        doubtful = self.doubtful(None)
        reasons = [why[0], f"Left out: {doubtful}" if doubtful else "", *why[1:]]
        sentences = [reason.removesuffix(".") for reason in reasons if reason]
        raise self.no_readings(torch, ". ".join(sentences))

    def from_readings(self, selected: SelectedReadings, software: Software) -> Estimate:
        """The estimate from the readings alone."""
        result = sum_of_readings(selected, self.protocol.launch)
        verdict, missing = result.verdict, self._missing(selected)
        readings = _readings_of(selected)
        measuring_s = [row.cost_s["total"] for row in readings if (row.cost_s or {}).get("total")]
        seconds_a_tuple = statistics.median(measuring_s) if measuring_s else SECONDS_A_TUPLE
        collectives_us = math.fsum(
            line.total_us for line in verdict.tuples if line.subject.short_name in COLLECTIVES
        )
        exposed_us = None
        if verdict.communication_us and not missing:
            exposed_us = verdict.communication_us[1]
        oldest_at_s = min((row.created_at_s for row in readings), default=None)
        age_s = None
        if oldest_at_s is not None:
            age_s = read_clock_s(self.session) - oldest_at_s
        covered = math.fsum(self.weight[id_] for id_ in selected.rows)
        whole = None
        if verdict.time.whole:
            whole = PassCost(verdict.time.whole, verdict.energy.whole if verdict.energy else None)
        return Estimate(
            variant=self.variant,
            card_model=self.card_model,
            protocol=self.protocol,
            software=software,
            method=selected.method,
            tuples=len(self.needed),
            covered_tuples=len(selected.rows),
            coverage=covered / math.fsum(self.weight.values()),
            readings=result.cost,
            whole=whole,
            missing=tuple(sorted(missing, key=lambda entry: (-entry.share, entry.needed.label))),
            measuring_rest_s=len(missing) * seconds_a_tuple,
            other_data_calls=selected.other_data_calls,
            flags=_flags_of(readings),
            origins=dict(Counter(row.origin for row in readings)),
            oldest_at_s=oldest_at_s,
            oldest_age_s=age_s,
            notes=(*result.notes, *_notes_of(selected, missing)),
            communication_us=verdict.collectives_alone_us or collectives_us,
            exposed_us=exposed_us,
            measured={
                id_: PassCost(Figure(rows[0].time_us), figure_of(rows[0].energy_mj, None))
                for id_, rows in selected.rows.items()
            },
            memory=self._memory(),
            largest_call_bytes=self._largest_call_bytes,
            left_out=self.doubtful(selected),
        )

    def _missing(self, selected: SelectedReadings) -> list[MissingTuple]:
        total = math.fsum(self.weight.values())
        return [
            MissingTuple(needed, self.weight[needed.operator_id] / total)
            for needed in self.needed
            if needed.operator_id not in selected.rows
        ]

    def _collectives(self, result: Estimate) -> tuple[dict[str, CallPrediction], list[str]]:
        """Predict the collectives without a reading. Return tuple id -> prediction, and notes."""
        missing = [
            entry.needed for entry in result.missing if entry.needed.short_name in COLLECTIVES
        ]
        if not missing:
            return {}, []
        names = {needed.short_name for needed in missing}
        protocols = protocols_like(self.session, self.protocol)
        sizes = collectives.measured_sizes(
            self.session, names, self.card_model, protocols, result.software
        )
        return collectives.predicted(missing, sizes, self.card_model)

    def with_predictions(self, result: Estimate, predictor: Predictor) -> Estimate:
        """Return the estimate with predictions for the missing tuples."""
        of_collectives, notes_of_collectives = self._collectives(result)
        operators = [needed for needed in self.needed if needed.short_name not in COLLECTIVES]
        unread = result.missing_by_id
        missing = [needed for needed in operators if needed.operator_id in unread]
        predicted = predictor.predict(missing, operators)
        idle = idle_power(self.session, self.card_model)
        predicted = above_floor(
            predicted,
            missing,
            self.card_model,
            tf32=self.protocol.tf32,
            idle_power_w=idle.power_w,
        )

        cards = self.variant.cards
        calls = dict(of_collectives)
        for needed, call in zip(missing, predicted.calls, strict=True):
            calls[needed.operator_id] = call.scaled(energy=cards)

        of_operators = predicted.total.scaled(energy=cards)
        if not missing:
            of_operators = replace(of_operators, energy_mj=PredictedValue(0.0, 0.0, 0.0))
        # Without software, the predictor gives lower bounds.
        communication = _costs_of_collectives(
            result.missing, of_collectives, least=predictor.software is None
        )
        predicted_cost = sum_of_costs([of_operators, *communication])
        communication_us = math.fsum(cost.time_us.value for cost in communication)

        notes = [*notes_of_collectives, *result.notes]
        if missing:
            notes = [*predicted.notes, *notes, *_notes_on_software(predictor, result)]
        readings_mj = result.readings.energy_mj if result.covered_tuples else Figure(0.0)
        readings = cost_at(replace(result.readings, energy_mj=readings_mj), PREDICTED_LEVEL)
        transfer = predicted.transfer if missing else None
        return replace(
            result,
            predictor=predictor.name,
            predicted=predicted_cost,
            total=sum_of_costs([readings, predicted_cost]),
            narrowing=(
                *(missing[position].operator_id for position in predicted.narrowing),
                *of_collectives,
            ),
            missing=tuple(
                replace(entry, predicted=calls[operator_id])
                for operator_id, entry in unread.items()
            ),
            transfer=transfer,
            communication_us=result.communication_us + communication_us,
            least_us=sum_of_floors_us(self.card_model, operators, tf32=self.protocol.tf32),
            idle_power=IdlePower(cards * idle.power_w, idle.source),
            notes=tuple(notes),
        )

    def in_ranks(self, result: Estimate) -> Estimate:
        """Return the estimate with what calls take longer in the ranks, by the same database as the
        readings, else by the package. The power meanwhile is unknown: the interval of this energy
        goes from none to twice the mean power's."""
        overlaps = self.variant.tensor_parallel == 1
        conditions = self.card_model, self.protocol, result.software, overlaps
        effects = rank_effects(self.session, *conditions)
        if effects is None:
            with packaged_database().read() as packaged:
                effects = rank_effects(packaged, *conditions)
        if effects is None:
            return result

        ratios, source = effects
        loops_us = {
            entry.needed.operator_id: entry.predicted_us
            for entry in result.missing
            if entry.predicted_us is not None
        }
        loops_us |= {id_: cost.time_us.value for id_, cost in result.measured.items()}
        added = added_time(ratios, self.needed, loops_us)
        alone = result.sum_at(PREDICTED_LEVEL)
        added_energy = None
        if alone.energy_mj:
            added_mj = alone.energy_mj.value / alone.time_us.value * added.value
            added_energy = Figure(added_mj, abs(added_mj))
        longer = "longer" if added.value >= 0 else "less"
        note = f"Calls take {quantity(abs(added.value), TIME)} {longer} in ranks than alone: "
        note += f"{source}."
        if overlaps:
            note += " How collectives overlap with computation is not estimated."
        return replace(result, ranks=PassCost(added, added_energy), notes=(note, *result.notes))

    def with_floor(self, result: Estimate) -> Estimate:
        """Return the estimate of a decode with the least time of its weights and cache."""
        if not has_floor(self.variant):
            return result
        times_us = {id_: cost.time_us.value for id_, cost in result.measured.items()}
        for entry in result.missing:
            if entry.predicted_us is not None:
                times_us[entry.needed.operator_id] = entry.predicted_us
        floor = token_floor(self.needed, times_us, self.roofline)
        least_us = max(result.least_us, self._least_of_token_us(floor))
        return replace(result, floor=floor, least_us=least_us)

    def _least_of_token_us(self, floor: TokenFloor | None) -> float:
        """Return the time to read the weights and the cache of a decode at the bandwidth of the
        data sheet; 0 without a sheet, or if the last cache of the card holds them."""
        if floor is None or not sheet_name_of(self.card_model):
            return 0.0
        sheet = data_sheet("cuda", self.card_model)
        read_bytes = floor.weights_bytes + floor.cache_bytes
        return read_bytes / sheet.bytes_per_s * 1e6 if read_bytes > sheet.l2_bytes else 0.0

    def with_routing(self, result: Estimate) -> Estimate:
        """Return the estimate with a note about the routing that it assumes."""
        times_us = dict(self.weight)
        for needed in self.needed:
            if needed.operator_id in result.measured:
                time_us = result.measured[needed.operator_id].time_us
                times_us[needed.operator_id] = time_us.value * needed.all_calls
        for entry in result.missing:
            if entry.predicted_us is not None:
                times_us[entry.needed.operator_id] = entry.all_calls_us
        note = routing_note(self.needed, times_us)
        return replace(result, notes=(note, *result.notes)) if note else result


def _costs_of_collectives(
    missing: Sequence[MissingTuple], predictions: Mapping[str, CallPrediction], *, least: bool
) -> list[PredictedCost]:
    """Return the cost of all calls of each predicted collective.

    Args:
        predictions: tuple id -> the cost of one call.
        least: count the lower ends of the times.
    """
    costs: list[PredictedCost] = []
    for entry in missing:
        cost = predictions.get(entry.needed.operator_id)
        if cost is None:
            continue
        if least:
            cost = replace(cost, time_us=PredictedValue(cost.time_us.low or 0.0))
        number = entry.needed.all_calls
        costs.append(cost.scaled(number, number))
    return costs


def _readings_of(selected: SelectedReadings) -> list[Any]:
    """The selected readings, each one time."""
    readings_by_id: dict[str, Any] = {}
    for rows in selected.rows.values():
        readings_by_id |= {row.id: row for row in rows}
    return list(readings_by_id.values())


def _flags_of(readings: Sequence[Any]) -> dict[str, int]:
    """Flag -> number of readings, the most frequent first."""
    flags: Counter[str] = Counter()
    for row in readings:
        flags.update(row.flags)
    return dict(flags.most_common())


def _notes_of(selected: SelectedReadings, missing: Sequence[MissingTuple]) -> Iterator[str]:
    if selected.other_sets:
        others = f"{selected.other_sets} other {plural('version', selected.other_sets)}"
        yield f"Readings with {others} of the method or the software exist. They were not mixed in."
    for entry in missing:
        if entry.needed.mismatch:
            share = f"{percent(entry.share)} of the estimated cost"
            yield f"{entry.needed.label} ({share}) has no reading: {entry.needed.mismatch}."


def _notes_on_software(predictor: Predictor, result: Estimate) -> Iterator[str]:
    """A note if predictions and readings are of different software."""
    learned, measured = predictor.software, result.software
    if learned is None or not result.covered_tuples:
        return
    if learned.id != measured.of_one_card.id:
        yield (
            f"Predictions are for torch {learned.torch}, readings are from torch {measured.torch}."
        )
