"""Graphs of passes with host steps, on a real NVIDIA card. Skipped without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farm.benchmark.bench import Bench
from farm.benchmark.host_steps import HostSteps
from farm.benchmark.torch_device import capture_graph, one_stream
from farm.benchmark_process.client import BenchmarkProcess
from farm.benchmark_process.requests import MeasureRequest
from farm.devices.host import discover, open_device
from farm.errors import Unmeasurable
from farm.models import catalog
from farm.settings import settings
from farm.training.extract import extract
from farm.types.details import Details
from farm.types.protocol import Protocol, Stopping
from farm.types.subject import Subject
from farm.types.tuple import OperatorTuple, TensorSpec
from tests.benchmark.operators import subject
from tests.benchmark.test_host_steps import Waiting
from tests.gpu import NEEDS_A_CARD

pytestmark = NEEDS_A_CARD
CARD = torch.device("cuda:0")


def of_one_tensor(name: str) -> Subject:
    tensor = TensorSpec("activation", "", (1,), "float32")
    return subject(OperatorTuple(name, "function", arguments=({"tensor": 0},), tensors=(tensor,)))


@torch.no_grad()
def test_replays_compute_what_an_eager_pass_computes() -> None:
    one_stream(CARD)
    torch.manual_seed(0)
    model, x = Waiting().to(CARD), torch.randn(6, 8, device=CARD)
    expected = model(x)
    steps = HostSteps.of(lambda: model(x), CARD)
    details = steps.noted(Details())
    assert details.launching.host_copies
    assert details.timing.left_out_us
    found: list[Any] = []
    graph = capture_graph([steps.around(lambda: found.append(model(x)))] * 2, CARD)
    for _ in range(3):
        for out in found:
            out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in found)


def test_a_read_of_a_value_is_measured_and_an_operator_that_is_left_out_is_not() -> None:
    bench = Bench(open_device(discover(settings())[0]), CARD)
    reading = bench.measure(of_one_tensor("torch.Tensor.item"), Protocol(), Stopping(maximum_s=1))
    assert reading.details.launching.host_copies == {"aten._local_scalar_dense.default": 1}
    assert reading.time_us.value > 0
    with pytest.raises(Unmeasurable, match="nothing else runs on the card"):
        bench.measure(of_one_tensor("torch.nonzero"), Protocol(), Stopping(maximum_s=1))


def test_wholes_with_host_steps_are_verified_and_measured_as_graphs() -> None:
    variants = [
        catalog.variant(f"transformers/{name}", dtype="float32", layers=1)
        for name in ("bloom-560m", "deberta-base", "mpnet-base")
    ]
    with BenchmarkProcess(
        discover(settings())[0].id
    ) as process:  # its start takes longer than a whole
        for variant in variants:
            predicted = extract(variant, device_type="cuda").capture.counts
            whole = Subject("variant", variant.id, variant.to_json())
            answer = process.measure(
                MeasureRequest(whole, Protocol(), Stopping(maximum_s=1), predicted=dict(predicted)),
                verify=True,
            )
            found = answer.verification
            assert found is not None
            assert (found.launch, found.not_captured, found.missing, found.unexpected) == (
                "graph",
                None,
                {},
                {},
            )
            assert bool(answer.reading.details.timing.left_out_us) == (
                "deberta" not in variant.model
            )
            assert answer.reading.details.order.places
