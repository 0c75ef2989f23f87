"""Estimate the cost of a model on a card without running it, from readings and predictions.

If the whole model has a reading, that is the cost. Otherwise the cost is a sum over the model's
tuples: a reading if there is one (as in verdicts, `farm.verdict.aggregate`), else a prediction.
Without a predictor the sum is incomplete."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sqlmodel import Session

from farm.addons.predict import collectives
from farm.addons.predict.floor import above_floor
from farm.addons.predict.rank_effects import added_time, rank_effects
from farm.addons.predict.readings import (
    SelectedReadings,
    card_bytes,
    left_out,
    peaks_of,
    protocols_like,
    select_for_model,
    tuples_of,
)
from farm.addons.predict.routing import routing_note
from farm.addons.predict.stored_predictor import CallPrediction, PredictedValue, Predictor
from farm.errors import FarmError, NoReadings, UsageError
from farm.exchange.packaged import packaged_database
from farm.requests.memory import MemoryNeed, memory_need
from farm.requests.partial_request import command_of, default_data
from farm.store.content import stored_software
from farm.store.database import read_clock_s
from farm.types.collective import COLLECTIVES
from farm.types.fields import figure_json
from farm.types.figure import Figure, value_of
from farm.types.format import ENERGY, TIME, percent, plural, quantity
from farm.types.protocol import Protocol, Software, Variant
from farm.types.request import Request
from farm.types.tuple import NeededTuple
from farm.verdict.aggregate import aggregate
from farm.verdict.expectation import Quantity, expected_whole
from farm.verdict.figures import PerToken
from farm.verdict.verdict import Verdict

LEVEL, PREDICTED_LEVEL = 0.95, 0.90  # levels of the intervals of readings and of predictions
_NARROWER = (
    1.645 / 1.960
)  # factor: half-width of a 95 % interval -> half-width of the 90 % interval
_UNITS = {"time": "us", "energy": "mj"}
# card time to measure a tuple if the database has no reading: the median on an H200
SECONDS_A_TUPLE = 1.4


@dataclass(frozen=True)
class MissingTuple:
    """A tuple without a reading. The fields with a default are None without a predictor."""

    operator_id: str
    operator: str
    label: str
    calls: int
    share: float  # of the model's estimated cost
    predicted_us: float | None = None  # the time of one call
    predicted_low_us: float | None = None  # the ends of its 90 % interval
    predicted_high_us: float | None = None
    predicted_mj: float | None = None
    known: bool | None = None  # True if its operator type has a reading
    far: bool | None = None  # True if no reading is similar, so its interval is wide
    mismatch: str = ""  # why it cannot be measured alone as the model runs it


@dataclass(frozen=True)
class Estimate:
    """The cost of one pass of a model. Each `Figure` has a 95 % interval, each `PredictedValue` a
    90 % interval.

    `time` and `energy` are the cost of the whole model.
    """

    variant: Variant
    card_model: str
    protocol: Protocol
    software: Software
    method: int
    tuples: int
    covered_tuples: int
    coverage: float  # share of the estimated cost that has readings
    measured_time: Figure  # the sum of the readings
    measured_energy: Figure | None
    whole_time: Figure | None  # the reading of the whole model, if there is one
    whole_energy: Figure | None
    missing: tuple[MissingTuple, ...]  # largest share first
    measuring_rest_s: float  # card time to measure the missing tuples
    other_data_calls: int  # calls that use a reading of another data class
    flags: Mapping[str, int]
    origins: Mapping[str, int]  # farm ("": this farm) -> number of readings
    oldest_at_s: float | None
    notes: tuple[str, ...]
    specs: Mapping[str, Any]  # tuple id -> description of a missing tuple; not in the JSON
    measured: Mapping[
        str, tuple[float, float | None]
    ]  # tuple id -> µs and mJ of one call alone; not in the JSON
    predictor: str = ""
    predicted_us: float | None = None  # time of the missing tuples, if there is a predictor
    predicted_mj: float | None = None
    total_time: PredictedValue | None = None  # readings and predictions together
    total_energy: PredictedValue | None = None
    narrowing: tuple[
        str, ...
    ] = ()  # ids of missing tuples; the one that would narrow the total most is first
    # what predictions from another card model are based on
    transfer: Mapping[str, Any] | None = None
    # time of all collectives alone, readings and predictions; part of `time`
    communication_us: float = 0.0
    # of a split model: what calls take longer in the ranks; part of `time`
    ranks_time: Figure | None = None
    ranks_energy: Figure | None = None
    # what the whole model takes longer than its other tuples; None: not measured
    exposed_us: float | None = None
    incomplete_reason: str = ""  # why `time` is only a part or a lower bound; "" if it is complete
    memory: MemoryNeed | None = None  # None: the memory of the card or the model is unknown
    # the doubtful readings of missing tuples and, without another one, of the whole model
    left_out: str = ""
    # the age of the oldest reading, by the clock of the database; not in the JSON
    oldest_age_s: float | None = None

    def __repr__(self) -> str:
        cost = (
            f"{quantity(self.time.value, TIME)}, "
            f"{quantity(self.energy.value if self.energy else None, ENERGY)}"
        )
        source = f"{self.covered_tuples} of {self.tuples} tuples measured"
        return f"<Estimate {self.variant} on {self.card_model}: {cost}; {source}>"

    @property
    def complete(self) -> bool:
        """True if `time` includes all tuples; False if it omits some or is a lower bound (see
        `incomplete_reason`).
        """
        return not self.incomplete_reason

    @property
    def level(self) -> float:
        """The level of the intervals on a page with this estimate: 0.90 if it has predictions, else
        0.95.
        """
        return (
            PREDICTED_LEVEL
            if self.missing and self.total_time and self.total_time.low is not None
            else LEVEL
        )

    @property
    def time(self) -> PredictedValue:
        """The time of the whole model; if `complete` is False, the time of a part. Unit: µs."""
        return self.time_at(self.level)

    @property
    def energy(self) -> PredictedValue | None:
        """The energy of the same pass as `time`. Unit: mJ."""
        return self.energy_at(self.level)

    def time_at(self, level: float) -> PredictedValue:
        """Return `time` with an interval of `level`, which must not exceed `self.level`. No
        interval if incomplete.
        """
        found = interval_at(self.whole_time, level) or self.sum_at(level)[0]
        return found if self.complete else PredictedValue(found.value)

    def energy_at(self, level: float) -> PredictedValue | None:
        if self.whole_time and not self.whole_energy and self.missing and not self.total_energy:
            return None
        found = interval_at(self.whole_energy, level) or self.sum_at(level)[1]
        return found if self.complete or found is None else PredictedValue(found.value)

    def sum_at(self, level: float) -> tuple[PredictedValue, PredictedValue | None]:
        """Return the time (µs) and energy (mJ) of readings, predictions and effects of the ranks
        together.

        The interval is one of the whole model: it includes what differs between two runs of a
        model."""
        time, energy = (
            interval_at(self.measured_time, level),
            interval_at(self.measured_energy, level),
        )
        if self.missing and self.total_time:
            time, energy = (
                self.total_time,
                energy if self.total_time.low is None else self.total_energy,
            )
        if self.ranks_time:
            time = _sum([time, interval_at(self.ranks_time, level)])
            energy = energy and _sum([energy, interval_at(self.ranks_energy, level)])
        assert time is not None

        return _of_whole(time, "time", level), energy and _of_whole(energy, "energy", level)

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the total time: measured, predicted, and predicted for operator types without a
        reading.
        """
        total = self.total_time.value if self.total_time else 0.0
        if not total:
            return {}
        unseen = math.fsum(
            (one.predicted_us or 0.0) * one.calls for one in self.missing if one.known is False
        )
        predicted = (self.predicted_us or 0.0) - unseen
        return {
            "measured": self.measured_time.value / total,
            "predicted": predicted / total,
            "unseen_types": unseen / total,
        }

    @property
    def per_token(self) -> PerToken:
        """The cost per token of the whole model, if it is complete."""
        return PerToken.of(
            self.variant, *((self.time, self.energy) if self.complete else (None, None))
        )

    def to_measure(self, most: int | None = None, seconds: float | None = None) -> tuple[str, ...]:
        """Return ids of missing tuples to measure first, at least one: in the order of `narrowing`,
        or of cost if that is empty. ``seconds``: card time to spend. Raises `UsageError` if every
        tuple has a reading, or the model is compiled or split over cards."""
        if self.variant.cards > 1:
            raise UsageError(
                "--measure and --budget measure on one card.", "Omit them, and measure the model."
            )
        if self.variant.compile:
            raise UsageError(
                "Generated kernels are measured with their model only.",
                "Omit --measure and --budget.",
            )
        if not self.missing:
            text = "All tuples of the model have readings, so there is nothing left to measure."
            raise UsageError(text, "Omit --measure.")
        unlike = {one.operator_id for one in self.missing if one.mismatch}
        order = self.narrowing or tuple(one.operator_id for one in self.missing)
        order = tuple(operator_id for operator_id in order if operator_id not in unlike)
        if not order:
            text = "The tuples without a reading cannot be measured alone as the model runs them."
            raise UsageError(text, "Omit --measure and --budget, and measure the whole model.")
        affordable = (
            max(1, int(seconds / self.measuring_rest_s * len(self.missing)))
            if seconds
            else len(order)
        )
        return order[: min(most or len(order), affordable)]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with units in the key names; shares are fractions. The first figures are for
        the whole model.

        ``low`` and ``high`` are the ends of an interval of ``interval_level``; in ``total``, of a
        90 % interval. Half-widths belong to 95 % intervals."""
        figures = {
            f"{name}_{of}": unit
            for name in ("measured", "whole", "ranks")
            for of, unit in _UNITS.items()
        }
        left_out = (*figures, "total_time", "total_energy", "specs", "measured", "oldest_age_s")
        return {
            **cost_json(self.time, self.energy, self.level),
            "complete": self.complete,
            **{name: value for name, value in vars(self).items() if name not in left_out},
            "basis": "whole model" if self.whole_time else "sum",
            "shares": self.shares,
            "variant": self.variant.to_json(),
            "protocol": self.protocol.to_json(),
            "software": self.software.to_json(),
            **{
                key: one
                for name in figures
                for key, one in figure_json(name, figures[name], vars(self)[name]).items()
            },
            **asdict(self.per_token),
            **interval_json("total_time", "us", self.total_time),
            **interval_json("total_energy", "mj", self.total_energy),
            "missing": [vars(entry) for entry in self.missing],
            "memory": self.memory.to_json() if self.memory else None,
        }


def interval_at(figure: Figure | None, level: float) -> PredictedValue | None:
    """Convert a measured figure: its interval gets the level `LEVEL` or `PREDICTED_LEVEL`."""
    if figure is None:
        return None
    half_width = figure.half_width * (1.0 if level == LEVEL else _NARROWER)
    return PredictedValue(figure.value, figure.value - half_width, figure.value + half_width)


def _of_whole(total: PredictedValue, quantity: Quantity, level: float) -> PredictedValue:
    """Widen the interval of a sum to one of the whole model, which differs from run to run
    (`expected_whole`).
    """
    if total.low is None or total.high is None:
        return total

    run = expected_whole(Figure(total.value), quantity)
    run_half_width = run.half_width if level == LEVEL else run.half_width * _NARROWER
    below = math.hypot(total.value - total.low, run_half_width)
    above = math.hypot(total.high - total.value, run_half_width)
    return PredictedValue(total.value, max(0.0, total.value - below), total.value + above)


def interval_json(name: str, unit: str, found: PredictedValue | None) -> dict[str, float | None]:
    """JSON of a value and the ends of its interval: ``name_unit``, ``name_low_unit`` and
    ``name_high_unit``.
    """
    keys = f"{name}_{unit}", f"{name}_low_{unit}", f"{name}_high_{unit}"
    return dict(zip(keys, vars(found).values() if found else (None,) * 3, strict=True))


def cost_json(
    time: PredictedValue, energy: PredictedValue | None, level: float
) -> dict[str, float | None]:
    """The first keys of an estimate's JSON. Half-widths belong to 95 % intervals: None if `level`
    is not 0.95.
    """
    found: dict[str, float | None] = {}
    for (name, unit), one in zip(_UNITS.items(), (time, energy), strict=True):
        known = level == LEVEL and one is not None and one.high is not None
        half_width = {f"{name}_half_width_{unit}": one.high - one.value if known else None}  # type: ignore[operator, union-attr]
        found |= interval_json(name, unit, one) | half_width
    return {**found, "interval_level": level}


def _no_readings(request: Request, where: str, why: str) -> NoReadings:
    return NoReadings(
        f"No tuple of {request.variant} has a reading on {where}, and {why}.",
        f"Measure the model: {command_of(request).removesuffix(' --reuse none')}; "
        "or import another farm's readings with `farm import`.",
    )


def _without_stop(note: str) -> str:
    return note.removesuffix(".")


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
    prediction, and as `tuples_of`.

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
        needed: the tuples of the model; None: see `tuples_of`.
    """
    kind, roofline = peaks_of(session, card_model, variant.computes_in, protocol.tf32)
    if needed is None:
        needed = tuples_of(
            session, variant, "cpu" if kind == "cpu" else "cuda", protocol.launch, card_model
        )
    weight = {
        one.operator_id: roofline.estimate_us(one.flops, one.bytes_moved) * one.all_calls
        for one in needed
    }
    selected = select_for_model(
        session, variant, needed, weight, card_model, protocol, roofline, torch
    )
    known = {*selected.rows, *(variant.id for _ in selected.wholes)} if selected else set()
    unread = [id_ for id_ in (*weight, variant.id) if id_ not in known]
    doubtful = left_out(session, unread, card_model, list(protocols_like(session, protocol)))
    if selected:
        software = stored_software(session, selected.software_id)
    elif predictor and predictor.software and predictor.software.torch.startswith(torch):
        software = predictor.software
        selected = SelectedReadings.none(needed, predictor.method, software.id, roofline)
    else:
        where = (
            card_model
            + f" under {protocol.launch} launch"
            + (f" and torch {torch}" if torch else "")
        )
        data = (
            "copied"
            if variant.compile
            else default_data(kind, not (variant.step or variant.cards > 1))
        )
        why = ". ".join(
            [unfilled, *([f"Left out: {doubtful}"] if doubtful else []), *map(_without_stop, notes)]
        )
        raise _no_readings(Request(variant=variant, protocol=protocol.with_data(data)), where, why)
    found = _from_readings(variant, card_model, protocol, software, needed, weight, selected)
    notes = (*(notes if found.missing else ()), *found.notes)
    age_s = None if found.oldest_at_s is None else read_clock_s(session) - found.oldest_at_s
    memory = _memory(session, variant, card_model, needed)
    found = replace(found, notes=notes, memory=memory, oldest_age_s=age_s, left_out=doubtful)
    if predictor:
        of_cards, its_notes = _of_collectives(session, found, needed, card_model, protocol)
        found = _with_predictions(
            replace(found, notes=(*its_notes, *found.notes)), predictor, needed, of_cards
        )
    if variant.cards > 1 and not found.whole_time:
        found = _in_ranks(session, found, needed, protocol)
    if found.missing and not found.whole_time and (predictor is None or predictor.software is None):
        why = (
            "count with a lower bound (the roofline)"
            if predictor
            else f"have no reading, and {unfilled}"
        )
        share = f"{percent(1 - found.coverage)} of the estimated cost"
        found = replace(
            found,
            incomplete_reason=f"{len(found.missing)} of {found.tuples} tuples ({share}) {why}.",
        )
    return _with_routing(found, needed, weight)


def _with_routing(
    found: Estimate, needed: Sequence[NeededTuple], weight: Mapping[str, float]
) -> Estimate:
    """Return the estimate with a note about the routing that it assumes, unless the whole model was
    measured.
    """
    if found.whole_time:
        return found
    times_us = dict(weight)
    for one in needed:
        if one.operator_id in found.measured:
            times_us[one.operator_id] = found.measured[one.operator_id][0] * one.all_calls
    for entry in found.missing:
        if entry.predicted_us is not None:
            times_us[entry.operator_id] = entry.predicted_us * entry.calls
    note = routing_note(needed, times_us)
    return replace(found, notes=(note, *found.notes)) if note else found


def too_large_from(curve: Sequence[Estimate]) -> Estimate | None:
    """Return the estimate with the smallest batch and length that exceeds the card's memory, or
    None.
    """
    too_large = [one for one in curve if one.memory and not one.memory.fits]
    return min(too_large, key=lambda one: (one.variant.batch, one.variant.length), default=None)


def _memory(
    session: Session, variant: Variant, card_model: str, needed: Sequence[NeededTuple]
) -> MemoryNeed | None:
    """The memory that one pass needs; None if the memory of the card or the model is unknown."""
    all_calls_bytes = sum(one.all_calls * (one.bytes_moved + one.held_bytes) for one in needed)
    largest_call_bytes = max(max(0, one.bytes_moved - one.held_bytes) for one in needed)
    try:
        size = card_bytes(session, card_model)
        return memory_need(variant, size, all_calls_bytes, largest_call_bytes) if size else None
    except FarmError:
        return None


def _from_readings(
    variant: Variant,
    card_model: str,
    protocol: Protocol,
    software: Software,
    needed: Sequence[NeededTuple],
    weight: Mapping[str, float],
    selected: SelectedReadings,
) -> Estimate:
    summed, time, energy, notes = _summed(selected, protocol.launch)
    if selected.other_sets:
        others = f"{selected.other_sets} other {plural('version', selected.other_sets)}"
        notes.append(
            f"Readings with {others} of the method or the software exist. They were not mixed in."
        )
    readings = list({row.id: row for rows in selected.rows.values() for row in rows}.values())
    measuring_s = [total for row in readings if (total := (row.cost_s or {}).get("total"))]
    total_weight = math.fsum(weight.values())
    rest = [one for one in needed if one.operator_id not in selected.rows]
    missing = []
    for one in rest:
        share = weight[one.operator_id] / total_weight
        about = one.operator_id, one.short_name, one.label, one.all_calls, share
        missing.append(MissingTuple(*about, mismatch=one.mismatch))
        if one.mismatch:
            notes.append(
                f"{one.label} ({percent(share)} of the estimated cost) has no reading: "
                f"{one.mismatch}."
            )
    return Estimate(
        variant=variant,
        card_model=card_model,
        protocol=protocol,
        software=software,
        method=selected.method,
        tuples=len(needed),
        covered_tuples=len(selected.rows),
        coverage=math.fsum(weight[id_] for id_ in selected.rows) / total_weight,
        measured_time=time,
        measured_energy=energy,
        whole_time=summed.time.whole,
        whole_energy=summed.energy.whole if summed.energy else None,
        missing=tuple(sorted(missing, key=lambda entry: (-entry.share, entry.label))),
        measuring_rest_s=len(missing)
        * (statistics.median(measuring_s) if measuring_s else SECONDS_A_TUPLE),
        other_data_calls=selected.other_data_calls,
        flags=dict(Counter(flag for row in readings for flag in row.flags).most_common()),
        origins=dict(Counter(row.origin for row in readings)),
        oldest_at_s=min((row.created_at_s for row in readings), default=None),
        notes=tuple(notes),
        specs={one.operator_id: one.spec for one in rest},
        communication_us=summed.collectives_alone_us
        or math.fsum(
            line.total_us for line in summed.tuples if line.subject.short_name in COLLECTIVES
        ),
        exposed_us=summed.communication_us[1] if summed.communication_us and not missing else None,
        measured={id_: (rows[0].time_us, rows[0].energy_mj) for id_, rows in selected.rows.items()},
    )


def _of_collectives(
    session: Session,
    found: Estimate,
    needed: Sequence[NeededTuple],
    card_model: str,
    protocol: Protocol,
) -> tuple[dict[str, CallPrediction], list[str]]:
    """Predict the collectives without a reading. Return tuple id -> prediction, and notes."""
    wanted = [
        one for one in needed if one.operator_id in found.specs and one.short_name in COLLECTIVES
    ]
    if not wanted:
        return {}, []
    names, protocol_ids = {one.short_name for one in wanted}, protocols_like(session, protocol)
    sizes = collectives.measured_sizes(session, names, card_model, protocol_ids, found.software)
    return collectives.predicted(wanted, sizes, card_model)


def _with_predictions(
    found: Estimate,
    predictor: Predictor,
    needed: Sequence[NeededTuple],
    of_cards: Mapping[str, CallPrediction],
) -> Estimate:
    """Return the estimate with predictions for the missing tuples. ``of_cards``: those of
    collectives.
    """
    operators = [one for one in needed if one.short_name not in COLLECTIVES]
    missing = [one for one in operators if one.operator_id in found.specs]
    predicted = predictor.predict(missing, operators)
    predicted = above_floor(predicted, missing, found.card_model, tf32=found.protocol.tf32)
    notes, cards = found.notes, found.variant.cards
    calls = dict(of_cards) | {
        one.operator_id: replace(call, energy_mj=call.energy_mj and call.energy_mj.times(cards))
        for one, call in zip(missing, predicted.calls, strict=True)
    }
    notes = (*(predicted.notes if missing else ()), *notes)
    of_one_card = found.software.of_one_card
    if (
        found.covered_tuples
        and missing
        and predictor.software
        and predictor.software.id != of_one_card.id
    ):
        torches = (
            f"Predictions are for torch {predictor.software.torch}, readings are from torch "
            f"{found.software.torch}."
        )
        notes = (*notes, torches)
    energy = predicted.energy_mj if missing else PredictedValue(0.0, 0.0, 0.0)
    times, energies = [predicted.time_us], [energy and energy.times(cards)]
    for entry in found.missing:
        if call := of_cards.get(entry.operator_id):
            bound = (
                PredictedValue(call.time_us.low or 0.0)
                if predictor.software is None
                else call.time_us
            )
            times.append(bound.times(entry.calls))
            energies.append(call.energy_mj and call.energy_mj.times(entry.calls))
    time, energy = _sum(times), _sum(energies)
    assert time is not None
    measured_energy = found.measured_energy if found.covered_tuples else Figure(0.0)
    return replace(
        found,
        predictor=predictor.name,
        predicted_us=time.value,
        predicted_mj=energy.value if energy else None,
        total_time=_sum([interval_at(found.measured_time, PREDICTED_LEVEL), time]),
        total_energy=_sum([interval_at(measured_energy, PREDICTED_LEVEL), energy]),
        narrowing=(*(missing[place].operator_id for place in predicted.narrowing), *of_cards),
        missing=tuple(_predicted(entry, calls[entry.operator_id]) for entry in found.missing),
        transfer=predicted.transfer if missing else None,
        communication_us=found.communication_us + math.fsum(one.value for one in times[1:]),
        notes=notes,
    )


def _in_ranks(
    session: Session, found: Estimate, needed: Sequence[NeededTuple], protocol: Protocol
) -> Estimate:
    """Return the estimate with what calls take longer in the ranks, by the same database as the
    readings, else by the package. The power meanwhile is unknown: the interval of this energy goes
    from none to twice the mean power's."""
    overlaps = found.variant.tensor_parallel == 1
    about = found.card_model, protocol, found.software, overlaps
    if (effects := rank_effects(session, *about)) is None:
        with packaged_database().read() as packaged:
            effects = rank_effects(packaged, *about)
    if effects is None:
        return found
    loops_us = {
        one.operator_id: one.predicted_us for one in found.missing if one.predicted_us is not None
    }
    added = added_time(
        effects[0], needed, loops_us | {id_: us for id_, (us, _) in found.measured.items()}
    )
    time, energy = found.sum_at(PREDICTED_LEVEL)
    mj = energy.value / time.value * added.value if energy else 0.0
    size, longer = quantity(abs(added.value), TIME), "longer" if added.value >= 0 else "less"
    note = f"Calls take {size} {longer} in ranks than alone: {effects[1]}."
    note += " How collectives overlap with computation is not estimated." if overlaps else ""
    return replace(
        found,
        ranks_time=added,
        ranks_energy=Figure(mj, abs(mj)) if energy else None,
        notes=(note, *found.notes),
    )


def _sum(values: Sequence[PredictedValue | None]) -> PredictedValue | None:
    """Add predictions. Half-widths add linearly, because all may be wrong in the same direction."""
    known = [one for one in values if one is not None]
    if len(known) < len(values):
        return None
    ends = [[one.low for one in known], [one.high for one in known]]
    low, high = (None if None in end else math.fsum(filter(None, end)) for end in ends)
    return PredictedValue(math.fsum(one.value for one in known), low, high)


def _predicted(entry: MissingTuple, call: CallPrediction) -> MissingTuple:
    time, energy_mj = call.time_us, call.energy_mj.value if call.energy_mj else None
    times: dict[str, Any] = {
        "predicted_us": time.value,
        "predicted_low_us": time.low,
        "predicted_high_us": time.high,
    }
    return replace(entry, **times, predicted_mj=energy_mj, known=call.known, far=call.far)


def _summed(
    selected: SelectedReadings, launch: str
) -> tuple[Verdict, Figure, Figure | None, list[str]]:
    """Return the sum of the readings, its time and energy, and notes.

    Without a reading of the whole model, its clocks are unknown. Tuples that reach the power limit
    in a loop then count as near to their bursts as the mean power of the sum allows: it is at most
    the power of these loops."""
    limited = [
        part.reading for part in selected.parts if part.reading and part.reading.details.burst
    ]
    loops = _sum_at(selected, launch, 0.0)
    bursts = _sum_at(selected, launch, 1.0) if limited and not selected.wholes else loops
    if bursts is loops or not (loops.energy and loops.power and bursts.energy and bursts.power):
        return loops, loops.time.total, loops.energy.total if loops.energy else None, []
    slow_w, fast_w = loops.power.total.value, bursts.power.total.value
    limit_w = max((value_of(one.energy_mj) or 0.0) / one.time_us.value * 1e3 for one in limited)
    share = (
        1.0
        if fast_w <= limit_w
        else 0.0
        if slow_w >= limit_w
        else (limit_w - slow_w) / (fast_w - slow_w)
    )

    def between(low: Figure, high: Figure) -> Figure:
        """The figure at the share; its interval includes both ends."""
        value, half_width = (
            low.value + share * (high.value - low.value),
            max(low.half_width, high.half_width),
        )
        return Figure(value, half_width + max(share, 1 - share) * abs(high.value - low.value))

    note = (
        f"{len(limited)} {plural('tuple', len(limited))} hit the power limit in a loop. By its "
        "mean power, the sum is "
        f"{percent(share)} of the way from loops to bursts at full clocks. The intervals include "
        "both ends."
    )
    time, energy = (
        between(loops.time.total, bursts.time.total),
        between(loops.energy.total, bursts.energy.total),
    )
    return (
        {0.0: loops, 1.0: bursts}.get(share) or _sum_at(selected, launch, share),
        time,
        energy,
        [note],
    )


def _sum_at(selected: SelectedReadings, launch: str, share: float) -> Verdict:
    """The sum. ``share``: how far tuples at the power limit are between their loops (0) and their
    bursts (1).
    """
    parts = [
        replace(part, reading=part.reading and part.reading.towards_bursts(share))
        for part in selected.parts
    ]
    return aggregate(
        parts if share else selected.parts, selected.wholes, target=0.95, launch=launch
    )
