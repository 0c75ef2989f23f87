"""A card of this host that this process holds: its lock, its health check, its quarantine, and
readings without an item.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator

from farm.benchmark_process.client import BenchmarkProcess, CardReading
from farm.devices.device import Card
from farm.devices.lock import CardLock
from farm.errors import (
    CardUnavailable,
    UnhealthyCard,
)
from farm.jobs import cards
from farm.jobs.outage import Outage
from farm.settings import settings
from farm.store.content import add_reading, store_protocol, store_software
from farm.store.database import Database
from farm.store.tables import CardState, ReadingRow
from farm.types.protocol import Protocol
from farm.types.software import Software
from farm.types.subject import Subject

log = logging.getLogger("farm.worker")

#: Longest time to wait for the last heartbeat at the end of a measurement. Unit: s.
LAST_BEAT_S = 10.0


def check_health(process: BenchmarkProcess) -> Software:
    """Wait until a benchmark process is ready and return its software. Raises `Unmeasurable` if the
    process failed to start, and `UnhealthyCard` if the card failed the check at its start. Then the
    process is killed; the next one checks again."""
    software = process.wait_ready()
    if reason := process.unhealthy:
        process.kill()
        raise UnhealthyCard(
            reason,
            f"Check the card with `farm doctor`. `farm cards release {process.card_id}` ends its "
            "quarantine.",
        )
    return software


@contextlib.contextmanager
def hold_card(card: Card, database: Database | None = None) -> Iterator[BenchmarkProcess]:
    """Lock a card of this host and run its benchmark process until the block ends.

    Args:
        database: stores the state of the card. A card that fails its health check is put in
            quarantine until a person releases it, or until the next command with an embedded farm
            checks it again. None: the state is neither checked nor stored.

    Raises:
        CardBusy: a worker or another command holds the card.
        CardUnavailable: the card is in quarantine.
        UnhealthyCard: the card fails its health check.
        Unmeasurable: the benchmark process fails to start.
    """
    with CardLock(card.id, settings().lock_dir):
        if database is not None:
            cards.end_embedded_quarantines(database, [card.id])
            refuse_card_in(database, card.id, CardState.QUARANTINED)
        with BenchmarkProcess(card.id) as process, quarantining(database, card):
            check_health(process)
            yield process


def refuse_card_in(database: Database, card_id: str, *states: CardState) -> None:
    """Raise `CardUnavailable` if the card is in one of these states."""
    state = cards.stored_state(database, card_id)
    if state in states:
        end = "resume" if state == CardState.DRAINING else "release"
        raise CardUnavailable(
            f"The card {card_id} is {state}.",
            f"`farm cards {end} {card_id}` gives the card work again.",
        )


@contextlib.contextmanager
def quarantining(database: Database | None, card: Card) -> Iterator[None]:
    """Put the card in quarantine if the block raises `UnhealthyCard`."""
    try:
        yield
    except UnhealthyCard as error:
        if database is not None:
            farm = cards.farm_name(settings().host, os.getpid(), uuid.uuid4().hex[:6])
            with database.write() as session:
                cards.ensure_card(session, card)
            cards.quarantine(database, card.id, error.message, farm=farm)
        raise


def keep_reading(
    database: Database, measured: CardReading, subject: Subject, protocol: Protocol
) -> ReadingRow:
    """Store a reading without an item, and its card; return the row of the reading."""
    reading = measured.reading
    trace = reading.trace.pack() if reading.trace is not None else None
    with database.write() as session:
        cards.ensure_card(session, measured.card, measured.software)
        software_id, protocol_id = (
            store_software(session, measured.software),
            store_protocol(session, protocol),
        )
        ids = {
            "card_id": measured.card.id,
            "card_model": measured.card.model,
            "software_id": software_id,
        }
        row = add_reading(session, reading, trace, subject, **ids, protocol_id=protocol_id)
        session.refresh(row)
        return row


@contextlib.contextmanager
def heartbeat(beat: Callable[[], None]) -> Iterator[None]:
    """Call `beat` every few seconds in a thread until the block ends.

    The thread logs each error of `beat` once. At the end of the block, the call in progress is
    waited for, so that no lease is renewed afterwards. The wait has a bound, `LAST_BEAT_S`, because
    the database may not answer.
    """
    current = settings()
    ended = threading.Event()
    outage = Outage(log, "This card has no heartbeat")

    def run() -> None:
        while not ended.wait(current.beat_s):
            try:
                beat()
                outage.over()
            except Exception as error:
                outage.note(error)

    thread = threading.Thread(target=run, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(LAST_BEAT_S)
