"""The cards in the database: registration, heartbeat, states, quarantine; also the names of workers
and farms.

A worker writes its holder name into the row of its card and into the items that it claims. An
embedded farm is started by one command for its own jobs. It has a name, which its jobs and the
holder names of its workers contain."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlalchemy import case, update
from sqlmodel import Session, and_, col, func, select

from farm.devices.cpu import cpu_card
from farm.devices.device import Card
from farm.devices.host import discover, is_installed, links_of
from farm.errors import FarmUnavailable, NoSuchCard, NoWorker
from farm.requests.card_selection import choose_cards, matching_cards
from farm.settings import settings
from farm.store.columns import HAVE_READINGS
from farm.store.content import storable_text, store_software
from farm.store.database import Database, database_now, locked, open_database, read_clock_s
from farm.store.item_state import has_message
from farm.store.tables import (
    CardRow,
    CardState,
    Item,
    ItemState,
    Job,
    Operator,
    SoftwareRow,
)
from farm.types.fingerprint import FINGERPRINT_VERSION, sound_fingerprint
from farm.types.software import Software

#: A card is lost if its worker has not been seen for this many heartbeats.
LOST_AFTER_HEARTBEATS = 3

#: A card is silent if it is idle and began no item for this many heartbeats while published items
#: wait for it. This is longer than the reconciler needs to publish items again whose messages the
#: broker lost.
SILENT_AFTER_HEARTBEATS = 6

#: So many published items of a card show when its items were last published; a card may have a
#: million waiting items.
ENOUGH = 100

#: States that a person or a failed health check sets. Only a person ends them; the start or stop of
#: a worker does not.
KEPT = (CardState.DRAINING, CardState.QUARANTINED)


def holder_name(card_id: str, host: str, pid: int, tag: str, farm: str = "") -> str:
    """Return the name with which a worker marks its card and its claims. It ends with ``farm``, the
    id of the worker's embedded farm; "" for the shared farm."""
    return holder_of_process(card_id, host, pid) + tag + (f"/{farm}" if farm else "")


def holder_of_process(card_id: str, host: str, pid: int) -> str:
    """Return the common prefix of all holder names of a card's worker with this process id."""
    return f"{card_id}@{host}:{pid}:"


def farm_of(holder: str) -> str:
    """Return the embedded farm of a worker; "" for a worker of the shared farm. Each farm has its
    own broker.
    """
    return holder.partition("/")[2]


def farm_name(host: str, pid: int, tag: str) -> str:
    """Name the embedded farm of a process: ``embedded:HOST:PID:START:TAG``, without START if there
    is no process.
    """
    return ":".join([farm_prefix(host) + str(pid), *filter(None, (process_started(str(pid)), tag))])


def farm_prefix(host: str) -> str:
    """The beginning of the names of all embedded farms of a host."""
    return f"embedded:{host}:"


def is_gone(farm: str, host: str) -> bool:
    """True if the process of an embedded farm of this host has ended. False for other hosts and
    hosts without /proc.

    The start time distinguishes the process from a later one with the same id. If the name has
    none, the id decides."""
    pid, *rest = farm.removeprefix(farm_prefix(host)).split(":")
    if (
        not farm.startswith(farm_prefix(host))
        or not pid.isdigit()
        or not Path("/proc/self").exists()
    ):
        return False
    started = process_started(pid)
    return not started or (len(rest) == 2 and rest[0] != started)


def process_started(pid: str) -> str:
    """Return when a process of this host started, in clock ticks since boot (field 22 of proc(5));
    "" if it ended.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


@dataclass(frozen=True)
class CardStatus:
    """One card with its present state and numbers of items."""

    card: CardRow
    state: str  # starting | idle | busy | draining | quarantined | lost | stopped
    measuring: str  # the label of the claimed item, or ""
    waiting: int  # waiting and deferred items
    seen_ago_s: float
    done_last_hour: int = 0  # only if `views` was asked to count these items
    deferred: int = 0  # items that wait because another item measures the same subject
    # seconds without a new item while items wait; 0 below SILENT_AFTER_HEARTBEATS
    silent_s: float = 0.0


def announce(
    database: Database, card_id: str, card: Card | None, *, holder: str, queue: str
) -> None:
    """Write ``holder`` as the worker of a card that starts: the card is listed, but measures no
    items yet.

    ``card`` is None if the host does not find the card. Then its row is changed only if it exists.
    """
    with database.write() as session:
        row = _described(session, card) if card else locked(session, CardRow, card_id)
        if row is not None:
            _serve(session, row, holder, queue, CardState.STARTING)


def register(
    database: Database,
    card: Card,
    software: Software,
    *,
    holder: str,
    queue: str,
    capabilities: Sequence[str] = (),
) -> str:
    """Register the card with its worker ``holder``, ready to measure; return the id of its
    software.

    A card that is draining or quarantined stays so.
    """
    with database.write() as session:
        row = _described(session, card)
        row.software_id, row.capabilities = store_software(session, software), sorted(capabilities)
        row.links = links_of(card)
        _serve(session, row, holder, queue, CardState.IDLE)
        return row.software_id


def ensure_card(session: Session, card: Card, software: Software | None = None) -> None:
    """Create the card's row, to which readings refer, if there is none. No job is planned on such a
    card.
    """
    if session.get(CardRow, card.id) is None:
        row = _described(session, card)
        row.software_id = store_software(session, software) if software else None
        session.add(row)
        session.flush()


def has_installed_software(session: Session, card: Card) -> bool:
    """True if the card is registered with the software that this host has now."""
    row = session.get(CardRow, card.id)
    software = session.get(SoftwareRow, row.software_id) if row and row.software_id else None
    return software is not None and is_installed(software.value, card)


def is_registered_as_now(session: Session, card: Card) -> bool:
    """The same, and with its present links and settings of the communication library."""
    return has_installed_software(session, card) and session.get_one(
        CardRow, card.id
    ).links == links_of(card)


def _described(session: Session, card: Card) -> CardRow:
    """Return the locked row of a card after updating its description; a new row if there was
    none.
    """
    row = locked(session, CardRow, card.id) or CardRow(id=card.id, kind=card.kind, model=card.model)
    row.kind, row.model = card.kind, card.model
    row.memory_bytes, row.driver = card.memory_bytes, card.driver
    row.host, row.index = card.host, card.index
    row.origin = ""  # its readings may have been imported before it joined
    if not row.registered_at_s:
        row.registered_at_s = database_now()  # type: ignore[assignment]
    return row


def _serve(session: Session, row: CardRow, holder: str, queue: str, state: CardState) -> None:
    """Write the worker of a card, and its state unless the card is draining or quarantined."""
    row.worker, row.queue = holder, queue
    if row.state not in KEPT:
        row.state, row.state_reason = state, ""
    row.last_seen_at_s = database_now()  # type: ignore[assignment]
    session.add(row)


def stored_state(database: Database, card_id: str) -> str:
    """Return the state in the card's row, without checking its heartbeat; "" if the card is not
    registered.
    """
    with database.read() as session:
        row = session.get(CardRow, card_id)
        return row.state if row is not None else ""


def stopped(database: Database, holder: str, reason: str = "") -> None:
    """Record that a worker stopped.

    Args:
        holder: its holder name, or the prefix from `holder_of_process`.
        reason: why it stopped although nobody stopped it; "": somebody stopped it.
    """
    of_holder = col(CardRow.worker).startswith(holder, autoescape=True)
    stopped = {"state": CardState.STOPPED, "state_reason": reason}
    with database.write() as session:
        session.execute(
            update(CardRow).where(of_holder, col(CardRow.state).not_in(KEPT)).values(stopped)
        )
        session.execute(update(CardRow).where(of_holder).values(worker=""))


def drain(database: Database, card_id: str, reason: str = "") -> None:
    """Let a card finish its item and start no other. Waiting items move to cards of the same model,
    or wait. Raises `NoSuchCard` if the card is not registered."""
    with database.write() as session:
        row = _known(locked(session, CardRow, card_id), card_id)
        if row.state != CardState.QUARANTINED:
            row.state, row.state_reason = CardState.DRAINING, reason


def quarantine(database: Database, card_id: str, reason: str, *, farm: str = "") -> None:
    """Keep a card from measuring until a person releases it. Raises `NoSuchCard` if the card is not
    registered.

    Args:
        farm: the embedded farm that found the card unhealthy. The next embedded farm ends this
            quarantine and checks the card again (`end_embedded_quarantines`). "": only a person
            ends it.
    """
    with database.write() as session:
        row = _known(locked(session, CardRow, card_id), card_id)
        if row.state != CardState.QUARANTINED:
            row.quarantined_by = farm
        elif not farm:
            row.quarantined_by = ""  # from now on only a person ends the quarantine
        row.state, row.state_reason = CardState.QUARANTINED, storable_text(reason[:500])


def end_embedded_quarantines(database: Database, card_ids: Sequence[str]) -> list[str]:
    """End the quarantines that earlier embedded farms set; return the ids of these cards. The
    caller checks them.
    """
    with database.write() as session:
        quarantined = col(CardRow.id).in_(card_ids), col(CardRow.state) == CardState.QUARANTINED
        rows = session.exec(
            select(CardRow).where(*quarantined, col(CardRow.quarantined_by) != "")
        ).all()
        for row in rows:
            row.state, row.state_reason, row.quarantined_by = CardState.STOPPED, "", ""
        return [row.id for row in rows]


def resume(database: Database, card_id: str, *, quarantined: bool = False) -> bool:
    """End a drain or, with ``quarantined``, a quarantine; return False if there was none. After a
    quarantine, the card's worker checks the card and registers it before it measures items. Raises
    `NoSuchCard` if it is not registered."""
    ending = CardState.QUARANTINED if quarantined else CardState.DRAINING
    with database.write() as session:
        row = _known(locked(session, CardRow, card_id), card_id)
        if row.state != ending:
            return False
        served = CardState.STARTING if quarantined else CardState.IDLE
        row.state, row.state_reason = served if row.worker else CardState.STOPPED, ""
        return True


def find(session: Session, name: str) -> CardRow:
    """Return the registered card that matches a name
    (`farm.requests.card_selection.matching_cards`). Raises `NoSuchCard` if no card or several cards
    match."""
    registered = select(CardRow).where(CardRow.origin == "")
    matches = matching_cards(session.exec(registered.order_by(col(CardRow.id))).all(), name)
    if len(matches) > 1:
        several = (
            f"{', '.join(card.id for card in matches[:8])}{', ...' if len(matches) > 8 else ''}"
        )
        raise NoSuchCard(
            f"'{name}' matches several cards: {several}.",
            "Give the id of one card; `farm cards` lists the ids.",
        )
    return _known(matches[0] if matches else None, name)


def _known(row: CardRow | None, card_id: str) -> CardRow:
    if row is None:
        raise NoSuchCard(f"No card '{card_id}' is registered.", "List the cards with `farm cards`.")
    return row


def views(
    session: Session, heartbeat_s: float, *, hourly: bool = False, silent: bool = False
) -> list[CardStatus]:
    """Return the status of all registered cards. ``hourly``: also count the items of the last hour,
    closed ones. ``silent``: also find silent cards, which may read all open items."""
    now = read_clock_s(session)
    registered = select(CardRow).where(CardRow.origin == "")
    rows = session.exec(registered.order_by(col(CardRow.host), col(CardRow.index))).all()
    # With the ids in the query, both databases count in one pass over the index instead of reading
    # a million rows.
    of_own = col(Item.card_id).in_([row.id for row in rows])
    counted = _counts(session, of_own, col(Item.state).in_((ItemState.WAITING, ItemState.DEFERRED)))
    lately = (
        Item.state == ItemState.DONE,
        col(Item.ended_at_s) >= now - 3600,
        col(Item.reused).is_(False),
        HAVE_READINGS,
    )
    counted |= _counts(session, *lately) if hourly else {}
    measuring = measured_now(session)
    states = {
        card.id: present_state(card, now, heartbeat_s, busy=card.id in measuring) for card in rows
    }
    idle = [
        row
        for row in rows
        if states[row.id] == CardState.IDLE and (row.id, ItemState.WAITING) in counted
    ]
    silent_s = silent_times_s(session, idle if silent else ())
    statuses = []
    for card in rows:
        measured = ""
        if card.id in measuring:
            measured = measuring[card.id] or "whole model"
        silence_s = silent_s.get(card.id, 0.0)
        if silence_s <= SILENT_AFTER_HEARTBEATS * heartbeat_s:
            silence_s = 0.0
        deferred = counted.get((card.id, ItemState.DEFERRED), 0)
        status = CardStatus(
            card,
            states[card.id],
            measured,
            counted.get((card.id, ItemState.WAITING), 0) + deferred,
            now - card.last_seen_at_s,
            counted.get((card.id, ItemState.DONE), 0),
            deferred,
            silence_s,
        )
        statuses.append(status)
    return statuses


def measured_now(session: Session, *which: Any) -> dict[str, str | None]:
    """Return card id -> label of the item that the card measures, for matching items; None for a
    whole model.

    An item on several cards has an entry for each card that is reserved for it.
    """
    # If the lease has ended, no worker measures the item.
    lasting = (Item.state == ItemState.CLAIMED, col(Item.lease_until_s) >= database_now(), *which)
    reserved = and_(col(CardRow.group_item_id) == Item.id, col(CardRow.group_token) == Item.token)
    labels: dict[str, str | None] = {}
    for card, card_id in ((None, col(Item.card_id)), (CardRow, col(CardRow.id))):
        query = sqlalchemy.select(card_id, col(Operator.label), col(Item.cards)).select_from(Item)
        query = query if card is None else query.join(card, reserved)
        labelled = query.join(
            Operator, col(Operator.id) == col(Item.subject_id), isouter=True
        ).where(*lasting)
        for id_, label, number in session.execute(labelled.order_by(card_id)):
            labels[id_] = f"{label} on {number} cards" if label and number > 1 else label
    return labels


def silent_times_s(session: Session, found: Sequence[CardRow]) -> dict[str, float]:
    """Return card id -> seconds since the card last began an item although published items of its
    farm wait for it.

    If the items were published later, count from that time: the newest of `ENOUGH` items. Cards
    without published items are left out. After the clock was set back, times in the future are as
    long ago as they are ahead."""
    if not found:
        return {}
    # Subqueries for each card: the database then reads few entries of the indexes per card.
    started_at_s = col(Item.started_at_s)
    begun = select(func.max(started_at_s)).where(
        Item.card_id == CardRow.id, started_at_s <= database_now()
    )
    worker = col(CardRow.worker)
    of_farm = case(
        (col(Job.farm) == "", ~worker.contains("/")), else_=worker.endswith("/" + col(Job.farm))
    )
    ours = select(Job.id).where(Job.id == Item.job_id, of_farm).correlate(Item, CardRow).exists()
    published_at_s = col(Item.published_at_s)
    waits = (
        col(Item.state).in_((ItemState.WAITING, ItemState.CLAIMED)),
        published_at_s.is_not(None),
        has_message(),
        ours,
    )
    ago_s: Any = select(func.abs(database_now() - published_at_s).label("ago_s"))
    some = (
        ago_s.where(Item.card_id == CardRow.id, *waits).limit(ENOUGH).correlate(CardRow).subquery()
    )
    published = select(func.min(some.c.ago_s))
    asked = select(CardRow.id, published.scalar_subquery(), begun.scalar_subquery())
    now_s = read_clock_s(session)
    silent_s = {}
    for card_id, published_ago_s, begun_s in session.execute(
        asked.where(col(CardRow.id).in_([c.id for c in found]))
    ):
        if published_ago_s is not None:
            silent_s[card_id] = min(published_ago_s, now_s - (begun_s or 0.0))
    return silent_s


def lost(session: Session, heartbeat_s: float) -> list[tuple[CardRow, float]]:
    """Return the lost cards of all hosts, each with the seconds since its last heartbeat.

    Cards of embedded farms are left out: their command was killed, and nobody waits for them.
    """
    now_s = read_clock_s(session)
    return [
        (card, now_s - card.last_seen_at_s)
        for card in session.exec(select(CardRow).order_by(col(CardRow.host), col(CardRow.index)))
        if present_state(card, now_s, heartbeat_s) == CardState.LOST and not farm_of(card.worker)
    ]


def served(database: Database, heartbeat_s: float) -> list[str]:
    """Return the cards with a living worker, as ``id on host``, also from a database with an older
    schema.
    """
    silent_s = database_now() - CardRow.last_seen_at_s
    query = (
        select(CardRow.id, CardRow.host)
        .where(col(CardRow.state).in_((CardState.STARTING, CardState.IDLE)))
        .where(silent_s <= LOST_AFTER_HEARTBEATS * heartbeat_s)
        .order_by(col(CardRow.id))
    )
    with database.read() as session:
        return [f"{card_id} on {host}" for card_id, host in session.exec(query)]


def present_state(
    card: CardRow, now_s: float, heartbeat_s: float | None = None, *, busy: bool = False
) -> str:
    """Return the present state of a card: that of its row, or lost, or busy. ``heartbeat_s``:
    default: the setting.
    """
    heartbeat_s = heartbeat_s or settings().heartbeat_s
    if card.state not in (CardState.STARTING, CardState.IDLE):
        return card.state
    if now_s - card.last_seen_at_s > LOST_AFTER_HEARTBEATS * heartbeat_s:
        return CardState.LOST
    if card.state == CardState.STARTING:
        return card.state
    return CardState.BUSY if busy else CardState.IDLE


def _counts(session: Session, *which: Any) -> dict[tuple[str, str], int]:
    """Return (card id, state) -> number of matching items."""
    query = (
        select(Item.card_id, Item.state, func.count())
        .where(*which)
        .group_by(col(Item.card_id), col(Item.state))
    )
    return {(card_id, state): number for card_id, state, number in session.execute(query)}


def needs_fingerprint(database: Database, card_id: str, driver: str) -> bool:
    """True if the card has no sound fingerprint from this driver. Simulated cards need none."""
    with database.read() as session:
        card = session.get(CardRow, card_id)
        if card is None or card.is_simulated:
            return False
        fingerprint = sound_fingerprint(card.fingerprint)
    is_current = (fingerprint.get("version"), fingerprint.get("driver")) == (
        FINGERPRINT_VERSION,
        driver,
    )
    return not is_current or fingerprint.get("copy_bytes_per_s", 0) <= 0


def keep_fingerprint(database: Database, card_id: str, fingerprint: Mapping[str, Any]) -> None:
    with database.write() as session:
        if (card := session.get(CardRow, card_id)) is not None:
            card.fingerprint = dict(fingerprint)


# ---- the cards that a command uses


Say = Callable[[str], None]


def all_own_cards() -> list[Card]:
    """Return every card of this host and its CPU, including cards on which the farm cannot
    measure.
    """
    cards = discover(settings())
    if all(card.is_gpu for card in cards):
        cards.append(cpu_card(settings()))
    return cards


def own_cards(say: Say) -> list[Card]:
    """Return every card of this host on which the farm can measure. `say` reports the others."""
    cards = all_own_cards()
    usable = _usable(cards, say)
    if len(usable) < len(cards) and all(card.is_cpu for card in usable):
        say("The farm cannot measure on any GPU of this host; it uses the CPU.")
    return usable


def _usable(found: Sequence[Card], say: Say) -> list[Card]:
    for card in found:
        if card.refusal:
            say(f"Not usable: {card}: {card.refusal}")
    return [card for card in found if not card.refusal]


def kind_of_cards() -> str:
    """Return the kind of card that a job would use. If this host has only a CPU, the cards of its
    farm count too.
    """
    cards = [card for card in all_own_cards() if not card.refusal]
    if settings().broker_url and all(card.is_cpu for card in cards):
        with contextlib.suppress(FarmUnavailable), open_database().read() as session:
            cards += [as_card(view.card) for view in views(session, settings().heartbeat_s)]
    return choose_cards(cards, [])[0].kind


def chosen_own_cards(wanted: Sequence[str], say: Say) -> list[Card]:
    """Return the cards of this host that ``--card`` options name; by default, all cards of the most
    frequent model. Raises `NoSuchCard` with the reason if no card matches, or the farm cannot
    measure on the matching cards."""
    if not wanted:
        return choose_cards(own_cards(say), [])
    chosen = choose_cards(all_own_cards(), wanted)
    if chosen and all(card.refusal for card in chosen):
        step = "Choose another card; `farm cards` lists the cards."
        raise NoSuchCard(f"The farm cannot measure on {chosen[0]}: {chosen[0].refusal}.", step)
    return _usable(chosen, say)


def as_card(row: CardRow) -> Card:
    """Convert a row of the database to a card."""
    return Card(
        id=row.id,
        kind=row.kind,  # type: ignore[arg-type]
        model=row.model,
        memory_bytes=row.memory_bytes,
        driver=row.driver,
        index=row.index,
        host=row.host,
    )


def serving_cards(database: Database, wanted: Sequence[str]) -> list[Card]:
    """Return the farm's cards that a worker serves now. ``wanted``: the ``--card`` options, which
    are checked. Raises `NoWorker`, which names the served cards, if no worker serves any card or a
    wanted one."""
    with database.read() as session:
        states = {
            as_card(view.card): str(view.state) for view in views(session, settings().heartbeat_s)
        }
    serving = [card for card, state in states.items() if state in ("idle", "busy")]
    names = "; ".join(str(card) for card in serving[:8])
    for want in wanted:
        matches = matching_cards(list(states), want)
        if matches and not any(card in serving for card in matches):
            state = states[matches[0]]
            step = {
                "starting": "Its worker is starting: try again in a moment",
                "draining": f"Give the card work again with `farm cards resume {matches[0].id}`",
                "quarantined": f"Examine the card, then run `farm cards release {matches[0].id}`",
            }.get(state, f"Start `farm worker` on {matches[0].host or 'its host'}")
            raise NoWorker(
                f"No worker accepts items for the card '{want}': {matches[0]} is {state}.",
                f"{step}{f', or choose one of these cards: {names}' if names else ''}.",
            )
    if not serving and (drained := [card for card, state in states.items() if state == "draining"]):
        named = "; ".join(map(str, drained[:8]))
        if len(drained) > 8:
            named += f" and {len(drained) - 8} more"
        kept = sum(state == "quarantined" for state in states.values())
        if kept:
            named += f"; {kept} more are quarantined"
        raise NoWorker(
            f"Every card with a worker is draining and accepts no new items: {named}.",
            f"Give a card work again: `farm cards resume {drained[0].id}`.",
        )
    if not serving:
        raise NoWorker(
            "This farm has no running worker.", "Start `farm worker` on each host with cards."
        )
    return serving
