"""NVIDIA cards through NVML (`pynvml`), without torch and without a CUDA context.

Cards differ in what they answer: no energy counter before Volta, no instant power on consumer cards, no process list
in some containers. Each of these is None here and missing from the capabilities, after which it is not asked again.
"""

from __future__ import annotations

import contextlib
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
    """The NVIDIA cards of this host in NVML's order; [] where there is no driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_describe(index, settings) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _describe(index: int, settings: Settings) -> Card:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    refusal = ""
    try:
        memory_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError:
        memory_bytes = 0
    if _optional(lambda: pynvml.nvmlDeviceGetMigMode(handle)[0]) == 1:
        # Energy, power and clocks are of the whole chip: an instance's share cannot be told from its neighbours'.
        refusal = "it is in MIG mode, and power and clocks cannot be read per instance"
    return Card(
        id=_text(pynvml.nvmlDeviceGetUUID(handle)),
        kind="cuda",
        model=_text(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes=memory_bytes,
        driver=_text(_optional(pynvml.nvmlSystemGetDriverVersion) or ""),
        index=index,
        host=settings.host,
        refusal=refusal,
    )


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
            if getattr(error, "value", None) in LACKS:
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
