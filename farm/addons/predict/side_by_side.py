"""Estimates of one model on several cards, beside each other, with what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farm.addons.predict.estimate import Estimate
from farm.addons.predict.stored_predictor import PredictedValue
from farm.errors import UsageError

_US_PER_HOUR = 3.6e9
_MILLION = 1e6


@dataclass(frozen=True)
class Offer:
    """An estimate, and the price of the card.

    Attributes:
        per_hour: the price of one card for one hour, in the user's currency; None: not given.
    """

    estimate: Estimate
    per_hour: float | None = None

    @property
    def cards(self) -> int:
        """The number of cards whose memory is sufficient."""
        return self.estimate.memory.cards if self.estimate.memory else 1

    @property
    def counted(self) -> str:
        """What the price is for a million of: tokens or samples."""
        return "tokens" if self.estimate.per_token.tokens else "samples"

    @property
    def per_million(self) -> PredictedValue | None:
        """The price of a million tokens or samples; None if no price is given.

        All cards that the memory needs are paid for, and the time is that of one card, so several
        cards are neither faster nor slower than one with enough memory."""
        if self.per_hour is None:
            return None
        number = self.estimate.per_token.tokens or self.estimate.variant.batch
        rented = max(self.cards, self.estimate.variant.cards)
        factor = self.per_hour * rented / _US_PER_HOUR * _MILLION / number
        return self.estimate.time.times(factor)

    def to_json(self) -> dict[str, Any]:
        """The keys of the estimate, and those of the price."""
        price = self.per_million
        return {
            **self.estimate.to_json(),
            "price_per_hour": self.per_hour,
            "price_per_million": price and price.value,
            "price_per_million_low": price and price.low,
            "price_per_million_high": price and price.high,
            "price_is_for": self.counted if price else None,
        }


def prices_of(text: str, cards: Sequence[str]) -> Mapping[str, float]:
    """The price of an hour by card.

    Args:
        text: ``H100=2.5,RTX 4090=0.4``; or one number, which is the price of each card.
        cards: the cards as the user names them.

    Raises:
        UsageError: a price is no positive number, or a name is not one of the cards.

    Example:
        >>> prices_of("h100=2.5", ["H100", "A10"])
        {'H100': 2.5}
    """
    prices: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, separator, number = part.rpartition("=")
        price = _positive(part, number)
        if not separator:
            return dict.fromkeys(cards, price)
        named = [card for card in cards if card.lower() == name.strip().lower()]
        if not named:
            raise UsageError(
                f"--price has a price of '{name.strip()}', which is not one of the cards.",
                f"Write the names as in --card: {', '.join(filter(None, cards)) or 'a card'}.",
            )
        prices[named[0]] = price
    return prices


def _positive(part: str, number: str) -> float:
    try:
        price = float(number)
    except ValueError:
        price = 0.0
    if not 0 < price < float("inf"):
        raise UsageError(
            f"--price: '{part.strip()}' has no positive number.",
            "Give the price of an hour for each card: --price H100=2.5,A10=0.7",
        )
    return price
