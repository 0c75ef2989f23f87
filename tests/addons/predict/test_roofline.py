import pytest

from farm.operators.roofline import Roofline, roofline_of


def test_a_call_costs_the_larger_of_arithmetic_and_traffic_plus_a_launch():
    roofline = Roofline(flops_per_s=1e12, bytes_per_s=1e11, launch_floor_us=2.0)
    assert roofline.estimate_us(3e6, 1e5) == pytest.approx(3 + 2)
    assert roofline.estimate_us(1e6, 1e6) == pytest.approx(10 + 2)
    assert roofline.estimate_us(0, 0) == 2


def test_the_card_and_the_dtype_decide():
    h200 = roofline_of("cuda", "NVIDIA H200")
    assert h200.bytes_per_s == 4.8e12
    assert roofline_of("cuda", "NVIDIA H200", dtype="bfloat16").flops_per_s > 10 * h200.flops_per_s
    assert roofline_of("cuda", "NVIDIA H200", tf32=True).flops_per_s > 5 * h200.flops_per_s
    assert (
        roofline_of("cuda", "NVIDIA H100 PCIe").bytes_per_s
        < roofline_of("cuda", "NVIDIA H100 80GB HBM3").bytes_per_s
    )
    assert (
        roofline_of("cuda", "A card of next year").flops_per_s
        > roofline_of("cpu", "Xeon").flops_per_s
    )


def test_what_was_measured_on_the_card_counts_more_than_its_data_sheet():
    fingerprint = {
        "copy_bytes_per_s": 4.1e12,
        "matmul_flops_per_s": {"float32": 51e12, "bfloat16": 0},
    }
    roofline = roofline_of("cuda", "NVIDIA H200", fingerprint)
    assert (roofline.bytes_per_s, roofline.flops_per_s) == (4.1e12, 51e12)
    assert roofline_of("cuda", "NVIDIA H200", fingerprint, dtype="bfloat16").flops_per_s == 990e12


def test_peaks_must_be_positive():
    with pytest.raises(ValueError, match="positive"):
        Roofline(0, 1, 1)
