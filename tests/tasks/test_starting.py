"""The farm starts from any folder: what lies there is neither imported nor run, in any of its
processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from farm.settings import environment_of_children
from tests import slow

#: What the farm's processes import, and what Celery and Flower would look for where they are
#: started.
NAMES = (
    "farm/__init__",
    "tasks",
    "cli",
    "celery",
    "torch",
    "numpy",
    "flowerconfig",
    "celeryconfig",
)
SWEEP = "- sweep: Linear\n  grid: {in_features: 64, out_features: 64}\n"


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """The current folder, full of files that tell of it when they are run."""
    folder = tmp_path / "hostile"
    for name in NAMES:
        file = folder / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            f"open({str(tmp_path / 'trap')!r}, 'a').write(__file__ + '\\n')\nraise "
            "SystemExit('hijacked')\n"
        )
    monkeypatch.chdir(folder)
    return tmp_path / "trap"


@slow.FAULT
def test_a_run_in_a_folder_with_files_of_the_same_names_measures_and_runs_none_of_them(
    hostile, tmp_path
):
    (tmp_path / "sweep.yml").write_text(SWEEP)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "cli", "run", "-f", "../sweep.yml", "--json"],
        env={**os.environ, "FARM_SIMULATED_CARDS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert not hostile.exists(), hostile.read_text()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


def test_children_import_from_where_things_are_installed_and_from_the_pythonpath_alone(
    hostile, monkeypatch
):
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(["", "/somewhere", ""])
    )  # an empty entry is the current folder
    said = subprocess.run(
        [sys.executable, "-c", "import json, sys, cli, tasks; print(json.dumps(sys.path))"],
        env=environment_of_children(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert not hostile.exists()
    assert "/somewhere" in json.loads(said)
    assert not {"", os.getcwd()} & set(json.loads(said))


def test_celery_imports_nothing_from_the_current_folder(hostile):
    from tasks.app import app

    with pytest.raises(ModuleNotFoundError):
        app.loader.import_from_cwd("flowerconfig")
    assert app.loader.import_from_cwd("tasks.queues").__name__ == "tasks.queues"
