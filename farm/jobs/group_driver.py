"""Measure one item on several cards: wait until the cards are free, start the ranks, watch over them.

The ranks are processes of the leading card's worker (`farm.benchmark_process.group`). They end within a second if the
job is cancelled, if one of the cards is drained, quarantined or lost, or if the claim or a worker has ended.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from sqlmodel import col, select

from farm.benchmark_process.client import Measured
from farm.benchmark_process.group import BenchmarkGroup
from farm.errors import DatabaseUnreachable
from farm.jobs import cards, item_state
from farm.jobs.cards import present_state
from farm.jobs.items import Claim
from farm.settings import settings
from farm.store.content import store_software
from farm.store.database import Database, database_now, read_clock_s
from farm.store.tables import CardRow, CardState, Item, ItemState
from farm.types.protocol import OnPhase

#: Interval in which the state of a group's cards is read. Unit: s.
WATCH_S = 0.5


class Interrupted(Exception):
    """A group had to end its measurement. ``counted``: the attempt counts."""

    def __init__(self, reason: str, counted: bool) -> None:
        super().__init__(reason)
        self.reason, self.counted = reason, counted


def measure(database: Database, claimed: Claim, on_phase: OnPhase, must_stop: Callable[[], bool]) -> Measured:
    """Measure a claimed item on the cards of its group.

    Args:
        must_stop: True if the process must stop. It then no longer waits for other cards.

    Raises:
        Interrupted: the measurement had to end; all ranks have ended.
        Unmeasurable: see `BenchmarkGroup.measure`, or a card failed its health check.
    """
    on_phase("reserve", {"cards": list(claimed.cards)})
    _await_peers(database, claimed, must_stop)
    with BenchmarkGroup(claimed.cards) as group, _watching(database, claimed, group) as found:
        try:
            software = group.wait_ready()
            with database.write() as session:  # a reading refers to it; the version of NCCL is part of it
                store_software(session, software)
            if sick := [card_id for card_id in claimed.cards if f"{card_id}: " in group.unhealthy]:
                for card_id in sick:
                    cards.quarantine(database, card_id, group.unhealthy)
                raise Interrupted(f"a card failed its health check: {group.unhealthy}", False)
            return group.measure(
                claimed.subject,
                claimed.protocol,
                claimed.stopping,
                timeout_s=settings().item_timeout_s,
                on_phase=on_phase,
            )
        except Exception:  # killed ranks may fail in any way
            if found:
                raise found[0] from None
            raise


def _await_peers(database: Database, claimed: Claim, must_stop: Callable[[], bool]) -> None:
    """Wait until the other cards have ended the items that they had begun before the reservation."""
    while True:
        with contextlib.suppress(DatabaseUnreachable):
            if found := _interruption(database, claimed):
                raise found
            if not peers_at_work(database, claimed):
                return
        if must_stop():
            raise Interrupted("its worker stops", False)
        time.sleep(WATCH_S / 5)


def _interruption(database: Database, claimed: Claim) -> Interrupted | None:
    reason, counted = interruption(database, claimed)
    return Interrupted(reason, counted) if reason else None


@contextlib.contextmanager
def _watching(database: Database, claimed: Claim, group: BenchmarkGroup) -> Iterator[list[Interrupted]]:
    """Kill the ranks as soon as the measurement has to end; the list then has the reason."""
    ended, found = threading.Event(), list[Interrupted]()

    def watch() -> None:
        while not ended.wait(WATCH_S):
            with contextlib.suppress(DatabaseUnreachable):  # the reading then waits in the spool
                if interruption := None if found else _interruption(database, claimed):
                    found.append(interruption)
            if found:
                group.kill()  # again and again: a request may just have started the ranks anew

    thread = threading.Thread(target=watch, name="group-watch", daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def peers_at_work(database: Database, claimed: Claim) -> bool:
    """True if one of the cards of a group still measures the item that it began before the reservation."""
    lasting = (item_state.in_work(), col(Item.lease_until_s) >= database_now(), col(Item.id) != claimed.item_id)
    query = select(Item.id).where(col(Item.card_id).in_(claimed.cards), *lasting)
    with database.read() as session:
        return session.exec(query.limit(1)).first() is not None


def interruption(database: Database, claimed: Claim) -> tuple[str, bool]:
    """Return why a group has to end its measurement, and whether the attempt counts; "" if it can continue.

    An attempt that a person ended (`farm cancel`, `farm cards drain`, the stop of a worker) does not count.
    """
    with database.read() as session:
        item = session.get(Item, claimed.item_id)
        if item is None or item.token != claimed.token:
            return "another worker has claimed the item", True
        if item.state == ItemState.CANCELLED:
            return "its job was cancelled", False
        now_s = read_clock_s(session)
        for card in session.exec(select(CardRow).where(col(CardRow.id).in_(claimed.cards))):
            state = present_state(card, now_s)
            if state in (CardState.DRAINING, CardState.QUARANTINED, CardState.STOPPED):
                return f"the card {card.id} is {state}", False
            if state == CardState.LOST or (card.kind != "cpu" and card.group_token != claimed.token):
                return f"the worker of the card {card.id} has ended", True
    return "", False


def put_off(database: Database, claimed: Claim, *, counted: bool) -> None:
    """End the claim on an item whose measurement was interrupted; it waits for its cards again.

    Args:
        counted: the attempt counts.
    """
    attempts = col(Item.attempts) if counted else col(Item.attempts) - 1
    its_own = (col(Item.id) == claimed.item_id, col(Item.token) == claimed.token, Item.state == ItemState.CLAIMED)
    with database.write() as session:
        session.exec(item_state.PUT_OFF.update(*its_own, attempts=attempts))
