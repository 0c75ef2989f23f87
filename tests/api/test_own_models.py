"""A model in hand: captured, named by its calls, measured on this host's card, and left as it
was.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import farm
from farm.benchmark_process.client import BenchmarkProcess, CardReading
from farm.benchmark_process.requests import MeasureRequest
from farm.devices.lock import CardLock
from farm.devices.software import torch_version
from farm.errors import CaptureError, CardBusy, CardUnavailable, TupleRejected, UsageError
from farm.jobs import cards, in_process, items
from farm.settings import settings
from farm.store import tables
from farm.store.database import read_clock_s
from farm.types.deciding import lacks_values
from farm.types.protocol import Protocol, Stopping
from farm.types.verification import Verification
from tests import slow
from tests.operators.routed import routed

SHORT = Stopping(
    warm_up_s=0.0, minimum_s=0.0, maximum_s=0.1, time_half_width=1.0, energy_half_width=1.0
)


class Masked(torch.nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, width)
        self.norm = torch.nn.BatchNorm1d(width)

    def forward(self, values: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
        found = torch.relu(self.norm(self.inner(values)))
        return found if mask is None else found * mask


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_SIMULATED_CARDS", "1")
    monkeypatch.setenv("FARM_SIMULATED_ITEM_S", "0")
    settings.cache_clear()


@pytest.fixture
def database(tmp_path: Path) -> farm.Database:
    return farm.open_database(tmp_path / "farm.db")


def test_a_model_in_hand_is_one_variant_by_its_calls_whatever_its_weights() -> None:
    one, same, other = (
        farm.capture_model(Masked(width).eval(), torch.randn(3, 4)) for width in (8, 8, 16)
    )
    assert one.variant == same.variant != other.variant
    assert one.variant.model.startswith("Masked-")
    assert (one.variant.batch, one.variant.dtype, one.variant.mode) == (3, "float32", "eval")
    assert [spec.short_name for spec in one.tuples] == ["Linear", "BatchNorm1d", "relu"]
    assert one.flops == 2 * 3 * 4 * 8
    assert one.bytes_moved > 0
    assert "Linear" in one._repr_html_()


def test_the_rows_of_experts_are_those_of_the_model_in_hand_and_not_part_of_its_name() -> None:
    (even, x), (skewed, _) = routed(), routed(skew=2.0)
    captured, other = farm.capture_model(even, x), farm.capture_model(skewed, x)
    assert captured.variant == other.variant
    assert captured.counts != other.counts
    assert not any(map(lacks_values, (*captured.tuples, *other.tuples)))


def test_keyword_inputs_count_and_training_is_another_variant() -> None:
    model, values = Masked().eval(), torch.randn(3, 4)
    plain, masked = (
        farm.capture_model(model, (values,), named) for named in ({}, {"mask": torch.ones(3, 8)})
    )
    assert "mul" in [spec.short_name for spec in masked.tuples]
    before = copy.deepcopy(model.state_dict())
    training = farm.capture_model(model.train(), values)
    assert len({entry.variant.id for entry in (plain, masked, training)}) == 3
    assert training.variant.mode == "train"
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_what_cannot_be_captured_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match="not a model"):
        farm.capture_model(torch.relu, torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="lazy"):
        farm.capture_model(torch.nn.LazyLinear(3), torch.ones(2, 2))
    with pytest.raises(CaptureError, match="raised"):
        farm.capture_model(torch.nn.Linear(3, 3), torch.ones(2, 2))


class Uncopyable(torch.nn.Linear):
    """It reads a value, and cannot be copied to run with values."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return super().forward(values) if values.sum().item() else values

    def __deepcopy__(self, memory: Any) -> Any:
        raise TypeError("cannot pickle '_thread.lock' object")


class Nested(torch.nn.Linear):
    def forward(self, values: dict[str, Any]) -> torch.Tensor:
        inner: Any = values
        while isinstance(inner, dict):
            inner = inner["next"]
        return super().forward(inner)


def test_inputs_that_are_nested_too_deeply_for_python_are_refused_with_a_next_step() -> None:
    shallow: Any = torch.ones(2, 3)
    for _ in range(20):
        shallow = {"next": shallow}
    deep = shallow
    for _ in range(5000):
        deep = {"next": deep}
    module = Nested(3, 3).eval()
    assert farm.capture_model(module, (shallow,)).tuples
    for ask in (
        lambda: farm.capture_model(module, (deep,)),
        lambda: farm.fits(module, (deep,), card="H200"),
    ):
        with pytest.raises(CaptureError, match="RecursionError") as caught:
            ask()
        assert "fewer levels" in caught.value.next_step


def test_the_whole_of_a_model_in_hand_is_not_counted() -> None:
    captured = farm.capture_model(torch.nn.Linear(3, 3), torch.ones(2, 3))
    assert captured.extraction.model_flops is None
    assert captured.flops == captured.extraction.flops == 2 * 2 * 3 * 3


def test_every_error_of_a_capture_is_an_error_of_the_farm() -> None:
    with pytest.raises(CaptureError, match=r"which cannot be made: TypeError: cannot pickle"):
        farm.capture_model(Uncopyable(3, 3), torch.ones(2, 3))


def test_a_model_of_another_dtype_is_a_variant_of_it() -> None:
    doubled = farm.capture_model(torch.nn.Linear(3, 3).double(), torch.ones(2, 3).double())
    assert doubled.variant.dtype == "float64"
    complex_ = farm.capture_model(
        torch.nn.Linear(3, 3).to(torch.complex64), torch.ones(2, 3).to(torch.complex64)
    )
    assert complex_.variant.dtype == "float32"


def test_a_captured_model_is_estimated_and_a_module_needs_its_inputs() -> None:
    module = Masked().eval()
    captured = farm.capture_model(module, torch.randn(3, 4))
    estimate = farm.estimate(captured, card="H200")
    assert (estimate.variant, estimate.tuples) == (captured.variant, 3)
    for ask in (
        lambda: farm.estimate(module, card="H200"),  # type: ignore[arg-type]
        lambda: farm.step_memory(module),  # type: ignore[arg-type]
        lambda: farm.measure_model(module, database=None),  # type: ignore[arg-type]
    ):
        with pytest.raises(UsageError, match="A value of type Masked is neither") as caught:
            ask()
        assert "farm.capture_model(module, inputs)" in caught.value.next_step


def test_what_needs_values_has_a_cost_wherever_its_tuples_go() -> None:
    class Selecting(torch.nn.Linear):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return super().forward(values[values[:, 0] > 0])

    captured = farm.capture_model(Selecting(4, 4).eval(), torch.ones(3, 4))
    assert captured.flops == 2 * 3 * 4 * 4
    assert len(farm.predict(captured.tuples, card="H200")) == len(captured.tuples)
    assert farm.estimate(captured, card="H200").tuples == len(captured.tuples)


@pytest.mark.usefixtures("simulated")
def test_tuples_are_read_on_a_held_card_and_kept_where_a_database_is_given(
    database: farm.Database,
) -> None:
    captured = farm.capture_model(Masked().eval(), torch.randn(3, 4))
    first, second = farm.measure_tuples(
        [captured.tuples[0], captured.tuples[1].to_json()], database=database
    )
    assert (first.spec, second.spec) == captured.tuples[:2]
    assert first.time_us > 0
    assert first.reading_id != second.reading_id
    assert "Linear" in first._repr_html_()
    assert re.fullmatch(r"<TupleReading Linear .* µs on simulated card>", repr(first))
    assert farm.measure_tuples(captured.tuples[:1])[0].reading_id == ""
    with pytest.raises(TupleRejected):
        farm.measure_tuples([{"operator": "os.system"}])
    with CardLock(first.card.id, settings().lock_dir), pytest.raises(CardBusy):
        farm.measure_tuples(captured.tuples)


@pytest.mark.usefixtures("simulated")
def test_a_model_is_a_job_to_its_verdict_without_a_broker(database: farm.Database) -> None:
    captured = farm.capture_model(Masked().eval(), (torch.randn(3, 4),), {"mask": torch.ones(3, 8)})
    report = farm.measure_model(captured, database=database)
    assert report.report.state == "done"
    assert report.outcome == "pass"
    assert report.report.readings.measured == len(captured.tuples) + 1
    assert re.fullmatch(rf"<JobReport {report.job_id} Masked-.*: {report.outcome}>", repr(report))
    assert farm.job_report(database, report.job_id[:6]).to_json() == report.to_json()
    with database.read() as session:
        from farm.store import tables

        assert session.get_one(tables.CardRow, report.report.cards[0].id).state != "idle", (
            "nobody waits on it any more"
        )


def test_on_the_cpu_the_whole_is_read_in_this_process_and_the_model_left_as_it_was(
    database: farm.Database,
) -> None:
    model = Masked().train()
    before, threads = copy.deepcopy(model.state_dict()), torch.get_num_threads()
    captured = farm.capture_model(model, (torch.randn(64, 4),), {"mask": torch.ones(64, 8)})
    report = farm.measure_model(captured, database=database, card="cpu", stopping=SHORT).report
    assert report.verdict.time.whole is not None
    assert report.verdict.time.whole.value > 0
    assert report.readings.measured == len(captured.tuples) + 1
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.get_num_threads() == threads
    with pytest.raises(UsageError, match="graphs"):
        farm.measure_model(
            captured, database=database, card="cpu", protocol=Protocol(launch="graph")
        )


@pytest.mark.usefixtures("simulated")
def test_the_whole_is_measured_first_and_what_the_card_does_not_run_is_not_measured(
    database: farm.Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a worker: the driver is the same."""
    captured = farm.capture_model(Masked().eval(), torch.randn(3, 4))
    asked: list[str] = []
    answered = BenchmarkProcess.measure

    def measure(process: BenchmarkProcess, request: MeasureRequest, **options: Any) -> CardReading:
        asked.append(request.subject.kind)
        answer = answered(process, request, **{**options, "verify": False})
        if request.subject.kind == "operator":
            return answer
        first = captured.extraction.capture.calls[0]  # all that the card runs
        observed = {
            "calls": [
                {
                    "index": 0,
                    "module_path": "",
                    "tuple_id": first.tuple_id,
                    "reads": [],
                    "writes": [],
                }
            ],
            "tuples": {
                first.tuple_id: captured.extraction.capture.tuples[first.tuple_id].to_json()
            },
            "costs": {
                first.tuple_id: dataclasses.asdict(captured.extraction.costs[first.tuple_id])
            },
        }
        return dataclasses.replace(answer, verification=Verification(observed=observed))

    monkeypatch.setattr(BenchmarkProcess, "measure", measure)
    known = in_process._store(database, captured, Protocol(), "simulated", torch_version())
    opened = in_process.open_job
    monkeypatch.setattr(
        in_process,
        "open_job",
        lambda database, resolved, **more: opened(
            database, dataclasses.replace(resolved, capture_id=known), **more
        ),
    )
    report = farm.measure_model(captured.variant, database=database, protocol=Protocol()).report
    assert asked == ["variant", "operator"]
    assert report.readings.not_run == 2


@pytest.mark.usefixtures("simulated")
def test_the_lease_of_an_item_is_renewed_while_it_is_measured(
    database: farm.Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARM_LEASE_S", "1.5")
    monkeypatch.setenv("FARM_SIMULATED_ITEM_S", "2.5")
    settings.cache_clear()
    left_s: list[float] = []
    complete = items.complete

    def watched(
        database: farm.Database, claimed: items.Claim, *more: Any, **about: Any
    ) -> items.FollowUp:
        with database.read() as session:
            left_s.append(
                session.get_one(tables.Item, claimed.item_id).lease_until_s - read_clock_s(session)
            )
        return complete(database, claimed, *more, **about)

    monkeypatch.setattr(items, "complete", watched)
    captured = farm.capture_model(torch.nn.ReLU().eval(), torch.randn(3, 4))
    assert farm.measure_model(captured, database=database).report.state == "done"
    assert min(left_s) > 0


@pytest.mark.usefixtures("simulated")
def test_a_card_in_quarantine_or_drained_measures_no_model(database: farm.Database) -> None:
    captured = farm.capture_model(torch.nn.ReLU().eval(), torch.randn(3, 4))
    (reading,) = farm.measure_tuples(captured.tuples, database=database)
    cards.drain(database, reading.card.id)
    with pytest.raises(CardUnavailable, match="draining"):
        farm.measure_model(captured, database=database)
    assert farm.measure_tuples(captured.tuples, database=database), "no job takes it, a person may"
    cards.quarantine(database, reading.card.id, "a sum came out wrong")
    for measure in (
        farm.measure_tuples,
        lambda tuples, database: farm.measure_model(captured, database=database),
    ):
        with pytest.raises(CardUnavailable, match="quarantined"):
            measure(captured.tuples, database=database)


@pytest.mark.usefixtures("simulated")
def test_a_label_is_text_in_a_notebook_and_nothing_else() -> None:
    from farm.types.notebook import table

    assert "<script>" not in table("<script>", ("<b>",), [("<img src=x>",)], "<i>")
    assert "<img" not in table("", (), [("<img src=x>",)])


def turns(database: farm.Database) -> list[str | None]:
    """For each reading of a tuple: the group that it was timed in turn with."""
    with database.read() as session:
        rows = list(session.exec(tables.ReadingRow.__table__.select()))  # type: ignore[attr-defined]
        return [row.details["turns_group"] for row in rows if row.subject_kind == "operator"]


def flagged_alone(database: farm.Database) -> list[bool]:
    """For each reading of a tuple: whether its flags say that it lost its turns."""
    with database.read() as session:
        rows = list(session.exec(tables.ReadingRow.__table__.select()))  # type: ignore[attr-defined]
        return ["timed_alone" in row.flags for row in rows if row.subject_kind == "operator"]


def test_a_cpu_times_the_tuples_of_a_model_in_turn(database: farm.Database) -> None:
    captured = farm.capture_model(Masked().eval(), torch.randn(3, 4))
    farm.measure_model(captured, database=database, card="cpu", stopping=SHORT)
    assert len(turns(database)) == len(captured.tuples) == 3
    assert len(set(turns(database))) == 1
    assert flagged_alone(database) == [False] * 3


@slow.PROCESS
def test_if_the_process_dies_while_it_times_items_in_turn_each_is_measured_alone(
    database: farm.Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    killed: list[int] = []

    def phase(self: Any, claimed: items.Claim, name: str, details: dict[str, Any]) -> None:
        if name == "window" and not killed:
            killed.append(self.benchmark.pid)
            os.kill(self.benchmark.pid, signal.SIGKILL)

    monkeypatch.setattr(in_process._JobDriver, "phase", phase)
    captured = farm.capture_model(Masked().eval(), torch.randn(3, 4))
    farm.measure_model(captured, database=database, card="cpu", stopping=SHORT)
    assert len(turns(database)) == len(set(turns(database))) == 3
    assert flagged_alone(database) == [True] * 3
    with database.read() as session:
        assert {item.attempts for item in session.exec(tables.Item.__table__.select())} == {1}  # type: ignore[attr-defined]
    assert "measured one after the other" in caplog.text


@slow.PROCESS
def test_readings_say_so_if_the_process_dies_after_it_timed_items_in_turn(
    database: farm.Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = BenchmarkProcess.measure
    measured: list[str] = []

    def measure_then_die(self: BenchmarkProcess, request: MeasureRequest, **options: Any) -> Any:
        answer = measure(self, request, **options)
        if not measured:
            self.kill()
        measured.append(request.subject.id)
        return answer

    monkeypatch.setattr(BenchmarkProcess, "measure", measure_then_die)
    captured = farm.capture_model(Masked().eval(), torch.randn(3, 4))
    farm.measure_model(captured, database=database, card="cpu", stopping=SHORT)
    assert sorted(flagged_alone(database)) == [False, True, True]


@slow.PROCESS
def test_a_process_that_must_stop_does_not_time_the_items_behind_the_claimed_one(
    database: farm.Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    turns_begun: list[str] = []
    monkeypatch.setattr(
        in_process._JobDriver, "phase", lambda self, claimed, name, _: turns_begun.append(name)
    )
    monkeypatch.setattr(
        in_process._JobDriver, "stop_requested", lambda self: turns_begun.count("window") == 2
    )
    caplog.set_level("INFO", logger="farm.worker")
    farm.measure_model(
        farm.capture_model(Masked().eval(), torch.randn(3, 4)),
        database=database,
        card="cpu",
        stopping=SHORT,
    )
    assert "is measured without the items behind it" in caplog.text
    assert len(turns(database)) == len(set(turns(database))) == 3
