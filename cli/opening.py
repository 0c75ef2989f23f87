"""The database and the cards of a command. Lines for people go to stderr."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from cli.output import say

if TYPE_CHECKING:
    from sqlmodel import Session

    from farm.devices.device import Card
    from farm.store.database import Database

Answer = TypeVar("Answer")


def open_database() -> Database:
    """See `farm.store.database.open_database`."""
    from farm.store.database import open_database

    return open_database()


@contextlib.contextmanager
def upgraded_database() -> Iterator[Database]:
    """The database of the settings, with this program's schema; created if it does not exist."""
    from farm.settings import settings
    from farm.store.database import Database

    database = Database(settings().database)
    try:
        database.upgrade()
        yield database
    finally:
        database.close()


def own_cards() -> list[Card]:
    """See `farm.jobs.cards.own_cards`."""
    from farm.jobs.cards import own_cards

    return own_cards(say)


def chosen_own_cards(wanted: Sequence[str]) -> list[Card]:
    """See `farm.jobs.cards.chosen_own_cards`."""
    from farm.jobs.cards import chosen_own_cards

    return chosen_own_cards(wanted, say)


def first_that_knows(ask: Callable[[Session], Answer], knows: Callable[[Answer], bool] = lambda _: True) -> Answer:
    """See `farm.exchange.packaged.first_answer`."""
    from farm.exchange.packaged import first_answer

    return first_answer(ask, knows, say)
