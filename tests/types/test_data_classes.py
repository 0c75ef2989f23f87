"""The named classes of data: rounded so that models share them, and read back as what they say."""

from __future__ import annotations

import pytest

from farm.errors import UsageError
from farm.types.protocol import Protocol
from farm.types.value_profiles import (
    Filling,
    HeldFilling,
    class_of,
    fillings,
    held_fillings,
    is_class,
)


def seen(zeros: float, least: float, channels: float = 0.0) -> dict[str, float]:
    return {"mean": 0.4, "spread": 0.6, "zeros": zeros, "least": least, "channels": channels}


@pytest.mark.parametrize(
    ("what", "name"),
    [
        (None, "normal"),
        ([], "normal"),
        ([None], "normal"),
        ([seen(0.0, -4)], "normal"),
        ([seen(0.04, -4)], "normal"),
        ([seen(0.52, 0)], "zeros-50+"),
        ([seen(0.48, 0)], "zeros-50+"),
        ([seen(0.31, -1)], "zeros-25"),
        ([seen(0.5, 0, 0.8)], "zeros-50+c90"),
        ([seen(0.5, 0, 0.4)], "zeros-50+c50"),
        ([seen(0.0, -1, 0.9)], "normal-c90"),
        ([seen(0.3, -1, 0.9)], "zeros-25-c90"),
        ([seen(0.0, 0.1)], "zeros-0+"),
        ([seen(1.0, 0)], "zeros-100"),
        ([seen(0.5, 0), seen(0.5, 0)], "zeros-50+"),
        ([seen(0.5, 0), seen(0.0, -3)], "zeros-50+,normal"),
        ([seen(0.4, 0), seen(0.6, 0), seen(0.4, 0), seen(0.6, 0)], "zeros-50+"),
        ([seen(0.4, 0), seen(0.6, 0), seen(0.4, 0), None], "normal"),
    ],
)
def test_what_was_seen_is_rounded_to_a_class(what: list, name: str) -> None:
    assert class_of(what) == name
    assert is_class(name)


def test_a_class_says_how_each_activation_is_filled() -> None:
    assert fillings("normal", 2) == [Filling(), Filling()]
    assert fillings("zeros-50+", 2) == [Filling(0.5, True)] * 2
    assert fillings("zeros-50+,normal", 2) == [Filling(0.5, True), Filling()]
    assert fillings("zeros-50+c90,normal-c50", 2) == [
        Filling(0.5, True, 0.9),
        Filling(channels=0.5),
    ]
    with pytest.raises(ValueError, match="2 tensors"):
        fillings("zeros-50+,normal", 3)


@pytest.mark.parametrize(
    "name",
    [
        "zeros-55",
        "zeros-30",
        "normal-c10",
        "c90",
        "zeros-110",
        "zeros--10",
        "zeros-50++",
        "zeros-50;",
        "",
        "seen-50",
    ],
)
def test_what_is_no_class_is_no_protocol_either(name: str) -> None:
    assert not is_class(name)
    with pytest.raises(UsageError):
        Protocol(data=name)


def test_a_class_is_part_of_the_protocol_and_a_whole_has_none() -> None:
    seen_data = Protocol(data="seen")
    assert seen_data.with_data("zeros-50+").id != seen_data.with_data("normal").id == Protocol().id
    assert seen_data.of_whole == Protocol()
    assert Protocol(data="zeros").of_whole.data == "zeros"


def test_what_a_call_was_given_of_the_model_stands_behind_a_stroke():
    empty, plain = {"held": 1.0, "zeros": 1.0}, {"held": 1.0, "zeros": 0.0}
    half = {"held": 1.0, "zeros": 0.6, "used": 0.5, "used_dimension": 2}
    assert class_of([None, plain, plain]) == "normal"
    assert class_of([None, empty, empty]) == "normal/zeros-100"
    assert class_of([None, plain, half]) == "normal/normal,used-50d2"
    assert class_of([None, {"held": 1.0, "zeros": 0.0, "same": 1.0}]) == "normal/same"
    assert is_class("zeros-50+,normal/used-50d2")
    assert not is_class("normal/used-10d2")
    assert held_fillings("normal", 2) == [HeldFilling()] * 2
    assert held_fillings("normal/zeros-100", 2) == [HeldFilling(1.0)] * 2
    assert held_fillings("normal/normal,used-25d1", 2) == [HeldFilling(), HeldFilling(0.75, 1)]
