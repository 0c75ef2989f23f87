"""No prediction is below what a card can do, and no reading is, either."""

import dataclasses

import pytest
import sqlalchemy
from sqlmodel import select

from farm.addons.predict.floor import above_floor, floor_us, sum_of_floors_us
from farm.addons.predict.stored_predictor import (
    CallPrediction,
    PredictedCost,
    PredictedValue,
    Predictions,
)
from farm.exchange.packaged import packaged_database
from farm.store import tables
from farm.types.tuple import NeededTuple

H100 = "NVIDIA H100 80GB HBM3"
#: Part of a reading's time by which it may be below the floor: the rates of data sheets are
#: rounded.
ROUNDING = 0.01


def product(size, dtype="bfloat16", calls=1):
    tensors = [{"shape": [size, size], "dtype": dtype, "role": "activation"}] * 2
    width = 2 if dtype == "bfloat16" else 4
    return NeededTuple(
        "id", "mm", "mm", 2 * size**3, 3 * width * size**2, {"": calls}, {"tensors": tensors}
    )


def test_the_floor_of_a_large_product_is_its_arithmetic():
    assert floor_us(H100, product(8192)) == pytest.approx(2 * 8192**3 / 990e12 * 1e6)
    assert floor_us(H100, product(8192, "float32")) == pytest.approx(2 * 8192**3 / 67e12 * 1e6)


def test_operands_that_fit_in_the_cache_need_no_memory():
    addition = NeededTuple("id", "add", "add", 0, 40 << 20, {"": 1}, {"tensors": []})
    assert floor_us(H100, addition) == 0
    large = dataclasses.replace(addition, bytes_moved=4 << 30)
    assert floor_us(H100, large) == pytest.approx(((4 << 30) - 52428800) / 3.35e12 * 1e6)


def linear(calls=1, kind="module"):
    """A product of one token with 117 MB of weights, as in the decode of a language model."""
    activation = {"shape": [1, 1, 4096], "dtype": "bfloat16", "role": "activation"}
    weight = {"shape": [14336, 4096], "dtype": "bfloat16", "role": "parameter"}
    weight_bytes = 2 * 4096 * 14336
    spec = {"kind": kind, "tensors": [activation, weight]}
    moved_bytes = weight_bytes + 2 * (4096 + 14336)
    flops = 2 * 4096 * 14336
    return NeededTuple("id", "Linear", "Linear", flops, moved_bytes, {"": calls}, spec)


def test_all_weights_come_from_memory_however_large_the_cache_is():
    weight_us = 2 * 4096 * 14336 / 300e9 * 1e6
    assert floor_us("L4", linear()) == pytest.approx(weight_us)  # 391 us
    assert floor_us("RTX 4090", linear()) == pytest.approx(weight_us * 300 / 1008)
    assert sum_of_floors_us("L4", [linear(calls=64)]) == pytest.approx(64 * weight_us)


def test_a_generated_kernel_may_read_a_part_of_a_weight():
    cached_us = 48 * 2**20 / 300e9 * 1e6
    kernel = linear(kind="kernel")
    assert floor_us("L4", kernel) == pytest.approx(kernel.bytes_moved / 300e9 * 1e6 - cached_us)


def test_an_unknown_card_has_no_floor():
    assert floor_us("Some Card 9000", product(8192)) == 0


def test_a_prediction_below_the_floor_is_raised_to_it():
    call = product(8192, calls=3)
    floor = floor_us(H100, call)
    low = PredictedValue(floor / 2, floor / 4, floor / 1.5)
    predictions = Predictions((CallPrediction(low),), PredictedCost(low.times(3)))
    bounded = above_floor(predictions, [call], H100)
    assert bounded.calls[0].time_us == PredictedValue(floor, floor, floor)
    assert bounded.total.time_us.low == pytest.approx(3 * floor)

    high = PredictedValue(2 * floor, 1.5 * floor, 3 * floor)
    assert (
        above_floor(
            Predictions((CallPrediction(high),), PredictedCost(high.times(3))), [call], H100
        )
        .calls[0]
        .time_us
        == high
    )


def test_no_packaged_reading_is_below_the_floor():
    reading, operator, protocol = tables.ReadingRow, tables.Operator, tables.ProtocolRow
    query = (
        sqlalchemy.select(reading.card_model, reading.time_us, operator, protocol.spec)
        .join(operator, operator.id == reading.subject_id)
        .join(protocol, protocol.id == reading.protocol_id)
        .where(reading.subject_kind == "operator")
    )
    below = []
    with packaged_database().read() as session:
        cards = set(session.exec(select(tables.CardRow.model)))
        for card_model, time_us, row, conditions in session.execute(query):
            if conditions["data"] == "copied":  # a kernel of the compiler may recompute
                continue
            call = NeededTuple(
                row.id, row.short_name, row.label, row.flops, row.bytes_moved, {"": 1}, row.spec
            )
            floor = floor_us(card_model, call, tf32=conditions["tf32"])
            if time_us < (1 - ROUNDING) * floor:
                below.append(f"{row.label}: {time_us:.1f} us, floor {floor:.1f} us")
    assert {"NVIDIA H200", H100} <= cards
    assert not below
