"""The readings of a model's tuples that an estimate adds up.

Readings of different methods or software are never mixed: an estimate uses the set that covers most
of the model."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import sqlalchemy
from sqlmodel import Session

from farm.store.columns import PROTOCOL, READING
from farm.store.content import stored_software
from farm.store.database import among, in_batches
from farm.store.reuse import DOUBTFUL, sound_readings
from farm.types.format import plural
from farm.types.protocol import Protocol
from farm.types.roofline import Roofline
from farm.types.software import Software
from farm.types.tuple import NeededTuple
from farm.types.variant import Variant
from farm.verdict.cost_line import CostLine, TupleView
from farm.verdict.figures import VIEW_COLUMNS, ReadingView, Whole


@dataclass(frozen=True)
class SelectedReadings:
    """The set of readings, all with one method and one software, that covers most of a model's
    cost.
    """

    method: int
    software_id: str
    parts: list[CostLine]
    # tuple id -> its readings, one for each data class that has a reading
    rows: Mapping[str, Sequence[Any]]
    wholes: list[Whole]
    other_sets: int  # the number of other pairs of method and software that have readings
    other_data_calls: int  # the number of calls that use a reading of another data class

    @classmethod
    def none(
        cls, needed: Sequence[NeededTuple], method: int, software_id: str, roofline: Roofline
    ) -> Self:
        """A selection without readings, for a model that is only predicted."""
        return cls(method, software_id, _parts(needed, {}, {}, roofline)[0], {}, [], 0, 0)


def select_for_model(
    session: Session,
    variant: Variant,
    needed: Sequence[NeededTuple],
    weight: Mapping[str, float],
    card_model: str,
    protocol: Protocol,
    roofline: Roofline,
    torch: str = "",
) -> SelectedReadings | None:
    """Select the readings of a model's tuples on one card model. None if no tuple in `weight`
    (tuple id -> the estimated cost of all its calls) has a reading. The data class of `protocol` is
    ignored. `torch`: a version, or its beginning."""
    data_of = protocols_like(session, protocol)
    subjects = [required.operator_id for required in needed if not required.mismatch]
    subjects.append(variant.id)
    sets = newest_readings(session, subjects, card_model, list(data_of), torch)
    measured = set(itertools.chain.from_iterable(sets.values()))
    if not any(weight.get(subject) for subject, _ in measured):
        return None

    def covered(key: tuple[int, str]) -> tuple[float, float]:
        """Return the measured share of the cost, and the time of the newest reading."""
        subjects = {subject for subject, _ in sets[key]}
        share = math.fsum(weight.get(subject, 0.0) for subject in subjects)
        return share, max(row.created_at_s for row in sets[key].values())

    method, software_id = max(sets, key=covered)
    rows = sets[method, software_id]
    parts, used, other_data_calls = _parts(needed, rows, data_of, roofline, variant.cards)
    whole = rows.get((variant.id, protocol.of_whole.id)) or rows.get(
        (variant.id, protocol.with_data("normal").id)
    )
    wholes = (
        [Whole(whole.card_id, ReadingView.of(whole), "", protocol.launch)]
        if whole is not None
        else []
    )
    return SelectedReadings(
        method, software_id, parts, used, wholes, len(sets) - 1, other_data_calls
    )


def most_similar(
    session: Session, sets: Mapping[tuple[int, str], Any], software: Software
) -> tuple[int, str]:
    """Return the key (method, software id) of a set of readings: that of ``software``, else one
    with the same software of the cards, else the one with most readings."""

    def fit(key: tuple[int, str]) -> tuple[bool, bool, int, int]:
        candidate = stored_software(session, key[1])
        return (
            candidate.id == software.id,
            candidate.of_one_card.id == software.of_one_card.id,
            len(sets[key]),
            key[0],
        )

    return max(sets, key=fit)


def protocols_like(session: Session, protocol: Protocol) -> dict[str, str]:
    """Return protocol id -> data class of the stored protocols that differ from a protocol at most
    in it.
    """
    like = {**protocol.to_json(), "data": None}
    protocols = session.execute(sqlalchemy.select(PROTOCOL.id, PROTOCOL.spec))
    return {id_: spec["data"] for id_, spec in protocols if spec and {**spec, "data": None} == like}


_COLUMNS = (
    *VIEW_COLUMNS,
    "subject_id",
    "software_id",
    "protocol_id",
    "method",
    "origin",
    "created_at_s",
    "cost_s",
)
NewestReadings = dict[tuple[str, str], Any]  # (subject id, protocol id) -> its newest reading


def newest_readings(
    session: Session,
    subjects: Sequence[str],
    model: str,
    protocol_ids: Sequence[str],
    torch: str = "",
) -> dict[tuple[int, str], NewestReadings]:
    """Return the newest sound readings for each (method, software id). Readings of studies are left
    out.
    """
    from farm.store.query import parse, select_readings

    conditions = [READING.protocol_id.in_(protocol_ids)]
    if torch:
        conditions += select_readings(session, parse([f"torch={torch}"])).conditions
    sets: dict[tuple[int, str], NewestReadings] = defaultdict(dict)
    for batch in in_batches(subjects):
        for row in sound_readings(
            session, model, _COLUMNS, *conditions, READING.subject_id.in_(batch)
        ):
            sets[row.method, row.software_id][row.subject_id, row.protocol_id] = row
    alone = set()
    for (method, software_id), rows in tuple(sets.items()):
        software = stored_software(session, software_id)
        # a model on several cards: add the readings on one card with the same software
        if software.communication:
            alone.add((method, software.of_one_card.id))
            sets[method, software_id] = {
                **sets.get((method, software.of_one_card.id), {}),
                **rows,
            }
    return {key: rows for key, rows in sets.items() if key not in alone}


def left_out(
    session: Session, subjects: Sequence[str], model: str, protocol_ids: Sequence[str]
) -> str:
    """Say how many readings of a model and its tuples are left out because they are doubtful, and
    why; "" if none.
    """
    query = sqlalchemy.select(READING.flags).where(
        READING.card_model == model,
        READING.simulated.is_(False),
        READING.protocol_id.in_(protocol_ids),
    )
    doubts = (
        DOUBTFUL.intersection(flags or ())
        for (flags,) in among(session, query, READING.subject_id, subjects)
    )
    why = Counter(" and ".join(sorted(flags)) for flags in doubts if flags)
    listed = ", ".join(f"{name} ×{number}" for name, number in why.most_common())
    if not listed:
        return ""
    readings = plural("reading", why.total())
    return f"{why.total()} doubtful {readings} of the model or its tuples ({listed})"


def _parts(
    needed: Sequence[NeededTuple],
    rows: NewestReadings,
    data_of: Mapping[str, str],
    roofline: Roofline,
    cards: int = 1,
) -> tuple[list[CostLine], dict[str, list[Any]], int]:
    """Return the parts of a sum, tuple id -> readings, and the number of calls with a reading of
    another data class.
    """
    by_subject: dict[str, dict[str, Any]] = defaultdict(dict)
    for (subject, protocol_id), row in rows.items():
        by_subject[subject][data_of[protocol_id]] = row
    parts, used, other_data_calls = [], defaultdict(list), 0
    for required in needed:
        by_data = by_subject.get(required.operator_id, {})
        for data, calls in required.calls.items():
            row = by_data.get(data) or by_data.get("normal") or next(iter(by_data.values()), None)
            if row is not None:
                used[required.operator_id].append(row)
                other_data_calls += calls if data and data not in by_data else 0
            described = TupleView.of_needed(required, roofline, data)
            if row is None:
                parts.append(CostLine(described, calls, "missing"))
                continue
            view = ReadingView.of(row).on_cards(cards)
            parts.append(CostLine.of_reading(described, calls, view))
    return parts, dict(used), other_data_calls
