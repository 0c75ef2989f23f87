"""Simulate items on several cards among items on one card: who waits for whom, and how long.

    python benchmarks/simulated_groups.py --hosts 100

Each host has 8 cards with full queues, in which items on 2, 4 and 8 cards are mixed at random with
items on one card. The rules are those of `farm/jobs/groups.py`; `block_of` is the farm's own
function. Hosts do not affect each other. The limits are checked: a reserved card waits at most for
one item of each peer, and between two groups a card begins an item on one card while such items
wait."""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
import sys
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from farm.jobs.groups import block_of
from farm.store.tables import CardRow

CARDS = 8
#: Time to start the processes of a group, whose cards are idle meanwhile. Unit: s.
START_S = 5.0


@dataclass(eq=False)
class Item:
    number: int
    cards: tuple[int, ...]  # of one item: its card
    takes_s: float
    asked_s: float = -1.0  # when its first message was taken
    reserved_s: float = -1.0


@dataclass
class Card:
    queue: deque[Item] = field(default_factory=deque)
    now: Item | None = None
    group: Item | None = None  # its reservation
    after_group: bool = False
    free_s: float = 0.0  # since when it waits
    alone_s: float = 0.0  # when its last item on one card ended
    in_a_row: int = 0  # groups since the last item on one card


@dataclass
class Found:
    held_s: list[float] = field(
        default_factory=list
    )  # a waiting item on one card: how long a group holds it up
    groups_s: list[float] = field(
        default_factory=list
    )  # a group: from its first message to its begin
    reserved_s: list[float] = field(default_factory=list)  # a reserved card: until the group begins
    longest_s: float = 0.0  # item on one card
    in_a_row: int = 0
    busy_s: float = 0.0
    whole_s: float = 0.0


class Host:
    def __init__(self, chance: random.Random, singles: int, share: float, found: Found) -> None:
        self.cards = [Card() for _ in range(CARDS)]
        self.found, self.now_s, self.serial = found, 0.0, 0
        self.events: list[tuple[float, int, Item]] = []
        self.put_off: dict[int, Item] = {}
        rows = [
            CardRow(id=str(n), kind="simulated", model="a card", host="h", index=n)
            for n in range(CARDS)
        ]
        number = 0
        for place, card in enumerate(self.cards):
            for _ in range(singles):
                number += 1
                card.queue.append(Item(number, (place,), chance.lognormvariate(0.3, 0.5)))
        for size in (2, 4, 8):
            # A third of the groups' card time for each size; the mean of the lognormal distribution
            # is 1.53 s.
            for _ in range(
                round(singles * CARDS * 1.53 * share / (1 - share) / 3 / (size * (START_S + 1.53)))
            ):
                number += 1
                leading = chance.randrange(0, CARDS, size)
                ids = tuple(map(int, block_of(rows, str(leading), size)))
                item = Item(number, ids, START_S + chance.lognormvariate(0.3, 0.5))
                self.cards[leading].queue.insert(chance.randrange(singles), item)
        self.longest_s = max(
            item.takes_s for card in self.cards for item in card.queue if len(item.cards) == 1
        )

    def run(self) -> None:
        for place in range(CARDS):
            self.step(place)
        while self.events:
            self.now_s, _, item = heapq.heappop(self.events)
            self.end(item)
        assert not self.put_off, "a group never began"
        assert not any(card.queue for card in self.cards), "an item never began"
        self.found.whole_s += CARDS * self.now_s
        self.found.longest_s = max(self.found.longest_s, self.longest_s)

    def begin(self, item: Item) -> None:
        self.serial += 1
        heapq.heappush(self.events, (self.now_s + item.takes_s, self.serial, item))
        for place in item.cards:
            self.cards[place].now = item
        self.found.busy_s += item.takes_s * len(item.cards)

    def end(self, item: Item) -> None:
        for place in item.cards:
            card = self.cards[place]
            card.now, card.free_s = None, self.now_s
            if card.group is item:
                card.group, card.after_group = None, True
        if len(item.cards) > 1:
            self.publish()
        else:
            self.cards[item.cards[0]].alone_s = self.now_s
            if (group := self.cards[item.cards[0]].group) is not None:
                self.try_begin(group)
        for place in item.cards:
            self.step(place)

    def step(self, place: int) -> None:
        """A card takes its next message, as long as there is something to do."""
        card = self.cards[place]
        while card.now is None and card.group is None and card.queue:
            item = card.queue.popleft()
            if len(item.cards) > 1:
                item.asked_s = self.now_s if item.asked_s < 0 else item.asked_s
                self.put_off.pop(item.number, None)
                if self.is_free(item):
                    for peer in item.cards:
                        self.cards[peer].group = item
                    item.reserved_s = self.now_s
                    self.try_begin(item)
                else:
                    self.put_off[item.number] = item
                continue
            self.found.held_s.append(self.now_s - card.alone_s)
            after_group, card.after_group, card.in_a_row = card.after_group, False, 0
            self.begin(item)
            if after_group:
                self.publish()

    def try_begin(self, group: Item) -> None:
        peers = [self.cards[place] for place in group.cards]
        if any(card.now is not None for card in peers):
            return
        self.found.groups_s.append(self.now_s - group.asked_s)
        for card in peers:
            self.found.reserved_s.append(self.now_s - max(card.free_s, group.reserved_s))
            card.in_a_row += 1
            if any(len(item.cards) == 1 for item in card.queue):
                self.found.in_a_row = max(self.found.in_a_row, card.in_a_row)
        self.begin(group)

    def is_free(self, item: Item) -> bool:
        peers = [self.cards[place] for place in item.cards]
        older = (other for number, other in self.put_off.items() if number < item.number)
        return (
            all(card.group is None for card in peers)
            and not any(
                card.after_group and any(len(one.cards) == 1 for one in card.queue)
                for card in peers
            )
            and all(set(other.cards).isdisjoint(item.cards) for other in older)
        )

    def publish(self) -> None:
        """Items that were put off go in front of the queue when their cards are free, as
        `farm.jobs.groups.due`.
        """
        for number in sorted(self.put_off):
            item = self.put_off[number]
            leading = self.cards[item.cards[0]]
            if self.is_free(item) and item not in leading.queue:
                leading.queue.appendleft(item)
                self.step(item.cards[0])


def simulate(hosts: int, singles: int, share: float, seed: int) -> dict[str, float]:
    found = Found()
    for number in range(hosts):
        Host(random.Random(f"{seed}/{number}"), singles, share, found).run()

    def percent(values: list[float], at: int) -> float:
        return round(statistics.quantiles(values, n=100, method="inclusive")[at - 1], 2)

    return {
        "share_of_card_time_for_groups": share,
        "groups": len(found.groups_s),
        "items_on_one_card": len(found.held_s),
        "group_waits_s_median": percent(found.groups_s, 50),
        "group_waits_s_99": percent(found.groups_s, 99),
        "group_waits_s_most": round(max(found.groups_s), 2),
        "reserved_card_waits_s_median": percent(found.reserved_s, 50),
        "reserved_card_waits_s_most": round(max(found.reserved_s), 2),
        "longest_item_s": round(found.longest_s, 2),
        "item_held_s_99": percent(found.held_s, 99),
        "item_held_s_most": round(max(found.held_s), 2),
        "groups_in_a_row": found.in_a_row,
        "cards_busy": round(found.busy_s / found.whole_s, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=100)
    parser.add_argument("--items", type=int, default=200, help="items on one card, for each card")
    parser.add_argument(
        "--share", type=float, action="append", help="share of the card time that groups take"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    results = [
        simulate(options.hosts, options.items, share, options.seed)
        for share in options.share or (0.05, 0.2, 0.5)
    ]
    print(json.dumps(results, indent=2))
    wrong = [
        one
        for one in results
        if one["reserved_card_waits_s_most"] > one["longest_item_s"] or one["groups_in_a_row"] > 1
    ]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
