"""Which predictor an estimate takes, and what is to be said of it: its software, and what was read since it was fitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy
from sqlmodel import Session

from farm.errors import UsageError
from farm.operators.roofline import Roofline
from farm.prediction import predictor_store
from farm.prediction.predictor import KeptPredictor, Predictor, RooflinePredictor
from farm.store import tables
from farm.store.reuse import tells_others
from farm.types.protocol import Protocol

FILLS = ("auto", "none", "roofline")
_READING = tables.Reading.__table__.c  # type: ignore[attr-defined]
_PROTOCOL = tables.Protocol.__table__.c  # type: ignore[attr-defined]


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
    for among in (folders, *([folder] for folder in folders)):  # one that cannot be read hides no other folder's
        try:
            found = predictor_store.find(among, card_model, torch, protocol.launch, protocol.tf32)
        except UsageError as error:  # what was read is told all the same
            if (told := f"{error.message} {error.next_step}") not in refused:
                refused.append(told)
            continue
        if found is not None:
            return Filling(KeptPredictor(found), (*refused, *_notes(session, found)))
    return Filling(None, tuple(refused))


def _notes(session: Session, found: predictor_store.Kept) -> list[str]:
    circumstances = found.circumstances
    any_of = {"data": None, "grad": None}  # the call tells them
    like = {**circumstances.protocol.to_json(), **any_of}
    protocols = session.execute(sqlalchemy.select(_PROTOCOL.id, _PROTOCOL.spec))
    query = sqlalchemy.select(_READING.subject_id, _READING.flags).where(
        _READING.card_model == found.card.model,
        _READING.software_id == circumstances.software.id,
        _READING.protocol_id.in_([row.id for row in protocols if {**(row.spec or {}), **any_of} == like]),
        _READING.subject_kind == "operator",
        _READING.method == circumstances.method,
        _READING.simulated.is_(False),
    )
    there = sorted({row.subject_id for row in session.execute(query) if tells_others(row.flags)})
    new = len(there) - int(found.has_learnt(there).sum())
    if not new:
        return []
    return [
        f"The predictor has learnt from {len(found.learnt)} tuples, and the database has {new} more: `farm predict fit` "
        "learns from all."
    ]
