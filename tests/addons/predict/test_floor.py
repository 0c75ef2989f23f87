"""No prediction is below what a card can do, and no reading is, either."""

import dataclasses

import pytest
import sqlalchemy
from sqlmodel import select

from farm.addons.predict.floor import (
    IDLE_SHARE,
    above_floor,
    floor_us,
    idle_power,
    sum_of_floors_us,
)
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


def test_the_least_energy_is_that_of_an_idle_card_in_the_same_time():
    call = product(512, calls=3)
    time = PredictedValue(10.0, 5.0, 20.0)
    one = CallPrediction(time, PredictedValue(3.0, 0.1, 4.0))
    total = PredictedCost(time.times(3), PredictedValue(9.0, 0.3, 12.0))
    bounded = above_floor(Predictions((one,), total), [call], H100, idle_power_w=70.0)
    assert bounded.calls[0].energy_mj == PredictedValue(3.0, pytest.approx(0.35), 4.0)
    assert bounded.total.energy_mj == PredictedValue(9.0, pytest.approx(1.05), 12.0)


def test_a_time_that_is_raised_to_its_floor_raises_the_energy_too():
    call = product(8192)
    floor = floor_us(H100, call)
    one = CallPrediction(PredictedValue(floor / 100), PredictedValue(1.0))
    predictions = Predictions((one,), PredictedCost(one.time_us, one.energy_mj))
    bounded = above_floor(predictions, [call], H100, idle_power_w=70.0)
    assert bounded.calls[0].energy_mj == PredictedValue(pytest.approx(floor * 0.07))
    assert bounded.total.energy_mj == PredictedValue(pytest.approx(floor * 0.07))


def test_the_idle_power_of_cards_without_a_measurement_is_below_that_of_measured_ones():
    with packaged_database().read() as session:
        for model in ("NVIDIA H200", H100):
            measured = idle_power(session, model)
            assert measured.source == "measured on this card model"
            assert measured.power_w == pytest.approx(75, abs=10)
            assert measured.power_w > IDLE_SHARE * 700
        assert idle_power(session, "L4").power_w == pytest.approx(IDLE_SHARE * 72)
        assert idle_power(session, "Some Card 9000").power_w == 0


def test_no_packaged_reading_takes_less_energy_than_an_idle_card():
    reading = tables.ReadingRow
    query = select(reading.card_model, reading.time_us, reading.energy_mj)
    with packaged_database().read() as session:
        rows = session.exec(query.where(reading.energy_mj != None)).all()  # noqa: E711
        idle_w = {model: idle_power(session, model).power_w for model in {row[0] for row in rows}}
    assert len(rows) > 5000
    assert not [row for row in rows if row[2] < idle_w[row[0]] * row[1] * 1e-3]


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
