"""A training step as a subject: measured as a whole, looked at on its card, its parts told apart in
a report.
"""

import dataclasses

import pytest
import torch

from farm.benchmark.subjects import STEP
from farm.benchmark.verification import verify
from farm.models import catalog
from farm.training.capture import capture_step
from farm.training.extract import build_step, extract
from farm.training.tensor_lifetime import allocated_peak_bytes
from farm.types.protocol import Protocol
from farm.types.subject import Subject

CPU = torch.device("cpu")
EAGERLY = Protocol(launch="eager")


def variant(**said):
    return catalog.variant("squeezenet1_1", 1, input_size=32, step="training", **said)


def subject_of(step):
    return Subject("variant", step.id, step.to_json())


@pytest.mark.parametrize("said", [{"optimizer": "adamw"}, {"amp": "float16"}])
def test_passes_of_a_step_leave_the_weights_where_they_are(said):
    passes = STEP.passes(subject_of(variant(**said)), EAGERLY, CPU)
    before = [tensor.clone() for tensor in passes.written]
    for _ in range(3):
        passes.first()
    for tensor, was in zip(passes.written, before, strict=True):
        torch.testing.assert_close(tensor, was, rtol=1e-6, atol=1e-8)
    with torch.no_grad():  # as everything is measured
        assert {"forward", "backward"} <= {call.part for call in passes.order().calls}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize(("model", "amp"), [("resnet18", ""), ("vit_b_32", "bfloat16")])
def test_what_a_card_allocates_for_a_step_is_what_its_tensors_are_and_workspaces(model, amp):
    card = torch.device("cuda")
    step = catalog.variant(model, 16, step="training", optimizer="adamw-fused", amp=amp)
    with torch.cuda.stream(torch.cuda.Stream(card)):
        told = STEP.passes(subject_of(step), Protocol(), card).details.memory
        torch.cuda.empty_cache()
        built = build_step(step, card, launch="graph")
        seen = capture_step(built, device_type="cuda", warmed_up=True)
    assert told.workspace_bytes >= 0
    assert told.allocated_peak_bytes <= told.reserved_peak_bytes
    beyond_bytes = told.allocated_peak_bytes - told.workspace_bytes - allocated_peak_bytes(seen)
    assert (
        0 <= beyond_bytes <= 0.05 * told.allocated_peak_bytes
    )  # what cuDNN has for the time of a call


def test_a_step_runs_on_its_card_what_was_predicted():
    step = dataclasses.replace(variant(optimizer="adam"), batch=2)
    predicted = extract(step).capture
    found = verify(Subject("variant", step.id, step.to_json()), EAGERLY, CPU, predicted.counts)
    assert found.matches, found.differences
    assert found.observed is None
    assert {
        tuple_id: len(times_us) for tuple_id, times_us in found.in_model.calls_us.items()
    } == dict(predicted.counts)
    assert all(time_us > 0 for times_us in found.in_model.calls_us.values() for time_us in times_us)


def test_what_a_card_runs_otherwise_tells_whose_part_it_is():
    step = variant()
    found = verify(Subject("variant", step.id, step.to_json()), EAGERLY, CPU, {})
    assert not found.matches
    parts = {call["part"] for call in found.observed["calls"]}
    assert parts == {"forward", "backward", "loss", "optimizer", "accumulation"}
    assert {call["owner"] for call in found.observed["calls"] if call["part"] == "backward"} >= {
        "Conv2d",
        "ReLU",
    }
