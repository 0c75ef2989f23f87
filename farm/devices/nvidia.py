"""NVIDIA cards through NVML (`pynvml`), without torch and without a CUDA context.

Cards differ in what they answer: no energy counter before Volta, no instant power on consumer cards, no process list
in some containers. Each of these is None here and missing from the capabilities, after which it is not asked again.
A card that does not even tell what it is stands in the list all the same, refused with what the driver said: beside
it the others work, and where it is the only one nobody takes the host for one without a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pynvml

from farm.devices.device import Card, Device
from farm.errors import NoSuchCard
from farm.settings import Settings

Answer = TypeVar("Answer")

# The card will not answer this later either. Anything else (a busy driver, an unknown error) may pass.
LACKS = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
)

# No driver here, so no NVIDIA card that could be measured on. Any other error comes from a driver that is there.
ABSENT = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

# Nothing works on such a card, although the driver may go on telling its name and UUID.
GONE = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)

# What to do about an error that says too little by itself.
NEXT_STEPS = {
    pynvml.NVML_ERROR_GPU_IS_LOST: "reset the card or restart the host",
    pynvml.NVML_ERROR_RESET_REQUIRED: "reset the card with `nvidia-smi --gpu-reset`",
    pynvml.NVML_ERROR_NO_PERMISSION: "let the farm's user read and write /dev/nvidia*",
    pynvml.NVML_ERROR_INSUFFICIENT_POWER: "look at the card's power cables",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "restart the host: its driver was changed while it was loaded",
}

#: The id of a card that does not tell its UUID begins so.
WITHOUT_UUID = "NVIDIA-"

# Energy, power and clocks are of the whole chip: an instance's share cannot be told from its neighbours'.
MIG_REFUSAL = "power and clocks cannot be read per instance; `nvidia-smi -mig 0` ends that mode"

# NVML's words for throttle reasons. Those that say nothing about slowing down (idle, a clock set by a person) keep
# their own names, so that the flags can tell them apart.
THROTTLE_REASONS = {
    pynvml.nvmlClocksEventReasonGpuIdle: "idle",
    pynvml.nvmlClocksEventReasonApplicationsClocksSetting: "clocks_set",
    pynvml.nvmlClocksEventReasonSwPowerCap: "power_cap",
    pynvml.nvmlClocksEventReasonHwSlowdown: "hardware_slowdown",
    pynvml.nvmlClocksEventReasonSyncBoost: "sync_boost",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "thermal",
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: "hardware_thermal",
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power_brake",
    pynvml.nvmlClocksEventReasonDisplayClockSetting: "display_clocks",
}


def nvidia_cards(settings: Settings) -> list[Card]:
    """The NVIDIA cards of this host in NVML's order; [] where there is no driver.

    A card that does not answer is listed with its refusal; so are, as one card, those of a driver that does not even
    tell how many there are.
    """
    try:
        pynvml.nvmlInit()
        try:
            return [_describe(index, settings) for index in range(pynvml.nvmlDeviceGetCount())]
        finally:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        if _code(error) in ABSENT:
            return []
        return [
            Card(
                id=_uncounted_id(settings),
                kind="cuda",
                model="all NVIDIA cards",
                memory_bytes=0,
                host=settings.host,
                refusal=_no_answer(error),
            )
        ]


def visible_cards(cards: list[Card], settings: Settings) -> list[Card]:
    """Those of `nvidia_cards` that CUDA_VISIBLE_DEVICES leaves; all where it is not set.

    What it may mean and cannot be measured on is there too, with its refusal: an instance of a card in MIG mode, and
    the cards without a UUID if it names one that no other card has.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not cards:
        return cards
    names = [name.strip() for name in chosen.split(",")]
    uuids = [name for name in names if name.startswith("GPU-")]
    indexes = [int(name) for name in names if name.isdigit()]
    unknown = [uuid for uuid in uuids if not any(card.id.startswith(uuid) for card in cards)]

    def is_named(card: Card) -> bool:
        if card.id == _uncounted_id(settings):
            return bool(indexes or uuids)
        if card.id.startswith(WITHOUT_UUID) and unknown:
            return True
        return card.index in indexes or any(card.id.startswith(uuid) for uuid in uuids)

    instances = [
        Card(
            id=name,
            kind="cuda",
            model="MIG instance",
            memory_bytes=0,
            index=index,
            host=settings.host,
            refusal=f"it is an instance of a card in MIG mode, and {MIG_REFUSAL}",
        )
        for index, name in enumerate(names)
        if name.startswith("MIG-")
    ]
    return [card for card in cards if is_named(card)] + instances


def _describe(index: int, settings: Settings) -> Card:
    card = Card(
        id=f"{WITHOUT_UUID}{settings.host}-{index}",
        kind="cuda",
        model="NVIDIA card",
        memory_bytes=0,
        driver=_text(_optional(pynvml.nvmlSystemGetDriverVersion) or ""),
        index=index,
        host=settings.host,
    )
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        card = dataclasses.replace(card, id=_text(pynvml.nvmlDeviceGetUUID(handle)))
        card = dataclasses.replace(card, model=_text(pynvml.nvmlDeviceGetName(handle)))
        card = dataclasses.replace(card, memory_bytes=_memory_bytes(handle))
    except pynvml.NVMLError as error:
        return dataclasses.replace(card, refusal=_no_answer(error))
    if _optional(lambda: pynvml.nvmlDeviceGetMigMode(handle)[0]) == 1:
        return dataclasses.replace(card, refusal=f"it is in MIG mode, and {MIG_REFUSAL}")
    return card


def _memory_bytes(handle: Any) -> int:
    """0 where the card does not tell.

    Raises:
        NVMLError: the card is gone.
    """
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError as error:
        if _code(error) in GONE:
            raise
        return 0


def _uncounted_id(settings: Settings) -> str:
    return f"{WITHOUT_UUID}{settings.host}"


def _no_answer(error: pynvml.NVMLError) -> str:
    """The refusal of what did not answer: what the driver said, and what to do."""
    said = str(error).rstrip(".")
    return f"the driver says '{said}'; {NEXT_STEPS.get(_code(error), 'look at `nvidia-smi`')}"


def _code(error: pynvml.NVMLError) -> int | None:
    return getattr(error, "value", None)


def _optional(ask: Callable[[], Answer]) -> Answer | None:
    try:
        return ask()
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError):
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


class NvidiaDevice(Device):
    """One card, found by its UUID whatever CUDA_VISIBLE_DEVICES says."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self._lacks: set[str] = set()
        self._lock = threading.Lock()
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(card.id)
        except pynvml.NVMLError as error:
            raise NoSuchCard(f"The card {card} does not answer: {error}.", "Look at `nvidia-smi`.") from error
        self._open = True
        for name in _GETTERS:
            if getattr(self, name)() is None:
                # A first question that fails for whatever reason decides: a source that comes and goes is no source.
                self._lacks.add(name)

    @property
    def capabilities(self) -> frozenset[str]:
        return frozenset(_GETTERS) - self._lacks

    def _ask(self, name: str, ask: Callable[[], Any]) -> Any:
        if name in self._lacks or not self._open:
            return None
        try:
            return ask()
        except pynvml.NVMLError as error:
            if _code(error) in LACKS:
                self._lacks.add(name)
            return None
        except pynvml.NVMLLibraryMismatchError:
            self._lacks.add(name)
            return None

    def energy_counter_mj(self) -> float | None:
        # Ticks every 100 ms on the H200. 0 means a counter that was never fed, not a card without consumption.
        value = self._ask("energy_counter_mj", lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        return float(value) if value else None

    def power_instant_w(self) -> float | None:
        def ask() -> float | None:
            field = pynvml.nvmlDeviceGetFieldValues(self._handle, [pynvml.NVML_FI_DEV_POWER_INSTANT])[0]
            if field.nvmlReturn != pynvml.NVML_SUCCESS:
                raise pynvml.NVMLError(field.nvmlReturn)
            return field.value.uiVal / 1e3 or None

        return self._ask("power_instant_w", ask)

    def power_average_w(self) -> float | None:
        # A 1 s average on Hopper (and on Ampere other than A100): only the last resort.
        value = self._ask("power_average_w", lambda: pynvml.nvmlDeviceGetPowerUsage(self._handle))
        return value / 1e3 if value else None

    def sm_clock_mhz(self) -> float | None:
        return self._ask(
            "sm_clock_mhz", lambda: float(pynvml.nvmlDeviceGetClockInfo(self._handle, pynvml.NVML_CLOCK_SM))
        )

    def memory_clock_mhz(self) -> float | None:
        return self._ask(
            "memory_clock_mhz", lambda: float(pynvml.nvmlDeviceGetClockInfo(self._handle, pynvml.NVML_CLOCK_MEM))
        )

    def temperature_c(self) -> float | None:
        return self._ask(
            "temperature_c",
            lambda: float(pynvml.nvmlDeviceGetTemperature(self._handle, pynvml.NVML_TEMPERATURE_GPU)),
        )

    def memory_temperature_c(self) -> float | None:
        def ask() -> float | None:
            field = pynvml.nvmlDeviceGetFieldValues(self._handle, [pynvml.NVML_FI_DEV_MEMORY_TEMP])[0]
            if field.nvmlReturn != pynvml.NVML_SUCCESS:
                raise pynvml.NVMLError(field.nvmlReturn)
            return float(field.value.uiVal) or None

        return self._ask("memory_temperature_c", ask)

    def power_limit_w(self) -> float | None:
        return self._ask("power_limit_w", lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(self._handle) / 1e3)

    def throttle_reasons(self) -> tuple[str, ...] | None:
        mask = self._ask("throttle_reasons", lambda: _throttle_mask(self._handle))
        if mask is None:
            return None
        return tuple(word for bit, word in THROTTLE_REASONS.items() if mask & bit)

    def compute_processes(self) -> frozenset[int] | None:
        return self._ask(
            "compute_processes",
            lambda: frozenset(entry.pid for entry in pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)),
        )

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                with contextlib.suppress(pynvml.NVMLError):
                    pynvml.nvmlShutdown()


def _throttle_mask(handle: Any) -> int:
    try:
        return pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except pynvml.NVMLError_FunctionNotFound:  # drivers before 535 know it by its old name
        return pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)


_GETTERS = (
    "energy_counter_mj",
    "power_instant_w",
    "power_average_w",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "temperature_c",
    "memory_temperature_c",
    "power_limit_w",
    "throttle_reasons",
    "compute_processes",
)
