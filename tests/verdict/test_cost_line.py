"""Lines of cost: what is stored of them, and their sums by a key."""

import json

import pytest

from farm.types.fields import figure_from_json, figure_json
from farm.types.figure import Figure, figure_of, total_of
from farm.verdict.cost_line import Change, CostLine, TupleView, group, merged
from farm.verdict.figures import CallCost

CONV = TupleView("1", "Conv2d", "Conv2d 3->8", flops=100, bytes_moved=10, estimated_us=2.0)
RELU = TupleView("2", "ReLU", "ReLU", "zeros-50", flops=1, bytes_moved=5, estimated_us=1.0)
MEASURED = CostLine(
    CONV, 3, "measured", CallCost(Figure(10.0, 0.5), Figure(4.0, 0.1)), reading_id="r"
)
NO_ENERGY = CostLine(CONV, 2, "reused", CallCost(Figure(20.0)))
MISSING = CostLine(RELU, 5, "missing", reason="out of memory")


@pytest.mark.parametrize("line", [MEASURED, NO_ENERGY, MISSING])
def test_a_stored_line_is_the_same_line(line):
    assert CostLine.from_stored(json.loads(json.dumps(line.stored()))) == line


def test_the_keys_of_a_figure_end_with_its_unit():
    assert figure_json("time", "us", Figure(2.0, 0.1)) == {
        "time_us": 2.0,
        "time_half_width_us": 0.1,
    }
    assert figure_json("change", "", None) == {"change": None, "change_half_width": None}
    stored = {"energy_mj": 3.0, "energy_half_width_mj": None}
    assert figure_from_json(stored, "energy", "mj") == Figure(3.0)
    assert figure_of(None, 0.5) is None


def test_a_total_lacks_nothing():
    assert total_of([(Figure(10.0, 3.0), 1), (Figure(5.0, 2.0), 2)]) == Figure(20.0, 5.0)
    assert total_of([(Figure(10.0, 3.0), 1), (None, 2)]) is None


def test_groups_count_calls_and_say_what_is_missing():
    groups = group([MEASURED, NO_ENERGY, MISSING], lambda line: line.subject.short_name)
    conv, relu = groups["Conv2d"], groups["ReLU"]
    assert (conv.calls, conv.tuples, conv.measured_tuples, conv.flops) == (5, 2, 2, 500)
    assert (conv.complete_us, conv.measured_mj) == (70.0, None)
    assert (relu.measured_us, relu.complete_us, relu.estimated_us) == (None, None, 5.0)

    total = merged(groups.values())
    assert (total.measured_us, total.complete_us) == (70.0, None)
    assert group([MEASURED], lambda line: line.subject.short_name, groups)["Conv2d"].calls == 8
    assert conv.calls == 5, "the groups before are not changed"


def test_a_change_counts_if_intervals_and_cards_are_apart():
    a, b = Figure(100.0, 1.0), Figure(110.0, 1.0)
    assert Change(a, b).verdict == "slower"
    assert Change(a, b, between_cards=0.2).verdict == "same"
    assert Change(a, None).verdict == "unknown"
    assert Change(a, None).change is None
