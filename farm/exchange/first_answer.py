"""Which database answers a query: the user's own one, or the packaged readings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sqlmodel import Session

from farm.errors import Ambiguous, FarmError, NoDatabase, NoReadings, UnsupportedModel, UsageError
from farm.exchange.packaged import packaged_database, packaged_files
from farm.store.database import Database, open_database

Answer = TypeVar("Answer")


def first_answer(
    ask: Callable[[Session], Answer],
    knows: Callable[[Answer], bool] = lambda _: True,
    say: Callable[[str], None] = lambda _: None,
    database: Database | None = None,
) -> Answer:
    """Query the user's own database; if it has no matching readings, query the packaged readings
    and `say` so. `knows` is True for an answer that is based on readings. With `database`, query
    only this one. Raises a `FarmError` if no query has an answer (see `_joined_error`), or if the
    own database cannot be read."""
    if database is not None:
        with database.read() as session:
            return ask(session)
    files = packaged_files()
    problem: FarmError | None = None
    answers: list[Answer] = []
    try:
        with open_database().read() as session:
            answers.append(ask(session))
        if not files or knows(answers[0]):
            return answers[0]
    except (NoDatabase, UsageError) as error:  # no database yet, or no such operator or card in it
        if not files or isinstance(error, Ambiguous):
            raise
        problem = error
    try:
        with packaged_database().read() as session:
            answers.append(ask(session))
        if knows(answers[-1]):
            say("Using the packaged readings: your own database has no readings for this.")
            return answers[-1]
    except UsageError as error:
        problem = _joined_error(problem, error)
    if answers:
        return answers[0]
    assert problem is not None
    raise problem


def _joined_error(own: FarmError | None, packaged: FarmError) -> FarmError:
    """Choose the error to raise if neither the own database nor the packaged readings have an
    answer.
    """
    from farm.store.query import NO_READINGS

    came_further = (
        (UnsupportedModel,) if isinstance(own, NoReadings) else (NoReadings, UnsupportedModel)
    )
    knows_more = isinstance(packaged, came_further)  # it has that card or operator
    if not isinstance(own, UsageError) or own.next_step == NO_READINGS or knows_more:
        return packaged
    suggests = ["Did you mean" in error.next_step for error in (own, packaged)]
    if own.message != packaged.message or suggests[0] or own.next_step == packaged.next_step:
        return own
    if suggests[1]:
        return packaged
    return UsageError(
        own.message,
        f"{own.next_step} In the packaged readings, "
        f"{packaged.next_step[:1].lower()}{packaged.next_step[1:]}",
    )
