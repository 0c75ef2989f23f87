"""A reading that the database could not take waits on disk, and is accepted or fenced out later."""

from __future__ import annotations

import pytest

from farm.errors import DatabaseUnreachable
from farm.spool import Spool
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
