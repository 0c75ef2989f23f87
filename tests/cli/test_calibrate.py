"""`farm calibrate` on a simulated card."""

from __future__ import annotations

import json

import pytest

from farm.settings import settings
from tests import slow


@pytest.fixture
def _simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_SIMULATED_CARDS", "1")
    settings.cache_clear()


@slow.FAULT
@pytest.mark.usefixtures("_simulated")
def test_the_list_is_measured_once_and_an_interrupted_calibration_continues(farm):
    said = farm("calibrate", "--json")
    assert said.code == 0, said.stderr
    (report,) = json.loads(said.stdout)["reports"]
    assert (report["title"], report["kind"]) == ("calibration", "sweep")
    assert len(report["tuples"]) == 30
    again = farm("calibrate", "--dry-run", "--json")
    preview = json.loads(again.stdout)
    assert not preview["jobs"] or preview["jobs"][0]["items_new"] == 0


def test_a_cpu_is_refused_in_one_line_with_a_next_step(farm):
    said = farm("calibrate", "--card", "cpu")
    assert (said.code, said.stdout) == (2, "")
    error, next_step = said.stderr.splitlines()
    assert error.startswith("error: Only predictions for GPUs")
    assert next_step == "→ Choose a GPU."


def test_a_calibration_in_a_file_has_no_grid(farm, tmp_path):
    file = tmp_path / "jobs.yml"
    file.write_text("- sweep: calibration\n  grid: {batch: [1]}\n")
    said = farm("run", "-f", file, "--dry-run")
    assert said.code == 2
    assert "fixed list of operator tuples" in said.stderr
    assert "Remove the grid" in said.stderr
