"""A reading that the database could not take waits on disk, and is accepted or fenced out later."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from farm.devices.simulated import SOFTWARE
from farm.errors import DatabaseUnreachable
from farm.jobs.spool import Spool
from farm.store.database import Database
from farm.store.tables import ItemState
from tests.planned import READING, claim, items_of, plan, readings, register


@pytest.fixture
def held(any_database):
    (card,) = register(any_database, 0)
    (item,) = items_of(any_database, plan(any_database, [card]))
    return claim(any_database, item, lease_s=-1)


def test_a_kept_reading_is_accepted_when_the_database_is_back(any_database, held, tmp_path):
    spool = Spool(tmp_path / "spool")
    spool.keep(
        held, READING, card_id="SIM-0", software_id=items_of(any_database, held.job_id)[0].subject_key.split(":")[2]
    )
    assert spool.flush(any_database, "another card") == []
    (closed,) = spool.flush(any_database, "SIM-0")
    assert closed.accepted
    assert len(spool) == 0
    assert items_of(any_database, held.job_id)[0].state == ItemState.DONE


def test_a_kept_reading_is_fenced_out_when_another_took_the_item(any_database, held, tmp_path):
    spool = Spool(tmp_path / "spool")
    spool.keep(held, READING, card_id="SIM-0", software_id="s")
    claim(any_database, items_of(any_database, held.job_id)[0], "another")
    (closed,) = spool.flush(any_database, "SIM-0")
    assert not closed.accepted
    assert (len(spool), readings(any_database)) == (0, 0)


def test_it_stays_on_disk_while_the_database_is_away(any_database, held, tmp_path):
    spool = Spool(tmp_path / "spool")
    spool.keep(held, READING, card_id="SIM-0", software_id="s")
    away = Database(f"sqlite:///{tmp_path / 'empty.db'}")
    with pytest.raises(DatabaseUnreachable):
        spool.flush(away, "SIM-0")
    away.close()
    assert len(spool) == 1


def test_a_file_that_is_not_a_reading_is_put_aside(any_database, tmp_path):
    spool = Spool(tmp_path / "spool")
    spool.folder.mkdir()
    (spool.folder / "1-x.json").write_text("{")
    assert spool.flush(any_database, "SIM-0") == []
    assert [path.name for path in spool.folder.iterdir()] == ["1-x.json.unreadable"]


def test_a_reading_that_the_database_refuses_is_put_aside_and_keeps_no_other_waiting(any_database, held, tmp_path):
    spool = Spool(tmp_path / "spool")
    refused = spool.keep(held, READING, card_id="SIM-0", software_id=SOFTWARE.id)
    data = json.loads(refused.read_text())
    data["reading"]["time_us"] = {}  # no number: nothing that PostgreSQL or SQLite could take
    (spool.folder / "0-first.json").write_text(json.dumps(data))
    (closed,) = spool.flush(any_database, "SIM-0")
    assert closed.accepted
    assert [path.name for path in spool.folder.iterdir()] == ["0-first.json.refused"]
    assert items_of(any_database, held.job_id)[0].state == ItemState.DONE


def test_a_file_of_another_name_is_no_reading(any_database, held, tmp_path):
    spool = Spool(tmp_path / "spool")
    spool.keep(held, READING, card_id="SIM-0", software_id="s")
    (spool.folder / "notes-old.json").write_text("{}")
    assert spool.items() == {held.item_id}
    spool.flush(any_database, "SIM-0")
    assert spool.items() == set()


def test_two_that_empty_it_at_once_write_each_reading_once(any_database, held, tmp_path):
    """The worker's heartbeat does, and its pool process before it claims an item that waits there."""
    spool = Spool(tmp_path / "spool")
    spool.keep(held, READING, card_id="SIM-0", software_id=SOFTWARE.id)
    with ThreadPoolExecutor(8) as pool:
        closed = [one for found in pool.map(lambda _: spool.flush(any_database, "SIM-0"), range(8)) for one in found]
    assert [one.accepted for one in closed] == [True]
    assert items_of(any_database, held.job_id)[0].repeated == 0
