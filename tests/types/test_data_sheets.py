"""Data sheets belong to exact card models."""

import pytest

from farm.types.data_sheets import GENERIC_GPU, data_sheet, data_sheets, sheet_name_of


@pytest.mark.parametrize(
    ("model", "sheet"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB PCIe"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A40", "A40"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("Tesla V100-PCIE-16GB", "V100 PCIe"),
        ("Tesla T4", "T4"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI250X/MI250", "MI250X"),
        ("AMD Radeon RX 7900 XTX", "RX 7900 XTX"),
        ("rtx 4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("a100", "A100 80GB"),
    ],
)
def test_a_card_has_the_sheet_of_its_exact_model(model, sheet):
    assert sheet_name_of(model) == sheet


@pytest.mark.parametrize(
    "model",
    [
        "NVIDIA A10G",
        "NVIDIA A100X",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA A16",
        "RTX",
        "",
    ],
)
def test_a_card_of_another_model_has_no_sheet(model):
    assert sheet_name_of(model) == ""
    assert data_sheet("cuda", model) == GENERIC_GPU


def test_no_two_sheets_have_a_name_in_common_and_each_finds_itself():
    for name, sheet in data_sheets().items():
        assert {sheet_name_of(listed) for listed in (name, *sheet.names)} == {name}
        assert sheet.source
        assert sheet.checked


def test_the_figures_of_a_sheet_are_those_of_a_gpu():
    for sheet in data_sheets().values():
        assert 5e12 < sheet.float32 <= sheet.tf32 <= sheet.half < 5e15
        assert 1e11 < sheet.bytes_per_s < 1e13
        assert 2**22 <= sheet.l2_bytes <= 2**28
        assert 50 <= sheet.power_limit_w <= 1500


@pytest.mark.parametrize(
    ("name", "reported_bytes"),
    [
        ("A10", 23_609_475_072),
        ("A40", 47_608_692_736),
        ("L4", 23_570_219_008),
        ("L40S", 47_803_596_800),
        ("T4", 15_095 << 20),
        ("A100 80GB", 85_100_068_864),
        ("H100 NVL", 99_861_594_112),
        ("RTX 4090", 25_386_352_640),
        ("B200", 191_514_411_008),
        ("MI300X", 205_822_885_888),
    ],
)
def test_no_sheet_has_more_memory_than_drivers_report(name, reported_bytes):
    memory_bytes = data_sheets()[name].memory_bytes
    assert 0.9 * reported_bytes < memory_bytes <= reported_bytes
