"""Which card measures what: by expected seconds, first when a round is planned, then again while cards work.

Expectations are wrong, cards differ, and cards come and go. So the first placement only has to be good; what keeps a
farm busy to the end is moving waiting items from the card that would end last to those that run dry. Arithmetic only,
without a database, so that a simulation of a hundred cards runs the very code that places the work.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Work:
    """One waiting item: its key, and the seconds it should take on a card of ordinary speed."""

    key: int
    expected_s: float


@dataclass
class Queue:
    """One card: what it is at, what waits for it, and how it lives up to expectations.

    ``slowness`` is taken over expected seconds of what it did lately; 4.0 is a card four times slower.
    """

    card_id: str
    waiting: list[Work] = field(default_factory=list)
    busy_s: float = 0.0  # of the item in work, as expected on an ordinary card
    slowness: float = 1.0

    @property
    def ends_s(self) -> float:
        """When it would run dry. Unit: seconds from now."""
        return self.slowness * (self.busy_s + sum(work.expected_s for work in self.waiting))


def place(work: Iterable[Work], free_at_s: Mapping[str, float], slowness: Mapping[str, float] = {}) -> dict[int, str]:
    """Longest first, each onto the card that would end it first (LPT); key -> card id.

    Args:
        free_at_s: cards, and when each is through with what it has.
        slowness: as in `Queue`; 1 where it is not known.
    """
    ends_s = dict(free_at_s)
    placed = {}
    for item in sorted(work, key=lambda item: (-item.expected_s, item.key)):
        card_id = min(ends_s, key=lambda card: (ends_s[card] + slowness.get(card, 1.0) * item.expected_s, card))
        ends_s[card_id] += slowness.get(card_id, 1.0) * item.expected_s
        placed[item.key] = card_id
    return placed


def balance(queues: Sequence[Queue], *, dry_within_s: float) -> dict[int, str]:
    """What to take from the fullest cards for those that run dry soon; key -> card id.

    Cards with enough to do are left alone: every move is a message. A move must gain more than it costs, so that
    cards that end together do not hand the last items to and fro.

    Args:
        dry_within_s: a card that ends sooner than this is given more. Unit: s.
    """
    ends_s = {queue.card_id: queue.ends_s for queue in queues}
    by_id = {queue.card_id: queue for queue in queues}
    # Ascending by length, so that the longest item that still helps is found quickly.
    left = {queue.card_id: sorted(queue.waiting, key=lambda work: (work.expected_s, work.key)) for queue in queues}
    dry = {card_id for card_id, end_s in ends_s.items() if end_s < dry_within_s}
    moves: dict[int, str] = {}
    while dry:
        taker = min(dry, key=lambda card_id: (ends_s[card_id], card_id))
        giver = max((card_id for card_id in left if left[card_id] and card_id not in dry), key=ends_s.get, default="")  # type: ignore[arg-type]
        room_s = (ends_s[giver] - ends_s[taker]) / 2 if giver else 0.0
        if not giver or room_s <= 0:
            # Nobody is full; among the dry ones, take from whoever still has several.
            giver = max((card_id for card_id in dry if len(left[card_id]) > 1), key=ends_s.get, default="")  # type: ignore[arg-type]
            room_s = (ends_s[giver] - ends_s[taker]) / 2 if giver and giver != taker else 0.0
        fitting = bisect.bisect_right(left[giver], room_s, key=lambda work: work.expected_s) if giver else 0
        slow = by_id[taker].slowness
        if not fitting and giver and left[giver]:
            # Nothing is that short: the shortest, if the taker would still end it before the giver ends all.
            fitting = 1 if ends_s[taker] + slow * left[giver][0].expected_s < 0.9 * ends_s[giver] else 0
        if not fitting or ends_s[taker] + slow * left[giver][fitting - 1].expected_s >= ends_s[giver]:
            dry.discard(taker)
            continue
        work = left[giver].pop(fitting - 1)
        moves[work.key] = taker
        ends_s[giver] -= by_id[giver].slowness * work.expected_s
        ends_s[taker] += slow * work.expected_s
    return moves
