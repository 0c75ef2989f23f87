"""Records as plain JSON, and back."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from farm.types.figure import Figure
from farm.types.stored import plain, record_from


@dataclass(frozen=True)
class Inner:
    time_us: Figure
    energy_mj: Figure | None = None
    counts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner
    optional: Inner | None = None
    several: tuple[Inner, ...] = ()
    by_name: Mapping[str, Inner] = field(default_factory=dict)
    by_name_maybe: Mapping[str, tuple[Inner, ...]] | None = None
    figures: tuple[Figure, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)


INNER = Inner(Figure(1.0, 0.1), Figure(2.0), (1, 2))
RECORDS = [
    INNER,
    Inner(Figure(3.0)),
    Outer("least", INNER),
    Outer("all", INNER, INNER, (INNER, INNER), {"a": INNER}, {"b": (INNER,)}, (Figure(1.0, 2.0),)),
    Outer("numbers", INNER, numbers={"x": 1.0}),
]


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_is_the_same_after_json(record):
    data = json.loads(json.dumps(plain(record)))
    assert record_from(type(record), data) == record
    assert record_from(type(record), plain(record)) == record
    assert record_from(type(record), {**data, "of another version": 1}) == record


def test_missing_keys_become_the_defaults_of_the_record():
    assert record_from(Outer, {"name": "x", "inner": {"time_us": 1}}) == Outer(
        "x", Inner(Figure(1.0))
    )


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"name": "x"},
        {"name": "x", "inner": None},
        {"name": "x", "inner": {}},
        {"name": "x", "inner": 3},
        {"name": "x", "inner": {"time_us": "long"}},
        {"name": "x", "inner": {"time_us": 1.0}, "several": 3},
        {"name": "x", "inner": {"time_us": 1.0}, "several": [None]},
        {"name": "x", "inner": {"time_us": 1.0}, "by_name": [1]},
    ],
)
def test_an_incomplete_record_or_another_type_is_a_value_error(data):
    with pytest.raises(ValueError, match=r"."):
        record_from(Outer, data)


def test_all_lists_are_plain_json():
    assert plain(((1, 2), [INNER])) == [[1, 2], [plain(INNER)]]
