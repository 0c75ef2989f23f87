"""The contract of `farm.subjects.base`: every kind keeps it, and a kind of one file is enough to
capture, label, check, build, count and measure an operator, with a phase of its own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlmodel import select
from torch import nn
from torch.utils._pytree import tree_leaves

from farm.benchmark.bench import Bench
from farm.benchmark.phases.base import Measurement, Phase
from farm.benchmark.subjects.model_variant import GivenModel
from farm.errors import TupleRejected, Unmeasurable
from farm.jobs import in_process, items, jobs
from farm.jobs.closing import Closing, close_round
from farm.operators.capture import predict
from farm.operators.cost import cost
from farm.operators.rebuild import rebuild, written_inputs
from farm.operators.self_check import checked
from farm.report import report
from farm.report.report import Report
from farm.settings import settings
from farm.store.database import Database
from farm.store.tables import ReadingRow
from farm.subjects import libraries, registry
from farm.subjects.base import Kind, reject
from farm.subjects.collective_calls import collective_tuple
from farm.subjects.label import label_of
from farm.subjects.parsing import parse
from farm.subjects.registry import KINDS, kind_of
from farm.subjects.values import Fill
from farm.training.captured_model import capture_model
from farm.types.details import Details
from farm.types.protocol import Protocol, Stopping
from farm.types.reading import Reading
from farm.types.request import Request
from farm.types.tuple import Cost, OperatorTuple, TensorSpec
from tests.benchmark.conftest import virtual_time
from tests.benchmark.fake_device import FakeDevice
from tests.benchmark.operators import subject
from tests.benchmark.virtual_time import VirtualTime
from tests.planned import claim, complete, items_of, register

__all__ = ["virtual_time"]  # a fixture

SQUARE = TensorSpec("activation", "", (4, 4), "float32")
OUTPUT = TensorSpec("activation", "", (4, 4), "float32", storage=1)
TENSOR = {"tensor": 0}


def linear_module() -> OperatorTuple:
    captured = predict(nn.Linear(4, 4, device="meta"), (torch.empty(2, 4, device="meta"),))
    (spec,) = captured.tuples.values()
    return spec


def generated_kernel() -> OperatorTuple:
    parameters = {
        "source": "0" * 32,
        "fused": "relu_add",
        "config": {"dict": []},
        "writes": [1],
        "outputs": [1],
    }
    arguments = (TENSOR, {"tensor": 1})
    return OperatorTuple(
        "triton.pointwise", "kernel", parameters, arguments, tensors=(SQUARE, OUTPUT)
    )


def operator_of_a_library() -> OperatorTuple:
    version = {"version": libraries.version_of(__name__)}
    return OperatorTuple(
        "farm_contract.powers.default", "library", version, (TENSOR, 2), tensors=(SQUARE,)
    )


LIST = """
[allowed]
"farm_contract.powers.default" = "(Tensor tensor, int number) -> Tensor"
[limits]
"farm_contract.powers.default" = {number = [0, 100]}
"""


@pytest.fixture(autouse=True)
def this_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The settings name this module as a library, with a list of its operator."""
    file = tmp_path / "list.toml"
    file.write_text(LIST)
    monkeypatch.setenv("FARM_LIBRARIES", json.dumps({__name__: str(file)}))
    settings.cache_clear()
    yield
    monkeypatch.undo()
    settings.cache_clear()


#: An operator of each kind that the farm has.
EXAMPLES: dict[str, Callable[[], OperatorTuple]] = {
    "module": linear_module,
    "function": lambda: OperatorTuple("torch.relu", "function", {}, (TENSOR,), tensors=(SQUARE,)),
    "aten": lambda: OperatorTuple("aten.relu.default", "aten", {}, (TENSOR,), tensors=(SQUARE,)),
    "library": operator_of_a_library,
    "kernel": generated_kernel,
    "collective": lambda: collective_tuple("all_gather", 1024, "float32", 4),
}


@pytest.fixture(params=list(EXAMPLES))
def example(request: pytest.FixtureRequest) -> OperatorTuple:
    return EXAMPLES[request.param]()


def test_every_kind_has_an_example() -> None:
    assert list(EXAMPLES) == list(KINDS)


def test_json_describes_the_same_operator(example: OperatorTuple) -> None:
    again = parse(json.loads(json.dumps(example.to_json())))
    assert again == example
    assert again.kind == kind_of(example).name


def test_an_operator_of_another_name_is_rejected_with_its_name(example: OperatorTuple) -> None:
    data = {**example.to_json(), "operator": "os.system"}
    with pytest.raises(TupleRejected, match=r"os\.system|operator|kernel"):
        rebuild(parse(data), "cpu").run()


def test_parameters_of_another_kind_are_rejected(example: OperatorTuple) -> None:
    data = {**example.to_json(), "parameters": {"surprise": 1}}
    with pytest.raises(TupleRejected):
        rebuild(parse(data), "meta")


def test_keywords_of_another_call_are_rejected(example: OperatorTuple) -> None:
    """PyTorch itself checks those of its modules and functions, at the call."""
    data = {**example.to_json(), "keywords": {"surprise": 1}}
    if example.kind in ("module", "function"):
        with pytest.raises(TypeError, match="surprise"):
            rebuild(parse(data), "cpu").run()
    else:
        with pytest.raises(TupleRejected):
            rebuild(parse(data), "cpu")


def test_a_truth_value_is_no_number(example: OperatorTuple) -> None:
    """In Python, True is an int: a kind that only asks for one accepts it."""
    data = json.loads(json.dumps(example.to_json()))
    numbers = [index for index, value in enumerate(data["arguments"]) if type(value) is int]
    for index in numbers:
        data["arguments"][index] = True
        with pytest.raises((TupleRejected, Unmeasurable)):
            rebuild(parse(data), "meta").run()


def test_the_label_is_one_short_line(example: OperatorTuple) -> None:
    label = label_of(example)
    assert example.short_name in label
    assert label.isprintable()
    assert len(label) <= 80


def test_the_cost_counts_bytes_and_the_shapes_of_the_outputs(example: OperatorTuple) -> None:
    found = cost(example)
    assert found.flops >= 0
    assert found.bytes > 0
    assert found.output_shapes or written_inputs(example)


def test_the_tensors_that_a_call_writes_are_tensors_of_the_tuple(example: OperatorTuple) -> None:
    kind, indices = kind_of(example), frozenset(range(len(example.tensors)))
    assert written_inputs(example) <= indices
    assert kind.outputs(example) <= written_inputs(example)
    storages = {tensor.storage for tensor in example.tensors}
    assert kind.unread_storages(example) | kind.host_storages(example) <= storages


def test_each_tensor_gets_values(example: OperatorTuple) -> None:
    kind, written = kind_of(example), written_inputs(example)
    for index in range(len(example.tensors)):
        assert isinstance(kind.values(example, index, written), Fill)
        assert isinstance(kind.may_be_zero(example, index, written), bool)


def test_an_operator_that_needs_no_other_process_runs_alone(example: OperatorTuple) -> None:
    kind = kind_of(example)
    kind.admit(example)
    if kind.standalone:
        assert kind.cards(example) == 1
        outputs = tree_leaves(rebuild(example, "cpu").run())
        shapes = tuple(tuple(tensor.shape) for tensor in outputs if tensor is not None)
        assert shapes == cost(example).output_shapes


# ----- a kind of one file


@torch.library.custom_op("farm_contract::powers", mutates_args=())
def powers(tensor: torch.Tensor, number: int) -> torch.Tensor:
    return torch.stack([tensor**power for power in range(number)])


@powers.register_fake
def _(tensor: torch.Tensor, number: int) -> torch.Tensor:
    return tensor.new_empty((number, *tensor.shape))


EAGERLY = Protocol(launch="eager")
SHORT = Stopping(
    warm_up_s=0.05, minimum_s=0.1, maximum_s=0.4, time_half_width=0.5, energy_half_width=0.5
)


@dataclass(frozen=True)
class LargestNote:
    """The largest power in the output of a pass."""

    largest: float
    powers: int


class LargestPower(Phase):
    """Notes the largest power."""

    name = "largest"

    def applies(self, measurement: Measurement) -> bool:
        return measurement.subject.spec["arguments"][1] > 1

    def run(self, measurement: Measurement, reading: Reading) -> Reading:
        output = measurement.passes.first()
        assert isinstance(output, torch.Tensor)
        note = LargestNote(largest=float(output.max()), powers=len(output))
        details = reading.details.recording("largest_power", note)
        return dataclasses.replace(reading, details=details)


class Powers(Kind):
    """An operator of another library, with its own cost, its own limit and its own phase."""

    name = "powers"
    public = True

    def recorded_name(self, function: Any) -> str:
        return "contract.powers" if function is powers._opoverload else ""

    def check(self, spec: OperatorTuple) -> None:
        if spec.operator != "contract.powers":
            raise reject("operator", "is not 'contract.powers'")

    def size_words(self, spec: OperatorTuple) -> list[str]:
        return [f"to {spec.arguments[1] - 1}"]

    def call_words(self, spec: OperatorTuple) -> list[str]:
        return []

    def admit(self, spec: OperatorTuple) -> None:
        if spec.arguments[1] > 100:
            raise Unmeasurable("rejected", f"{label_of(spec)} has too many powers.", "Use 100.")

    def target(
        self, spec: OperatorTuple, tensors: list[torch.Tensor], device: torch.device
    ) -> Callable[..., Any]:
        return powers._opoverload

    def phases(self, spec: OperatorTuple) -> Mapping[str, Phase]:
        return {"burst": LargestPower()}

    def cost(self, spec: OperatorTuple) -> Cost:
        (tensor,), number = spec.tensors, spec.arguments[1]
        size_bytes = (1 + number) * tensor.distinct_bytes
        return Cost(number * tensor.numel, size_bytes, ((number, *tensor.shape),))


class PowersModel(nn.Module):
    def __init__(self, number: int = 5) -> None:
        super().__init__()
        self.number = number

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.relu(powers(tensor, self.number))


@pytest.fixture
def new_kind() -> Iterator[Kind]:
    kind = Powers()
    registry.register(kind)
    yield kind
    del registry._KINDS[kind.name]


@pytest.fixture
def new_tuple(new_kind: Kind) -> OperatorTuple:
    captured = predict(PowersModel(), (torch.empty(8, 8, device="meta"),))
    assert not captured.gaps
    assert not checked(captured, "cpu").mismatches
    spec, relu = captured.tuples.values()
    assert relu.operator == "torch.relu"
    return spec


def test_a_kind_of_one_file_is_captured_labelled_and_counted(new_tuple: OperatorTuple) -> None:
    assert new_tuple.kind == "powers"
    assert parse(json.loads(json.dumps(new_tuple.to_json()))) == new_tuple
    assert label_of(new_tuple) == "powers to 4 | 8x8 fp32"
    assert cost(new_tuple) == Cost(320, 6 * 256, ((5, 8, 8),))


def test_a_kind_of_one_file_is_measured(
    new_tuple: OperatorTuple, virtual_time: VirtualTime
) -> None:
    bench = Bench(FakeDevice(), "cpu", idle_power_w=80.0)
    announced: list[str] = []
    reading = bench.measure(
        subject(new_tuple), EAGERLY, SHORT, lambda phase, _: announced.append(phase)
    )
    assert reading.time_us.value == pytest.approx(virtual_time.pass_s * 1e6, rel=0.01)
    assert announced[-2:] == ["window", "largest"]
    assert reading.cost_s["largest"] > 0
    note = reading.details.recorded("largest_power", LargestNote)
    assert note is not None
    assert (note.powers, note.largest > 1) == (5, True)


def test_a_key_of_the_details_holds_no_other_record() -> None:
    with pytest.raises(ValueError, match="'burst'"):
        Details().recording("burst", LargestNote(1.0, 1))


def report_of(database: Database, model: nn.Module) -> Report:
    """The report of a job that captures a model, and measures its tuples and the whole of it in
    this process."""
    captured = capture_model(model, torch.ones(8, 8))
    (card,) = register(database, 0)
    capture_id = in_process._store(database, captured, EAGERLY, "simulated", "t")
    request = Request(variant=captured.variant, protocol=EAGERLY, stopping=SHORT)
    job_id = jobs.create(database, request, [card], scope=("all",), capture_id=capture_id).job_id
    bench = Bench(FakeDevice(), "cpu", idle_power_w=80.0)
    for item in items_of(database, job_id):
        claimed = claim(database, item)
        measured = claimed.work.subject
        if claimed.role == "whole":
            measured = GivenModel.of(measured, captured.model, captured.args)
        try:
            reading = bench.measure(measured, claimed.work.protocol, claimed.work.stopping)
        except Unmeasurable as error:
            items.fail(database, claimed, error.reason, error.message)
        else:
            complete(database, claimed, card, reading=reading)
    assert close_round(database, job_id, 1).closing is Closing.DONE
    with database.read() as session:
        return report.build(session, job_id)


def test_a_kind_of_one_file_is_summed_and_reported(
    new_kind: Kind, virtual_time: VirtualTime, database: Database
) -> None:
    found = report_of(database, PowersModel())
    rows = {row.subject.label: row for row in found.tuples}
    assert "powers to 4 | 8x8 fp32" in rows
    for row in rows.values():
        assert row.time_us is not None
        assert row.time_us.value == pytest.approx(virtual_time.pass_s * 1e6, rel=0.01)
    assert found.verdict.coverage == 1
    time = found.verdict.time
    assert (time.total.value, time.whole.value) == (  # each pass takes the same virtual time
        pytest.approx(2 * virtual_time.pass_s * 1e6, rel=0.01),
        pytest.approx(virtual_time.pass_s * 1e6, rel=0.01),
    )
    assert found.flops == 320

    with database.read() as session:
        rows = session.exec(select(ReadingRow)).all()
    notes = [Details.from_json(row.details).recorded("largest_power", LargestNote) for row in rows]
    assert [note.powers for note in notes if note is not None] == [5]


def test_an_operator_that_a_new_kind_refuses_is_a_row_with_a_reason(
    new_kind: Kind, virtual_time: VirtualTime, database: Database
) -> None:
    found = report_of(database, PowersModel(101))
    (missing,) = (row for row in found.tuples if row.time_us is None)
    assert missing.reason.startswith("rejected: powers to 100 | 8x8 fp32")
    assert found.verdict.coverage < 1


def test_an_operator_that_a_new_kind_refuses_has_a_reason(new_kind: Kind) -> None:
    arguments = (TENSOR, 101)
    spec = OperatorTuple("contract.powers", "powers", {}, arguments, tensors=(SQUARE,))
    bench = Bench(FakeDevice(), "cpu", idle_power_w=80.0)
    with pytest.raises(Unmeasurable, match=r"powers to 100 .* has too many powers") as caught:
        bench.measure(subject(spec), Protocol(launch="eager"), Stopping())
    assert caught.value.reason == "rejected"


def test_a_kind_that_this_process_does_not_know_is_refused() -> None:
    spec = OperatorTuple("contract.powers", "powers", {}, (TENSOR, 2), tensors=(SQUARE,))
    with pytest.raises(TupleRejected, match="'powers'"):
        label_of(spec)
    with pytest.raises(TupleRejected, match="kind is wrong"):
        parse(spec.to_json())
