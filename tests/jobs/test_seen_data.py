"""A model job under `--data seen`: each class of data that a tuple's calls see is a reading of its
own.
"""

from __future__ import annotations

from farm.jobs import items, jobs
from farm.operators.captured import CapturedCall
from farm.store import captures, content, tables
from farm.store.captures import classes, store_values, stored_values
from farm.store.database import Database
from farm.types.protocol import Protocol
from farm.types.request import Request
from farm.types.variant import Variant
from farm.verdict.job_results import JobResults
from tests.farms import store_operators
from tests.planned import claim, complete, items_of, register

VARIANT = Variant("resnet18", batch=1, input_size=224)
SEEN = Protocol(launch="eager", data="seen")
BEHIND_RELU = [{"zeros": 0.5, "least": 0.0, "channels": 0.0}]


def capture(database: Database, origin: str = "predicted") -> int:
    """One operator called three times: first with normal data, then twice behind a ReLU."""
    (operator_id,) = store_operators(database, [""])
    with database.write() as session:
        content.store_variant(session, VARIANT)
        calls = [CapturedCall(index, f"layer{index}", operator_id, (), ()) for index in range(3)]
        return captures.store_capture(
            session,
            calls,
            tables.Capture(
                variant_id=VARIANT.id,
                device_type="cpu",
                grad=False,
                torch="t",
                launch="graph",
                origin=origin,
            ),
        )


def look(database: Database, capture_id: int) -> None:
    with database.write() as session:
        for index, data in enumerate(([], BEHIND_RELU, BEHIND_RELU)):
            call = session.get_one(tables.Call, (capture_id, index))
            call.data = data
            session.add(call)


def plan(database: Database, protocol: Protocol = SEEN) -> str:
    capture_id = capture(database)
    look(database, capture_id)
    request = Request(variant=VARIANT, protocol=protocol)
    return jobs.create(database, request, register(database, 1), capture_id=capture_id).job_id


def test_each_class_is_an_item_under_its_own_protocol_and_the_whole_runs_on_normal_inputs(
    database: Database,
) -> None:
    job_id = plan(database)
    tuples = items_of(database, job_id, "tuple")
    assert {item.protocol_id for item in tuples} == {
        SEEN.with_data(name).id for name in ("normal", "zeros-50+")
    }
    assert len({item.subject_id for item in tuples}) == 1
    (whole,) = items_of(database, job_id, "whole")
    assert whole.protocol_id == SEEN.with_data("normal").id
    assert {claim(database, item).work.protocol.data for item in tuples} == {"normal", "zeros-50+"}


def test_the_parts_count_the_calls_of_each_class(database: Database) -> None:
    job_id = plan(database)
    behind = next(
        i
        for i in items_of(database, job_id, "tuple")
        if i.protocol_id == SEEN.with_data("zeros-50+").id
    )
    held = claim(database, behind)
    assert isinstance(held, items.Claim)
    complete(database, held, behind.card_id)
    with database.read() as session:
        parts = JobResults(session, session.get_one(tables.Job, job_id), 1).parts
    assert {part.subject.data: (part.count, part.reading is not None) for part in parts} == {
        "normal": (1, False),
        "zeros-50+": (2, True),
    }
    assert len({part.subject.key for part in parts}) == 2


def test_another_policy_is_the_class_of_every_call(database: Database) -> None:
    tuples = items_of(database, plan(database, Protocol(launch="eager")), "tuple")
    assert [item.protocol_id for item in tuples] == [Protocol(launch="eager").id]


def test_what_was_seen_goes_on_to_the_capture_that_a_card_observed(database: Database) -> None:
    predicted, observed = capture(database), capture(database, "observed")
    look(database, predicted)
    with database.write() as session:
        kept = stored_values(session, predicted)
        assert [data for _, calls in sorted(kept.items()) for data in calls] == [
            [],
            BEHIND_RELU,
            BEHIND_RELU,
        ]
        store_values(session, observed, {})
        assert list(classes(session, observed, "seen").values()) == [3], (
            "where nothing is known, data is normal"
        )
