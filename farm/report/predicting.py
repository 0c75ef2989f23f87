"""Which predictor an estimate takes, and what is to be said of it: its software, and what was read since it was fitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy
from sqlmodel import Session

from farm.errors import UsageError
from farm.prediction import kept
from farm.prediction.predictor import KeptPredictor, Predictor, RooflinePredictor
from farm.prediction.roofline import Roofline
from farm.store import tables
from farm.words.protocol import Protocol

FILLS = ("auto", "none", "roofline")
_READING = tables.Reading.__table__.c  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Filling:
    """What fills an estimate's gaps, if anything does, and what a person should know of it."""

    predictor: Predictor | None
    notes: tuple[str, ...] = ()


def filling(
    session: Session,
    word: str,
    card_model: str,
    roofline: Roofline,
    protocol: Protocol,
    folders: Sequence[Path],
    torch: str = "",
) -> Filling:
    """
    Args:
        word: `auto` is the card's kept predictor where there is one, `none` nothing, `roofline` the card's peaks.
        folders: where predictors are kept.

    Raises:
        UsageError: there is no such predictor. One that cannot be read is passed over, and a note says so.
    """
    if word not in FILLS:
        raise UsageError(f"There is no predictor '{word}'.", f"Give --fill one of {', '.join(FILLS)}.")
    if word == "roofline":
        return Filling(RooflinePredictor(roofline))
    if word == "none" or protocol.residency != "resident":
        return Filling(None)
    refused: list[str] = []
    for folder in folders:
        try:
            found = kept.find([folder], card_model, torch, protocol.launch, protocol.tf32)
        except UsageError as error:  # what was read is told all the same
            refused.append(f"{error.message} {error.next_step}")
            continue
        if found is not None:
            return Filling(KeptPredictor(found), (*refused, *_notes(session, found)))
    return Filling(None, tuple(refused))


def _notes(session: Session, found: kept.Kept) -> list[str]:
    query = sqlalchemy.select(_READING.subject_id).where(
        _READING.card_model == found.card.model,
        _READING.subject_kind == "operator",
        _READING.method == found.circumstances.method,
        _READING.simulated.is_(False),
    )
    there = sorted(set(session.scalars(query.distinct())))
    new = len(there) - int(found.has_learnt(there).sum())
    if not new:
        return []
    return [
        f"The predictor has learnt from {len(found.learnt)} tuples, and the database has {new} more: `farm predict fit` "
        "learns from all."
    ]
