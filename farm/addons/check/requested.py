"""The requests of a check: packaged lists of tuples, measured anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sqlmodel import Session, col, select

from farm.requests.card_selection import CardLike
from farm.requests.partial_request import PartialRequest
from farm.requests.resolved import ResolvedRequest, resolve
from farm.store.tables import CardRow
from farm.types.request import CARD_CHECK, LINK_CHECK, Sweep


def check_request(card: CardLike) -> ResolvedRequest:
    """Return the request of a check of a card. It reuses no reading."""
    return _request(CARD_CHECK, [card])


def link_requests(session: Session, card_ids: Sequence[str]) -> list[ResolvedRequest]:
    """Return the requests of the checks of links between registered cards: each is in at least one
    pair of its host, if it can access the memory of the other card.
    """
    rows = session.exec(select(CardRow).where(col(CardRow.id).in_(card_ids))).all()
    return [_request(LINK_CHECK, pair) for pair in _pairs(rows)]


def _request(checked: str, cards: Sequence[CardLike]) -> ResolvedRequest:
    title = f"check of {' and '.join(card.id for card in cards)}"
    partial = PartialRequest(sweep=Sweep(checked, {}, title), reuse="none")
    return resolve(partial, cards, target=0.95, pinned=True)


def _pairs(cards: Sequence[CardRow]) -> Iterator[tuple[CardRow, CardRow]]:
    """Neighbours of one host and model. The last pair of an odd number has a card of the pair
    before.
    """
    alike: dict[tuple[str, str], list[CardRow]] = {}
    for card in sorted(cards, key=lambda card: card.index):
        alike.setdefault((card.host, card.model), []).append(card)
    for of_host in alike.values():
        if len(of_host) > 1:
            for first in range(0, len(of_host), 2):
                pair = of_host[min(first, len(of_host) - 2) :][:2]
                peers = (pair[0].links or {}).get("peers")
                if peers is None or pair[1].id in peers:
                    yield pair[0], pair[1]
