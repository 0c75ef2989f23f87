"""The whole path on a real CPU: a user's own model, real servers and workers, torch in the end.

On PostgreSQL; on SQLite `farm run` takes it (`test_whole_path.py`).
"""

import json
import os

import pytest

from farm.store.database import Database
from farm.store.tables import Operator
from tests import slow
from tests.farms import Farm, kill_all_of

MODELS = """
import torch
from torch import nn

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.linear = nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.5)

    def forward(self, words, scale):
        embedded = self.embedding(words)
        return (self.dropout(self.linear(embedded)) + embedded) * scale

def residual():
    return Residual(), (torch.arange(24).reshape(2, 12), torch.ones(16))

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.weights = nn.Linear(16, 4), nn.Parameter(torch.ones(4, 16, 16))

    def forward(self, x):
        best, order = self.router(x).argmax(1).sort()
        ends = torch.histc(best.float(), bins=4, min=0, max=3).cumsum(0).int()
        return torch._grouped_mm(x[order].bfloat16(), self.weights.bfloat16(), offs=ends)

def experts():
    return Experts(), torch.randn(12, 16)

def out_of_range():
    return nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16)), torch.full((2, 12), 99)
"""


@pytest.fixture
def cpu_farm(tmp_path, broker, postgres_url):
    """A broker, a database and a real ``farm worker`` for the CPU; two models of the user's in its
    settings.
    """
    (tmp_path / "models_of_mine.py").write_text(MODELS)
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "FARM_BROKER_URL": broker.url,
        "FARM_DATABASE_URL": postgres_url,
        "FARM_MODELS": json.dumps(
            {name: f"models_of_mine:{name}" for name in ("residual", "experts", "out_of_range")},
        ),
        "FARM_MODELS_PATH": str(tmp_path),
    }
    database = Database(postgres_url)
    farm = Farm(database, environment, tmp_path / "farm.log")
    database.upgrade()
    worker = farm.start("worker", "--card", "cpu")
    try:
        farm.wait_for(lambda: worker.poll() is not None or farm.alive(), 120)
        yield farm
    finally:
        kill_all_of(worker)
        database.close()


def submit(farm, *arguments):
    """What ``farm submit --wait --json`` reports of each model."""
    done = farm.say("submit", *arguments, "--quick", "--window", "0.1", "--wait", "--json")
    assert done.returncode == 0, f"{done.stderr}\n{farm.log.read_text()[-3000:]}"
    return json.loads(done.stdout)["reports"]


def check_rows_of_experts(farm, report):
    assert (report["state"], report["verdict"]["coverage"]) == ("done", 1.0)
    first, second = report["rounds"]
    assert first["reason"] == "first"
    assert "values that decide the work of 1 tuple" in second["reason"]
    last = {item.round: item for item in farm.items(report["job_id"]) if item.role == "tuple"}[2]
    with farm.database.read() as session:
        operator = session.get_one(Operator, last.subject_id)
    assert operator.short_name == "_grouped_mm"
    assert operator.spec["tensors"][2]["values"]["form"] == "lengths"


@slow.FAULT
def test_a_model_of_ones_own_is_measured_once_and_one_that_fails_says_why(cpu_farm, tmp_path):
    file = tmp_path / "jobs.yml"
    models = (
        "- {model: residual}\n- {model: residual, mode: train}\n- {model: experts}\n- {model: "
        "out_of_range}\n"
    )
    file.write_text(models)
    report, trained, of_experts, failed = submit(cpu_farm, "-f", str(file), "-b", "4")
    assert report["state"] == "done"
    assert {row["short_name"]: row["calls"] for row in report["types"]} == {
        "Embedding": 1,
        "Linear": 1,
        "add": 1,
        "mul": 1,
    }
    verdict = report["verdict"]
    assert verdict["sum_time_us"] > 0
    assert verdict["whole_time_us"] > 0
    assert verdict["coverage"] == 1.0
    assert verdict["outcome"] in ("pass", "fail", "none")  # a busy machine decides which
    assert (verdict["outcome"] == "none") is (verdict["gap_time"] is None)

    # What is known is not measured again.
    (again,) = submit(cpu_farm, "residual", "-b", "4")
    assert again["verdict"]["sum_time_us"] == verdict["sum_time_us"]
    assert {item.reused for item in cpu_farm.items(again["job_id"])} == {True}

    # What the file says now is measured, by the worker that has imported it as it was.
    older = MODELS.replace(
        "self.dropout(self.linear(embedded))", "self.linear(self.dropout(self.linear(embedded)))"
    )
    (tmp_path / "models_of_mine.py").write_text(older)
    done = cpu_farm.say(
        "submit", "residual", "-b", "4", "--quick", "--window", "0.1", "--wait", "--json"
    )
    (edited,) = json.loads(done.stdout)["reports"]
    assert f"residual changed since job {again['job_id']}: +1 call of Linear" in done.stderr
    assert {row["short_name"]: row["calls"] for row in edited["types"]} == {
        "Embedding": 1,
        "Linear": 2,
        "add": 1,
        "mul": 1,
    }
    states = {(item.role, item.state, item.reused) for item in cpu_farm.items(edited["job_id"])}
    assert states == {("tuple", "done", True), ("whole", "done", False)}
    assert edited["title"].startswith(f"{report['title']} version ")

    # A host whose file differs from that of the submitting one refuses the whole, once, and says
    # why.
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "models_of_mine.py").write_text(
        MODELS.replace(" * scale", " - scale")
    )
    elsewhere = {**cpu_farm.environment, "FARM_MODELS_PATH": str(tmp_path / "elsewhere")}
    done = Farm(cpu_farm.database, elsewhere, cpu_farm.log).ask(
        "submit", "residual", "-b", "4", "--quick", "--window", "0.1", "--wait", "--json"
    )
    (refused,) = json.loads(done.stdout)["reports"]
    assert "+1 call of sub" in done.stderr
    (whole,) = (item for item in cpu_farm.items(refused["job_id"]) if item.role == "whole")
    assert (whole.state, whole.reason, whole.attempts) == ("failed", "rejected", 1)
    assert "on this host have version " in whole.message
    assert "the job was submitted with " in whole.message

    # In training, dropout is work; the rest is the same, but for modules that know which of the two
    # it is.
    assert {row["short_name"] for row in trained["types"]} == {
        "Embedding",
        "Linear",
        "Dropout",
        "add",
        "mul",
    }

    # The products of experts are measured after the whole model has shown their rows.
    check_rows_of_experts(cpu_farm, of_experts)

    # One that fails on the card is a row with its reason; the job ends, and the worker goes on.
    assert failed["state"] == "done"
    assert failed["verdict"]["outcome"] == "none"
    reasons = {item.role: (item.state, item.reason) for item in cpu_farm.items(failed["job_id"])}
    assert reasons == {"tuple": ("done", ""), "whole": ("failed", "raised")}
