"""Kernels and in-model times on a real NVIDIA card. Skipped without one."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from farm.audit import audit_kernels
from farm.benchmark import verification
from farm.benchmark.measure import Bench
from farm.benchmark.protocol import Protocol, Stopping, Subject, Variant
from farm.devices.device import discover, open_device
from farm.settings import settings
from farm.verdict import Part, ReadingView
from tests.benchmark.operators import linear
from tests.gpu import NEEDS_A_CARD

pytestmark = NEEDS_A_CARD


def test_the_tuples_kernels_are_the_models_kernels_and_every_kernel_finds_its_call() -> None:
    device = open_device(discover(settings())[0])
    bench = Bench(device, "cuda:0")
    variant = Variant("resnet18", 8, 224)
    subject = Subject("variant", variant.id, variant.to_json())
    observed, found = verification.verify(subject, Protocol(), bench.torch_device, None)
    assert observed is not None
    assert found["in_model"]["source"] == "kernels"
    assert found["in_model"]["attributed_share"] > 0.99
    assert all(value for times in found["in_model"]["calls_us"].values() for value in times)
    counts = Counter(call["tuple_id"] for call in observed["calls"])
    quick = Stopping(warm_up_s=0.05, minimum_s=0.05, maximum_s=0.1, time_half_width=1, energy_half_width=1)
    parts = []
    for tuple_id, spec in observed["tuples"].items():
        reading = bench.measure(Subject("operator", tuple_id, spec), Protocol(), quick)
        assert reading.details["kernels"]
        view = ReadingView(reading.time_us, details=reading.details)
        parts.append(Part(tuple_id, "", tuple_id, counts[tuple_id], reading=view))
    audit = audit_kernels(found["kernels"], parts)
    assert audit is not None
    assert audit.explained > 0.98, audit
    device.close()


def test_naming_a_tuples_kernels_costs_little_and_slows_no_later_reading() -> None:
    device = open_device(discover(settings())[0])
    bench = Bench(device, "cuda:0")
    before = bench.measure(linear(64, 1024, 1024), Protocol(), Stopping())
    begin_s = time.perf_counter()
    after = bench.measure(linear(64, 1024, 1024), Protocol(), Stopping())
    assert after.cost_s["kernels"] < 0.1 * (time.perf_counter() - begin_s)
    assert after.time_us == pytest.approx(before.time_us, rel=0.02)
    device.close()
