import pytest

from farm.types.figure import Figure
from farm.types.format import ENERGY, TIME, count_of, gap, interval, percent, quantity, span


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "–"),
        (0, "0 µs"),
        (0.5, "0.500 µs"),
        (5.312, "5.31 µs"),
        (5312, "5.31 ms"),
        (1.5e9, "1500 s"),
    ],
)
def test_times(value, expected):
    assert quantity(value, TIME) == expected


def test_energies_have_their_own_units():
    assert quantity(0.012, ENERGY) == "12.0 µJ"
    assert quantity(3610, ENERGY) == "3.61 J"


def test_an_interval_decides_the_digits():
    assert interval(Figure(7460.4, 21.0), TIME) == "7.460 ± 0.021 ms"
    assert interval(Figure(7460.4, 2100.0), TIME) == "7.5 ± 2.1 ms"
    assert interval(Figure(7460.4), TIME) == "7.460 ms"
    assert interval(None, TIME) == "–"


def test_percentages_do_not_round_up_to_complete():
    assert percent(0.9996) == "99.9 %"
    assert percent(0.00001) == "<0.1 %"
    assert percent(0.0) == "0.0 %"
    assert percent(-0.00001) == ">-0.1 %"  # no negative zero
    assert percent(-0.0331) == "-3.3 %"
    assert percent(1.0) == "100.0 %"
    assert percent(None) == "–"
    assert gap(Figure(-0.0331, 0.011)) == "-3.3 ± 1.1 %"
    assert gap(Figure(-0.0001, 0.002)) == "+0.0 ± 0.2 %"  # no negative zero


def test_counts_and_spans():
    assert count_of(4.09e9, "FLOP") == "4.09 GFLOP"
    assert count_of(12, "B") == "12 B"
    assert [span(s) for s in (0, 0.28, 0.6)] == ["0 s", "280 ms", "1 s"]
    assert [span(s) for s in (8, 200, 7500, 270000, None)] == [
        "8 s",
        "3 min 20 s",
        "2 h 5 min",
        "3 d 3 h",
        "–",
    ]
