"""Opening what a verb needs: the database with a matching schema, the cards of this host or of the farm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from cli.output import say

if TYPE_CHECKING:
    from sqlmodel import Session

    from farm.devices.device import Card
    from farm.errors import FarmError
    from farm.store import tables
    from farm.store.database import Database

Answer = TypeVar("Answer")


def open_database() -> Database:
    """The farm's database.

    Raises:
        DatabaseUnreachable, SchemaMismatch, SettingsError: with what to do.
    """
    from farm.settings import settings
    from farm.store.database import Database

    database = Database(settings().database)
    database.check_schema()
    return database


def all_own_cards() -> list[Card]:
    """Every card of this host, its CPU included, and also those that refuse to be measured on."""
    from farm.devices.cpu import cpu_card
    from farm.devices.host import discover
    from farm.settings import settings

    found = discover(settings())
    if not any(card.kind in ("cpu", "simulated") for card in found):
        found.append(cpu_card(settings()))
    return found


def own_cards() -> list[Card]:
    """Every card of this host that can be measured on; says which cannot, and where only the CPU is left for it."""
    own = all_own_cards()
    usable = [card for card in own if not card.refusal]
    for card in own:
        if card.refusal:
            say(f"Left out: {card}: {card.refusal}")
    if len(usable) < len(own) and all(card.kind == "cpu" for card in usable):
        say("No GPU of this host can be measured on; its CPU is the card that is left.")
    return usable


def kind_of_cards() -> str:
    """The kind of card that a job would be measured on: of this host's or, where it has but a CPU, of its farm's."""
    from farm.errors import FarmUnavailable
    from farm.jobs import cards as registry
    from farm.requests.card_selection import choose_cards
    from farm.settings import settings

    there = [card for card in all_own_cards() if not card.refusal]
    if settings().broker_url and all(card.kind == "cpu" for card in there):
        with contextlib.suppress(FarmUnavailable), open_database().read() as session:
            there += [as_card(view.card) for view in registry.views(session, settings().heartbeat_s)]
    return choose_cards(there, [])[0].kind


def chosen_own_cards(wanted: Sequence[str]) -> list[Card]:
    """The cards of this host that ``--card`` options name; without any, all of the commonest model.

    Raises:
        NoSuchCard: nothing matches, or what matches cannot be measured on; says why.
    """
    from farm.errors import NoSuchCard
    from farm.requests.card_selection import choose_cards

    if not wanted:
        return choose_cards(own_cards(), [])
    chosen = choose_cards(all_own_cards(), wanted)
    usable = [card for card in chosen if not card.refusal]
    for card in chosen:
        if card.refusal:
            if not usable:
                raise NoSuchCard(f"{card} cannot be measured on: {card.refusal}.", "`farm cards` lists the others.")
            say(f"Left out: {card}: {card.refusal}")
    return usable


def as_card(row: tables.Card) -> Card:
    """A registered card in the words of `farm.devices`."""
    from farm.devices.device import Card

    return Card(
        id=row.id,
        kind=row.kind,  # type: ignore[arg-type]
        model=row.model,
        memory_bytes=row.memory_bytes,
        driver=row.driver,
        index=row.index,
        host=row.host,
    )


def first_that_knows(ask: Callable[[Session], Answer], knows: Callable[[Answer], bool]) -> Answer:
    """The answer of one's own database, or of the readings that come with the package where it knows none.

    Raises:
        FarmError: where neither has an answer (see `_of_both`), or where one's own cannot be read.
    """
    from farm.errors import Ambiguous, NoDatabase, UsageError
    from farm.exchange.packaged import database_of, packaged_files
    from farm.settings import settings

    files = packaged_files()
    problem: FarmError | None = None
    answer: Answer | None = None
    try:
        with open_database().read() as session:
            answer = ask(session)
        if not files or knows(answer):
            return answer
    except Ambiguous:
        raise
    except (NoDatabase, UsageError) as error:  # there is none yet, or it has no such operator or card
        if not files:
            raise
        problem = error
    try:
        with database_of(files, settings().state_dir / "packaged").read() as session:
            packaged = ask(session)
        if knows(packaged):
            say("From the readings that come with the package.")
            return packaged
    except UsageError as error:
        problem = _of_both(problem, error)
        packaged = None
    if answer is not None:
        return answer
    if packaged is not None:
        return packaged
    assert problem is not None
    raise problem


def _of_both(own: FarmError | None, packaged: FarmError) -> FarmError:
    """What to say where neither one's own database nor the package knows: what one's own lacks, and what there is."""
    from farm.errors import UsageError

    if not isinstance(own, UsageError) or own.next_step == "It has no readings at all.":
        return packaged
    if own.message != packaged.message or "Did you mean" in own.next_step:
        return own
    if "Did you mean" in packaged.next_step:
        return packaged
    if own.next_step == packaged.next_step:
        return own
    return UsageError(
        own.message, f"{own.next_step} In the package {packaged.next_step[:1].lower()}{packaged.next_step[1:]}"
    )
