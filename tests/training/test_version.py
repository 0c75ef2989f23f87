"""A user's own model is what its files say now: an edit makes another version, which is captured
and measured again.
"""

from __future__ import annotations

import json
import os
import py_compile
import sys

import pytest

import farm
from farm.benchmark_process.client import BenchmarkProcess
from farm.benchmark_process.requests import MeasureRequest
from farm.devices.cpu import cpu_card
from farm.errors import Unmeasurable
from farm.models import catalog
from farm.report.lookup import lookup
from farm.requests.partial_request import PartialRequest, complete
from farm.settings import settings
from farm.store.query import parse
from farm.training.version import versioned
from farm.types.protocol import Protocol, Stopping
from farm.types.request import Request
from farm.types.subject import Subject
from farm.types.variant import Variant

SHORT = Stopping(
    warm_up_s=0.0, minimum_s=0.0, maximum_s=0.1, time_half_width=1.0, energy_half_width=1.0
)
EAGER = Protocol(launch="eager")
NET = """
import torch
from {helper} import LAYERS, wait

class Net(torch.nn.Sequential):
    def forward(self, values):
        wait()
        return super().forward(values)

def net():
    return Net(*(torch.nn.Linear(8, 8) for _ in range(LAYERS))), torch.ones(2, 8)

def loss(output):
    return output.sum()
"""
HELPER = """
LAYERS = 1
def wait(): pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a model `net` of a module of its own name, and the module that it imports."""
    name = f"net_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(NET.format(helper=f"helper_{name}"))
    (tmp_path / f"helper_{name}.py").write_text(HELPER)
    monkeypatch.setenv("FARM_MODELS", json.dumps({"net": f"{name}:net"}))
    monkeypatch.setenv("FARM_MODELS_PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    settings.cache_clear()
    return tmp_path


def edit(folder, before, after):
    (file,) = folder.glob("helper_*.py")
    assert before in file.read_text()
    file.write_text(file.read_text().replace(before, after))


def version():
    return versioned(catalog.variant("net", 2)).version


def test_a_version_follows_calls_and_code_and_neither_comments_nor_docstrings(folder):
    first = version()
    assert len(first) == 12
    assert version() == first
    edit(folder, "def wait(): pass", 'def wait():\n    "Does nothing."\n    pass  # at all')
    assert version() == first
    edit(folder, "pass", "import time; time.sleep(0)")
    other_code = version()
    edit(folder, "LAYERS = 1", "LAYERS = 8")
    assert len({first, other_code, version()}) == 3
    assert catalog.build(versioned(catalog.variant("net", 2)))[7].in_features == 8
    assert versioned(Variant("resnet18", 2, 224)) == Variant("resnet18", 2, 224)


def test_an_edit_counts_within_the_same_second_and_size_and_after_an_import_by_the_session(folder):
    (file,) = folder.glob("helper_*.py")
    sys.path.append(str(folder))
    __import__(next(folder.glob("net_*.py")).stem)  # by the user, before the farm
    py_compile.compile(str(file))
    at_ns = file.stat().st_mtime_ns
    edit(folder, "LAYERS = 1", "LAYERS = 7")
    os.utime(file, ns=(at_ns, at_ns))
    assert len(catalog.build(versioned(catalog.variant("net", 2)))) == 7


def test_a_loss_is_part_of_the_version_of_a_training_step(folder, monkeypatch):
    name = next(folder.glob("net_*.py")).stem
    step = catalog.variant("net", 2, step="training")
    before = versioned(step).version, version()
    monkeypatch.setattr(settings(), "losses", {"net": f"{name}:loss"})
    assert version() == before[1]
    assert versioned(step).version != before[0]


def test_a_version_that_a_user_gives_is_no_field_of_a_request():
    with pytest.raises(TypeError, match="version"):
        PartialRequest(model="net", version="0")


def test_an_edited_model_is_measured_again_and_old_jobs_keep_their_version(folder, monkeypatch):
    monkeypatch.setenv("FARM_SIMULATED_CARDS", "1")
    monkeypatch.setenv("FARM_SIMULATED_ITEM_S", "0")
    settings.cache_clear()
    database = farm.open_database(folder / "farm.db")

    def measured():
        return farm.measure_model("net", database=database, card="simulated", stopping=SHORT)

    old = measured()
    assert (
        Request.from_json(old.to_json()["request"])
        .command()
        .startswith("farm run net --batch 2 --launch")
    )
    assert (
        measured().to_json()["verdict"]["whole_time_us"]
        == old.to_json()["verdict"]["whole_time_us"]
    )
    edit(folder, "LAYERS = 1", "LAYERS = 8")
    new = measured()
    assert [row["calls"] for row in new.to_json()["types"]] == [8]
    assert new.to_json()["verdict"]["whole_time_us"] > 7 * old.to_json()["verdict"]["whole_time_us"]
    kept = farm.job_report(database, old.to_json()["job_id"]).to_json()
    assert (kept["types"], kept["verdict"]) == (old.to_json()["types"], old.to_json()["verdict"])
    versions = [one.to_json()["request"]["variant"]["version"] for one in (old, new)]
    assert len({*versions}) == 2
    with database.read() as session:
        rows, _ = lookup(session, parse(["model=net"]))
    assert {row.label.rpartition(" version ")[2] for row in rows} == {one[:8] for one in versions}
    assert new.to_json()["title"] == f"{old.to_json()['title']} version {versions[1][:8]}"


def test_a_benchmark_process_refuses_another_version_and_measures_the_edited_file(folder):
    variant = complete(PartialRequest(model="net", batch=2), "cpu", target=0.95).variant

    def subject(one):
        return Subject("variant", one.id, one.to_json())

    with BenchmarkProcess(cpu_card(settings()).id) as process:
        assert (
            process.measure(
                MeasureRequest(subject(variant), EAGER, SHORT, predicted={}), verify=True
            ).reading.time_us.value
            > 0
        )
        edit(folder, "LAYERS = 1", "LAYERS = 8")
        with pytest.raises(
            Unmeasurable,
            match=f"have version .* submitted with version {variant.version}",
        ) as no:
            process.measure(
                MeasureRequest(subject(variant), EAGER, SHORT, predicted={}), verify=True
            )
        assert (no.value.reason, "submit again" in no.value.next_step) == ("rejected", True)
        assert (
            process.measure(
                MeasureRequest(subject(versioned(variant)), EAGER, SHORT, predicted={}), verify=True
            ).verification.matches
            is not None
        )
