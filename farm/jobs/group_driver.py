"""Measure one item on several cards: wait until the cards are free, start the ranks, watch over
them.

The ranks are processes of the leading card's worker (`farm.benchmark_process.group`). They end
within a second if the job is cancelled, if one of the cards is drained, quarantined or lost, or if
the claim or a worker has ended."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from sqlmodel import col, select

from farm.benchmark_process.client import CardReading
from farm.benchmark_process.group import BenchmarkGroup
from farm.benchmark_process.requests import MeasureRequest
from farm.errors import DatabaseUnreachable
from farm.jobs import cards
from farm.jobs.items import Claim
from farm.jobs.outage import LATE_HEARTBEATS, SteadyAnswers
from farm.settings import settings
from farm.store import item_state
from farm.store.content import store_software
from farm.store.database import Database, database_now, read_clock_s
from farm.store.tables import CardRow, CardState, Item, ItemState
from farm.types.protocol import OnPhase

#: Interval in which the state of a group's cards is read. Unit: s.
WATCH_S = 0.5


class KeptGroup:
    """The ranks of a worker's newest item on several cards. They wait for the next item on the same
    cards.

    Their start takes longer than an item. They end with the first error, or after
    `FARM_GROUP_IDLE_S` without an item."""

    def __init__(self) -> None:
        self._group: BenchmarkGroup | None = None
        self._lock = threading.Lock()
        self._end = threading.Timer(0, lambda: None)

    @contextlib.contextmanager
    def used(self, card_ids: Sequence[str], watch: Callable[[], None]) -> Iterator[BenchmarkGroup]:
        """The group of these cards, for one item. ``watch``: see `BenchmarkGroup`."""
        self._end.cancel()
        if self._group is not None and self._group.card_ids != tuple(card_ids):
            self.close()
        with self._lock:
            self._group = self._group or BenchmarkGroup(card_ids)
            self._group.watch = watch
            try:
                yield self._group
            except BaseException:
                self._group.kill()
                raise
        self._end = threading.Timer(settings().group_idle_s, self.close)
        self._end.daemon = True
        self._end.start()

    def close(self) -> None:
        """End the ranks."""
        self._end.cancel()
        with self._lock:
            if self._group is not None:
                self._group.close()
            self._group = None


class GroupInterrupted(Exception):
    """A group has to end its measurement. Arguments: why, and whether the attempt counts: no person
    ended it.
    """


def measure(
    database: Database,
    claimed: Claim,
    work: MeasureRequest,
    kept: KeptGroup,
    farm: str,
    on_phase: OnPhase,
    must_stop: Callable[[], bool],
) -> CardReading:
    """Measure the ``work`` of a claimed item on the cards of its group, and first verify its calls
    if they are predicted. It does not wait for the cards if the process ``must_stop``. Raises
    `GroupInterrupted` if the measurement had to end (all ranks have ended), and as
    `BenchmarkGroup.measure`."""
    next_s = 0.0
    answers = SteadyAnswers(_late_s())

    def watch() -> None:
        nonlocal next_s
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + WATCH_S
            with contextlib.suppress(DatabaseUnreachable):  # the reading then waits in the spool
                check_cards(database, claimed, answers)

    on_phase("reserve", {"cards": list(claimed.cards)})
    while peers_at_work(database, claimed):
        watch()
        if must_stop():
            raise GroupInterrupted("its worker stops", False)
        time.sleep(0.1)
    with kept.used(claimed.cards, watch) as group:
        software, sick = group.wait_ready(), group.unhealthy
        for card_id in claimed.cards:
            if f"{card_id}: " in sick:
                cards.quarantine(database, card_id, sick, farm=farm)
        check_cards(database, claimed, answers)
        with database.write() as session:
            # it may differ from that of the card, see `Software.communication`
            store_software(session, software)
        return group.measure(work, timeout_s=settings().item_timeout_s, on_phase=on_phase)


def peers_at_work(database: Database, claimed: Claim) -> bool:
    """True if one of the cards of a group still measures the item that it began before the
    reservation.
    """
    lasting = (
        item_state.in_work(),
        col(Item.lease_until_s) >= database_now(),
        col(Item.id) != claimed.item_id,
    )
    query = select(Item.id).where(col(Item.card_id).in_(claimed.cards), *lasting)
    with database.read() as session:
        return session.exec(query.limit(1)).first() is not None


def check_cards(database: Database, claimed: Claim, answers: SteadyAnswers | None = None) -> None:
    """Raise `GroupInterrupted` if the claim on an item, or the use of one of its cards, has ended.

    ``answers``: those of the database. For some time after an outage no card counts as lost: all
    cards look lost until their workers have written a heartbeat again. None: there was no outage.
    """
    awaited = contextlib.nullcontext() if answers is None else answers.awaited()
    with awaited, database.read() as session:
        item = session.get(Item, claimed.item_id)
        now_s = read_clock_s(session)
        rows = session.exec(select(CardRow).where(col(CardRow.id).in_(claimed.cards))).all()
    if answers is not None:
        answers.clock_was_read(now_s)
    if item is None or item.token != claimed.token:
        raise GroupInterrupted("another worker has claimed the item", True)
    if item.state == ItemState.CANCELLED:
        raise GroupInterrupted("its job was cancelled", False)
    may_be_lost = answers is None or answers.steady_for_s > _late_s()
    for card in rows:
        state = cards.present_state(card, now_s)
        if state in (CardState.DRAINING, CardState.QUARANTINED, CardState.STOPPED):
            raise GroupInterrupted(f"the card {card.id} is {state}", False)
        lost = state == CardState.LOST and may_be_lost
        reserved_by_another = not card.is_cpu and card.group_token != claimed.token
        if lost or reserved_by_another:
            raise GroupInterrupted(f"the worker of the card {card.id} has ended", True)


def _late_s() -> float:
    return LATE_HEARTBEATS * settings().heartbeat_s
