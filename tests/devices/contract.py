"""The rules that every `Device` class keeps. A new class passes `check` before anything else uses it: see
test_contract.py.
"""

from __future__ import annotations

import inspect
import threading
import time
from typing import Any

from farm.benchmark_process.requests import from_json, to_json
from farm.devices.device import Card, Device

GETTERS = sorted(
    name
    for name, _ in inspect.getmembers(Device, inspect.isfunction)
    if name not in ("close", "__init__")
)
NOT_SENSORS = {"simulated"}  # a word for a kind of card
LEAST = {"temperature_c": -50.0, "memory_temperature_c": -50.0}
MOST = {"power_instant_w": 5e3, "power_average_w": 5e3, "power_limit_w": 5e3, "sm_clock_mhz": 2e4}
MOST |= {"memory_clock_mhz": 5e4, "temperature_c": 150.0, "memory_temperature_c": 150.0}
REASONS = {
    "idle",
    "clocks_set",
    "power_cap",
    "hardware_slowdown",
    "sync_boost",
    "thermal",
    "hardware_thermal",
}
REASONS |= {"power_brake", "display_clocks"}


def check(device: Device) -> None:
    """All rules, in an order in which the device still works; `closes` is last."""
    describes_its_card(device)
    capabilities_are_the_getters_that_answer(device)
    values_have_the_unit_and_type(device)
    energy_never_decreases(device)
    threads_may_ask_at_once(device)
    closes(device)


def describes_its_card(device: Device) -> None:
    card = device.card
    assert card.kind in ("cuda", "cpu", "simulated")
    assert card.id
    assert card.model
    assert card.memory_bytes >= 0
    assert from_json(Card, to_json(card)) == card


def capabilities_are_the_getters_that_answer(device: Device) -> None:
    assert device.capabilities - NOT_SENSORS <= set(GETTERS)
    for name in GETTERS:
        value = getattr(device, name)()
        assert (value is not None) == (name in device.capabilities), name


def values_have_the_unit_and_type(device: Device) -> None:
    for name in device.capabilities - NOT_SENSORS:
        _has_unit_and_type(name, getattr(device, name)())


def _has_unit_and_type(name: str, value: Any) -> None:
    if name == "throttle_reasons":
        assert isinstance(value, tuple)
        assert set(value) <= REASONS
    elif name == "compute_processes":
        assert isinstance(value, frozenset)
        assert all(isinstance(pid, int) for pid in value)
    else:
        assert isinstance(value, float), f"{name}: {value!r}"
        assert LEAST.get(name, 0.0) < value < MOST.get(name, float("inf")), f"{name}: {value}"


def energy_never_decreases(device: Device) -> None:
    values = []
    for _ in range(20 if "energy_counter_mj" in device.capabilities else 0):
        values.append(device.energy_counter_mj())
        time.sleep(0.001)
    known = [value for value in values if value is not None]
    assert known == sorted(known)


def threads_may_ask_at_once(device: Device) -> None:
    faults: list[Exception] = []

    def ask() -> None:
        try:
            for _ in range(20):
                values_have_the_unit_and_type(device)
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


def closes(device: Device) -> None:
    """`close` may be called twice, and a getter then returns None or a value, without an error."""
    device.close()
    device.close()
    for name in GETTERS:
        getattr(device, name)()
