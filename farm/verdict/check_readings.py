"""Reads the checks of the cards of a job from the database, for `farm.verdict.checked_cards`."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import sqlalchemy
from sqlmodel import Session

from farm.store import tables
from farm.store.columns import ITEM, JOB, OPERATOR, READING
from farm.store.reuse import UNSOUND, tells_others
from farm.store.tables import ItemRole, JobState
from farm.types.request import CARD_CHECK
from farm.types.roofline import Roofline
from farm.verdict.checked_cards import LONGEST_AGE_S, CardFigure
from farm.verdict.corrections import POWER_PER_C

_OF_READING = ("card_id", "subject_id", "protocol_id", "software_id", "method", "flags")
_FIGURES = ("time_us", "energy_mj", "temperature_c", "created_at_s")


def figures_of_checks(
    session: Session, readings: Sequence[Any], left_out: Collection[str], peaks: Roofline
) -> list[CardFigure]:
    """Return the figures of the checks of all cards of a job, those nearest in time first.

    Only checks with the protocol that all figures share, with the software of the job, and not long
    before or after every reading of the job on their card. Not those that another process
    disturbed.

    Args:
        readings: rows of the job's readings: card_id, software_id, created_at_s.
        left_out: the ids of operator tuples that do not count.
        peaks: they decide the kind of work of each figure.
    """
    times_s: dict[str, list[float]] = {}
    for reading in readings:
        times_s.setdefault(reading.card_id, []).append(reading.created_at_s)
    query = (
        sqlalchemy.select(
            *(READING[name] for name in (*_OF_READING, *_FIGURES)),
            *(OPERATOR.flops, OPERATOR.bytes_moved, OPERATOR.short_name),
        )
        .join(tables.Item, ITEM.reading_id == READING.id)
        .join(tables.Job, JOB.id == ITEM.job_id)
        .join(tables.Operator, OPERATOR.id == READING.subject_id)
        .where(
            JOB.state == JobState.DONE,
            JOB.request["sweep"]["operator"].as_string() == CARD_CHECK,
            JOB.protocol_id == ITEM.protocol_id,
            ITEM.role == ItemRole.TUPLE,
            READING.card_id.in_(times_s),
            READING.software_id.in_({reading.software_id for reading in readings}),
        )
    )
    figures = []
    for row in session.execute(query.order_by(READING.id)):
        age_s = max(abs(row.created_at_s - time_s) for time_s in times_s[row.card_id])
        is_sound = tells_others(row.flags) and not UNSOUND.intersection(row.flags)
        if age_s <= LONGEST_AGE_S and is_sound and row.subject_id not in left_out:
            figures.append((age_s, _figure(row, peaks)))
    figures.sort(key=lambda aged: aged[0])
    return [figure for _, figure in figures]


def _figure(row: Any, peaks: Roofline) -> CardFigure:
    energy = None
    if row.energy_mj:
        energy = math.log(row.energy_mj) - POWER_PER_C.value * (row.temperature_c or 0.0)
    return CardFigure(
        (row.subject_id, row.protocol_id, row.software_id, str(row.method)),
        peaks.bound_of(row),
        row.card_id,
        math.log(row.time_us),
        energy,
    )
