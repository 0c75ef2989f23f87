"""How much two cards of one model differ, from readings of the same subjects on several cards."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import sqlalchemy
from sqlmodel import Session

from farm.store.columns import READING
from farm.store.database import in_fixed_order
from farm.types.measured_constants import MEASURED

Quantity = Literal["time", "energy"]

LEAST_ON_CARDS = 5  # tuples and wholes on several cards, for a spread between cards
#: The spread of a card model of which too few were measured: the largest known one.
USUAL_SPREADS: dict[Quantity, float] = {
    "time": MEASURED["card_spread_time"].value,
    "energy": MEASURED["card_spread_energy"].value,
}


def card_spread(session: Session, model: str) -> dict[Quantity, float]:
    """Return the relative half-widths of differences between cards of a model; a quantity is
    missing if unknown.

    Of the tuples and wholes that were measured on several cards with the same software and
    protocol, those with 95 % of the time differ by at most this much between the card with the
    largest and the card with the smallest mean."""
    sql = sqlalchemy.func
    key = (READING.subject_id, READING.protocol_id, READING.software_id, READING.method)
    of_card = (*key, READING.card_id)
    averaged = (READING.time_us, READING.energy_mj)
    reading = in_fixed_order(
        (*of_card, *averaged), READING.card_model == model, by=(*of_card, READING.id)
    ).c
    means = (sql.avg(reading.time_us).label("time"), sql.avg(reading.energy_mj).label("energy"))
    groups = [reading[column.name] for column in of_card]
    card = sqlalchemy.select(*groups, *means).group_by(*groups).subquery()
    ratios = [
        sql.max(card.c[name]) / sql.nullif(sql.min(card.c[name]), 0) for name in get_args(Quantity)
    ]
    grouped = (
        sqlalchemy.select(*ratios, sql.max(card.c.time))
        .group_by(*(card.c[column.name] for column in key))
        .having(sql.count() > 1)
    )
    rows = session.execute(grouped).all()
    spreads: dict[Quantity, float] = {}
    for number, quantity in enumerate(get_args(Quantity)):
        differences = sorted((row[number] - 1, row[-1]) for row in rows if row[number] is not None)
        if len(differences) >= LEAST_ON_CARDS:
            until_us = list(itertools.accumulate(time_us for _, time_us in differences))
            spreads[quantity] = differences[bisect.bisect_left(until_us, 0.95 * until_us[-1])][0]
    return spreads


def between_cards(
    session: Session, models: Sequence[str], cards: Sequence[Sequence[str]]
) -> Mapping[Quantity, float]:
    """Return the relative half-widths of the difference between two sides that were measured on
    different cards.

    A spread is the difference between two cards of one model, so each side has its part of it, a
    square root of a half.

    Args:
        models: the card model of each of the two sides.
        cards: the ids of the cards of each side.

    Returns:
        Half-widths of 95 % intervals; {} if both sides are of one card. If the spread of a card
        model is unknown, it counts as that of `USUAL_SPREADS`.
    """
    if len(set(itertools.chain(*cards))) < 2:
        return {}
    spreads = {model: USUAL_SPREADS | card_spread(session, model) for model in set(models)}
    between: dict[Quantity, float] = {}
    for quantity in get_args(Quantity):
        of_sides = [spreads[model][quantity] for model in models]
        between[quantity] = math.hypot(*of_sides) / math.sqrt(2)
    return between
