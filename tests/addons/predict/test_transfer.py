"""Predictions of one card model from another, on made-up readings whose differences are known."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from farm.addons.predict.calibration import Calibration
from farm.addons.predict.stored_predictor import StoredPredictor
from farm.addons.predict.tile_roofline import card_rates
from farm.addons.predict.transfer import (
    SourceCosts,
    TransferredPredictor,
    _log_ratio,
    data_sheet_model,
    distance,
)
from farm.types.figure import PassCost
from tests.addons.predict.made_up import H200, MEDIANS, dataset

DATA = dataset()
SOURCE = StoredPredictor.of(DATA, MEDIANS.fit(DATA), Calibration(*[1.5] * 8))
H100 = dataclasses.replace(H200, model="NVIDIA H100")  # with the properties of the H200


def target_rows(slower=1.2, power=0.9, card_id="GPU-1", every=4, types=("ReLU", "add", "Linear")):
    """Readings of some of the source's tuples on the target."""
    return [
        dataclasses.replace(
            row,
            cost=PassCost(row.cost.time_us.times(slower), row.cost.energy_mj.times(slower * power)),
            card_id=card_id,
        )
        for row in DATA.rows[::every]
        if row.call.operator_type.lower() in [name.lower() for name in types]
    ]


def transfer(rows, card_id="", read=True):
    return TransferredPredictor.fit(
        SourceCosts(SOURCE, lambda ids: DATA.rows if read else ()), H100, rows, card_id
    )


CALLS = [row.call for row in DATA.rows[1::4]]
READ_US = np.array([row.cost.time_us.value for row in DATA.rows[1::4]])
READ_W = np.array([row.cost.mean_power_w for row in DATA.rows[1::4]])


def errors(found, slower=1.2, power=0.9):
    return (
        np.median(abs(of - 1))
        for of in (found.time_us / READ_US / slower, found.power_w / READ_W / power)
    )


def test_without_readings_an_equal_card_has_the_costs_of_the_source():
    found = transfer([]).costs(CALLS)
    assert np.median(found.time_us / READ_US) == pytest.approx(1)
    assert (found.time_spread > 0).all()
    assert len(transfer([]).costs([]).time_us) == 0


def test_readings_of_the_target_correct_other_tuples_and_narrow_their_intervals():
    before, after = transfer([]).costs(CALLS), transfer(target_rows()).costs(CALLS)
    time, power = errors(after)
    assert time < 0.06 < 0.15 < next(errors(before))
    assert power < 0.05
    assert np.median(after.time_spread) < 0.8 * np.median(before.time_spread)
    assert np.median(after.power_spread) < 0.8 * np.median(before.power_spread)
    assert (abs(np.log(after.time_us / READ_US / 1.2)) <= after.time_spread).mean() > 0.8


def test_a_tuple_that_the_source_has_only_predicted_has_a_wider_interval():
    rows = target_rows()
    assert (
        transfer(rows, read=False).costs(CALLS).time_spread
        > transfer(rows).costs(CALLS).time_spread
    ).all()


def test_families_without_a_reading_have_wider_intervals():
    found = transfer(target_rows(types=("ReLU", "add"))).costs(CALLS)
    products = np.array([call.operator_type.lower() == "linear" for call in CALLS])
    assert found.time_spread[products].min() > np.median(found.time_spread[~products])


def test_an_own_card_keeps_its_offset():
    rows = [*target_rows(power=0.9), *target_rows(power=1.0, card_id="GPU-2", every=5)]
    low, high, any_card = (transfer(rows, card).costs(CALLS) for card in ("GPU-1", "GPU-2", ""))
    assert np.median(low.power_w) < np.median(any_card.power_w) < np.median(high.power_w)
    assert (low.power_spread < any_card.power_spread).all()


def test_the_power_of_one_card_of_the_model_is_corrected_and_its_times_are_not():
    rows = target_rows(slower=1.0, power=0.94)
    own = TransferredPredictor.fit(
        SourceCosts(SOURCE, lambda ids: DATA.rows), H200, rows, "GPU-1"
    ).costs(CALLS)
    assert np.median(own.power_w / READ_W) == pytest.approx(0.94, abs=0.01)
    assert np.median(own.time_us / READ_US) == pytest.approx(1)
    assert np.median(own.power_spread) < np.median(
        transfer(target_rows(power=0.94), "GPU-1").costs(CALLS).power_spread
    )


def test_a_card_without_readings_is_less_certain_the_less_it_is_like_the_source():
    source = dataclasses.replace(H200, bytes_per_s=0.9 * H200.bytes_per_s)  # measured
    b200 = data_sheet_model(source, "B200")
    assert b200.bytes_per_s == pytest.approx(0.9 * card_rates("cuda", "B200").bytes_per_s)
    assert distance(H200, H100) == 1 < distance(source, b200)
    other = TransferredPredictor.fit(SourceCosts(SOURCE, lambda ids: DATA.rows), b200, []).costs(
        CALLS
    )
    assert np.mean(other.time_us / READ_US) < 1  # it is faster
    assert (other.time_spread > transfer([]).costs(CALLS).time_spread).all()


def addition(megabytes):
    """An addition of tensors of so many MB that no weights need."""
    call = next(row.call for row in DATA.rows if row.call.operator_type == "add")
    return dataclasses.replace(call, bytes_moved=megabytes * 1_000_000, parameter_bytes=0)


def ratio(target, call, time_us):
    return np.exp(_log_ratio(H200, target, [call], np.array([time_us])))[0]


def test_tensors_that_fit_into_the_cache_of_the_source_only_come_from_the_memory_of_the_target():
    small_cache = dataclasses.replace(H200, model="other", l2_bytes=4 << 20)
    call = addition(40)
    cached_us = H200.launch_floor_us + call.bytes_moved / (1.5 * H200.bytes_per_s) * 1e6
    uncached_us = H200.launch_floor_us + call.bytes_moved / H200.bytes_per_s * 1e6
    assert ratio(H200, call, cached_us) == pytest.approx(1)
    assert cached_us * ratio(small_cache, call, cached_us) == pytest.approx(uncached_us)
    large_cache = dataclasses.replace(H200, model="other", l2_bytes=256 << 20)
    call = addition(200)
    memory_us = H200.launch_floor_us + call.bytes_moved / H200.bytes_per_s * 1e6
    assert ratio(large_cache, call, memory_us) < 0.8


def test_the_rate_of_the_last_cache_grows_with_the_multiprocessors():
    half = dataclasses.replace(H200, model="other", multiprocessors=H200.multiprocessors // 2)
    call = addition(40)
    cache_us = call.bytes_moved / (1.5 * H200.bytes_per_s) * 1e6
    time_us = H200.launch_floor_us + cache_us
    assert time_us * ratio(half, call, time_us) == pytest.approx(time_us + cache_us)
