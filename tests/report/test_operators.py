"""The list of a model's operator tuples."""

from types import SimpleNamespace

import pytest

from farm.report.operators import operators
from farm.types.tuple import NeededTuple
from farm.types.variant import Variant


def needed(operator_id: str, mismatch: str) -> NeededTuple:
    return NeededTuple(
        operator_id=operator_id,
        short_name="add",
        label="add 1x1",
        flops=1,
        bytes_moved=12,
        calls={"normal": 1},
        spec={},
        mismatch=mismatch,
    )


def test_the_reason_of_each_tuple_has_the_label_of_its_row():
    """Two tuples have the same label."""
    extraction = SimpleNamespace(
        capture=SimpleNamespace(gaps=()),
        refusal=lambda name: None,
        needed=lambda: [needed("a" * 64, "why a"), needed("b" * 64, "why b")],
        model_flops=2,
        note_on_values="",
    )
    listed = operators(Variant("model", 1, 8), extraction)
    assert listed.to_json()["model_flops"] == 2
    reasons = {row.operator_id: listed.mismatches[row.label] for row in listed.rows}
    assert reasons == {"a" * 64: "why a", "b" * 64: "why b"}
    assert [row.estimated_cost_share for row in listed.rows] == pytest.approx([0.5, 0.5])
