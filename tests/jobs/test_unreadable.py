"""Damaged rows: the items that need them fail with the reason; all others go on."""

from __future__ import annotations

import json

import pytest

from farm.errors import Unreadable
from farm.jobs import closing, items, listing
from farm.jobs.items import Claim, Declined, DeclineReason
from farm.jobs.moving import move_items
from farm.report.report import build
from farm.store import tables
from tests.planned import claim, complete, items_of, plan, register

DEEP = "[" * 3000 + "]" * 3000


def write_raw(database, table, column, key, text):
    with database.engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE {table} SET {column} = ? WHERE id = ?", (text, key))


@pytest.fixture
def on_sqlite(database):
    """PostgreSQL takes no text that is no JSON, and nests no deeper than it can."""
    return database


@pytest.mark.parametrize("text", ["no json", DEEP, json.dumps({"another": "form"}), "[]", "null"])
def test_a_job_whose_request_cannot_be_read_ends_with_the_reason(on_sqlite, text):
    database = on_sqlite
    cards = register(database, 0, 1)
    job_id, other = plan(database, cards, number=2), plan(database, cards, number=1)
    write_raw(database, "job", "request", job_id, text)
    for item in items_of(database, job_id):
        refused = claim(database, item)
        assert isinstance(refused, Declined)
        assert refused.why is DeclineReason.REFUSED
    assert refused.closed.rounds == ((job_id, 1),)
    assert {(item.state, item.reason) for item in items_of(database, job_id)} == {
        ("failed", "rejected")
    }
    assert all("cannot be read" in item.message for item in items_of(database, job_id))
    with pytest.raises(Unreadable):
        closing.close_round(database, job_id, 1)
    closing.close_round(database, job_id, 1, failed="The job's request cannot be read")
    with database.read() as session:
        assert {row["id"]: row["state"] for row in listing.jobs(session, 9)} == {
            job_id: "done",
            other: "open",
        }
        with pytest.raises(Unreadable, match="cannot be read"):
            build(session, job_id)
    (item,) = items_of(database, other)
    assert isinstance(claim(database, item), Claim), "its neighbour is none the worse"


def test_work_moves_although_a_jobs_request_cannot_be_read(on_sqlite):
    cards = register(on_sqlite, 0, 1)
    job_id, other = plan(on_sqlite, cards[:1]), plan(on_sqlite, cards[:1])
    write_raw(on_sqlite, "job", "request", job_id, "no json")
    with on_sqlite.read() as session:
        peer = session.get_one(tables.CardRow, cards[1])
    moved = move_items(on_sqlite, cards[0], [peer])
    assert {item.id for item in items_of(on_sqlite, other)} <= set(moved)


@pytest.mark.parametrize("text", ["no json", DEEP])
def test_an_operator_that_cannot_be_read_is_refused(on_sqlite, text):
    (item,) = items_of(on_sqlite, plan(on_sqlite, register(on_sqlite, 0)))
    write_raw(on_sqlite, "operator", "spec", item.subject_id, text)
    refused = claim(on_sqlite, item)
    assert isinstance(refused, Declined)
    (item,) = items_of(on_sqlite, item.job_id)
    assert (item.state, item.reason) == ("failed", "rejected")
    assert closing.close_round(on_sqlite, item.job_id, 1).closing is closing.Closing.DONE


def test_a_reading_is_written_although_what_waits_for_it_cannot_be_read(on_sqlite):
    cards = register(on_sqlite, 0, 1)
    first = plan(on_sqlite, cards[:1])
    (item,) = items_of(on_sqlite, first)
    second = plan(on_sqlite, cards[1:], operators=[item.subject_id])
    held = claim(on_sqlite, item)
    (waiting,) = items_of(on_sqlite, second)
    assert claim(on_sqlite, waiting).why is DeclineReason.DEFERRED
    write_raw(on_sqlite, "job", "request", second, "no json")
    assert complete(on_sqlite, held, cards[0]).accepted
    (waiting,) = items_of(on_sqlite, second)
    assert waiting.state == "waiting", "its own claim says what is wrong with it"


def test_a_cancelled_item_whose_process_crashes_gives_its_claim_back_at_once(any_database):
    from farm.jobs import jobs

    cards = register(any_database, 0, 1)
    job_id = plan(any_database, cards[:1])
    (item,) = items_of(any_database, job_id)
    other = plan(any_database, cards[1:], operators=[item.subject_id])
    held = claim(any_database, item)
    (waiting,) = items_of(any_database, other)
    assert claim(any_database, waiting).why is DeclineReason.DEFERRED
    jobs.cancel(any_database, job_id)
    assert items.fail(any_database, held, "crashed", "its process is gone", again=True).woken == (
        waiting.id,
    )
    (item,), (waiting,) = items_of(any_database, job_id), items_of(any_database, other)
    assert (item.state, item.token, item.claim_key) == ("cancelled", "", None)
    assert waiting.state == "waiting"
