"""Tuples whose work depends on values that only a card shows are measured in the round after it has
shown them.
"""

from __future__ import annotations

import dataclasses

import pytest

from farm.devices.device import Card
from farm.devices.simulated import SOFTWARE
from farm.jobs import cards, jobs
from farm.jobs.closing import Closing, close_round
from farm.operators.captured import CapturedCall
from farm.report import report
from farm.store import captures, content, tables
from farm.types.distribution import segments_of
from farm.types.protocol import Protocol
from farm.types.request import Request
from farm.types.tuple import Cost, OperatorTuple, TensorSpec
from farm.types.variant import Variant
from farm.types.verification import Verification
from farm.verdict.figures import NOT_SHOWN
from tests.planned import claim, complete, items_of

CARD = "CPU-values"
VARIANT = Variant("resnet18", batch=1, input_size=224)  # any name of the catalog
RELU = OperatorTuple(
    "torch.relu",
    "function",
    {},
    ({"tensor": 0},),
    {},
    (TensorSpec("activation", "", (4,), "float32"),),
)
PLAIN = OperatorTuple(
    "torch._grouped_mm",
    "function",
    {},
    ({"tensor": 0}, {"tensor": 1}),
    {"offs": {"tensor": 2}},
    (
        TensorSpec("activation", "", (512, 64), "bfloat16"),
        TensorSpec("parameter", "", (4, 64, 32), "bfloat16", storage=1),
        TensorSpec("activation", "", (4,), "int32", storage=2),
    ),
)


def routed(*rows):
    *others, ends = PLAIN.tensors
    return dataclasses.replace(
        PLAIN, tensors=(*others, dataclasses.replace(ends, values=segments_of(rows, 64)))
    )


@pytest.fixture
def planned(any_database):
    """Return a function that plans a job of a relu and two products of groups on a real card: its
    id.
    """
    card = Card(id=CARD, kind="cpu", model="a cpu", memory_bytes=0, host="here", index=0)
    cards.register(any_database, card, SOFTWARE, holder="holder", queue=f"card.{CARD}")
    calls = [
        CapturedCall(index, f"layer.{index}", one.id, (), ())
        for index, one in enumerate((RELU, PLAIN, PLAIN))
    ]
    with any_database.write() as session:
        content.store_operators(session, {RELU: Cost(0, 32), PLAIN: Cost(1000, 1000)})
        content.store_variant(session, VARIANT)
        about = {"device_type": "cpu", "grad": False, "torch": "t", "launch": "eager"}
        capture = tables.Capture(variant_id=VARIANT.id, **about, origin="predicted")
        capture_id = captures.store_capture(session, calls, capture)

    def plan(**changes):
        request = Request(variant=VARIANT, protocol=Protocol(launch="eager"), **changes)
        return jobs.create(
            any_database, request, [CARD], scope=("all",), capture_id=capture_id
        ).job_id

    plan.capture_id = capture_id
    return plan


def observed(*tuples):
    """A verification with the capture of a card, as its benchmark process sends it."""
    calls = [
        {
            "index": index,
            "module_path": f"layer.{index}",
            "tuple_id": one.id,
            "reads": [],
            "writes": [],
        }
        for index, one in enumerate(tuples)
    ]
    costs = {one.id: {"flops": 1000, "bytes": 1000, "output_shapes": None} for one in tuples}
    specs = {one.id: one.to_json() for one in tuples}
    capture = {"tuples": specs, "costs": costs, "calls": calls}
    return Verification(matches=True, missing={}, unexpected={}, observed=capture)


def measure(database, job_id):
    for item in items_of(database, job_id):
        if item.state == "waiting":
            complete(database, claim(database, item), CARD)


def subjects(database, job_id, number):
    return [item.subject_id for item in items_of(database, job_id, "tuple") if item.round == number]


def test_they_are_items_of_the_next_round_and_the_others_of_the_first(any_database, planned):
    job_id = planned()
    assert subjects(any_database, job_id, 1) == [RELU.id]
    predicted, verify = captures.predicted_counts(any_database, planned.capture_id, job_id, CARD)
    assert (predicted, verify) == ({RELU.id: 1, PLAIN.id: 2}, True)

    skewed, even = routed(512, 0, 0, 0), routed(128, 128, 128, 128)
    shown = captures.store_observed(
        any_database, planned.capture_id, observed(RELU, skewed, even), card_id=CARD
    )
    measure(any_database, job_id)
    assert close_round(any_database, job_id, 1).closing is Closing.NEXT
    assert subjects(any_database, job_id, 2) == [skewed.id, even.id]
    with any_database.read() as session:
        reason = session.get_one(tables.Round, (job_id, 2)).reason
    assert "values that decide the work of 1 tuple" in reason

    measure(any_database, job_id)
    assert close_round(any_database, job_id, 2).closing is Closing.DONE
    with any_database.read() as session:
        told = report.build(session, job_id)
    assert told.verdict.coverage == 1.0

    # The next job begins with them.
    assert captures.predicted_counts(any_database, shown, job_id, CARD)[0] == {
        RELU.id: 1,
        PLAIN.id: 2,
    }
    with any_database.read() as session:
        assert (
            captures.find_capture(session, session.get_one(tables.Capture, planned.capture_id))
            == shown
        )


def test_a_card_that_does_not_show_them_leaves_them_unmeasured_with_a_reason(any_database, planned):
    job_id = planned()
    measure(any_database, job_id)
    assert close_round(any_database, job_id, 1).closing is Closing.DONE
    with any_database.read() as session:
        verdict = report.build(session, job_id).verdict
    assert verdict.coverage < 0.5
    assert [entry.reason for entry in verdict.unmeasured] == [NOT_SHOWN]


def test_a_whole_model_runs_again_as_long_as_no_card_has_shown_them(any_database, planned):
    measure(any_database, planned())
    again = planned()
    states = {item.role: item.state for item in items_of(any_database, again)}
    assert states == {"tuple": "done", "whole": "waiting"}


def test_a_card_that_shows_other_values_than_the_measured_ones_says_so(any_database, planned):
    first, second = routed(512, 0, 0, 0), routed(256, 256, 0, 0)
    shown = captures.store_observed(
        any_database, planned.capture_id, observed(RELU, first, first), card_id=CARD
    )
    captures.store_observed(any_database, shown, observed(RELU, first, first), card_id=CARD)
    with any_database.read() as session:
        stored = session.get_one(tables.Capture, shown).verification
    assert stored["matches"] is True
    assert "observed" not in stored, "it is stored as a capture"
    assert (
        captures.store_observed(any_database, shown, observed(RELU, first, second), card_id=CARD)
        == shown
    )
    with any_database.read() as session:
        kept = Verification.from_json(session.get_one(tables.Capture, shown).verification)
    assert not kept.matches
    (difference,) = kept.differences
    assert "values that decide the work" in difference
