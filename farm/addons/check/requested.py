"""The request of a card check: the packaged list of tuples, measured anew on one card."""

from __future__ import annotations

from farm.devices.device import Card
from farm.requests.partial_request import PartialRequest
from farm.requests.resolved import ResolvedRequest, resolve
from farm.types.request import CARD_CHECK, Sweep


def check_request(card: Card) -> ResolvedRequest:
    """Return the request of a check of a card. It reuses no reading."""
    partial = PartialRequest(sweep=Sweep(CARD_CHECK, {}, f"check of {card.id}"), reuse="none")
    return resolve(partial, [card], target=0.95)
