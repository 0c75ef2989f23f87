"""The peaks of a card model are those of a typical card, not of the first one."""

import dataclasses
import math

from farm.types.fingerprint import median_fingerprint
from farm.types.roofline import Roofline, roofline_of
from farm.types.tuple import NeededTuple


def fingerprint(float32, bytes_per_s=3e12):
    return {
        "copy_bytes_per_s": bytes_per_s,
        "matmul_flops_per_s": {"float32": float32},
        "driver": "580",
    }


def test_an_outlier_among_the_cards_does_not_set_the_peaks():
    cards = [fingerprint(34e12), fingerprint(51e12), fingerprint(52e12)]
    assert median_fingerprint(cards) == {
        "copy_bytes_per_s": 3e12,
        "matmul_flops_per_s": {"float32": 51e12},
    }


def test_cards_without_a_fingerprint_do_not_count():
    assert median_fingerprint([None, {}]) == {}
    assert median_fingerprint([None, fingerprint(50e12)])["matmul_flops_per_s"] == {
        "float32": 50e12
    }


def test_a_figure_that_is_not_a_number_does_not_count():
    cards = [{"copy_bytes_per_s": None}, {"copy_bytes_per_s": True}, fingerprint(50e12)]
    assert median_fingerprint(cards)["copy_bytes_per_s"] == 3e12


def test_products_of_eight_bits_have_a_rate_of_their_own():
    peaks = roofline_of("cuda", "NVIDIA H200", dtype="bfloat16")
    assert peaks.rate_of("_scaled_mm") == peaks.rate_of("_int_mm") == 2 * peaks.rate_of("mm")
    old = roofline_of("cuda", "Tesla V100", dtype="float16")
    assert old.rate_of("_int_mm") == old.rate_of("mm")
    launch_us = peaks.launch_floor_us
    product = NeededTuple("1", "mm", "mm", 10**15, 1, {"": 1}, {})
    scaled = dataclasses.replace(product, short_name="_scaled_mm")
    product_us, scaled_us = peaks.call_us(product), peaks.call_us(scaled)
    assert product_us - launch_us == 2 * (scaled_us - launch_us)


def test_a_damaged_fingerprint_does_not_count():
    damaged = {
        "copy_bytes_per_s": math.inf,
        "matmul_flops_per_s": [1e12],
        "launch_floor_us": 10**400,
    }
    assert median_fingerprint([damaged]) == {}
    assert median_fingerprint([damaged, fingerprint(50e12)]) == {
        "copy_bytes_per_s": 3e12,
        "matmul_flops_per_s": {"float32": 50e12},
    }


def test_the_roofline_says_what_limits_a_call():
    def call(flops, bytes_moved, operator):
        return NeededTuple("1", operator, operator, flops, bytes_moved, {"": 1}, {})

    peaks = Roofline(flops_per_s=1e12, bytes_per_s=1e12, launch_floor_us=2.0)
    assert peaks.bound_of(call(10**7, 10**6, "mm")) == "compute"
    assert peaks.bound_of(call(10**6, 10**7, "relu")) == "memory"
    assert peaks.bound_of(call(10**3, 10**3, "add")) == "launch"
