"""Whether a card's worker still hears of its items.

A worker may live, beat and answer, and take nothing any more: Celery has one slot for it, and whatever goes wrong between
taking a message and handing it to the pool keeps that slot for good. Nobody else is there for the card's queue, and the
database knows what waits. So the worker listens to itself, and leaves when it is deaf; its supervisor starts the next.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass

from celery.worker import state as worker_state

from farm.jobs import cards
from farm.settings import Settings
from farm.store import tables
from farm.store.database import Database
from farm.store.tables import CardState
from tasks.app import check_broker

log = logging.getLogger("farm.worker")

#: What a deaf worker ends with (EX_TEMPFAIL).
DEAF = 75


@dataclass
class Hearing:
    """One worker's; asked at every heartbeat.

    Args:
        limit_s: how long it may take nothing while items wait; 0: for ever.
    """

    card_id: str
    limit_s: float
    _taken: int = -1
    _heard_at_s: float = 0.0

    def lost(self, database: Database, *, taken: int, at_work: bool, now_s: float) -> bool:
        """Args:
        taken: how many messages the pool has taken so far.
        now_s: on a clock that only goes forward.
        """
        if taken != self._taken or at_work or not self.limit_s or not self._items_wait(database):
            self._taken, self._heard_at_s = taken, now_s
        return now_s - self._heard_at_s > self.limit_s > 0

    def leave_if_lost(self, database: Database, current: Settings) -> None:
        """End this process when it is deaf. At once, since nothing is in work: a stop in order would put the message that
        made it so back into its queue.

        Raises:
            BrokerUnreachable: it is the broker's fault, and no reason to leave.
        """
        now_s = time.monotonic()
        taken, at_work = worker_state.all_total_count[0], bool(worker_state.active_requests)
        if self.lost(database, taken=taken, at_work=at_work, now_s=now_s):
            self._heard_at_s = now_s
            check_broker(current)
            log.error(
                "Items wait for %s and none has come through for %g s, though the broker answers: starting anew",
                self.card_id,
                self.limit_s,
            )
            os._exit(DEAF)

    def _items_wait(self, database: Database) -> bool:
        with database.read() as session:
            card = session.get(tables.Card, self.card_id)
            return card is not None and card.state == CardState.IDLE and bool(cards.silences(session, [card]))
