"""The cost of a model on a card from readings alone, without running it.

The sum is that of verdicts (`farm.verdict.aggregate`). Tuples without a reading are listed and left out, unless a
predictor fills them; predictions are reported apart from readings.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import sqlalchemy
from sqlmodel import Session

from farm.errors import UsageError
from farm.estimate.readings import card_model_named, peaks_of, select_for_model, tuples_of, without_readings
from farm.prediction.stored_predictor import NeededTuple, PredictedValue, Predictions, Predictor
from farm.requests.partial_request import command_of, default_data
from farm.store import tables
from farm.types.format import ENERGY, count_of, plural, quantity
from farm.types.protocol import Protocol, Software, Variant
from farm.types.request import Request
from farm.verdict.aggregate import aggregate
from farm.verdict.figures import Figure, figure_json

SECONDS_A_TUPLE = 1.4  # card time to measure a tuple if the database has no reading: the median on an H200


@dataclass(frozen=True)
class PerToken:
    """Tokens a second and energy a token.

    A pass has `tokens` tokens: of a prompt or text, or one of each decoded sequence. A figure is None if the time or
    energy is unknown.
    """

    tokens: int
    tokens_per_s: float | None
    energy_per_token_mj: float | None

    @classmethod
    def of(cls, variant: Variant | None, time: Figure | None, energy: Figure | None) -> PerToken:
        """
        Args:
            time, energy: of one whole pass, in us and mJ.
        """
        if variant is None or not variant.tokens:
            return cls(0, None, None)
        tokens_per_s = variant.tokens / time.value * 1e6 if time and time.value else None
        return cls(variant.tokens, tokens_per_s, energy.value / variant.tokens if energy else None)

    def __str__(self) -> str:
        """``8 tokens a pass: 12.3 k tokens/s, 4.2 mJ a token``; "" for a model without tokens."""
        if not self.tokens:
            return ""
        figures = [f"{count_of(self.tokens_per_s, '').strip()} tokens/s"] if self.tokens_per_s else []
        figures += [f"{quantity(self.energy_per_token_mj, ENERGY)} a token"] if self.energy_per_token_mj else []
        a_pass = f"{self.tokens} {plural('token', self.tokens)} a pass"
        return f"{a_pass}: {', '.join(figures)}" if figures else a_pass


@dataclass(frozen=True)
class MissingTuple:
    """A tuple without a reading.

    Attributes:
        share: of the model's estimated cost.
        predicted_us: one call; None without a predictor. Low and high are its 90 % interval.
        known: whether its operator type has a reading; None without a predictor.
    """

    operator_id: str
    operator: str
    label: str
    calls: int
    share: float
    predicted_us: float | None = None
    predicted_low_us: float | None = None
    predicted_high_us: float | None = None
    predicted_mj: float | None = None
    known: bool | None = None


@dataclass(frozen=True)
class Estimate:
    """The cost of one pass of a model. Figures are of the covered part, with half-widths of the 95 % interval."""

    variant: Variant
    card_model: str
    protocol: Protocol
    software: Software
    method: int
    tuples: int
    covered_tuples: int
    coverage: float  # share of the estimated cost
    time: Figure
    energy: Figure | None
    whole_time: Figure | None  # the whole model, if it has a reading
    whole_energy: Figure | None
    predicted_us: float | None  # the rest, if there is a predictor
    predictor: str
    missing: tuple[MissingTuple, ...]  # largest share first
    measuring_rest_s: float  # card time
    other_data_calls: int  # calls whose class of data has no reading, taken from another class
    flags: Mapping[str, int]
    origins: Mapping[str, int]  # farm ("" own) -> readings
    oldest_at_s: float | None
    notes: tuple[str, ...]
    predicted_mj: float | None = None
    total_time: PredictedValue | None = None  # readings and predictions together
    total_energy: PredictedValue | None = None
    specs: Mapping[str, Any] = field(default_factory=dict)  # of missing tuples by id; not in the JSON
    narrowing: tuple[str, ...] = ()  # ids of missing tuples, those first whose readings would narrow the total most

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the total time: measured, predicted, and predicted of operator types without a reading."""
        total = self.total_time.value if self.total_time else 0.0
        if not total:
            return {}
        unseen = math.fsum((one.predicted_us or 0.0) * one.calls for one in self.missing if one.known is False)
        predicted = (self.predicted_us or 0.0) - unseen
        return {
            "measured": self.time.value / total,
            "predicted": predicted / total,
            "unseen_types": unseen / total,
        }

    @property
    def per_token(self) -> PerToken:
        """Of the whole model if it has a reading, else of the sum if readings cover all of it."""
        complete = self.covered_tuples == self.tuples
        time, energy = (self.time, self.energy) if complete else (None, None)
        return PerToken.of(self.variant, self.whole_time or time, self.whole_energy or energy)

    def to_measure(self, most: int | None = None, seconds: float | None = None) -> tuple[str, ...]:
        """Ids of missing tuples to measure first: by `narrowing`, or without intervals by their share of the cost.

        Args:
            seconds: card time; at least one tuple is returned.

        Raises:
            UsageError: readings cover every tuple.
        """
        if not self.missing:
            raise UsageError("Readings cover every tuple: there is nothing left to measure.", "Omit --measure.")
        order = self.narrowing or tuple(one.operator_id for one in self.missing)
        each_s = self.measuring_rest_s / len(self.missing)
        return order[: min(most or len(order), max(1, int(seconds / each_s)) if seconds else len(order))]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with units in the key names; shares are fractions."""

        def interval(name: str, unit: str, found: PredictedValue | None) -> dict[str, float | None]:
            values = (found.value, found.low, found.high) if found else (None, None, None)
            return dict(zip((f"{name}_{unit}", f"{name}_low_{unit}", f"{name}_high_{unit}"), values, strict=True))

        plain = ["tuples", "covered_tuples", "coverage", "predicted_us", "predictor", "predicted_mj", "shares"]
        plain += ["measuring_rest_s", "other_data_calls", "oldest_at_s", "card_model", "method"]
        return {
            **{name: getattr(self, name) for name in plain},
            "variant": self.variant.to_json(),
            "protocol": self.protocol.to_json(),
            "software": self.software.to_json(),
            **figure_json("time", "us", self.time),
            **figure_json("energy", "mj", self.energy),
            **figure_json("whole_time", "us", self.whole_time),
            **figure_json("whole_energy", "mj", self.whole_energy),
            **asdict(self.per_token),
            **interval("total_time", "us", self.total_time),
            **interval("total_energy", "mj", self.total_energy),
            "narrowing": list(self.narrowing),
            "missing": [asdict(entry) for entry in self.missing],
            "flags": dict(self.flags),
            "origins": dict(self.origins),
            "notes": list(self.notes),
        }


def estimate(
    session: Session,
    variant: Variant,
    card: str = "",
    *,
    protocol: Protocol | None = None,
    torch: str = "",
    predictor: Predictor | None = None,
    notes: Sequence[str] = (),
) -> Estimate:
    """Estimate the cost of one pass of a model from the readings of its tuples.

    Args:
        card: part of the card's model.
        protocol: launch, residency and numeric flags; the usual ones of the card if None. Its class of data is ignored:
            each call has the class that the model showed, or another one if that has no reading.
        torch: a version, or its beginning; "" for the one that covers most.
        predictor: fills tuples without a reading; None leaves them out. One that has a software also answers for
            a model without any reading.
        notes: about the predictor; kept if tuples are missing.

    Raises:
        UsageError: there is no such card, several, or no reading of any of the model's tuples.
        CaptureError: see `tuples_of`.
    """
    model = card_model_named(session, card)
    kind, roofline = peaks_of(session, model, variant.computes_in, protocol is not None and protocol.tf32)
    protocol = protocol or Protocol(launch="eager" if kind == "cpu" else "graph")
    needed = tuples_of(session, variant, "cpu" if kind == "cpu" else "cuda", protocol.launch)
    weight = {one.operator_id: roofline.estimate_us(one.flops, one.bytes_moved) * one.all_calls for one in needed}
    selected = select_for_model(session, variant, needed, weight, model, protocol, roofline, torch)
    if selected:
        software = _software(session, selected.software_id)
    elif predictor and predictor.software and predictor.software.torch.startswith(torch):
        software = predictor.software
        selected = without_readings(needed, predictor.method, software.id, roofline)
    else:
        about = f" under {protocol.launch} launch" + (f" and torch {torch}" if torch else "")
        request = Request(variant=variant, protocol=protocol.with_data(default_data(kind, variant.step)))
        command = command_of(request).removesuffix(" --reuse none")
        raise UsageError(
            f"No reading of {model}{about} is of a tuple of {variant}.",
            f"Measure it: {command}; or import another farm's readings with `farm import`.",
        )
    parts = selected.parts
    summed = aggregate(parts, selected.wholes, target=0.95, launch=protocol.launch)
    time, energy = summed.time.total, summed.energy.total if summed.energy else None
    missing = [one for one in needed if one.operator_id not in selected.rows]
    predicted = predictor.predict(missing, needed) if predictor else None
    notes = list(notes) if missing else []
    bursts = [
        part.count * abs(part.reading.time_us - part.reading.details.burst.time_us)
        for part in parts
        if part.reading and part.reading.details.burst
    ]
    if bursts and not selected.wholes:
        # Only a reading of the whole model shows which of its two states the model would be in.
        time = Figure(time.value, time.half_width + math.fsum(bursts))
        notes.append(
            f"{len(bursts)} tuples hit the power limit when looped: the interval includes their time in bursts."
        )
    if selected.other_sets:
        notes.append(f"Readings of {selected.other_sets} other methods or software exist and were not mixed in.")
    readings = list({row.id: row for rows in selected.rows.values() for row in rows}.values())
    if readings and missing and predictor and predictor.software and predictor.software.id != software.id:
        notes.append(f"Predictions are for torch {predictor.software.torch}, readings for torch {software.torch}.")
    measuring_s = [total for row in readings if (total := (row.cost_s or {}).get("total"))]
    everything = math.fsum(weight.values())
    listed = [
        _missing(one, weight[one.operator_id] / everything, predicted, place) for place, one in enumerate(missing)
    ]
    predicted_energy = predicted.energy_mj if predicted else None
    measured_energy = energy if selected.rows else Figure(0.0)
    rest_energy = predicted_energy if missing else PredictedValue(0.0, 0.0, 0.0)
    return Estimate(
        variant=variant,
        card_model=model,
        protocol=protocol,
        software=software,
        method=selected.method,
        tuples=len(needed),
        covered_tuples=len(selected.rows),
        coverage=math.fsum(weight[id_] for id_ in selected.rows) / everything,
        time=time,
        energy=energy,
        whole_time=summed.time.whole,
        whole_energy=summed.energy.whole if summed.energy else None,
        predicted_us=predicted.time_us.value if predicted else None,
        predictor=predictor.name if predictor else "",
        missing=tuple(sorted(listed, key=lambda entry: (-entry.share, entry.label))),
        measuring_rest_s=len(missing) * (statistics.median(measuring_s) if measuring_s else SECONDS_A_TUPLE),
        other_data_calls=selected.other_data_calls,
        flags=dict(Counter(flag for row in readings for flag in row.flags).most_common()),
        origins=dict(Counter(row.origin for row in readings)),
        oldest_at_s=min((row.created_at_s for row in readings), default=None),
        notes=tuple(notes),
        predicted_mj=predicted_energy.value if predicted_energy else None,
        total_time=_total(time, predicted.time_us) if predicted else None,
        total_energy=_total(measured_energy, rest_energy) if predicted else None,
        specs={one.operator_id: one.spec for one in missing},
        narrowing=tuple(missing[place].operator_id for place in predicted.narrowing) if predicted else (),
    )


def _software(session: Session, software_id: str) -> Software:
    columns = tables.SoftwareRow.__table__.c  # type: ignore[attr-defined]
    row = session.execute(sqlalchemy.select(*columns).where(columns.id == software_id)).one()
    return Software(**{name: value for name, value in row._mapping.items() if name != "id"})


def _missing(one: NeededTuple, share: float, predicted: Predictions | None, place: int) -> MissingTuple:
    entry = (one.operator_id, one.short_name, one.label, one.all_calls, share)
    if predicted is None:
        return MissingTuple(*entry)
    call = predicted.calls[place]
    time, energy = call.time_us, call.energy_mj
    return MissingTuple(*entry, time.value, time.low, time.high, energy.value if energy else None, call.known)


def _total(measured: Figure | None, predicted: PredictedValue | None) -> PredictedValue | None:
    """Readings and predictions together. Their intervals are added, as if both were wrong in the same way."""
    if measured is None or predicted is None:
        return None
    value = measured.value + predicted.value
    if predicted.low is None or predicted.high is None:
        return PredictedValue(value)
    low, high = measured.value - measured.half_width, measured.value + measured.half_width
    return PredictedValue(value, low + predicted.low, high + predicted.high)
