"""Checks of the farm's database: does it answer, does its schema match this program, and are its
cards healthy?
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from sqlmodel import Session, and_, col, func, or_, select

from farm.errors import DatabaseUnreachable, FarmError, SchemaMismatch, SettingsError
from farm.jobs import cards
from farm.jobs.cards import CardStatus
from farm.settings import Settings
from farm.store import tables
from farm.store.database import Database, by_key, database_now, read_clock_s
from farm.store.tables import Item, ItemState, Job, JobState
from farm.types.format import plural
from tasks.doctor import Check, ok, problem, warning

#: Leases use the database's clock only, so skew does not affect them. It does affect logs,
#: certificates and graphs.
SKEW_WARNING_S = 2.0
SKEW_PROBLEM_S = 300.0


def database_checks(current: Settings) -> Iterator[Check]:
    """Check that the database answers; then check its schema, its clock and its cards."""
    try:
        database = Database(current.database)
    except FarmError as error:
        yield problem("database", error.message, error.next_step)
        return
    sqlite = database.engine.dialect.name == "sqlite"
    if database.missing:
        if current.broker_url or current.database_url:
            yield problem(
                "database",
                f"the database {database} does not exist",
                "Create it with `farm db upgrade`.",
            )
        else:
            yield ok("database", f"{database} does not exist yet; `farm run` creates it")
        return
    try:
        database.check_schema()
        with database.read() as session:
            begin_s = time.time()
            clock_s = read_clock_s(session)
            end_s = time.time()
            yield _where_the_database_is(current, str(database), sqlite, database.url)
            yield ok("schema", f"{database.schema_version()}, the schema that this program needs")
            yield from _writes(database)
            ahead_s = 0.0 if sqlite else (begin_s + end_s) / 2 - clock_s
            yield _clock(ahead_s, (end_s - begin_s) / 2)
            yield from card_checks(session, current)
    except (DatabaseUnreachable, SchemaMismatch, SettingsError) as error:
        name = "schema" if isinstance(error, SchemaMismatch) else "database"
        yield problem(name, error.message, error.next_step)
    finally:
        database.close()


def _writes(database: Database) -> Iterator[Check]:
    try:
        database.check_writes()
    except DatabaseUnreachable as error:
        yield problem("database", error.message, error.next_step)


def _where_the_database_is(current: Settings, shown: str, sqlite: bool, url: Any) -> Check:
    if sqlite and current.broker_url and not is_local(current.broker_url):
        message = f"{shown} is a file on this host, but the broker is on another host"
        step = (
            "The hosts of a farm share one PostgreSQL database: set FARM_DATABASE_URL to its URL."
        )
        return warning("database", message, step)
    is_remote = not sqlite and not _is_local_host(url.host or "")
    if is_remote and url.query.get("sslmode") != "verify-full":
        message = f"{shown} is on another host, and its certificate is not checked"
        step = "Add sslmode=verify-full and sslrootcert to FARM_DATABASE_URL (docs/operate.md)."
        return warning("database", message, step)
    return ok("database", shown)


def _clock(ahead_s: float, uncertain_s: float) -> Check:
    beyond_s = abs(ahead_s) - uncertain_s
    if beyond_s > SKEW_WARNING_S:
        way = "ahead of" if ahead_s > 0 else "behind"
        message = f"the clock of this host is {abs(ahead_s):.1f} s {way} the clock of the database"
        result = problem if beyond_s > SKEW_PROBLEM_S else warning
        return result(
            "clock", message, "Start a time service (chrony, systemd-timesyncd) on both hosts."
        )
    most_s = max(abs(ahead_s), uncertain_s, 0.001)
    return ok("clock", f"differs from the clock of the database by at most {most_s:.3f} s")


def card_checks(session: Session, current: Settings) -> Iterator[Check]:
    """Check the cards in the database: does a worker serve each card, and do all cards have the
    same software?
    """
    views = cards.views(session, current.heartbeat_s, silent=True)
    farms = {view.card.id: cards.farm_of(view.card.worker) for view in views}
    gone = {card_id for card_id, farm in farms.items() if cards.is_gone(farm, current.host)}
    present = [view for view in views if view.card.id not in gone]
    serving = [view for view in present if view.state in ("idle", "busy")]
    starting = sum(view.state == "starting" for view in present)
    for view in views:
        has_ended = view.card.id in gone or (view.state == "lost" and farms[view.card.id])
        yield from _card_check(view, bool(has_ended), current)
    if serving:
        hosts = len({view.card.host for view in serving})
        message = f"; {starting} more starting" if starting else ""
        here = f"{len(serving)} {plural('card', len(serving))} on {hosts} {plural('host', hosts)}"
        yield ok("cards", f"workers serve {here}{message}")
    elif starting:
        message = f"no worker is ready yet; {starting} {plural('worker', starting)} starting"
        yield warning("cards", message, "Run `farm doctor` again in a minute.")
    elif current.broker_url:
        yield warning(
            "cards", "no worker serves a card", "Start `farm worker` on a host with cards."
        )
    yield from _unserved_items(session, views)
    yield from _software_checks(session, [view.card for view in serving])


def _card_check(view: CardStatus, has_ended: bool, current: Settings) -> Iterator[Check]:
    """Report what is wrong with a card. ``has_ended``: the `farm run` that used it has ended."""
    card = view.card
    name = f"card {card.host}:{card.index}"
    look = f"Read the log of the worker on {card.host} (`journalctl -u farm-worker`)"
    if view.state == "quarantined":
        message = f"{card.id} is quarantined: {card.state_reason or 'no reason is stored'}"
        yield problem(name, message, _NEXT_STEPS[view.state].format(card))
    elif has_ended:
        yield warning(
            name,
            f"the `farm run` on {card.id} has ended unexpectedly; {view.waiting} of its items are "
            "not measured",
            "Run the same command again: it continues where it stopped.",
        )
    elif view.state == "lost":
        yield problem(
            name,
            f"{card.id} has sent no heartbeat for {view.seen_ago_s:.0f} s; {view.waiting} items "
            "wait for this card",
            f"{look}. If the card will not return, run `farm cards drain {card.id}`.",
        )
    elif view.state == "stopped" and card.state_reason:
        message = f"no worker serves {card.id}: {card.state_reason}"
        yield problem(name, message, f"{look}, and start `farm worker` again.")
    elif view.silent_s:
        restart = "Restart the worker"
        if current.deaf_after_s:
            restart = (
                f"The worker restarts by itself after {current.deaf_after_s:g} s "
                "(FARM_DEAF_AFTER_S)"
            )
        yield problem(
            name,
            f"{card.id} is idle and has taken no item for {view.silent_s:.0f} s, though "
            f"{view.waiting} items wait",
            f"{look} and check the broker. {restart}.",
        )
    elif view.state == "draining":
        yield warning(name, f"{card.id} is draining", _NEXT_STEPS[view.state].format(card))


_NEXT_STEPS = {
    "draining": "`farm cards resume {0.id}` gives it work again.",
    "quarantined": "Correct the cause, then run `farm cards release {0.id}` (docs/operate.md).",
}


def waiting_items(session: Session) -> dict[str, int]:
    """Return card id -> number of items of the shared farm that wait for it, or whose worker has
    gone.
    """
    abandoned = and_(col(Item.state) == ItemState.CLAIMED, col(Item.lease_until_s) < database_now())
    query = (
        select(Item.card_id, func.count())
        .join(Job, col(Job.id) == col(Item.job_id))
        .where(or_(col(Item.state).in_([ItemState.WAITING, ItemState.DEFERRED]), abandoned))
        .where(Job.farm == "", Job.state == JobState.OPEN)
    )
    return dict(session.execute(query.group_by(col(Item.card_id))).all())  # type: ignore[arg-type]


def _unserved_items(session: Session, views: Sequence[CardStatus]) -> Iterator[Check]:
    """Report items that no card can measure: no worker serves a card of their model and
    software.
    """
    waiting = waiting_items(session)
    kinds = by_key(lambda view: (view.card.model, view.card.software_id), views)
    for (model, _), alike in kinds.items():
        number = sum(waiting.get(view.card.id, 0) for view in alike)
        shared = [view for view in alike if not cards.farm_of(view.card.worker)]
        if not number or any(view.state in ("idle", "busy", "starting") for view in shared):
            continue
        states = ", ".join(f"{view.card.id} is {view.state}" for view in shared[:5])
        first = (shared or alike)[0]
        step = _NEXT_STEPS.get(first.state, "Start `farm worker` on {0.host}.").format(first.card)
        message = (
            f"no worker serves a card of model {model}, but {number} {plural('item', number)} "
            "must be measured there"
        )
        yield problem("cards", f"{message}: {states or 'a `farm run` uses the card'}", step)


def _software_checks(session: Session, serving: Sequence[Any]) -> Iterator[Check]:
    with_software = [card for card in serving if card.software_id]
    differ = False
    for model, alike in by_key(lambda card: card.model, with_software).items():
        groups = by_key(lambda card: card.software_id, alike)
        if len(groups) == 1:
            continue
        differ = True
        yield warning(
            "versions",
            f"the cards of model {model} run different software ({_differences(session, groups)})",
            "Readings of different software are not mixed, so each of these hosts measures "
            "everything: install the same versions on all hosts.",
        )
    if with_software and not differ:
        yield ok(
            "versions", "all cards of a card model have the same torch, CUDA, cuDNN and driver"
        )


def _differences(session: Session, groups: Mapping[str, Sequence[Any]]) -> str:
    """The versions in which the software of some cards differs, by host. ``groups``: id of a
    software -> its cards.
    """
    versions = {software_id: _versions(session, software_id) for software_id in groups}
    texts = []
    for software_id, alike in groups.items():
        words = [
            f"{field} {version}"
            for field, version in versions[software_id].items()
            if any(other[field] != version for other in versions.values())
        ]
        hosts = ", ".join(sorted({card.host for card in alike}))
        texts.append(f"{hosts}: {' '.join(words)}")
    return "; ".join(texts)


def _versions(session: Session, software_id: str) -> dict[str, str]:
    """The versions of a software. Its other fields are those of the first host that stored it."""
    row = session.get_one(tables.SoftwareRow, software_id)
    return {"torch": row.torch, "cuda": row.cuda, "cudnn": row.cudnn, "driver": row.driver}


def is_local(url: str) -> bool:
    """True if the URL of a broker names this host."""
    try:
        parts = urlsplit(url)
    except ValueError:  # the check of the broker reports this error
        return True
    return "+socket" in parts.scheme or _is_local_host(parts.hostname or "")


def _is_local_host(host: str) -> bool:
    return host in ("", "localhost", "::1") or host.startswith(("127.", "/"))
