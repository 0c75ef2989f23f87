"""The cards of a job, and the card of each new item."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from sqlmodel import Session, col, func, select

from farm.errors import NoSuchCard, UsageError
from farm.jobs.balance import QueuedItem, assign
from farm.store.database import fetch, remembered
from farm.store.tables import OPEN, CardRow, Item

#: The loads of the cards of a job that is planned in parts are queried again after this time.
#: Unit: s.
LOADS_VALID_S = 30.0


def chosen_cards(session: Session, card_ids: Sequence[str]) -> list[CardRow]:
    """Return the cards with these ids, in this order; check that one job can measure on all of
    them.

    Raises:
        NoSuchCard: a chosen card is not registered.
        UsageError: the chosen cards are of several models or run different software.
    """
    rows = fetch(session, CardRow, card_ids)
    for card_id in card_ids:
        if card_id not in rows:
            raise NoSuchCard(
                f"No card '{card_id}' is registered.", "Start `farm worker` on the card's host."
            )
    cards = [rows[card_id] for card_id in card_ids]
    if not cards:
        raise NoSuchCard(
            "No card was chosen.", "Start a worker with `farm worker`, or choose one with --card."
        )
    models = {card.model for card in cards}
    if len(models) > 1:
        raise UsageError(
            f"The chosen cards have several card models: {', '.join(sorted(models))}.",
            "A job measures on one card model: choose one with --card.",
        )
    if len({card.software_id for card in cards}) > 1:
        raise UsageError(
            "The chosen cards run different software, and readings of different software are not "
            "summed.",
            "`farm cards --json` shows the versions. Install the same torch, CUDA and driver on "
            "all hosts, or choose "
            "cards with --card.",
        )
    return cards


def card_for_each(
    session: Session, items: Sequence[Item], cards: Sequence[CardRow], growing_job_id: str = ""
) -> list[str]:
    """Return a card id for each item. The longest item is placed first, on the card that finishes
    it first (LPT). ``growing_job_id``: a job that is planned in parts. Then the cards' loads are
    queried only every `LOADS_VALID_S`."""
    now_s, ids = time.monotonic(), [card.id for card in cards]
    if len(ids) == 1:
        return ids * len(items)
    loads = remembered(session, "loads of the cards of growing jobs")
    read_s, free_at_s = loads.pop(growing_job_id, (-math.inf, {}))
    if now_s - read_s > LOADS_VALID_S or list(free_at_s) != ids:
        read_s, free_at_s = now_s, _loads_s(session, ids)
    in_order = sorted(range(len(items)), key=lambda number: items[number].subject_id)
    placed = assign(
        (QueuedItem(key, items[number].expected_s) for key, number in enumerate(in_order)),
        free_at_s,
    )
    chosen = {number: placed[key] for key, number in enumerate(in_order)}
    if growing_job_id:
        for number, card_id in chosen.items():
            free_at_s[card_id] += items[number].expected_s
        loads.clear()
        loads[growing_job_id] = read_s, free_at_s
    return [chosen[number] for number in range(len(items))]


def _loads_s(session: Session, card_ids: Sequence[str]) -> dict[str, float]:
    """Return card id -> expected time of its open items, in the order of the ids. Unit: s."""
    query = select(Item.card_id, func.sum(Item.expected_s)).group_by(col(Item.card_id))
    of_open_items = query.where(col(Item.state).in_(OPEN), col(Item.card_id).in_(card_ids))
    stored = dict(session.execute(of_open_items).all())
    return {card_id: float(stored.get(card_id) or 0.0) for card_id in card_ids}
