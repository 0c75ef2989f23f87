"""The core works where the folders of the add-ons and the packages of the extras are absent."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import slow
from tests.report import rows
from tests.report.measured import measured

ROOT = Path(__file__).parents[2]
#: Hides the editable installation, which would find the add-ons, and the packages of the extras.
SITE = """
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder

class CoreFinder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] in ("matplotlib", "plotly", "scipy", "sklearn")
        return None if hidden else super().find_spec(name, path, target)

sys.meta_path[:] = [BuiltinImporter, FrozenImporter, CoreFinder]
"""
#: Runs commands in one process: each line of the standard input is a list of words.
SEVERAL = """
import json, sys
from typer.testing import CliRunner
from cli.main import app
for line in sys.stdin:
    result = CliRunner().invoke(app, json.loads(line))
    print(json.dumps([result.exit_code, result.stdout, result.stderr]))
import farm
print(json.dumps(farm.__all__))
assert "farm.addons" not in sys.modules
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """A copy of the program without add-ons."""
    folder = tmp_path_factory.mktemp("core")
    for package in ("farm", "tasks", "cli"):
        left_out = ("addons", "data") if package == "farm" else ()
        ignore = shutil.ignore_patterns(*left_out)
        shutil.copytree(ROOT / package, folder / package, ignore=ignore)
    (folder / "farm/data").symlink_to(ROOT / "farm/data")
    (folder / "sitecustomize.py").write_text(SITE)
    return folder


def run(core, *command, text=None, **settings):
    return subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"PYTHONPATH": str(core), "COLUMNS": "100"} | settings,
        cwd=core,
        capture_output=True,
        text=True,
        input=text,
    )


@slow.PROCESS
def test_commands_of_the_core_work(core, database):
    measured(database, rows.VARIANT, "job1")
    commands = [
        ["--help"],
        ["jobs"],
        ["report", "job1"],
        ["report", "job1", "--json"],
        ["export", "readings.parquet"],
        ["report", "job1", "--html", "job1.html"],
        ["estimate", "resnet18"],
        ["publish", "site"],
        ["cards", "check"],
        ["worker", "--check-every", "24h"],
    ]
    text = "\n".join(map(json.dumps, commands))
    simulated = {"FARM_SIMULATED_CARDS": "1"}
    done = run(core, "-c", SEVERAL, text=text, FARM_DATABASE_URL=str(database), **simulated)
    assert done.returncode == 0, done.stderr
    *answers, public = map(json.loads, done.stdout.splitlines())
    helped, jobs, report, as_json, _, html, estimate, publish, check, worker = answers
    assert [code for code, *_ in answers] == [0, 0, 0, 0, 0, 2, 2, 2, 2, 2], answers
    assert "│ report " in helped[1]
    assert "│ estimate " not in helped[1]
    assert "job1" in jobs[1]
    assert "coverage" in report[1]
    assert json.loads(as_json[1])["job_id"] == "job1"
    assert (core / "readings.parquet").exists()
    assert "--html needs the add-on 'pages'" in html[2]
    assert "There is no command 'farm estimate'." in estimate[2]
    assert "belongs to the add-on 'predict'" in estimate[2]
    assert "It belongs to the add-on 'pages'" in publish[2]
    assert "There is no command 'farm cards check'." in check[2]
    assert "It belongs to the add-on 'check'" in check[2]
    assert "--check-every needs the add-on 'check'" in worker[2]
    assert "measure_model" in public
    assert "estimate" not in public


@slow.PROCESS
def test_a_model_is_measured(core):
    model = ("alexnet", "-b", "1", "--input-size", "64")
    done = run(
        core, "-m", "cli", "run", *model, FARM_SIMULATED_CARDS="1", FARM_SIMULATED_ITEM_S="0"
    )
    assert "coverage" in done.stdout, done.stderr
    assert "AlexNet" in done.stdout or "alexnet" in done.stdout
