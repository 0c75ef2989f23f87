"""Values that decide how much work a call does have a short canonical form, which keeps that
work.
"""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farm.errors import TupleRejected
from farm.subjects.label import label_of
from farm.subjects.parsing import parse
from farm.types.deciding import TILE_ROWS, deciding_input, lacks_values
from farm.types.distribution import (
    LENGTH_STEP,
    MOST_NUMBERS,
    Distribution,
    equal_lengths,
    lengths_of,
    ordered_lengths,
    segments_of,
)
from farm.types.tuple import OperatorTuple, TensorSpec

ROWS, EXPERTS = 1024, 8


def product(values=None, rows=ROWS, experts=EXPERTS):
    tensors = (
        TensorSpec("activation", "", (rows, 64), "bfloat16"),
        TensorSpec("activation", "", (experts, 64, 32), "bfloat16", storage=1),
        TensorSpec("activation", "", (experts,), "int32", storage=2, values=values),
    )
    return OperatorTuple(
        "torch._grouped_mm",
        "function",
        {},
        ({"tensor": 0}, {"tensor": 1}),
        {"offs": {"tensor": 2}},
        tensors,
    )


def tiles(lengths, rows):
    return sum(-(-length // rows) for length in lengths)


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=300))
def test_the_canonical_form_is_short_and_keeps_the_total_and_the_tiles(lengths):
    values = segments_of(lengths, TILE_ROWS)
    assert not values.problem()
    assert len(values.numbers) <= MOST_NUMBERS
    rebuilt = lengths_of(values, sum(lengths))
    assert len(rebuilt) == len(lengths)
    assert sum(rebuilt) == sum(lengths)
    assert sum(map(bool, rebuilt)) == sum(map(bool, lengths))
    for rows in (values.step, 2 * values.step, 4 * values.step):  # of the kernels
        assert tiles(rebuilt, rows) == tiles(lengths, rows)


def test_the_order_of_the_experts_and_rows_within_a_tile_do_not_matter():
    lengths = [300, 128, 64, 200, 100, 0, 132, 100]
    shuffled = random.Random(1).sample(lengths, len(lengths))
    moved = [299, 127, 63, 199, 102, 0, 134, 100]
    assert segments_of(lengths, 64) == segments_of(shuffled, 64) == segments_of(moved, 64)
    assert segments_of(lengths, 64) != segments_of([length and 128 for length in lengths], 64)
    assert lengths_of(segments_of(lengths, 64), sum(lengths)) == lengths_of(
        segments_of(shuffled, 64), sum(lengths)
    )


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=MOST_NUMBERS))
def test_few_segments_keep_their_order_and_their_tiles(lengths):
    values = ordered_lengths(lengths)
    assert not values.problem()
    assert len(values.numbers) <= MOST_NUMBERS
    rebuilt = lengths_of(values, sum(lengths))
    assert sum(rebuilt) == sum(lengths)
    for rows in (LENGTH_STEP, 64, 128, 256):
        assert [-(-length // rows) for length in rebuilt] == [
            -(-length // rows) for length in lengths
        ]


def test_few_segments_have_another_description_for_another_order():
    assert ordered_lengths([0, 0, 1, 1]) != ordered_lengths([1, 1, 0, 0])
    rebuilt = lengths_of(ordered_lengths([0, 3, 0, 1]), 4)
    assert [length > 0 for length in rebuilt] == [False, True, False, True]


def test_short_lengths_are_exact():
    assert sorted(lengths_of(segments_of([3, 1, 2, 2], 1), 8)) == [1, 2, 2, 3]


def test_without_recorded_values_all_segments_are_equal():
    assert equal_lengths(8, 1024) == [128] * 8
    assert sum(equal_lengths(8, 2)) == 2


def test_a_product_of_groups_needs_values_and_is_another_tuple_with_them():
    plain, skewed = product(), product(segments_of([1024, *[0] * 7], 64))
    assert lacks_values(plain)
    assert not lacks_values(skewed)
    assert plain.id != skewed.id
    assert skewed.without_values.id == plain.id
    assert plain.without_values is plain
    assert "values" not in plain.to_json()["tensors"][2]
    assert parse(skewed.to_json()) == skewed
    assert label_of(skewed).endswith("1 of 8 groups in 16 x 64")


@pytest.mark.parametrize(
    "form",
    [
        {"form": "segments", "numbers": [64, 2]},
        {"form": "segments", "numbers": [0, 1, 8]},
        {"form": "segments", "numbers": [64, 1, 4, 2, 4]},
        {"form": "segments", "numbers": [64, 2, 0, 1, 8]},
        {"form": "segments", "numbers": [64, *range(70, 0, -1)]},
        {"form": "segments", "numbers": [64, 1, -8]},
        {"form": "segments", "numbers": [64, 1.0, 8]},
        {"form": "lengths", "numbers": []},
        {"form": "lengths", "numbers": [-1, 2]},
        {"form": "lengths", "numbers": [1] * 65},
        {"form": "places", "numbers": [17, 0]},
        {"form": "places", "numbers": [4, 3]},
        {"form": "marks", "numbers": [4]},
        {"form": "code", "numbers": [4, 0]},
        {"numbers": [64, 1, 8]},
        [64, 1, 8],
    ],
)
def test_a_malformed_distribution_is_rejected(form):
    spec = product().to_json()
    spec["tensors"][2]["values"] = form
    with pytest.raises(TupleRejected):
        parse(spec)


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ((64, 1, 7), "has 8 segments"),
        ((64, 30, 1, 1, 7), "needs? at least"),
        ((2**30, 2, 8), "needs? at least"),
    ],
)
def test_values_that_do_not_fit_the_call_are_a_problem(numbers, problem):
    spec = product()
    found = deciding_input(spec)
    assert found is not None
    assert re.search(problem, found.problem(Distribution("segments", numbers)))
    assert found.problem(Distribution("places", (3, 0)))
