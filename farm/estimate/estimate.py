"""What a model costs on a card from readings alone, without running it.

The sum is the one that verdicts are made of (`farm.verdict.aggregate`), and it is of one method and one software: of the
readings that are there, those taken together are the set that covers most of the model. What no reading covers is listed and
left out, unless a predictor is named to fill it; that part is then told apart.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import sqlalchemy
from sqlmodel import Session

from farm.errors import Ambiguous, UsageError, did_you_mean
from farm.estimate.per_token import PerToken, per_token
from farm.operators.roofline import Roofline, roofline_of
from farm.prediction.predictor import Asked, Predicted, Predictor, Range
from farm.requests.partial_request import command_of, default_data
from farm.store import tables
from farm.store.content import classes
from farm.store.reuse import tells_others
from farm.store.rows import in_batches
from farm.types.label import label_of
from farm.types.protocol import Protocol, Software, Variant
from farm.types.request import Request
from farm.verdict.aggregate import aggregate
from farm.verdict.figures import Figure, Part, ReadingView, Whole

SECONDS_A_TUPLE = 1.4  # of card time, where the database has no reading to tell: the median on an H200


@dataclass(frozen=True)
class Missing:
    """A tuple that no reading covers. `share` is of the model's estimated cost."""

    operator_id: str
    operator: str
    label: str
    calls: int
    share: float
    predicted_us: float | None = None  # one call, where a predictor was asked
    predicted_low_us: float | None = None  # of the 90 % interval
    predicted_high_us: float | None = None
    predicted_mj: float | None = None
    known: bool | None = None  # some reading is of its operator type; None: no predictor was asked


@dataclass(frozen=True)
class Estimate:
    """A model's cost. Figures are of one pass over the covered part; half-widths of the 95 % interval."""

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
    whole_time: Figure | None  # of the whole model, where a reading of it is there
    whole_energy: Figure | None
    predicted_us: float | None  # of the rest, where a predictor was asked
    predictor: str
    missing: tuple[Missing, ...]
    measuring_rest_s: float  # card time
    other_data_calls: int  # calls whose class of data has no reading, taken from another class
    flags: Mapping[str, int]
    origins: Mapping[str, int]  # farm ("" own) -> readings
    oldest_at_s: float | None
    notes: tuple[str, ...]
    predicted_mj: float | None = None
    total_time: Range | None = None  # readings and predictions together, with the 90 % interval
    total_energy: Range | None = None
    specs: Mapping[str, Any] = field(default_factory=dict)  # of missing tuples by id; no part of the JSON
    narrowing: tuple[str, ...] = ()  # ids of missing tuples, those first whose readings would narrow the total most

    @property
    def shares(self) -> dict[str, float]:
        """Of the time of the total: what was read, what is predicted, and what is predicted of types that nobody has read."""
        total = self.total_time.value if self.total_time else 0.0
        if not total:
            return {}
        unseen = math.fsum((one.predicted_us or 0.0) * one.calls for one in self.missing if one.known is False)
        predicted = self.predicted_us or 0.0
        return {
            "measured": self.time.value / total,
            "predicted": (predicted - unseen) / total,
            "unseen_types": unseen / total,
        }

    @property
    def per_token(self) -> PerToken:
        """Of the whole model where it was read, else of the sum where readings cover all of it."""
        complete = self.covered_tuples == self.tuples
        time, energy = (self.time, self.energy) if complete else (None, None)
        return per_token(self.variant, self.whole_time or time, self.whole_energy or energy)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with units in the key names; shares are fractions."""

        def pair(name: str, unit: str, figure: Figure | None) -> dict[str, float | None]:
            return {
                f"{name}_{unit}": figure.value if figure else None,
                f"{name}_half_width_{unit}": figure.half_width if figure else None,
            }

        def ranged(name: str, unit: str, found: Range | None) -> dict[str, float | None]:
            return {
                f"{name}_{unit}": found.value if found else None,
                f"{name}_low_{unit}": found.low if found else None,
                f"{name}_high_{unit}": found.high if found else None,
            }

        return {
            "variant": self.variant.to_json(),
            "card_model": self.card_model,
            "protocol": self.protocol.to_json(),
            "software": self.software.to_json(),
            "method": self.method,
            "tuples": self.tuples,
            "covered_tuples": self.covered_tuples,
            "coverage": self.coverage,
            **pair("time", "us", self.time),
            **pair("energy", "mj", self.energy),
            **pair("whole_time", "us", self.whole_time),
            **pair("whole_energy", "mj", self.whole_energy),
            **asdict(self.per_token),
            "predicted_us": self.predicted_us,
            "predictor": self.predictor,
            "predicted_mj": self.predicted_mj,
            **ranged("total_time", "us", self.total_time),
            **ranged("total_energy", "mj", self.total_energy),
            "shares": self.shares,
            "narrowing": list(self.narrowing),
            "missing": [asdict(entry) for entry in self.missing],
            "measuring_rest_s": self.measuring_rest_s,
            "other_data_calls": self.other_data_calls,
            "flags": dict(self.flags),
            "origins": dict(self.origins),
            "oldest_at_s": self.oldest_at_s,
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Wanted:
    """One tuple of a model: calls in each class of data ("" where that is not known)."""

    operator_id: str
    short_name: str
    label: str
    flops: int
    bytes_moved: int
    calls: Mapping[str, int]
    spec: dict[str, Any]


_READING = tables.Reading.__table__.c  # type: ignore[attr-defined]
_CAPTURE = tables.Capture.__table__.c  # type: ignore[attr-defined]
_CARD = tables.Card.__table__.c  # type: ignore[attr-defined]
_PROTOCOL = tables.Protocol.__table__.c  # type: ignore[attr-defined]
_OPERATOR = tables.Operator.__table__.c  # type: ignore[attr-defined]
_SOFTWARE = tables.Software.__table__.c  # type: ignore[attr-defined]


def card_model_named(session: Session, word: str) -> str:
    """The one card model with readings that a word is part of; without a word, the only one there is.

    Raises:
        UsageError: none; Ambiguous: several.
    """
    real = sqlalchemy.select(_CARD.model).where(_CARD.kind != "simulated")  # whose figures are of no card
    models = sorted(set(session.scalars(real.distinct())))
    found = [model for model in models if word.lower() in model.lower()]
    found = [model for model in found if model.lower() == word.lower()] or found
    if len(found) == 1:
        return found[0]
    known = f"There are readings of {', '.join(models[:8])}." if models else "It has no readings at all."
    if not found:
        raise UsageError(f"The database has no card '{word}'.", did_you_mean(word, models) or known)
    raise Ambiguous(
        f"'{word}' is part of several card models." if word else "The database has several card models.",
        f"Choose with --card: {', '.join(found[:8])}.",
    )


def peaks_of(session: Session, card_model: str, dtype: str, tf32: bool = False) -> tuple[str, Roofline]:
    """The kind of a card model, and its peaks as its fingerprint or else its data sheet has them."""
    cards = session.execute(sqlalchemy.select(_CARD.kind, _CARD.fingerprint).where(_CARD.model == card_model)).all()
    fingerprint = next((row.fingerprint for row in cards if row.fingerprint), None)
    return cards[0].kind, roofline_of(cards[0].kind, card_model, fingerprint, dtype=dtype, tf32=tf32)


def tuples_of(session: Session, variant: Variant, device_type: str, launch: str) -> list[Wanted]:
    """The tuples of a model: as a stored capture has them, with the classes of data that were seen; otherwise extracted now.

    Raises:
        CaptureError: it cannot be extracted.
    """
    if stored := stored_tuples(session, variant, device_type, launch):
        return stored
    from farm.training.extract import extract

    apart = extract(variant, device_type=device_type)
    return [
        Wanted(
            id_,
            spec.short_name,
            label_of(spec),
            apart.costs[id_].flops,
            apart.costs[id_].bytes,
            {"": apart.capture.counts[id_]},
            spec.to_json(),
        )
        for id_, spec in apart.capture.tuples.items()
    ]


def stored_tuples(session: Session, variant: Variant, device_type: str, launch: str) -> list[Wanted]:
    """The tuples of a model as a stored capture has them, best of the same launch; none where there is no capture."""
    stored = session.scalars(
        sqlalchemy.select(_CAPTURE.id)
        .where(_CAPTURE.variant_id == variant.id, _CAPTURE.device_type == device_type, _CAPTURE.grad.is_(False))
        .order_by(
            _CAPTURE.launch != launch, _CAPTURE.origin.like(tables.IMPORTED + "%"), _CAPTURE.origin, _CAPTURE.id.desc()
        )
    ).first()
    if stored is None:
        return []
    calls: dict[str, dict[str, int]] = defaultdict(dict)
    for (operator_id, data), number in classes(session, stored, "seen").items():
        calls[operator_id][data] = number
    names = ("id", "short_name", "label", "flops", "bytes_moved", "spec")
    rows = {
        row.id: row
        for batch in in_batches(calls)
        for row in session.execute(
            sqlalchemy.select(*(_OPERATOR[name] for name in names)).where(_OPERATOR.id.in_(batch))
        )
    }
    return [
        Wanted(row.id, row.short_name, row.label, row.flops, row.bytes_moved, calls[row.id], row.spec)
        for row in (rows[operator_id] for operator_id in calls)
    ]


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
    """What one pass of a model costs, from the readings of its tuples.

    Args:
        card: part of the card's model.
        protocol: launch, residency and numeric flags; what suits the card if None. Its data policy does not count: each
            call is taken in the class of data that was seen there, or in another where that has no reading.
        torch: a version, or its beginning; the one that covers most if "".
        predictor: fills what no reading covers; None leaves it out. One of a software answers where no reading covers anything.
        notes: to be told beside the others where it was asked.

    Raises:
        UsageError: no such card, several, or no reading of any of the model's tuples.
        CaptureError: see `tuples_of`.
    """
    model = card_model_named(session, card)
    tf32 = protocol is not None and protocol.tf32
    kind, roofline = peaks_of(session, model, variant.computes_in, tf32)
    protocol = protocol or Protocol(launch="eager" if kind == "cpu" else "graph")
    wanted = tuples_of(session, variant, "cpu" if kind == "cpu" else "cuda", protocol.launch)
    weight = {
        one.operator_id: roofline.estimate_us(one.flops, one.bytes_moved) * sum(one.calls.values()) for one in wanted
    }
    taken = readings_taken(session, variant, wanted, weight, model, protocol, roofline, torch)
    software = _software(session, taken.software_id) if taken else predictor.software if predictor else None
    if software is not None and not software.torch.startswith(torch):  # a predictor of another than was asked for
        software = None
    if taken is None and predictor is not None and software is not None:  # it answers for all of it
        taken = Taken(predictor.method, software.id, _parts(wanted, {}, {}, roofline)[0], {}, [], 0, 0)
    if taken is None or software is None:
        about = f" under {protocol.launch} launch" + (f" and torch {torch}" if torch else "")
        data = default_data(kind, variant.step)
        measuring = command_of(Request(variant=variant, protocol=protocol.with_data(data)))
        raise UsageError(
            f"No reading of {model}{about} is of a tuple of {variant}.",
            f"Measure it: {measuring.removesuffix(' --reuse none')}; or import another farm's readings with `farm import`.",
        )
    parts, used, wholes = taken.parts, taken.rows, taken.wholes
    summed = aggregate(parts, wholes, target=0.95, launch=protocol.launch)
    everything = math.fsum(weight.values())
    lacking = [one for one in wanted if one.operator_id not in used]
    predicted = _predicted(predictor, lacking, wanted) if predictor else None
    missing = [
        _missing(one, weight[one.operator_id] / everything, predicted, place) for place, one in enumerate(lacking)
    ]
    time, energy = summed.time.total, summed.energy.total if summed.energy else None
    notes = list(notes) if lacking else []
    bursts = [
        part.count * abs(part.reading.time_us - part.reading.details.burst.time_us)
        for part in parts
        if part.reading and part.reading.details.burst
    ]
    if bursts and not wholes:
        # Which of its two states the model would be in, only a reading of the whole says.
        time = Figure(time.value, time.half_width + math.fsum(bursts))
        notes.append(
            f"{len(bursts)} tuples hit the power limit when looped: the interval holds their time in bursts, too."
        )
    if taken.others:
        notes.append(f"Readings of {taken.others} other methods or software are there, and were not mixed in.")
    readings = list({row.id: row for row in used.values()}.values())
    if used and lacking and predictor and predictor.software and predictor.software.id != software.id:
        notes.append(f"Predictions are for torch {predictor.software.torch}, the readings of torch {software.torch}.")
    totals = [total for row in readings if (total := (row.cost_s or {}).get("total"))]
    return Estimate(
        variant=variant,
        card_model=model,
        protocol=protocol,
        software=software,
        method=taken.method,
        tuples=len(wanted),
        covered_tuples=len(used),
        coverage=math.fsum(weight[id_] for id_ in used) / everything,
        time=time,
        energy=energy,
        whole_time=summed.time.whole,
        whole_energy=summed.energy.whole if summed.energy else None,
        predicted_us=predicted.time_us.value if predicted else None,
        predictor=predictor.name if predictor else "",
        missing=tuple(sorted(missing, key=lambda entry: (-entry.share, entry.label))),
        measuring_rest_s=len(missing) * (statistics.median(totals) if totals else SECONDS_A_TUPLE),
        other_data_calls=taken.other_data_calls,
        flags=dict(Counter(flag for row in readings for flag in row.flags).most_common()),
        origins=dict(Counter(row.origin for row in readings)),
        oldest_at_s=min((row.created_at_s for row in readings), default=None),
        notes=tuple(notes),
        predicted_mj=predicted.energy_mj.value if predicted and predicted.energy_mj else None,
        total_time=_together(time, predicted.time_us) if predicted else None,
        total_energy=_together(
            energy if used else Figure(0.0), predicted.energy_mj if lacking else Range(0.0, 0.0, 0.0)
        )
        if predicted
        else None,
        specs={one.operator_id: one.spec for one in lacking},
        narrowing=tuple(lacking[place].operator_id for place in predicted.narrowing) if predicted else (),
    )


def _software(session: Session, software_id: str) -> Software:
    row = session.execute(sqlalchemy.select(*_SOFTWARE).where(_SOFTWARE.id == software_id)).one()
    return Software(**{name: value for name, value in row._mapping.items() if name != "id"})


def _predicted(predictor: Predictor, lacking: Sequence[Wanted], wanted: Sequence[Wanted]) -> Predicted:
    def asked(some: Sequence[Wanted]) -> list[Asked]:
        return [
            Asked(one.operator_id, one.short_name, one.flops, one.bytes_moved, one.spec, sum(one.calls.values()))
            for one in some
        ]

    return predictor.predict(asked(lacking), asked(wanted))


def _missing(one: Wanted, share: float, predicted: Predicted | None, place: int) -> Missing:
    calls = sum(one.calls.values())
    if predicted is None:
        return Missing(one.operator_id, one.short_name, one.label, calls, share)
    told = predicted.calls[place]
    return Missing(
        one.operator_id,
        one.short_name,
        one.label,
        calls,
        share,
        told.time_us.value,
        told.time_us.low,
        told.time_us.high,
        told.energy_mj.value if told.energy_mj else None,
        told.known,
    )


def _together(read: Figure | None, predicted: Range | None) -> Range | None:
    """What was read and what is predicted: their intervals are added, as if both were wrong in the same way."""
    if read is None or predicted is None:
        return None
    if predicted.low is None or predicted.high is None:
        return Range(read.value + predicted.value)
    return Range(
        read.value + predicted.value,
        read.value - read.half_width + predicted.low,
        read.value + read.half_width + predicted.high,
    )


@dataclass(frozen=True)
class Taken:
    """The readings of one method and one software that cover most of a model's cost.

    Attributes:
        rows: by tuple.
        others: how many other methods and software there are readings of.
        other_data_calls: calls whose class of data has no reading, taken from another class.
    """

    method: int
    software_id: str
    parts: list[Part]
    rows: Mapping[str, Any]
    wholes: list[Whole]
    others: int
    other_data_calls: int


def readings_taken(
    session: Session,
    variant: Variant,
    wanted: Sequence[Wanted],
    weight: Mapping[str, float],
    card_model: str,
    protocol: Protocol,
    roofline: Roofline,
    torch: str = "",
) -> Taken | None:
    """What there is of a model's tuples on one model of card; None where no reading is of a tuple that weighs anything.

    Args:
        weight: the cost of all calls of a tuple, by its id.
    """
    data_of = _protocols_like(session, protocol)
    sets = _sets(session, [one.operator_id for one in wanted] + [variant.id], card_model, list(data_of), torch)
    if not any(weight.get(subject) for rows in sets.values() for subject, _ in rows):
        return None

    def covered(key: tuple[int | None, str]) -> tuple[float, float]:
        subjects = {subject for subject, _ in sets[key]}
        newest = max(row.created_at_s for row in sets[key].values())
        return math.fsum(weight.get(subject, 0.0) for subject in subjects), newest

    method, software_id = chosen = max(sets, key=covered)
    rows = sets[chosen]
    parts, used, other = _parts(wanted, rows, data_of, roofline)
    whole = rows.get((variant.id, protocol.of_whole.id)) or rows.get((variant.id, protocol.with_data("normal").id))
    wholes = [Whole(whole.card_id, ReadingView.of(whole), "", protocol.launch)] if whole is not None else []
    return Taken(method or 0, software_id, parts, used, wholes, len(sets) - 1, other)


def _protocols_like(session: Session, protocol: Protocol) -> dict[str, str]:
    """Protocol id -> class of data, of all that differ from this one in nothing else."""
    wanted = {**protocol.to_json(), "data": None}
    rows = session.execute(sqlalchemy.select(_PROTOCOL.id, _PROTOCOL.spec)).all()
    return {row.id: row.spec["data"] for row in rows if row.spec and {**row.spec, "data": None} == wanted}


_ROW = [
    "id",
    "subject_id",
    "card_id",
    "software_id",
    "protocol_id",
    "method",
    "origin",
    "created_at_s",
    "time_us",
    "time_half_width_us",
    "energy_mj",
    "energy_half_width_mj",
    "idle_power_w",
    "base_power_w",
    "sm_clock_mhz",
    "throttle_reasons",
    "flags",
    "details",
    "cost_s",
]

Rows = dict[tuple[str, str], Any]  # (subject id, protocol id) -> its newest reading


def _sets(
    session: Session, subjects: Sequence[str], model: str, protocol_ids: Sequence[str], torch: str
) -> dict[tuple[int | None, str], Rows]:
    """Readings by method and software. Sound ones alone, and none of a study, whose windows are its own."""
    from farm.exchange.filters import parse, select_readings

    about = [_READING.card_model == model, _READING.protocol_id.in_(protocol_ids), _READING.simulated.is_(False)]
    if torch:
        about += select_readings(session, parse([f"torch={torch}"])).conditions
    found: dict[tuple[int | None, str], Rows] = defaultdict(dict)
    for batch in in_batches(subjects):
        query = sqlalchemy.select(*(_READING[name] for name in _ROW)).where(*about, _READING.subject_id.in_(batch))
        for row in session.execute(query.order_by(_READING.created_at_s, _READING.id)):
            if row.method is not None and tells_others(row.flags):
                found[row.method, row.software_id][row.subject_id, row.protocol_id] = row
    return found


def _parts(
    wanted: Sequence[Wanted], rows: Rows, data_of: Mapping[str, str], roofline: Any
) -> tuple[list[Part], dict[str, Any], int]:
    """Parts of a sum, the readings they take by tuple, and how many calls are taken in another class of data than seen."""
    by_subject: dict[str, dict[str, Any]] = defaultdict(dict)
    for (subject, protocol_id), row in rows.items():
        by_subject[subject][data_of[protocol_id]] = row
    parts, used, other = [], {}, 0
    for one in wanted:
        there = by_subject.get(one.operator_id, {})
        for data, calls in one.calls.items():
            row = there.get(data) or there.get("normal") or next(iter(there.values()), None)
            if row is not None:
                used[one.operator_id] = row
                other += calls if data and data not in there else 0
            parts.append(
                Part(
                    operator_id=one.operator_id,
                    short_name=one.short_name,
                    label=one.label,
                    count=calls,
                    flops=one.flops,
                    bytes_moved=one.bytes_moved,
                    estimated_us=roofline.estimate_us(one.flops, one.bytes_moved),
                    reading=ReadingView.of(row) if row is not None else None,
                    data=data,
                )
            )
    return parts, used, other
