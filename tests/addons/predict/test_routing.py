"""An estimate says which routing of a mixture of experts it assumes, and what another one
changes.
"""

from __future__ import annotations

import dataclasses

from farm.addons.predict.routing import routing_note
from farm.types.distribution import segments_of
from farm.types.tuple import NeededTuple
from tests.types.test_deciding import product


def needed(*specs):
    return [
        NeededTuple(one.id, one.short_name, one.short_name, 1, 1, {"": 1}, one.to_json())
        for one in specs
    ]


def test_it_says_what_a_random_router_changes():
    spec = product()
    note = routing_note(needed(spec), {spec.id: 30.0, "others": 70.0})
    assert "1 tuple (30.0 % of the time)" in note
    assert "the estimate assumes equal rows" in note
    assert (
        "by +14 % (if it prefers no expert) to +" in note
    )  # about half of the experts need a second tile


def test_it_says_that_recorded_rows_are_those_of_a_run():
    recorded = product(segments_of([512, 512, *[0] * 6], 64))
    note = routing_note(needed(recorded), {recorded.id: 1.0})
    assert "1 tuple are those of a run" in note


def test_it_says_nothing_of_other_models():
    spec = dataclasses.replace(
        product(), operator="torch.bmm", keywords={}, tensors=product().tensors[:2]
    )
    assert routing_note(needed(spec), {spec.id: 1.0}) == ""
