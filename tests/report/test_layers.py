"""What a job costs layer by layer: every call counted once, and modules that add up to the
model.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json

import pytest
import torch
from sqlmodel import select

from farm.errors import NoSuchJob, UsageError
from farm.operators.capture import capture
from farm.report import report
from farm.report.layers import BY, COLUMNS, _LayerCall, _total_weights, csv_lines, layers
from farm.store.captures import PlacedCall
from farm.store.database import Database
from farm.store.job_ids import find_job
from farm.store.tables import Operator
from tests.report import rows
from tests.report.measured import measured


@pytest.fixture(scope="module")
def resnet18(tmp_path_factory):
    """A database with resnet18 measured, as a session."""
    database = Database(f"sqlite:///{tmp_path_factory.mktemp('resnet18') / 'farm.db'}")
    database.upgrade()
    measured(database)
    with database.read() as session:
        yield session
    database.close()


def grouped(session, by, **options):
    return layers(session, report.build(session, "job1"), by, **options)


def test_a_call_has_its_place_sizes_parameters_and_cost(resnet18):
    calls = {(row.module_path, row.operator): row for row in grouped(resnet18, "call").rows}
    first = calls["conv1", "Conv2d"]
    assert first.name == "Conv2d 3->64 k7 s2 p3"
    assert first.call_index == 0
    assert first.input_sizes == ((32, 3, 224, 224),)
    assert first.output_sizes == ((32, 64, 112, 112),)
    assert (first.kernel_size, first.parameters["stride"]) == ([7, 7], [2, 2])
    assert (first.held_parameters, first.held_bytes) == (9408, 4 * 9408)
    assert first.cost.flops == 2 * 9408 * 32 * 112 * 112
    assert first.energy_mj > 0
    added = calls["layer1.0", "add_"]
    assert added.input_sizes == ((32, 64, 56, 56),) * 2
    assert added.held_parameters == 0


def test_tied_weights_count_once_in_the_module_that_has_both():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words = torch.nn.Embedding(10, 4)
            self.head = torch.nn.Linear(4, 10, bias=False)
            self.head.weight = self.words.weight

        def forward(self, ids):
            return self.head(self.words(ids))

    captured = capture(Tied(), (torch.arange(3),), device_type="cpu")
    calls = []
    for call in captured.calls:
        place = PlacedCall(call.index, call.module_path, call.tuple_id, "normal")
        spec = captured.tuples[call.tuple_id]
        calls.append(_LayerCall(place, spec.short_name, None, spec, None, call.reads))
    assert [_total_weights([call]) for call in calls] == [(40, 160), (40, 160)]
    assert _total_weights(calls) == (40, 160)
    unknown = [dataclasses.replace(call, reads=()) for call in calls]
    assert _total_weights(unknown) == (80, 320), "the capture does not say which memory it is"


@pytest.mark.parametrize("by", BY)
def test_shares_of_what_is_apart_add_to_all(resnet18, by):
    found = grouped(resnet18, by).rows
    apart = [row for row in found if row.depth == (1 if by == "module" else 0)]
    assert sum(row.time_share for row in apart) == pytest.approx(1)
    assert sum(row.energy_share for row in apart) == pytest.approx(1)
    assert sum(row.cost.calls for row in apart) == 68
    built = report.build(resnet18, "job1")
    assert sum(row.time_us for row in apart) == pytest.approx(built.verdict.time.total.value)


def test_a_module_costs_what_stands_under_it(resnet18):
    tree = {row.module_path: row for row in grouped(resnet18, "module").rows}
    assert tree[""].held_parameters == 11_689_512
    for path in ("", "layer1", "layer1.0"):
        start = f"{path}." if path else ""
        under = [
            row
            for name, row in tree.items()
            if row.depth == tree[path].depth + 1
            and (name.startswith(start) or name.startswith(f"{path}:"))
        ]
        assert sum(row.time_us for row in under) == pytest.approx(tree[path].time_us)
    assert tree["layer1.0:add_"].cost.calls == 1
    assert tree["layer1.0.relu"].cost.calls == 2
    assert {row.depth for row in grouped(resnet18, "module", depth=1).rows} == {0, 1}


def test_csv_and_json_have_the_same_rows_with_units_in_their_names(resnet18):
    found = grouped(resnet18, "call")
    read = list(csv.DictReader(io.StringIO("\n".join(csv_lines([found])))))
    told = json.loads(json.dumps(found.to_json(), allow_nan=False))["rows"]
    assert len(read) == len(told) == 68
    assert (read[0]["input_sizes"], read[0]["output_sizes"]) == ("32x3x224x224", "32x64x112x112")
    assert json.loads(read[0]["parameters"]) == told[0]["parameters"]
    assert float(read[0]["time_us"]) == told[0]["time_us"]
    assert set(told[0]) == set(read[0]) - {"job_id", "title"}
    _, row, *_ = csv_lines([dataclasses.replace(found, title="=1+1")])
    assert next(csv.reader([row]))[1] == "'=1+1"


def test_a_call_is_named_by_the_description_of_its_tuple_not_by_its_label(resnet18):
    built = report.build(resnet18, "job1")
    renamed = dataclasses.replace(
        built,
        tuples=tuple(
            dataclasses.replace(line, subject=dataclasses.replace(line.subject, label="a | b"))
            for line in built.tuples
        ),
    )
    first = {row.operator: row for row in layers(resnet18, renamed, "tuple", outputs=False).rows}[
        "AdaptiveAvgPool2d"
    ]
    assert (first.name, first.call) == ("a | b", "AdaptiveAvgPool2d o1x1")
    assert "call" not in first.to_json()


def test_sizes_of_outputs_are_those_stored_with_the_tuple(resnet18):
    stored = {
        row.id: tuple(map(tuple, row.output_shapes)) for row in resnet18.exec(select(Operator))
    }
    assert {
        row.operator_id: row.output_sizes for row in grouped(resnet18, "tuple").rows
    }.items() <= stored.items()
    assert ((32, 1000),) in stored.values()


def test_what_was_not_measured_has_no_time_and_says_why(database):
    job_id = rows.model_job(database)
    with database.read() as session:
        found = {
            row.operator: row for row in layers(session, report.build(session, job_id), "type").rows
        }
    assert (found["ReLU"].time_us, found["ReLU"].measured_calls, found["ReLU"].cost.calls) == (
        None,
        0,
        2,
    )
    assert found["MaxPool2d"].reason == "not in scope"
    assert found["Conv2d"].time_us == 630
    assert found["Conv2d"].held_parameters is None  # nothing in these rows says what they hold


def test_a_sweep_has_tuples_and_no_modules(database):
    job_id = rows.sweep_job(database)
    with database.read() as session:
        built = report.build(session, job_id)
        assert [row.cost.calls for row in layers(session, built, "tuple").rows] == [1, 1]
        with pytest.raises(UsageError, match="no modules"):
            layers(session, built, "module")


def test_rows_in_json_have_the_columns_of_the_csv(resnet18):
    rows = grouped(resnet18, "type").rows
    assert all(tuple(row.to_json()) == COLUMNS for row in rows)


def test_the_name_of_a_model_is_no_job_and_its_jobs_are_named(resnet18):
    with pytest.raises(NoSuchJob) as refused:
        find_job(resnet18, "resnet18")
    assert "farm jobs resnet18" in refused.value.next_step
