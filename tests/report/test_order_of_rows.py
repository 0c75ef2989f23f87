"""No figure depends on the order in which a database finds the rows of a query: a sum of the same
numbers in another order has other last digits."""

import pytest
from sqlmodel import delete

from farm.report.card_spread import card_spread
from farm.report.compared_side import _means_of_readings
from farm.store import tables
from farm.store.query import parse
from farm.verdict import job_results
from tests.report import rows
from tests.report.test_report import built, large_sweep
from tests.statements import rows_in_order

SUBJECTS = ("a-", "b-", "c-", "d-", "e-")
TIMES_US = (0.1, 0.2, 0.3)
assert sum(TIMES_US) != sum(reversed(TIMES_US))


def store(database, numbers):
    """Store the readings of five tuples on two cards in an order; their ids are always the same."""
    with database.write() as session:
        session.exec(delete(tables.ReadingRow))
        for number in numbers:
            for subject in SUBJECTS:
                for card, slower in ((rows.CARD, 1.0), (rows.OTHER_CARD, 1.1)):
                    time_us = TIMES_US[number] * slower
                    id_ = f"{subject}{card[4:8]}{number}"
                    rows.reading(session, subject, time_us, time_us / 3, card, id=id_)


@pytest.fixture
def stored(any_database):
    with any_database.write() as session:
        rows.ground(session)
        for subject in SUBJECTS:
            assert rows.operator(session, subject[0], "") == subject
    return any_database


def figures(database):
    with database.read() as session:
        spread = card_spread(session, "NVIDIA H200")
        means = _means_of_readings(session, parse(["card=H200"]))
    return spread, means


def test_means_and_spreads_do_not_depend_on_the_order_of_readings(stored):
    results = []
    for numbers in ((0, 1, 2), (2, 1, 0)):
        store(stored, numbers)
        for order in (0, 1):
            with rows_in_order(stored, order):
                results.append(figures(stored))
    spread, means = results[0]
    assert (spread.keys(), len(means)) == ({"time", "energy"}, len(SUBJECTS))
    assert all(result == results[0] for result in results)


def test_the_sum_of_a_large_sweep_does_not_depend_on_the_order_of_its_items(
    any_database, monkeypatch
):
    job_id = large_sweep(any_database)
    monkeypatch.setattr(job_results, "MOST_TUPLES", 4)
    monkeypatch.setattr(job_results, "IN_BATCH", 3)
    documents = []
    for order in (0, 1):
        with rows_in_order(any_database, order):
            documents.append(built(any_database, job_id).to_json())
    assert documents[0] == documents[1]
