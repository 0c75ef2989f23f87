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


@dataclass(frozen=True)
class Waiting:
    """An item that waits on one card, and may be taken by some."""

    id: int
    card_id: str
    expected_s: float
    job_id: str
    takers: frozenset[str]


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
        full = [card_id for card_id in left if left[card_id] and card_id not in dry]
        giver = max(full, key=ends_s.__getitem__, default=None)
        if giver is None or ends_s[giver] <= ends_s[taker]:
            # Nobody is full; among the dry ones, take from whoever still has several.
            several = [card_id for card_id in dry if len(left[card_id]) > 1]
            giver = max(several, key=ends_s.__getitem__, default=None)
        slow = by_id[taker].slowness
        position = None if giver is None else _worth_moving(left[giver], ends_s[giver], ends_s[taker], slow)
        if giver is None or position is None:
            dry.discard(taker)
            continue
        work = left[giver].pop(position)
        moves[work.key] = taker
        ends_s[giver] -= by_id[giver].slowness * work.expected_s
        ends_s[taker] += slow * work.expected_s
    return moves


def _worth_moving(waiting: Sequence[Work], giver_ends_s: float, taker_ends_s: float, slowness: float) -> int | None:
    """The position of what the taker should have of the giver's, None where no move gains enough.

    Args:
        waiting: the giver's, ascending by length, at least one.
        slowness: the taker's.
    """
    room_s = (giver_ends_s - taker_ends_s) / 2
    position, by_s = bisect.bisect_right(waiting, room_s, key=lambda work: work.expected_s) - 1, giver_ends_s
    if position < 0:
        # Nothing is that short: the shortest, if the taker would still end it before the giver ends all.
        position, by_s = 0, 0.9 * giver_ends_s
    return position if taker_ends_s + slowness * waiting[position].expected_s < by_s else None


def balance_groups(
    waiting: Sequence[Waiting], open_s: Mapping[str, float], slowness: Mapping[str, float], *, dry_within_s: float
) -> dict[int, str]:
    """`balance` where not every card may take everything; item id -> card id.

    Args:
        open_s: all that the cards have to do, also what must stay, as expected on an ordinary card. Unit: s.
        slowness, dry_within_s: as in `balance`; a slowness is 1 where it is not known.
    """
    open_s = dict(open_s)
    moves: dict[int, str] = {}
    # Those with the fewest cards to choose from come first; what they moved counts for the next.
    for group in sorted({item.takers for item in waiting}, key=lambda group: (len(group), sorted(group))):
        queues = {card_id: Queue(card_id, [], open_s[card_id], slowness.get(card_id, 1.0)) for card_id in group}
        movable = {item.id: item for item in waiting if item.takers == group and item.card_id in group}
        for item in movable.values():
            queue = queues[item.card_id]
            queue.waiting.append(Work(item.id, item.expected_s))
            queue.busy_s = max(0.0, queue.busy_s - item.expected_s)
        found = balance(list(queues.values()), dry_within_s=dry_within_s)
        for item_id, taker in found.items():
            open_s[movable[item_id].card_id] -= movable[item_id].expected_s
            open_s[taker] += movable[item_id].expected_s
        moves |= found
    return moves
