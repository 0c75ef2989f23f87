"""What a card's pool process does with one message: against a real database, with its benchmark
process replaced.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import re
import signal
import tempfile
import threading
from types import SimpleNamespace

import pytest
from celery.exceptions import Ignore, Reject
from sqlalchemy import update

from farm.benchmark_process.client import BenchmarkProcess, CardReading
from farm.devices.device import Card
from farm.devices.simulated import SOFTWARE
from farm.errors import DatabaseUnreachable, Unmeasurable
from farm.jobs import cards, groups, items, jobs
from farm.jobs.spool import Spool
from farm.settings import settings
from farm.store.database import database_now
from farm.store.tables import Item
from farm.types.protocol import Protocol
from tasks import measure, queues
from tests.farms import store_operators
from tests.planned import READING, claim, complete, items_of, plan, readings, register, sweep

TASK = SimpleNamespace(send_event=lambda *_, **__: None)
CARD = Card(id="SIM-0", kind="simulated", model="a card", memory_bytes=0, host="here", index=0)


class Benchmark:
    """One that is ready at once, reads the same of everything, and counts what was asked of it."""

    card = CARD
    card_id = CARD.id
    unhealthy = ""

    def __init__(self):
        self.asked = []

    def wait_ready(self):
        self.asked.append("ready")
        return SOFTWARE

    def kill(self):
        pass

    def fingerprint(self):
        raise Unmeasurable("raised", "it is not asked for one here")

    def measure(self, request, **_):
        self.asked.append(request.subject.id)
        return CardReading(READING, SOFTWARE, CARD)


@pytest.fixture
def worker(any_database, tmp_path):
    register(any_database, 0)
    return measure.CardWorker(
        "SIM-0", "holder-0", any_database, Benchmark(), Spool(tmp_path / "spool"), SOFTWARE
    )


@pytest.fixture
def no_broker(monkeypatch):
    """What follows from an item is left to the reconciler."""
    monkeypatch.setattr(measure, "follow_up", lambda *_: None)


def test_a_reading_that_the_database_refuses_is_kept_and_told(worker, any_database, monkeypatch):
    (item,) = items_of(any_database, plan(any_database, ["SIM-0"]))
    held = claim(any_database, item, "holder-0")
    with monkeypatch.context() as patched:
        patched.setattr(items, "complete", refuse)
        with pytest.raises(ValueError, match="not this one"):
            worker._store(held, CardReading(READING, SOFTWARE, CARD))
    assert worker.spool.items() == {item.id}
    (closed,) = worker.spool.flush(any_database, "SIM-0")
    assert closed.accepted
    assert readings(any_database) == 1


def test_a_reading_that_waits_on_disk_is_written_before_its_item_is_claimed_again(
    worker, any_database, no_broker
):
    (item,) = items_of(any_database, plan(any_database, ["SIM-0"]))
    held = claim(any_database, item, "holder-0")  # the very holder: it may claim at once
    worker.spool.keep(held, READING, card_id="SIM-0", software_id=SOFTWARE.id)
    with pytest.raises(Ignore):
        measure.run_item(None, worker, item.id)
    assert len(worker.spool) == 0
    assert worker.benchmark.asked == ["ready"], "nothing is measured again"
    (item,) = items_of(any_database, item.job_id)
    assert (item.state, item.attempts, item.repeated, readings(any_database)) == ("done", 1, 0, 1)


@pytest.mark.parametrize("attempts_left", [1, 0])
def test_an_item_whose_reading_on_disk_cannot_be_read_is_measured_again_while_it_has_attempts(
    worker, any_database, no_broker, attempts_left
):
    (item,) = items_of(any_database, plan(any_database, ["SIM-0"]))
    for _ in range(settings().max_attempts - attempts_left):
        held = claim(any_database, item, "holder-0")
    worker.spool.keep(held, READING, card_id="SIM-0", software_id=SOFTWARE.id).write_bytes(b"\xff")
    status = measure.run_item(None, worker, item.id)["status"]
    (item,) = items_of(any_database, item.job_id)
    assert (status, item.state) == (("done", "done") if attempts_left else ("failed", "failed"))
    assert (item.reason, readings(any_database)) == (
        "" if attempts_left else "attempts_exhausted",
        attempts_left,
    )
    assert len(worker.spool) == 0


def test_a_database_that_is_away_while_an_item_is_declined_is_waited_for(
    worker, any_database, no_broker, monkeypatch
):
    (item,) = items_of(any_database, plan(any_database, ["SIM-0"]))
    with any_database.write() as session:
        session.execute(update(Item).values(attempts=settings().max_attempts))
    stored, outages = worker._stored, [DatabaseUnreachable("It is away.", "Start it.")]

    def read(item_id):
        if outages:
            raise outages.pop()
        return stored(item_id)

    monkeypatch.setattr(worker, "_stored", read)
    monkeypatch.setattr("farm.jobs.item_driver.time.sleep", lambda _: None)
    assert measure.run_item(None, worker, item.id)["reason"] == "attempts_exhausted"
    assert not outages


def test_a_card_in_quarantine_begins_no_process_for_its_messages(worker, any_database, no_broker):
    waiting = items_of(any_database, plan(any_database, ["SIM-0"], number=5))
    worker.benchmark.unhealthy = "a sum came out wrong"
    for item in waiting:
        with pytest.raises(Ignore):
            measure.run_item(None, worker, item.id)
    assert worker.benchmark.asked == ["ready"]
    assert all(item.attempts == 0 for item in items_of(any_database, waiting[0].job_id))
    # Released, it is checked anew.
    worker.benchmark.unhealthy = ""
    cards.resume(any_database, "SIM-0", quarantined=True)
    assert measure.run_item(None, worker, waiting[0].id)["status"] == "done"


@pytest.mark.parametrize("ending", ["told to stop", "its worker died"])
def test_a_benchmark_process_that_ends_with_its_worker_puts_no_card_in_quarantine(
    worker, any_database, no_broker, monkeypatch, ending
):
    (item,) = items_of(any_database, plan(any_database, ["SIM-0"]))
    process = BenchmarkProcess("SIM-0")
    worker.benchmark, worker.software = process, None

    def end(*_):
        """What ends a worker while its benchmark process gets ready: the process first, then the
        one that minds it.
        """
        monkeypatch.setattr(
            worker.process,
            *(("stop_signals", [1]) if ending == "told to stop" else ("parent", -1)),
        )
        os.kill(process.pid, signal.SIGKILL)

    monkeypatch.setattr(process, "_start_verifier", lambda: threading.Thread(target=end).start())
    with pytest.raises(Reject):
        measure.run_item(None, worker, item.id)
    assert cards.stored_state(any_database, "SIM-0") == "idle"
    (item,) = items_of(any_database, item.job_id)
    assert (item.state, item.attempts) == ("waiting", 0)


def test_a_message_leaves_the_time_limit_to_the_worker_that_takes_it():
    assert measure.measure.time_limit, (
        "this process knows the task, and has a limit of its own for it"
    )
    message = queues._measure(
        SimpleNamespace(id=1, card_id="SIM-0", cards=1, short_name="Conv2d", label="Conv2d 3->8")
    )
    assert {**measure.measure._get_exec_options(), **message.options}["time_limit"] is None


def refuse(*_, **__):
    raise ValueError("not this one")


def test_the_events_of_a_group_name_its_cards(worker, any_database):
    register(any_database, 1)
    (item,) = items_of(any_database, plan(any_database, ["SIM-0", "SIM-1"], cards=2))
    events = []
    worker.task = SimpleNamespace(send_event=lambda kind, **fields: events.append((kind, fields)))
    worker.phase(claim(any_database, item, "holder-0"), "window", {})
    ((kind, fields),) = events
    assert (kind, fields["args"]) == ("task-window", f"{fields['operator']} on SIM-0, SIM-1")


def test_a_card_that_a_group_holds_keeps_its_message_until_the_group_has_ended(
    worker, any_database, monkeypatch
):
    register(any_database, 1)
    ids = ["SIM-0", "SIM-1"]
    (group,) = items_of(any_database, plan(any_database, ids, cards=2))
    (alone,) = items_of(any_database, plan(any_database, ["SIM-0"]))
    held = claim(any_database, group, "another")
    monkeypatch.setattr(worker, "stop_requested", lambda: True)
    with pytest.raises(Reject):
        measure.run_item(None, worker, alone.id)
    pauses = []
    monkeypatch.setattr(
        worker,
        "stop_requested",
        lambda: pauses.append(1) or complete(any_database, held, "SIM-0") is None,
    )
    assert measure.run_item(None, worker, alone.id) == {"item": alone.id, "status": "done"}
    assert len(pauses) == 1


@pytest.fixture
def slow_item(database, monkeypatch, tmp_path, no_broker):
    """A worker with a real benchmark process of a simulated card, and an item that uses the host's
    slow memory.
    """
    changes = {"SIMULATED_CARDS": 1, "HOST": "here", "LOCK_DIR": tmp_path, "ITEM_TIMEOUT_S": 0.3}
    for name, value in changes.items():
        monkeypatch.setenv(f"FARM_{name}", str(value))
    settings.cache_clear()
    card_id = "SIM-here-0"
    card = dataclasses.replace(CARD, id=card_id)
    cards.register(database, card, SOFTWARE, holder="holder-0", queue="q")
    request = sweep(protocol=Protocol(launch="eager", placement="in0"))
    job_id = jobs.create(
        database, request, [card_id], operator_ids=store_operators(database, [""])
    ).job_id
    with database.write() as session:
        session.execute(update(Item).values(published_at_s=database_now()))
    with BenchmarkProcess(card_id) as process:
        driver = measure.CardWorker(
            card_id, "holder-0", database, process, Spool(tmp_path / "spool"), SOFTWARE
        )
        yield driver, items_of(database, job_id)[0]


def test_an_item_whose_lock_a_foreign_process_holds_waits_and_loses_no_attempt(
    slow_item, database, tmp_path
):
    driver, item = slow_item
    path = tmp_path / "slow-memory.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for _ in range(settings().max_attempts + 1):
            with pytest.raises(Ignore):
                measure.run_item(TASK, driver, item.id)
        (found,) = items_of(database, item.job_id)
        assert (found.state, found.attempts) == ("waiting", 0)
        with database.read() as session:
            message = jobs.progress(session, item.job_id).message
        assert re.search(rf"slow-memory .* 0.3 s, last by .*process \({os.getpid()}, ", message)
    assert groups.due(database, "") == [item.id], "the reconciler publishes it again"
    measure.run_item(TASK, driver, item.id)
    (found,) = items_of(database, item.job_id)
    assert (found.state, found.attempts) == ("done", 1)


def test_an_item_whose_lock_cannot_be_used_waits_and_loses_no_attempt(
    slow_item, database, tmp_path
):
    driver, item = slow_item
    os.mkfifo(tmp_path / "slow-memory.lock")
    with pytest.raises(Ignore):
        measure.run_item(TASK, driver, item.id)
    (found,) = items_of(database, item.job_id)
    assert (found.state, found.attempts) == ("waiting", 0)
    assert "slow-memory.lock is not a regular file" in found.message


def test_a_group_without_a_temporary_folder_waits_and_loses_no_attempt(
    any_database, no_broker, monkeypatch, tmp_path
):
    ids = register(any_database, 0, 1)
    (item,) = items_of(any_database, plan(any_database, ids, cards=2))
    driver = measure.CardWorker(
        "SIM-0", "holder-0", any_database, Benchmark(), Spool(tmp_path / "spool"), SOFTWARE
    )
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(Ignore):
        measure.run_item(TASK, driver, item.id)
    (found,) = items_of(any_database, item.job_id)
    assert (found.state, found.attempts) == ("waiting", 0)
    assert "need a folder in" in found.message
