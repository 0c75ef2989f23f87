"""The logs of a worker's processes have the requested format in every process, whatever happens."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys

import pytest

from tasks import logs
from tests import slow
from tests.farms import ROOT, running


@contextlib.contextmanager
def restored_logging():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.handlers[:], root.level = handlers, level


@slow.FAULT
def test_with_json_every_line_of_every_process_is_an_object_while_items_fail_and_processes_die(
    tmp_path, broker, sqlite_url
):
    with running(
        tmp_path,
        broker.url,
        sqlite_url,
        options=("--json-logs",),
        in_order=True,
        FARM_MAX_ATTEMPTS="1",
    ) as farm:
        job_id = farm.submit(["", "raise", "crash", "oom"])
        farm.wait_for(lambda: farm.ended(job_id))
        assert sorted(item.state for item in farm.items(job_id)) == [
            "done",
            "failed",
            "failed",
            "failed",
        ]
    lines = [json.loads(line) for line in farm.log.read_text().splitlines() if line]
    assert all({"time_s", "level", "logger", "message"} <= set(line) for line in lines)
    told = [line["message"] for line in lines]
    assert any("Simulated: the operator raised" in message for message in told), (
        "of the pool's process"
    )
    assert any("succeeded in" in message for message in told), "of Celery"
    assert any("shutdown" in message for message in told), "of its end"
    assert {line["card"] for line in lines if "the operator raised" in line["message"]} == {
        farm.items(job_id)[0].card_id
    }


@pytest.mark.parametrize("as_json", [True, False])
def test_warnings_and_what_nobody_caught_are_lines_too(as_json):
    code = (
        f"from tasks import logs; logs.set_up({as_json}); import threading, warnings; "
        "warnings.warn('look out')\n"
        "def fall(): raise ValueError('in a thread')\n"
        "thread = threading.Thread(target=fall); thread.start(); thread.join()\n"
        "raise KeyError('in main')"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    ).stderr
    assert "look out" in said
    assert "in a thread" in said
    if as_json:
        lines = [json.loads(line) for line in said.splitlines()]
        assert [line["level"] for line in lines] == ["warning", "critical", "critical"]
        assert "in main" in lines[-1]["traceback"]


def test_what_a_message_brings_begins_no_line_of_its_own_and_commands_no_terminal(capsys):
    forged = "x\n2026-01-01 00:00:00,000 INFO    farm.worker  all is well\x1b]0;title\x07"
    with restored_logging():
        logs.set_up(False)
        try:
            raise ValueError(forged)
        except ValueError:
            logging.getLogger("farm.test").exception("Task measure[%s] failed", forged)
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if not line.startswith("    ")] == lines[:1]
    assert "".join(lines).isprintable()
    assert r"Task measure[x\n2026-01-01" in lines[0]
