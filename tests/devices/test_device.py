"""Every device keeps the contract of `Device`: capabilities name getters, and a getter without a sensor returns
None.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from farm.devices.device import Device
from farm.devices.host import CpuDevice, cpu_card, find_card, open_device
from farm.devices.simulated import SimulatedDevice, simulated_cards
from farm.settings import Settings, settings
from tests.benchmark.fake_device import FakeDevice
from tests.devices.fake_nvml import UUID, behind_pynvml

GETTERS = [name for name, one in inspect.getmembers(Device, inspect.isfunction) if name != "close" and name[0] != "_"]
NOT_SENSORS = {"simulated"}  # a word for a kind of card


@pytest.fixture(params=["cpu", "simulated", "nvidia", "fake"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Device]:
    makers: dict[str, Callable[[], Device]] = {
        "cpu": lambda: CpuDevice(cpu_card(settings()), tmp_path),
        "simulated": lambda: SimulatedDevice(simulated_cards(Settings(simulated_cards=1))[0]),
        "nvidia": lambda: open_device(find_card(UUID, settings())),
        "fake": FakeDevice,
    }
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with behind_pynvml(monkeypatch):
        made = makers[request.param]()
        yield made
        made.close()


def test_capabilities_are_getters_and_the_others_return_none(device: Device) -> None:
    assert device.capabilities - NOT_SENSORS <= set(GETTERS)
    for name in set(GETTERS) - device.capabilities:
        assert getattr(device, name)() is None, name
    for name in device.capabilities - NOT_SENSORS:
        assert getattr(device, name)() is not None, name


def test_a_device_names_its_card(device: Device) -> None:
    assert device.card.kind in ("cpu", "simulated", "cuda")
    assert device.card.id
