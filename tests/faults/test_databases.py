"""The database restarts, goes away, or is full: the farm waits for it, and no reading is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from functools import partial

import pytest
import redis
from sqlalchemy import event

from farm.errors import DatabaseUnreachable
from farm.jobs import items
from farm.jobs.spool import Spool
from farm.store.database import Database
from farm.types.details import Details
from tests import slow
from tests.clock import hide_server_clock, set_server_clock_back
from tests.disks import SmallDisk, why_not
from tests.farms import SharedFarm
from tests.faults.conftest import Hurt
from tests.planned import READING, claim, complete, items_of, plan, readings, register
from tests.servers import PostgresServer


@pytest.fixture(scope="module")
def postgres():
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="module")
def on_postgres(tmp_path_factory, postgres):
    def new_database():
        postgres.start()
        return postgres.new_database()

    with contextlib.closing(
        SharedFarm(lambda: tmp_path_factory.mktemp("farm"), 2, new_database)
    ) as shared:
        yield shared


@pytest.fixture
def pair(on_postgres):
    return Hurt(*on_postgres.whole())


@pytest.fixture
def small_disk(tmp_path):
    if reason := why_not():
        pytest.skip(reason)
    with SmallDisk(tmp_path / "disk") as disk:
        yield disk


@slow.FAULT
def test_postgresql_is_restarted_and_crashes_during_a_job(pair, postgres):
    job_id = pair.submit(["slow"] * 10, 0.4)
    pair.done(job_id)
    postgres.restart()
    pair.farm.wait_for(lambda: _answers(pair))
    pair.done(job_id, 3)
    postgres.kill()
    postgres.start()
    pair.farm.wait_for(lambda: _answers(pair))
    assert pair.settled(job_id) == {"done": 10}


@pytest.mark.parametrize(
    "away_s", [pytest.param(6.0, marks=slow.FAULT), pytest.param(60.0, marks=slow.SOAK)]
)
def test_a_reading_that_ends_while_the_database_is_away_is_kept(pair, postgres, away_s):
    job_id = pair.submit(["slow"] * 6, 1.0)
    item = pair.in_work(job_id)
    postgres.stop()
    time.sleep(away_s)  # longer than a lease, and than a card may be unseen
    postgres.start()
    pair.farm.wait_for(lambda: _answers(pair))
    assert pair.settled(job_id) == {"done": 6}
    (kept,) = [one for one in pair.farm.items(job_id) if one.id == item.id]
    assert (kept.attempts, kept.repeated) == (1, 0), (
        "it was read once, before the database came back"
    )


@slow.FAULT
def test_a_database_that_was_frozen_for_25_s_delays_repairs_no_longer_than_that(pair, postgres):
    """No session gets an error. All leases have ended by then, and all cards look lost."""
    job_id = pair.submit(["slow"] * 12, 1.0)
    item = pair.in_work(job_id)
    with postgres.frozen():
        time.sleep(25)
        with redis.Redis.from_url(pair.broker.redis_url) as client:
            client.flushall()
    assert pair.settled(job_id, 60) == {"done": 12}
    found = {one.id: one for one in pair.farm.items(job_id)}
    assert (found[item.id].attempts, found[item.id].repeated) == (1, 0)
    assert {(one.attempts, one.repeated) for one in found.values()} == {(1, 0)}, (
        "no card was taken for lost"
    )


@slow.FAULT
def test_a_database_that_takes_no_writes_is_waited_for(start, postgres):
    """Like a standby, or a server closed by its operator. One card only: a peer would take over
    items without lease.
    """
    postgres.start()
    hurt = start(database_url=postgres.new_database())
    job_id = hurt.submit(["slow"] * 6, 0.5)
    item = hurt.in_work(job_id)
    _writes(postgres, "off")
    time.sleep(6)  # longer than a lease
    assert hurt.messages() >= 4, "nobody can be told the outcome, so none is begun"
    _writes(postgres, "on")
    assert hurt.settled(job_id) == {"done": 6}
    (kept,) = [one for one in hurt.farm.items(job_id) if one.id == item.id]
    assert (kept.attempts, kept.repeated) == (1, 0)


@slow.FAULT
def test_a_worker_that_only_waits_for_the_database_stops_at_once(pair, postgres):
    job_id = pair.submit(["slow"] * 16, 0.5)  # enough for a database that stops slowly
    pair.done(job_id)
    postgres.stop()
    time.sleep(
        3
        # each card's worker ends its item and waits; it logs that only if it did not wait a minute ago
    )
    supervisor = pair.supervisor()
    supervisor.terminate()
    supervisor.wait(15)
    postgres.start()
    pair.farm.start_again()
    assert pair.settled(job_id) == {"done": 16}
    # Of each card at most the item at whose claim or reading the database went away.
    assert sum(item.attempts - 1 + item.repeated for item in pair.farm.items(job_id)) <= 2


@slow.FAULT
def test_a_database_that_refuses_its_user_is_told_once_and_a_worker_that_starts_waits_for_it(
    pair, postgres
):
    _writes(postgres, "off")
    pair.farm.wait_for(lambda: pair.said().count("has no heartbeat: The database") == 2)
    pair.worker().kill()  # its supervisor starts another one
    pair.farm.wait_for(lambda: "does not start: The database" in pair.said())
    time.sleep(3)
    told = [line.partition("  ")[2] for line in pair.said().splitlines() if "The database" in line]
    assert len(told) == pair.said().count("is read-only") <= 2 + 1 + 1, (
        "of two cards, the new worker, the reconciler"
    )
    _writes(postgres, "on")
    pair.farm.wait_for(
        lambda: pair.said().count("it works again") == len(told) - 1
    )  # not of the killed worker
    pair.farm.wait_for(lambda: len(pair.farm.alive()) == 2)
    assert pair.settled(pair.submit(["", ""])) == {"done": 2}


def _writes(postgres, allowed):
    with postgres.connect() as connection:
        connection.execute("SET default_transaction_read_only = off")
        connection.execute(
            f"ALTER SYSTEM SET default_transaction_read_only = {'off' if allowed == 'on' else 'on'}"
        )
        connection.execute("SELECT pg_reload_conf()")


def _answers(hurt):
    try:
        return hurt.farm.database.schema_version() is not None
    except DatabaseUnreachable:
        return False


@slow.FAULT
@pytest.mark.parametrize("spool_on", ["another disk", "the same disk"])
def test_a_full_disk_loses_no_reading(small_disk, start, tmp_path, spool_on):
    state = (small_disk.path if spool_on == "the same disk" else tmp_path) / "state"
    hurt = start(
        cards=2, database_url=f"sqlite:///{small_disk.path / 'farm.db'}", FARM_STATE_DIR=str(state)
    )
    spool = Spool(state / "spool")
    job_id = hurt.submit(["slow"] * 6, 1.0)
    item = hurt.in_work(job_id)
    with hurt.farm.database.engine.connect() as connection:
        # Its write-ahead log is written over from the beginning where it can be: now that wants
        # room as well.
        connection.exec_driver_sql("COMMIT")
        assert connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").one()[0] == 0
    small_disk.fill()
    if spool_on == "the same disk":
        hurt.farm.wait_for(lambda: "waits in memory" in hurt.said())
        assert len(spool) == 0
    else:
        hurt.farm.wait_for(lambda: len(spool) > 0)
    done = sum(one.state == "done" for one in hurt.farm.items(job_id))
    time.sleep(6)  # longer than a lease, and than a card may be unseen
    assert sum(one.state == "done" for one in hurt.farm.items(job_id)) == done, (
        "it is full, so nothing goes on"
    )
    small_disk.make_room()
    assert hurt.settled(job_id) == {"done": 6}
    assert len(spool) == 0
    (kept,) = [one for one in hurt.farm.items(job_id) if one.id == item.id]
    # Its lease ended long ago: whoever comes first once there is room, this reading or a peer, gets
    # the item.
    assert kept.attempts - 1 == kept.repeated <= 1


def test_a_file_that_may_not_grow_sends_readings_to_the_spool_and_loses_none(sqlite_url, tmp_path):
    database = Database(sqlite_url)
    database.upgrade()
    (card,) = register(database, 0)
    job_id = plan(database, [card], number=3)
    first, second, _ = items_of(database, job_id)
    held = [claim(database, first, "a"), claim(database, second, "b")]
    with database.engine.connect() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()

    full = Database(sqlite_url)

    @event.listens_for(full.engine, "connect")
    def _limit(connection, _record):
        connection.execute(f"PRAGMA max_page_count={pages}")

    spool = Spool(tmp_path / "spool")
    big = dataclasses.replace(READING, details=Details(other={"filler": "x" * 200_000}))
    software_id = items_of(database, job_id)[0].subject_key.split(":")[2]
    for one in held:
        with pytest.raises(DatabaseUnreachable, match="full"):
            items.complete(full, one, big, card_id=card, software_id=software_id)
        spool.keep(one, big, card_id=card, software_id=software_id)
    assert (len(spool), readings(database)) == (2, 0)
    assert all(closed.accepted for closed in spool.flush(database, card))
    assert (len(spool), readings(database)) == (0, 2)
    assert complete(database, claim(database, items_of(database, job_id)[2]), card).accepted
    full.close()
    database.close()


@pytest.fixture
def set_back(pair, postgres):
    name = pair.farm.database.url.database
    with postgres.connect(name) as connection:
        hide_server_clock(connection)
        # The farm's sessions begin again, with this clock.
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        pair.farm.wait_for(lambda: _answers(pair))
        yield partial(set_server_clock_back, connection)


@slow.FAULT
def test_the_clock_of_the_database_is_set_back_by_an_hour(pair, set_back):
    """While one group measures, others are put off, and single items wait."""
    groups = pair.submit(["slow"] * 3, 1.0, cards=2)
    alone = pair.submit(["slow"] * 6, 0.5)
    pair.in_work(groups)
    set_back(3600)
    assert pair.settled(groups) == {"done": 3}
    assert pair.settled(alone) == {"done": 6}
    items = [*pair.farm.items(groups), *pair.farm.items(alone)]
    assert {(item.attempts, item.repeated) for item in items} == {(1, 0)}


STEPPING = """
import os, time
_real = time.time
time.time = lambda: _real() + float(open(os.environ["CLOCK_STEP"]).read() or 0)
"""


@slow.FAULT
def test_the_clock_of_a_host_steps(start, tmp_path):
    """Leases, heartbeats and losses are on the database's clock, so no host's own clock decides
    anything.
    """
    folder = tmp_path / "clock"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(STEPPING)
    step = folder / "step"
    step.write_text("0")
    hurt = start(cards=2, PYTHONPATH=str(folder), CLOCK_STEP=str(step))
    job_id = hurt.submit(["slow"] * 12, 0.5)
    hurt.done(job_id)
    for seconds in ("86400", "-86400"):
        step.write_text(seconds)
        time.sleep(1.5)
    assert hurt.settled(job_id) == {"done": 12}
    assert all((item.attempts, item.repeated) == (1, 0) for item in hurt.farm.items(job_id))
