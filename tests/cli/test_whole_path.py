"""From a model's name to a report, through the command line, with real servers and workers on
simulated cards.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from sqlmodel import select

from farm.jobs import listing
from farm.settings import settings
from farm.store.tables import Job
from tests import slow
from tests.planned import know

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def _simulated_card(monkeypatch):
    monkeypatch.setenv("FARM_SIMULATED_CARDS", "1")
    settings.cache_clear()


@pytest.fixture
def known_resnet18(database, monkeypatch):
    monkeypatch.setenv("FARM_DATABASE_URL", database.url.render_as_string())
    settings.cache_clear()
    know(database, "resnet18")
    return database


@pytest.fixture
def shared_farm(two_cards):
    """A running farm that this host's settings name; its database."""
    farm, _ = two_cards.whole()
    with farm.here():
        yield farm.database


def wait_for(condition, process, timeout_s=180):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.1)


def test_run_measures_and_reports_and_the_job_can_be_looked_at_afterwards(farm):
    # Only one type is measured: too little for a verdict, so that --check has nothing to say.
    said = farm("run", "resnet18", "--json", "--operators", "Linear", "--check")
    assert said.code == 0, said.stderr
    (report,) = json.loads(said.stdout)["reports"]
    assert report["state"] == "done"
    assert report["verdict"]["outcome"] == "none"
    assert sum(row["calls"] for row in report["types"]) == 68
    assert "68 calls of 28 operator tuples" in said.stderr

    job = report["job_id"]
    assert json.loads(farm("report", job, "--json").stdout)["verdict"] == report["verdict"]
    assert "resnet18" in farm("report", job[:4]).stdout
    assert farm("report", job, "--check").code == 0
    assert json.loads(farm("status", job, "--json").stdout)["jobs"][0]["state"] == "done"
    assert farm("status", "--watch").code == 0
    (row,) = json.loads(farm("jobs", "--json").stdout)["jobs"]
    assert (row["id"], row["state"], row["closed"]) == (job, "done", row["items"])
    cards = json.loads(farm("cards", "--json").stdout)["cards"]
    assert {card["state"] for card in cards} == {"stopped"}
    assert "ended" in farm("cancel", job).stderr
    assert "ended" in farm("resume", job).stderr


LEFT_OUT = """
import torch

class Calls(torch.nn.Module):
    def forward(self, values):
        return values.nonzero()

def make(): return Calls(), torch.ones(2, 8)
"""


@slow.FAULT
def test_a_sweep_and_models_from_a_file_run_once_and_are_skipped_then(farm, tmp_path, monkeypatch):
    (tmp_path / "left_out.py").write_text(LEFT_OUT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FARM_MODELS", '{"left_out": "left_out:make"}')
    path = tmp_path / "jobs.yml"
    path.write_text(
        "- sweep: Conv2d\n  name: kernels\n"
        "  grid: {in_channels: 3, out_channels: 8, kernel_size: [1, 3, 9], image_size: 7}\n"
        "- {model: left_out}\n- {model: squeezenet1_1, batch: [1, 2]}\n"
    )
    said = farm("run", "-f", path, "--json")
    # What cannot be extracted stops none of the others.
    assert said.code == 1, said.stderr
    (refused,) = json.loads(said.stdout)["refused"]
    assert f"jobs.yml:4: {refused['title']} is left out: {refused['reason']}" in said.stderr
    assert (
        f"error: 1 of 4 requests cannot be measured:\n  {refused['title']}: {refused['reason']}"
        in said.stderr
    )
    reports = json.loads(said.stdout)["reports"]
    assert [report["kind"] for report in reports] == ["sweep", "model", "model"]
    assert len(reports[0]["tuples"]) == 2
    assert "1 of 3 combinations are left out" in said.stderr

    # What is done already is not measured again, and its report is shown.
    said = farm("run", "-f", path, "--json", "--check")
    again = json.loads(said.stdout)
    assert (said.code, again["refused"]) == (5, [refused])
    assert [one["title"] for one in again["skipped"]] == [
        "kernels",
        "squeezenet1_1 1x224 float32",
        "squeezenet1_1 2x224 float32",
    ]
    jobs = [report["job_id"] for report in reports]
    assert [one["job"] for one in again["skipped"]] == jobs
    assert [report["job_id"] for report in again["reports"]] == jobs
    assert f"job {jobs[0]} has measured " in said.stderr


@slow.FAULT
def test_an_interrupted_run_leaves_no_process_and_says_how_to_go_on(known_resnet18):
    with a_run(FARM_SIMULATED_ITEM_S="0.5") as run:
        wait_for(lambda: run.stderr.readline().startswith("job "), run)
        says_that_it_was_interrupted(run, signal.SIGINT)
    with known_resnet18.read() as session:
        assert [job["state"] for job in listing.jobs(session, 10)] == ["cancelled"]


def test_a_run_that_is_told_to_end_while_it_starts_says_how_to_go_on():
    with a_run() as run:
        wait_for(lambda: Path(settings().state_dir, "farm.db").exists(), run)
        says_that_it_was_interrupted(run, signal.SIGTERM)


def a_run(**changes):
    return subprocess.Popen(
        [sys.executable, "-m", "cli", "run", "resnet18"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **changes},
    )


def says_that_it_was_interrupted(run, sign):
    run.send_signal(sign)
    stdout, stderr = run.communicate(timeout=90)
    assert (run.returncode, stdout) == (130, "")
    assert "error: interrupted." in stderr
    assert "the same command continues" in stderr
    assert "Traceback" not in stderr


@slow.FAULT
@pytest.mark.parametrize("moment", ["starting", "measuring"])
def test_an_impatient_ctrl_c_ends_a_run_in_order_too(known_resnet18, moment):
    """Pressed again and again until the command has ended, through all that it puts in order on its
    way.
    """
    with tempfile.TemporaryDirectory(
        prefix="t", dir="/tmp"
    ) as temporary:  # short enough for a socket
        with a_run(FARM_SIMULATED_ITEM_S="0.5", TMPDIR=temporary) as run:
            begins = "Starting" if moment == "starting" else "job "
            wait_for(lambda: run.stderr.readline().startswith(begins), run)
            theirs = psutil.Process(run.pid).children(recursive=True)
            while run.poll() is None:
                run.send_signal(signal.SIGINT)
                time.sleep(0.05)
            stdout, stderr = run.communicate(timeout=90)
        assert (run.returncode, stdout) == (130, "")
        assert "error: interrupted." in stderr
        assert "Traceback" not in stderr
        _, alive = psutil.wait_procs(theirs, timeout=60)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        assert left_in(temporary) == [], (
            "its broker's folder, its logs and its workers' temporary files are gone"
        )


@slow.FAULT
def test_a_killed_run_takes_its_workers_and_servers_with_it(known_resnet18):
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as temporary:
        with a_run(FARM_SIMULATED_ITEM_S="0.5", TMPDIR=temporary) as run:
            wait_for(lambda: run.stderr.readline().startswith("job "), run)
            theirs = psutil.Process(run.pid).children(recursive=True)
            assert len(theirs) >= 3
            run.kill()
            run.communicate()
        _, alive = psutil.wait_procs(theirs, timeout=60)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        (left,) = left_in(temporary)
        assert left.startswith("farm-"), (
            "all that is left lies in the folder that the next run sweeps away"
        )


def left_in(folder):
    """What is left in a temporary folder, apart from the one that PyTorch makes for each
    account.
    """
    return [
        path.name for path in Path(folder).iterdir() if not path.name.startswith("torchinductor_")
    ]


def test_submit_goes_through_the_workers_of_a_running_farm(shared_farm, farm):
    said = farm("submit", "resnet18", "squeezenet1_1", "--json")
    assert said.code == 0, said.stderr
    jobs = [row["job"] for row in json.loads(said.stdout)["jobs"]]
    assert len(jobs) == 2

    with shared_farm.read() as session:
        earlier = set(session.exec(select(Job.id)))
    waited = farm("submit", "resnet18", "--wait", "--card", "1")
    assert waited.code == 0, waited.stderr
    assert "resnet18 32x224 float32" in waited.stdout
    with shared_farm.read() as session:
        (waited_job,) = (id_ for id_ in session.exec(select(Job.id)) if id_ not in earlier)
    assert farm("status", *jobs, "--watch").code == 0
    # Every card reads a whole that is the sum of the tuples, also where another has verified it
    # before.
    for job in [*jobs, waited_job]:
        verdict = json.loads(farm("report", job, "--json").stdout)["verdict"]
        assert verdict["outcome"] == "pass", verdict["reasons"]
        assert len({round(whole["time_us"], 6) for whole in verdict["wholes"]}) == 1
    assert {card["state"] for card in json.loads(farm("cards", "--json").stdout)["cards"]} <= {
        "idle",
        "busy",
    }

    # Ctrl-C ends the waiting, not the job.
    command = [sys.executable, "-m", "cli", "submit", "resnet18", "--wait"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as submit:
        # A slow host also gets a note of progress.
        job = next(line for line in submit.stderr if line.startswith("job ")).split()[1].rstrip(":")
        submit.send_signal(signal.SIGINT)
        _, stderr = submit.communicate(timeout=90)
    if submit.returncode:  # it may have been done by then
        assert submit.returncode == 130
        assert f"`farm status {job} --watch`" in stderr
    assert farm("cancel", job).code == 0
    again = farm("resume", jobs[0], "--failed")
    assert again.code == 0, again.stderr
    assert f"Job {jobs[0]} repeats 0 failed or cancelled items." in again.stderr
