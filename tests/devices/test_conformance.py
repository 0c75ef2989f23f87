"""Every `Device` class of the farm passes the conformance suite. To add a class, add a function
that makes a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pynvml
import pytest

from farm.devices.device import Device
from farm.devices.host import CpuDevice, cpu_card, discover, find_card, open_device
from farm.devices.simulated import SimulatedDevice, simulated_cards
from farm.settings import Settings, settings
from tests.benchmark.fake_device import FakeDevice
from tests.devices import conformance, fake_nvml, recorded_amdsmi
from tests.devices.test_cpu import package

Maker = Callable[[pytest.MonkeyPatch, Path, ExitStack], Device]
MAKERS: dict[str, Maker] = {}


def maker(make: Maker) -> Maker:
    MAKERS[make.__name__] = make
    return make


@maker
def cpu(monkeypatch: pytest.MonkeyPatch, folder: Path, stack: ExitStack) -> Device:
    return CpuDevice(cpu_card(settings()))


@maker
def cpu_with_an_energy_counter(
    monkeypatch: pytest.MonkeyPatch, folder: Path, stack: ExitStack
) -> Device:
    package(folder, "intel-rapl:0", "package-0", 500_000)
    return CpuDevice(cpu_card(settings()), folder)


@maker
def simulated(monkeypatch: pytest.MonkeyPatch, folder: Path, stack: ExitStack) -> Device:
    return SimulatedDevice(simulated_cards(Settings(simulated_cards=1))[0])


@maker
def fake(monkeypatch: pytest.MonkeyPatch, folder: Path, stack: ExitStack) -> Device:
    return FakeDevice()


@maker
def nvidia_on_a_fake_library(
    monkeypatch: pytest.MonkeyPatch, folder: Path, stack: ExitStack
) -> Device:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    stack.enter_context(fake_nvml.behind_pynvml(monkeypatch))
    return open_device(find_card(fake_nvml.UUID, settings()))


@maker
def nvidia(monkeypatch: pytest.MonkeyPatch, folder: Path, stack: ExitStack) -> Device:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        pytest.skip("this host has no NVIDIA card")
    usable = [card for card in discover(settings()) if card.kind == "cuda" and not card.refusal]
    if not usable:
        pytest.skip("this host has no usable NVIDIA card")
    return open_device(usable[0])


@maker
def amd_instinct_recorded(
    monkeypatch: pytest.MonkeyPatch, folder: Path, stack: ExitStack
) -> Device:
    stack.enter_context(recorded_amdsmi.rocm(monkeypatch))
    return open_device(find_card(recorded_amdsmi.UUID, settings()))


@maker
def amd_radeon_recorded(monkeypatch: pytest.MonkeyPatch, folder: Path, stack: ExitStack) -> Device:
    stack.enter_context(recorded_amdsmi.rocm(monkeypatch))
    return open_device(find_card(recorded_amdsmi.RADEON_UUID, settings()))


@pytest.fixture(params=MAKERS)
def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Device]:
    with ExitStack() as stack:
        yield MAKERS[request.param](monkeypatch, tmp_path, stack)


def test_every_device_conforms(device: Device) -> None:
    conformance.check(device)
