"""The CPU as a card, with RAPL's files and without."""

from __future__ import annotations

from pathlib import Path

from farm.devices.cpu import CpuDevice, cpu_card
from farm.devices.host import find_card
from farm.settings import settings


def package(powercap: Path, name: str, label: str, energy_uj: int) -> Path:
    folder = powercap / name
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{label}\n")
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    (folder / "max_energy_range_uj").write_text("1000000\n")
    return folder


def test_the_cpu_says_what_it_is() -> None:
    card = cpu_card(settings())
    assert card.kind == "cpu"
    assert card.model
    assert card.memory_bytes > 0
    assert find_card(card.id, settings()) == card


def test_where_the_kernel_shows_no_rapl_energy_is_not_available_rather_than_zero(
    tmp_path: Path,
) -> None:
    device = CpuDevice(cpu_card(settings()), tmp_path / "absent")
    assert device.energy_counter_mj() is None
    assert device.capabilities == frozenset()


def test_sockets_are_added_and_their_parts_are_not(tmp_path: Path) -> None:
    package(tmp_path, "intel-rapl:0", "package-0", 500_000)
    package(tmp_path, "intel-rapl:0:0", "core", 400_000)
    package(tmp_path, "intel-rapl:1", "package-1", 250_000)
    package(tmp_path, "intel-rapl:2", "psys", 900_000)
    device = CpuDevice(cpu_card(settings()), tmp_path)
    assert device.energy_counter_mj() == 750.0
    assert device.capabilities == {"energy_counter_mj"}


def test_a_counter_that_wraps_goes_on(tmp_path: Path) -> None:
    folder = package(tmp_path, "intel-rapl:0", "package-0", 999_000)
    device = CpuDevice(cpu_card(settings()), tmp_path)
    (folder / "energy_uj").write_text("1000\n")
    assert device.energy_counter_mj() == 1001.0


def test_a_counter_that_may_not_be_read_is_not_available(tmp_path: Path) -> None:
    folder = package(tmp_path, "intel-rapl:0", "package-0", 1)
    (folder / "energy_uj").unlink()
    assert CpuDevice(cpu_card(settings()), tmp_path).energy_counter_mj() is None
