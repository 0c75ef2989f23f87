"""The card models in a database: their names, memory and peaks."""

from __future__ import annotations

import sqlalchemy
from sqlmodel import Session

from farm.errors import Ambiguous, UsageError, did_you_mean
from farm.store.columns import CARD, REAL_CARDS
from farm.store.query import NO_READINGS
from farm.types.data_sheets import data_sheet
from farm.types.fingerprint import median_fingerprint
from farm.types.roofline import Roofline, roofline_of


def card_model_named(session: Session, word: str) -> str:
    """Return the one card model that has readings and whose name contains `word` ("": any name).
    Raises `UsageError` if there is none, `Ambiguous` if there are several."""
    real = sqlalchemy.select(CARD.model).where(REAL_CARDS)
    models = sorted(set(session.scalars(real.distinct())))
    matches = [model for model in models if word.lower() in model.lower()]
    matches = [model for model in matches if model.lower() == word.lower()] or matches
    if len(matches) == 1:
        return matches[0]
    choice = f"Choose a card that has readings: {', '.join(models[:8])}." if models else NO_READINGS
    if not matches:
        problem = (
            f"The database has no readings of a card '{word}'."
            if models
            else "The database has no readings."
        )
        raise UsageError(problem, did_you_mean(word, models) or choice)
    raise Ambiguous(
        f"'{word}' matches several card models."
        if word
        else "The database has readings of several card models.",
        f"Choose one with --card: {', '.join(matches[:8])}.",
    )


def card_bytes(session: Session, card_model: str) -> int:
    """The memory of a card model in bytes: of its cards, else of its data sheet; 0 if unknown."""
    sizes = sqlalchemy.select(sqlalchemy.func.max(CARD.memory_bytes)).where(
        CARD.model == card_model
    )
    return session.scalar(sizes) or int(data_sheet("cuda", card_model).memory_bytes)


def peaks_of(
    session: Session, card_model: str, dtype: str, tf32: bool = False
) -> tuple[str, Roofline]:
    """Return the kind of a card model and its peaks: the medians of its cards' fingerprints, else
    its data sheet.
    """
    cards = session.execute(
        sqlalchemy.select(CARD.kind, CARD.fingerprint).where(CARD.model == card_model)
    ).all()
    fingerprint = median_fingerprint(row.fingerprint for row in cards)
    kind = cards[0].kind if cards else "cuda"  # only GPUs have data sheets
    return kind, roofline_of(kind, card_model, fingerprint, dtype=dtype, tf32=tf32)
