"""Processes of a worker are killed in the middle of an item: nothing is lost and nothing counted
twice.
"""

from __future__ import annotations

import contextlib
import re
import signal

import psutil
import pytest
from sqlmodel import select

from farm.store import tables
from tests import slow
from tests.farms import TIMEOUT_S


@pytest.mark.parametrize("victim", ["benchmark", "pool", "worker"])
def test_kill_9_of_one_process_in_the_middle_of_an_item(hurt, victim):
    job_id = hurt.submit(["slow"] * 2, 2.0)  # time enough to look the process up
    item = hurt.in_work(job_id)
    getattr(hurt, victim)().kill()
    assert hurt.settled(job_id) == {"done": 2}
    (again,) = [one for one in hurt.farm.items(job_id) if one.id == item.id]
    assert again.attempts == 2
    if victim == "worker":  # it held the item's message, which the broker gives out once more
        assert hurt.delivered_again == [("measure", item.id)]


@slow.FAULT
def test_kill_9_of_everything_in_the_middle_of_an_item(hurt):
    job_id = hurt.submit(["slow"] * 3, 1.0)
    hurt.in_work(job_id)
    for process in hurt.everything():
        process.kill()
    assert hurt.messages() >= 0
    hurt.farm.start_again()
    assert hurt.settled(job_id) == {"done": 3}


@slow.FAULT
def test_items_that_kill_or_poison_their_process_end_with_their_reason_and_harm_no_other(start):
    hurt = start(FARM_ITEM_TIMEOUT_S="2")
    job_id = hurt.submit(
        ["", "crash", "exit", "poison", "oom", "raise", "hang", "print", "not_capturable", ""]
    )
    assert hurt.settled(job_id) == {"done": 3, "failed": 7}
    reasons = [item.reason for item in sorted(hurt.farm.items(job_id), key=lambda item: item.id)]
    assert reasons == [
        "",
        "crashed",
        "crashed",
        "raised",
        "out_of_memory",
        "raised",
        "hung",
        "",
        "not_capturable",
        "",
    ]
    assert hurt.farm.say("resume", "--failed", job_id).returncode == 0
    assert hurt.settled(job_id) == {"done": 3, "failed": 7}


@slow.FAULT
def test_the_hard_time_limit_kills_the_process_that_supervises_a_hanging_item(start):
    """The backstop: the item's own time limit, which would end it as hung, is out of reach."""
    # So long that a busy machine still sees the first of its two attempts, and not the item after
    # them.
    hurt = start(FARM_HARD_LIMIT_S="5", FARM_ITEM_TIMEOUT_S="600")
    job_id = hurt.submit(["", "hang", ""])
    hurt.in_work(job_id)
    killed = [hurt.pool(), hurt.benchmark()]
    worker = hurt.worker()
    _, alive = psutil.wait_procs(killed, TIMEOUT_S)
    assert not alive
    assert worker.is_running(), "only the process of the task is killed, and what it started"
    assert hurt.settled(job_id) == {"done": 2, "failed": 1}
    (hung,) = [one for one in hurt.farm.items(job_id) if one.state == "failed"]
    assert (hung.reason, hung.attempts) == ("attempts_exhausted", 2)
    assert "hard time limit" in hurt.said().lower()


def test_an_item_that_kills_its_worker_every_time_ends_as_failed(hurt):
    job_id = hurt.submit(["slow"], 3.0)
    for attempt in (1, 2):
        hurt.in_work(job_id, attempt)
        hurt.pool().kill()
    assert hurt.settled(job_id) == {"failed": 1}
    assert hurt.farm.items(job_id)[0].reason == "attempts_exhausted"


@slow.FAULT
def test_sigterm_to_everything(hurt):
    job_id = hurt.submit(["slow"] * 4, 0.7)
    hurt.in_work(job_id)
    processes = hurt.everything()
    for process in processes:
        with contextlib.suppress(
            psutil.NoSuchProcess
        ):  # those that were told first may have ended others already
            process.terminate()
    _, alive = psutil.wait_procs(processes, TIMEOUT_S)
    assert not alive
    hurt.farm.start_again()
    assert hurt.settled(job_id) == {"done": 4}


def test_a_worker_that_is_told_to_stop_finishes_its_item(hurt):
    job_id = hurt.submit(["slow"] * 3, 1.0)
    item = hurt.in_work(job_id)
    supervisor = hurt.supervisor()
    supervisor.send_signal(signal.SIGTERM)
    psutil.wait_procs([supervisor], TIMEOUT_S)
    states = {one.id: (one.state, one.attempts) for one in hurt.farm.items(job_id)}
    assert states[item.id] == ("done", 1)
    # Of what it said, each line is the farm's or its workers': no hint at options of Celery's own,
    # nothing of the migrations.
    lines = [line for line in hurt.said().splitlines() if line]
    assert any("shutdown" in line for line in lines)
    assert [
        line
        for line in lines
        if not re.match(r"[\d-]+ [\d:,]+ (INFO|WARNING) +(farm|celery)\.", line)
    ] == []
    hurt.farm.start_again()
    assert hurt.settled(job_id) == {"done": 3}
    assert all(one.attempts == 1 for one in hurt.farm.items(job_id))


@slow.FAULT
def test_a_worker_that_is_told_to_stop_twice_hands_its_item_back(hurt):
    job_id = hurt.submit(["slow"], 4.0)
    item = hurt.in_work(job_id)
    processes = hurt.everything()
    supervisor = hurt.supervisor()
    supervisor.terminate()
    hurt.farm.wait_for(lambda: "Stopping" in hurt.said())
    supervisor.terminate()
    _, alive = psutil.wait_procs(processes, TIMEOUT_S)
    assert not alive
    (back,) = [one for one in hurt.farm.items(job_id) if one.id == item.id]
    assert (back.state, back.attempts, back.holder) == ("waiting", 0, "")
    assert card_states(hurt) == {"stopped"}
    hurt.farm.start_again()
    assert hurt.settled(job_id) == {"done": 1}
    assert all((one.attempts, one.repeated) == (1, 0) for one in hurt.farm.items(job_id))


def card_states(hurt):
    with hurt.farm.database.read() as session:
        return {card.state for card in session.exec(select(tables.CardRow))}


def test_a_second_worker_for_a_card_is_refused(hurt):
    second = hurt.farm.ask("worker")
    assert second.returncode == 4
    assert "is in use by `farm worker`" in second.stderr
    job_id = hurt.submit(["", ""])
    assert hurt.settled(job_id) == {"done": 2}


def test_cancel_in_the_middle(hurt):
    job_id = hurt.submit(["slow"] * 20, 0.7)
    item = hurt.in_work(job_id)
    assert hurt.farm.say("cancel", job_id).returncode == 0
    hurt.check(job_id)
    hurt.farm.wait_for(
        lambda: any(one.id == item.id and one.reading_id for one in hurt.farm.items(job_id))
    )
    assert {one.state for one in hurt.farm.items(job_id)} <= {"cancelled", "done"}
    follower = hurt.submit([""])
    assert hurt.settled(follower) == {"done": 1}


SLOW_TO_IMPORT = """
import sys, time
if any("billiard.spawn" in word for word in sys.orig_argv):
    time.sleep(6)
"""


@slow.FAULT
def test_a_host_that_is_slow_to_start_its_processes_starts_them(start, tmp_path):
    """As where all cards' workers start at once on a few cores; Celery itself would give each
    process 4 s.
    """
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SLOW_TO_IMPORT)
    hurt = start(PYTHONPATH=str(folder))
    job_id = hurt.submit([""])
    assert hurt.settled(job_id) == {"done": 1}
    assert "Timed out waiting for UP" not in hurt.said()


DEAF_AT_FIRST = """
import os, sys
if "tasks.main" in sys.orig_argv and "card" in sys.orig_argv and not os.path.exists({mark!r}):
    open({mark!r}, "w").close()
    import celery.worker.request
    def revoked(self):
        raise TypeError("as where a header is none: the worker's slot is not given back")
    celery.worker.request.Request.revoked = revoked
"""


@slow.FAULT
def test_a_worker_that_has_gone_deaf_is_started_anew_and_takes_what_waits(start, tmp_path):
    folder = tmp_path / "deaf"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(DEAF_AT_FIRST.format(mark=str(folder / "mark")))
    hurt = start(PYTHONPATH=str(folder), FARM_DEAF_AFTER_S="3")
    job_id = hurt.submit(["", "", ""])
    assert hurt.settled(job_id) == {"done": 3}
    assert {item.attempts for item in hurt.farm.items(job_id)} == {1}
    log = hurt.said()
    assert "received no message for 3 s; it restarts" in log
    assert log.count("ended with exit code 75; it starts again") == 1


HANGS_ONCE = """
import os, sys, time
if "tasks.main" in sys.orig_argv and {role!r} in sys.orig_argv:
    from celery.worker.heartbeat import Heart
    from tasks import watchdog
    watchdog.HUNG_AFTER_S = 3.0
    send = Heart._send
    def hang(self, *arguments, **options):
        if os.path.exists({mark!r}):
            os.remove({mark!r})
            time.sleep(600)
        return send(self, *arguments, **options)
    Heart._send = hang
"""


@slow.FAULT
@pytest.mark.parametrize(("role", "begun"), [("card", 0), ("card", 1), ("control", 1)])
def test_a_worker_whose_main_loop_hangs_is_started_anew(start, tmp_path, role, begun):
    mark = tmp_path / "mark"
    folder = tmp_path / "hangs"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HANGS_ONCE.format(mark=str(mark), role=role))
    hurt = start(PYTHONPATH=str(folder))
    if begun:
        job_id = hurt.submit(["slow"] * 2, 8.0)
        item = hurt.in_work(job_id)
    mark.touch()
    hurt.farm.wait_for(lambda: not mark.exists())
    if not begun:
        job_id = hurt.submit(["", ""])
    assert hurt.settled(job_id) == {"done": 2}
    attempts = {one.id: one.attempts for one in hurt.farm.items(job_id)}
    lost = role == "card" and begun
    assert sum(attempts.values()) == (3 if lost else 2)
    assert not lost or attempts[item.id] == 2, "its claim was lost"
    log = hurt.said()
    assert "did nothing for 3 s; it restarts" in log
    assert "time.sleep(600)" in log, "the log says where it hung"
    assert log.count("ended with exit code 75; it starts again") == 1
