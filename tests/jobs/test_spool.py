"""A reading that the database could not take waits on disk, and is accepted or fenced out later."""

from __future__ import annotations

import json
import os
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
        held,
        READING,
        card_id="SIM-0",
        software_id=items_of(any_database, held.job_id)[0].subject_key.split(":")[2],
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


def test_a_file_of_an_earlier_version_with_another_field_is_read(any_database, held, tmp_path):
    spool = Spool(tmp_path / "spool")
    path = spool.keep(held, READING, card_id="SIM-0", software_id=SOFTWARE.id)
    kept = json.loads(path.read_text())
    assert kept["claim"]["subject"]["id"] == held.work.subject.id
    kept["claim"]["short_name"] = "Conv2d"
    path.write_text(json.dumps(kept))
    (closed,) = spool.flush(any_database, "SIM-0")
    assert closed.accepted


def test_it_stays_on_disk_while_the_database_is_away(any_database, held, tmp_path):
    spool = Spool(tmp_path / "spool")
    spool.keep(held, READING, card_id="SIM-0", software_id="s")
    away = Database(f"sqlite:///{tmp_path / 'empty.db'}")
    with pytest.raises(DatabaseUnreachable):
        spool.flush(away, "SIM-0")
    away.close()
    assert len(spool) == 1


def _not_utf8(path):
    path.write_bytes(b'{"card_id": "\xff"}')


def _nested(path):
    path.write_text("[" * 100_000)


def _not_permitted(path):
    if os.geteuid() == 0:
        pytest.skip("root may read every file")
    path.write_text("{}")
    path.chmod(0)


def _a_claim_of_another_program(path):
    data = json.loads(next(path.parent.glob("*.json")).read_text())
    data["claim"]["protocol"] = {"launch": "by hand"}
    path.write_text(json.dumps(data))


UNREADABLE = {
    "not JSON": lambda path: path.write_text("{"),
    "not UTF-8": _not_utf8,
    "nested too deep": _nested,
    "a folder": lambda path: (path / "within").mkdir(parents=True),
    "a pipe": os.mkfifo,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "without permission": _not_permitted,
    "of another program": _a_claim_of_another_program,
}


@pytest.mark.parametrize("make", UNREADABLE.values(), ids=UNREADABLE)
def test_a_file_that_cannot_be_read_is_put_aside_and_keeps_no_other_waiting(
    any_database, held, tmp_path, caplog, make
):
    spool = Spool(tmp_path / "spool")
    spool.keep(held, READING, card_id="SIM-0", software_id=SOFTWARE.id)
    make(spool.folder / "0-first.json")
    (closed,) = spool.flush(any_database, "SIM-0")
    assert closed.accepted
    assert len(spool) == 0
    assert spool.put_aside() == [spool.folder / "unreadable" / "0-first.json"]
    assert spool.flush(any_database, "SIM-0") == []
    assert sum("0-first.json cannot be read" in line.getMessage() for line in caplog.records) == 1


def test_a_file_that_cannot_be_moved_either_keeps_no_other_waiting(
    any_database, held, tmp_path, caplog
):
    spool = Spool(tmp_path / "spool")
    spool.keep(held, READING, card_id="SIM-0", software_id=SOFTWARE.id)
    (spool.folder / "0-first.json").write_text("{")
    spool.unreadable.write_text("a file in the place of the folder")
    (closed,) = spool.flush(any_database, "SIM-0")
    assert closed.accepted
    assert spool.flush(any_database, "SIM-0") == []
    assert (
        sum(
            "0-first.json cannot be moved or deleted" in line.getMessage()
            for line in caplog.records
        )
        == 1
    )
    assert spool.items() == {0}


def test_a_reading_that_the_database_refuses_is_put_aside_and_keeps_no_other_waiting(
    any_database, held, tmp_path
):
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
    (spool.folder / f"{2**64}-old.json").write_text("{}")  # no id that a database could have
    assert spool.items() == {held.item_id}
    spool.flush(any_database, "SIM-0")
    assert spool.items() == set()


def test_two_that_empty_it_at_once_write_each_reading_once(any_database, held, tmp_path):
    """The worker's heartbeat does, and its pool process before it claims an item that waits
    there.
    """
    spool = Spool(tmp_path / "spool")
    spool.keep(held, READING, card_id="SIM-0", software_id=SOFTWARE.id)
    with ThreadPoolExecutor(8) as pool:
        closed = [
            one
            for found in pool.map(lambda _: spool.flush(any_database, "SIM-0"), range(8))
            for one in found
        ]
    assert [one.accepted for one in closed] == [True]
    assert items_of(any_database, held.job_id)[0].repeated == 0
