"""Selects cards by a name on the command line, or by default if no name is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from farm.errors import NoSuchCard, did_you_mean


class CardLike(Protocol):
    """The description of a card: of this host (`Card`) or in the database (`CardRow`)."""

    @property
    def id(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def is_gpu(self) -> bool: ...
    @property
    def is_cpu(self) -> bool: ...
    @property
    def model(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...


AnyCard = TypeVar("AnyCard", bound=CardLike)


def choose_cards(cards: Sequence[AnyCard], texts: Sequence[str]) -> list[AnyCard]:
    """Return the cards that the ``--card`` options select (see `matching_cards`); raise
    `NoSuchCard` if there are none.

    Default: all cards of the most frequent model, GPUs before CPUs. Models are not mixed, because
    their sums differ."""
    if not texts:
        groups = list(by_model(cards).values())
        if not groups:
            raise NoSuchCard(
                "There is no card on which the farm can measure.",
                "`farm cards` lists the cards and their states.",
            )
        return max(groups, key=lambda group: (group[0].is_gpu, len(group)))
    chosen: dict[str, AnyCard] = {}
    for text in texts:
        matches = matching_cards(cards, text)
        if not matches:
            raise NoSuchCard(f"No card matches '{text}'.", _similar_cards(cards, text))
        chosen.update({card.id: card for card in matches})
    return list(chosen.values())


def _similar_cards(cards: Sequence[CardLike], text: str) -> str:
    """What to give instead of a text that matches no card."""
    if not cards:
        return "`farm cards` lists the cards of this host and of the farm."
    names = [*(card.id for card in cards), *(card.model for card in cards)]
    listed = "; ".join(f"{card.model} ({card.id})" for card in cards[:8])
    return did_you_mean(text, names) or f"The cards are: {listed}."


def by_model(cards: Iterable[AnyCard]) -> Mapping[str, list[AnyCard]]:
    """Group the cards by model, in the given order. Each group gets its own job."""
    groups: dict[str, list[AnyCard]] = {}
    for card in cards:
        groups.setdefault(card.model, []).append(card)
    return groups


def matching_cards(cards: Sequence[AnyCard], text: str) -> list[AnyCard]:
    """Return all cards that a text names. The first form that fits counts: an id, "cpu" or "gpu",
    an index, host:index, the beginning of an id, a host or part of a model.
    """
    low = text.strip().lower()
    if not low:
        return []
    if exact := [card for card in cards if card.id.lower() == low]:
        return exact
    if low == "cpu":
        return [card for card in cards if card.is_cpu]
    if low in ("gpu", "cuda"):
        return [card for card in cards if card.is_gpu]
    if low.isdigit():
        # If there are GPUs, 0 selects GPU 0, although a CPU also has index 0.
        indexed = [card for card in cards if card.index == int(low)]
        return [card for card in indexed if card.is_gpu] or indexed
    host, colon, index = low.rpartition(":")
    if colon and index.isdigit():
        return [card for card in cards if card.host.lower() == host and card.index == int(index)]
    if starting := [card for card in cards if card.id.lower().startswith(low)]:
        return starting
    return [card for card in cards if low in card.model.lower() or card.host.lower() == low]
