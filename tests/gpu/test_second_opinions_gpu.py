"""Kernels and in-model times on a real NVIDIA card. Skipped without one."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from farm.benchmark import verification
from farm.benchmark.bench import Bench
from farm.benchmark_process.client import BenchmarkProcess
from farm.benchmark_process.requests import MeasureRequest
from farm.devices.host import discover, open_device
from farm.settings import settings
from farm.types.protocol import Protocol, Stopping
from farm.types.subject import Subject
from farm.types.variant import Variant
from farm.verdict.cost_line import CostLine, TupleView
from farm.verdict.kernel_audit import audit_kernels
from tests.gpu import NEEDS_A_CARD

pytestmark = NEEDS_A_CARD


def test_the_tuples_kernels_are_the_models_kernels_and_every_kernel_finds_its_call() -> None:
    device = open_device(discover(settings())[0])
    bench = Bench(device, "cuda:0")
    variant = Variant("resnet18", 8, 224)
    subject = Subject("variant", variant.id, variant.to_json())
    found = verification.verify(subject, Protocol(), bench.torch_device, None)
    observed = found.observed
    assert observed is not None
    assert found.in_model.source == "kernels"
    assert found.in_model.attributed_share > 0.99
    assert all(value for times in found.in_model.calls_us.values() for value in times)
    assert set(found.tuple_kernels) == set(observed["tuples"])
    counts = Counter(call["tuple_id"] for call in observed["calls"])
    parts = [
        CostLine(TupleView(tuple_id, "", tuple_id), count, "missing")
        for tuple_id, count in counts.items()
    ]
    audit = audit_kernels(found, parts)
    assert audit is not None
    assert audit.explained > 0.98, audit
    device.close()


def test_a_model_that_runs_something_else_while_it_is_captured_is_taken_as_it_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FARM_MODELS", json.dumps({"asking": "tests.benchmark.asking:model"}))
    settings.cache_clear()
    variant = Variant("asking", 64, 224)
    subject = Subject("variant", variant.id, variant.to_json())
    with BenchmarkProcess(discover(settings())[0].id) as process:
        answer = process.measure(
            MeasureRequest(subject, Protocol(), Stopping(), predicted={}), verify=True
        )
    settings.cache_clear()
    assert answer.verification is not None
    assert answer.verification.observed is not None
    names = [
        answer.verification.observed["tuples"][call["tuple_id"]]["operator"]
        for call in answer.verification.observed["calls"]
    ]
    assert [name.rsplit(".", 1)[-1] for name in names] == ["Linear", "mul", "add"]
    assert answer.verification.launch == "graph"
    assert answer.verification.eagerly is not None
    (apart,) = answer.verification.eagerly.operators
    assert (apart.launched, apart.eager) == (1, 0)
    counts = Counter(call["tuple_id"] for call in answer.verification.observed["calls"])
    parts = [
        CostLine(TupleView(tuple_id, "", ""), count, "missing")
        for tuple_id, count in counts.items()
    ]
    audit = audit_kernels(answer.verification, parts)
    assert audit is not None
    assert audit.same, audit
    assert audit.launch == "graph"
    assert set(answer.reading.details.order.places or {}) == set(counts)


def test_processes_agree_on_what_a_graph_with_memory_operations_takes() -> None:
    # Ten in a pass. Once a process had worked on a second stream, for its health check say, each
    # took 14 us longer.
    variant = Variant("swin_t", 1, 224)
    subject = Subject("variant", variant.id, variant.to_json())
    times_us = []
    for _ in range(2):
        with BenchmarkProcess(discover(settings())[0].id) as process:
            times_us += [
                process.measure(
                    MeasureRequest(subject, Protocol(), Stopping())
                ).reading.time_us.value
                for _ in range(2)
            ]
    assert max(times_us) < 1.02 * min(times_us), times_us


def test_a_process_that_measures_never_uses_the_profiler() -> None:
    variant = Variant(
        "swin_t", 1, 224
    )  # short kernels: with the profiler in the process a tenth slower
    subject = Subject("variant", variant.id, variant.to_json())
    with BenchmarkProcess(discover(settings())[0].id) as process:
        before = process.measure(MeasureRequest(subject, Protocol(), Stopping())).reading
        assert process._verifier is not None
        pid, verifier = process.pid, process._verifier.pid
        answer = process.measure(
            MeasureRequest(subject, Protocol(), Stopping(), predicted={}), verify=True
        )
        assert answer.verification is not None
        assert answer.verification.tuple_kernels
        assert process.pid == pid
        assert verifier not in (pid, process._verifier.pid)
    assert answer.reading.time_us.value == pytest.approx(before.time_us.value, rel=0.03)
