"""A training step's memory and plan, asked from Python."""

from __future__ import annotations

import pytest

import farm
from farm.errors import UsageError
from farm.models import catalog

STEP = catalog.variant("squeezenet1_1", 2, input_size=64, step="training")


def test_a_step_is_planned_within_a_share_of_its_peak() -> None:
    found = farm.step_memory(STEP, fast="90%", slow_bandwidth="55GB/s")
    assert found.offload_plans is not None
    (plan,) = found.offload_plans.plans
    assert plan.peak_bytes <= plan.fast_bytes < found.offload_plans.all_fast.peak_bytes
    assert plan.slow
    assert found.to_json()["placement"]["plans"]


def test_a_step_without_a_plan_is_its_memory_alone() -> None:
    assert farm.step_memory(STEP).offload_plans is None


def test_a_forward_pass_is_refused() -> None:
    with pytest.raises(UsageError, match="is a forward pass"):
        farm.step_memory(catalog.variant("squeezenet1_1", 2, input_size=64))


def test_what_is_no_amount_is_said() -> None:
    with pytest.raises(UsageError, match="fast"):
        farm.step_memory(STEP, fast="much")
