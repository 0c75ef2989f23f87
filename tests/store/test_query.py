"""Filters select readings; a filter that cannot mean anything is refused."""

import pytest
from sqlmodel import col, select

from farm.errors import UsageError
from farm.store import tables
from farm.store.query import parse, select_readings
from tests.report import filled


@pytest.fixture
def flagged(any_database):
    """Three readings with the flags `starved`, `shared` and both; all others have none."""
    filled.fill(any_database)
    with any_database.write() as session:
        rows = session.exec(select(tables.ReadingRow).order_by(col(tables.ReadingRow.id))).all()
        for row, flags in zip(rows, (["starved"], ["shared"], ["shared", "starved"]), strict=False):
            row.flags = flags
            session.add(row)
        return any_database, len(rows)


def selected(database, *words):
    with database.read() as session:
        (conditions,) = select_readings(session, parse(words)).where()
        return len(session.exec(select(tables.ReadingRow.id).where(*conditions)).all())


def test_a_filter_of_flags_takes_a_list(flagged):
    database, total = flagged
    assert selected(database, "flag=starved") == 2
    assert selected(database, "flag=starved,shared") == 3
    assert selected(database, "flag=starved", "flag=shared") == 1
    assert selected(database, "flag!=starved") == total - 2
    assert selected(database, "flag!=starved,shared") == total - 3


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("flag<rough", "the values of flag have no order"),
        ("flag>=rough", "the values of flag have no order"),
        ("card<H200", "the values of card have no order"),
        ("time_us=20..10", "no value is in this range"),
        ("time_us=1..nan", "time_us needs a number, not 'nan'"),
        ("time_us>nan", "time_us needs a number, not 'nan'"),
        ("time_us=..10", "time_us needs a number, not ''"),
        ("flops=nan", "flops needs a whole number, not 'nan'"),
    ],
)
def test_a_filter_that_no_reading_can_match_is_refused(word, problem):
    with pytest.raises(UsageError, match=problem):
        parse([word])


def test_a_range_includes_its_ends():
    (condition,) = parse(["time_us=10..10"]).filters
    assert condition.holds(10.0)
    assert not condition.holds(10.1)
