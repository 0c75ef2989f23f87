"""Flower is a window on the farm: read-only, with a password, and what it shows is readable."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import psutil
from flower.options import options
from packaging.requirements import Requirement

from tasks.measure import failure
from tasks.servers import BrokerServer
from tests import slow
from tests.farms import ROOT
from tests.flowers import AUTH, flower_of


@slow.FAULT
def test_flower_shows_what_each_item_is_and_why_it_failed(one_card, monkeypatch):
    farm, _ = one_card.whole()
    monkeypatch.setitem(farm.environment, "FARM_FLOWER_BASIC_AUTH", AUTH)
    with flower_of(farm) as (process, page):
        farm.wait_for(page.hears)
        job_id = farm.submit(["", "oom", "crash", "slow"], seconds=0.1)
        farm.wait_for(lambda: farm.ended(job_id))

        def told():
            shown = [task for task in page.tasks().values() if task["name"] == "Conv2d"]
            done = [task for task in shown if task["state"] in ("SUCCESS", "FAILURE")]
            return (
                {task["args"].split("|")[1].strip()[0]: task for task in done}
                if len(done) == 4
                else None
            )

        tasks = farm.wait_for(told)
        assert [tasks[number]["state"] for number in "0123"] == [
            "SUCCESS",
            "FAILURE",
            "FAILURE",
            "SUCCESS",
        ]
        assert tasks["0"]["args"] == "Conv2d 64->64 k3 p1 | 0x64x56x56 fp32"
        assert tasks["1"]["exception"].startswith("out_of_memory: ")
        assert tasks["2"]["exception"].startswith(
            "crashed: The benchmark process ended (signal SIGKILL)"
        )
        assert tasks["2"]["retried"]
        # A copy of a message finds nothing to do, and says so.
        farm.publish_again(job_id)
        farm.wait_for(
            lambda: [task for task in page.tasks().values() if task["state"] == "DECLINED"]
        )
        assert {task["name"] for task in page.tasks().values()} <= {"Conv2d", "aggregate"}
        metrics = page.get("/metrics", auth=None)[1]
        for phase in ("rebuild", "warm-up", "window", "retried", "failed"):
            assert f'task="Conv2d",type="task-{phase}"' in metrics, phase
        assert "64->64" not in metrics, "a shape as a label would make a series of each"

        # Whose password it is stays between the two, and looking is all that can be done.
        assert page.get("/api/tasks", auth="operator:wrong")[0] == 401
        assert page.get("/tasks")[0] == 200
        assert page.get("/api/worker/shutdown/control@x", method="POST")[0] in (401, 403, 405)
        assert "a-secret-word" not in " ".join(process_titles(process.pid)) + farm.log.read_text()
        assert "alembic" not in farm.log.read_text()
        (listening,) = {
            connection.laddr.ip
            for connection in psutil.Process(process.pid).net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening == "127.0.0.1"
    assert list(Path(farm.environment["FARM_STATE_DIR"]).glob("flower*")), (
        "what it knows outlives it"
    )


@slow.FAULT
def test_flower_says_in_a_line_that_its_port_is_taken_runs_nothing_it_finds_and_ends_when_its_broker_is_away(
    tmp_path, monkeypatch
):
    (tmp_path / "flowerconfig.py").write_text("raise SystemExit('hijacked')")
    monkeypatch.chdir(tmp_path)
    words = [sys.executable, "-P", "-m", "cli", "flower", "--port"]
    with BrokerServer() as broker:
        environment = {**os.environ, "FARM_BROKER_URL": broker.url}
        with subprocess.Popen(
            [*words, "0"], env=environment, stderr=subprocess.PIPE, text=True
        ) as flower:
            (port,) = re.findall(r"http://127.0.0.1:(\d+) \(read-only\)", flower.stderr.readline())
            second = subprocess.run(
                [*words, port], env=environment, capture_output=True, text=True, timeout=60
            )
            assert (second.returncode, second.stdout) == (2, "")
            error, next_step = second.stderr.splitlines()
            assert f"127.0.0.1:{port}" in error
            assert "--port" in next_step
            broker.stop()
            while "Failed to capture events" not in flower.stderr.readline():
                assert flower.poll() is None
            flower.terminate()
            assert flower.wait(30) == 0
            assert "Traceback" not in flower.stderr.read()


def test_no_flower_is_installed_that_knows_nothing_of_read_only():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = [one for one in map(Requirement, project["dependencies"]) if one.name == "flower"]
    assert not wanted.specifier.contains("2.0.1"), (
        "it has no such option, and ignores FLOWER_READ_ONLY"
    )
    assert "read_only" in options


def process_titles(pid):
    process = psutil.Process(pid)
    return [word for one in [process, *process.children(recursive=True)] for word in one.cmdline()]


def test_the_reason_of_a_failed_item_is_read_from_its_status():
    assert failure(
        str({"item": 1, "status": "failed", "reason": "hung", "message": 'it\'s "late"'})
    ) == ('hung: it\'s "late"')
    assert failure(str({"item": 1, "status": "failed"})) == "failed"
    for other in (
        str({"item": 1, "status": "done"}),
        "{'item': 1, 'status'...",
        "[",
        None,
        "'" * 9999,
        "(" * 9999,
    ):
        assert failure(other) == ""
