"""The workers of a host renew their leases together, and each alone if the others cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from sqlalchemy import event
from sqlmodel import select

from farm.settings import Settings, settings
from farm.store import tables
from farm.store.database import Database
from farm.store.tables import Item
from tasks.heartbeats import HostHeartbeat
from tasks.watchdog import SILENT_AFTER_S, Pulse
from tests.planned import claim, items_of, plan, register

BEAT_ONCE = """
import os, time
from farm.settings import settings
from farm.store.database import Database
from tasks.heartbeats import HostHeartbeat
from tasks.watchdog import Pulse
beats = HostHeartbeat("holder-1", settings(), Pulse())
beats.beat(Database(settings().database), [int(os.environ["ITEM"])])
print("noted", flush=True)
time.sleep(600)
"""


class Host:
    """Two workers of a host, each with an item whose lease has just ended."""

    def __init__(self, database: Database) -> None:
        self.database = database
        cards = register(database, 0, 1)
        self.items = [items_of(database, plan(database, [card]))[0].id for card in cards]
        self.pulse = Pulse()
        self.workers = [
            HostHeartbeat(f"holder-{number}", settings(), self.pulse) for number in (0, 1)
        ]
        self.end_leases()

    def end_leases(self) -> None:
        with self.database.read() as session:
            items = session.exec(select(Item).order_by(Item.id)).all()
        for number, item in enumerate(items):
            claim(self.database, item, f"holder-{number}", lease_s=-1, max_attempts=100)
        with self.database.write() as session:
            for card in session.exec(select(tables.CardRow)):
                card.last_seen_at_s = 0.0

    def beat(self, number: int) -> int:
        """Return the number of statements."""
        said: list[str] = []

        def note(_connection, _cursor, statement, *_):
            said.append(statement)

        event.listen(self.database.engine, "before_cursor_execute", note)
        self.workers[number].beat(self.database, [self.items[number]])
        event.remove(self.database.engine, "before_cursor_execute", note)
        return sum(one.startswith(("UPDATE", "WITH")) for one in said)

    def later(self, periods: float) -> None:
        """Let the notes be so old."""
        path = self.workers[0].path
        notes = json.loads(path.read_text())
        notes["begun_at_s"] -= periods * settings().beat_s
        for one in notes["workers"].values():
            one["at_s"] -= periods * settings().beat_s
            one["renewed_at_s"] -= periods * settings().beat_s
        path.write_text(json.dumps(notes))

    def renewed(self) -> list[tuple[bool, bool]]:
        """For each worker: whether its lease lasts, and whether its card was seen."""
        with self.database.read() as session:
            items = session.exec(select(Item).order_by(Item.id)).all()
            cards = session.exec(select(tables.CardRow).order_by(tables.CardRow.id)).all()
        lasting = [item.lease_until_s > (item.started_at_s or 0.0) + 30 for item in items]
        return list(zip(lasting, [card.last_seen_at_s > 0 for card in cards], strict=True))


@pytest.fixture
def host(any_database, monkeypatch, tmp_path):
    changes = {
        "STATE_DIR": tmp_path / "state",
        "LOCK_DIR": tmp_path,
        "DATABASE_URL": url_of(any_database),
    }
    for name, value in changes.items():
        monkeypatch.setenv(f"FARM_{name}", str(value))
    settings.cache_clear()
    yield Host(any_database)
    settings.cache_clear()


def url_of(database: Database) -> str:
    return database.url.render_as_string(hide_password=False)


BOTH, FIRST, SECOND = (
    [(True, True)] * 2,
    [(True, True), (False, False)],
    [(False, False), (True, True)],
)


def test_one_worker_renews_the_leases_of_all_in_one_transaction_per_period(host):
    assert [host.beat(0), host.beat(1)] == [2, 2], "nobody knew of the second one"
    assert host.renewed() == BOTH
    for number in (0, 1):
        host.end_leases()
        host.later(1)
        assert [host.beat(number), host.beat(1 - number)] == [2, 0]
        assert host.renewed() == BOTH


def test_a_worker_whose_leases_nobody_renews_does_it_alone(host):
    host.beat(0)
    host.beat(1)
    host.end_leases()
    host.later(1)
    notes = json.loads(host.workers[0].path.read_text())
    # The first worker hangs between taking the turn and its transaction.
    host.workers[0].path.write_text(
        json.dumps({**notes, "begun_at_s": notes["begun_at_s"] + settings().beat_s})
    )
    assert host.beat(1) == 0, "it was renewed a period ago"
    host.later(0.5)
    assert host.beat(1) == 2
    assert host.renewed() == SECOND


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "{",
        "[]",
        '{"workers": {"holder-9": {}}, "begun_at_s": 0}',
        '{"workers": {"holder-0": {}}, "begun_at_s": 0}',
    ],
)
def test_notes_that_cannot_be_read_stop_no_heartbeat(host, damaged):
    host.workers[0].path.parent.mkdir(exist_ok=True)
    host.workers[0].path.write_text(damaged)
    assert host.beat(0) == 2
    assert host.renewed() == FIRST


def test_a_worker_that_hangs_in_a_transaction_stops_no_other(host):
    if host.database.engine.dialect.name == "sqlite":
        pytest.skip("SQLite has one writer")
    host.beat(0)
    host.beat(1)
    host.end_leases()
    host.later(1)
    with host.database.write() as session:
        session.exec(
            select(tables.CardRow).where(tables.CardRow.id == "SIM-1").with_for_update()
        ).one()
        session.exec(select(Item).where(Item.id == host.items[1]).with_for_update()).one()
        host.beat(0)
    assert host.renewed() == FIRST


def test_the_leases_of_a_killed_worker_end(host):
    script = [sys.executable, "-c", BEAT_ONCE]
    environment = {**os.environ, "ITEM": str(host.items[1])}
    with subprocess.Popen(script, env=environment, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "noted\n"
        host.beat(0)
        host.end_leases()
        host.later(1)
        host.beat(0)
        assert host.renewed() == BOTH, "it lives"
        worker.kill()
    host.end_leases()
    host.later(1)
    host.beat(0)
    assert host.renewed() == FIRST


def test_a_worker_whose_main_loop_hangs_loses_its_leases(host):
    host.beat(0)
    host.beat(1)
    host.end_leases()
    host.later(1)
    host.pulse.silent_s = SILENT_AFTER_S
    assert host.beat(0) == 0
    host.pulse.silent_s = 0.0
    host.later(1)  # its last note is old
    assert host.beat(1) == 2
    assert host.renewed() == SECOND


def test_workers_of_different_databases_are_apart(tmp_path):
    one, other = (
        HostHeartbeat(
            "a",
            Settings(state_dir=tmp_path, database_url=f"sqlite:///{tmp_path}/{name}.db"),
            Pulse(),
        )
        for name in ("one", "other")
    )
    assert one.path != other.path
