"""NVIDIA cards through NVML (`pynvml`), without torch and without a CUDA context.

Cards differ in their sensors: there is no energy counter before Volta, no instant power on consumer
cards, and no process list in some containers. If a card lacks a sensor, the getter returns None,
the capabilities lack its name, and the farm does not query it again. If a card's driver fails, the
card is listed with a refusal that quotes the driver: the other cards still work, and the farm does
not use the CPU as if the host had no GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pynvml

from farm.devices import nvidia_errors, nvidia_links
from farm.devices.device import Card, Device
from farm.devices.nvml import field_value, opened, optional
from farm.devices.queried import QueriedDevice
from farm.devices.software import Installed, nccl_of, packaged_version
from farm.devices.vendor import Vendor
from farm.errors import NoSuchCard
from farm.settings import Settings
from farm.types.error_counters import ErrorCounters
from farm.types.software import Software

# With these errors the card will never support the query. Other errors (for example a busy driver)
# may be temporary.
LACKS = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
)

# With these errors the host has no NVIDIA driver, so the farm can measure no NVIDIA card. Other
# errors need a driver.
ABSENT = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

# With these errors the card cannot be used, although the driver may still report its name and UUID.
GONE = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)

# Next steps for errors whose text names none.
NEXT_STEPS = {
    pynvml.NVML_ERROR_GPU_IS_LOST: "reset the card or restart the host",
    pynvml.NVML_ERROR_RESET_REQUIRED: "reset the card with `nvidia-smi --gpu-reset`",
    pynvml.NVML_ERROR_NO_PERMISSION: "let the farm's user read and write /dev/nvidia*",
    pynvml.NVML_ERROR_INSUFFICIENT_POWER: "check the card's power cables",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "restart the host: the driver was updated while it was loaded"
    ),
}

#: The ids of cards with unknown UUID begin with this prefix.
WITHOUT_UUID = "NVIDIA-"
_UNKNOWN_MODEL = "NVIDIA card"

# Sensors give energy, power and clocks of the whole chip: the share of one MIG instance is unknown.
MIG_REFUSAL = (
    "power and clocks cannot be measured per instance; `nvidia-smi -mig 0` ends the MIG mode"
)

# The farm's names of NVML's throttle reasons. Reasons that do not slow the card down (idle, a clock
# set by a person) have separate names, so that flags can ignore them.
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


def visible_cards(cards: list[Card], settings: Settings) -> list[Card]:
    """The cards that CUDA_VISIBLE_DEVICES names; all cards if it is not set.

    The list includes MIG instances, and cards with unknown UUID if the variable names a UUID that
    no other card has."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not cards:
        return cards
    names = [name.strip() for name in chosen.split(",")]
    uuids = [name for name in names if name.startswith("GPU-")]
    indexes = [int(name) for name in names if name.isdigit()]
    unknown = [uuid for uuid in uuids if not any(card.id.startswith(uuid) for card in cards)]

    def is_named(card: Card) -> bool:
        if card.id == uncounted_id(settings):
            return bool(indexes or uuids)
        if card.id.startswith(WITHOUT_UUID) and unknown:
            return True
        return card.index in indexes or any(card.id.startswith(uuid) for uuid in uuids)

    refusal = f"it is an instance of a card in MIG mode, and {MIG_REFUSAL}"
    instances = [
        Card(name, "cuda", "MIG instance", 0, index=index, host=settings.host, refusal=refusal)
        for index, name in enumerate(names)
        if name.startswith("MIG-")
    ]
    return [card for card in cards if is_named(card)] + instances


def _describe(index: int, settings: Settings) -> Card:
    card = Card(
        id=f"{WITHOUT_UUID}{settings.host}-{index}",
        kind="cuda",
        model=_UNKNOWN_MODEL,
        memory_bytes=0,
        driver=optional(pynvml.nvmlSystemGetDriverVersion) or "",
        index=index,
        host=settings.host,
    )
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        card = dataclasses.replace(card, id=pynvml.nvmlDeviceGetUUID(handle))
        card = dataclasses.replace(card, model=pynvml.nvmlDeviceGetName(handle))
        memory_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
        card = dataclasses.replace(card, memory_bytes=memory_bytes)
    except pynvml.NVMLError as error:
        # If only the memory size is unknown, the card is usable, and its memory size stays 0.
        if card.model == _UNKNOWN_MODEL or _code(error) in GONE:
            return dataclasses.replace(card, refusal=_no_answer(error))
    if optional(lambda: pynvml.nvmlDeviceGetMigMode(handle)[0]) == 1:
        return dataclasses.replace(card, refusal=f"it is in MIG mode, and {MIG_REFUSAL}")
    return card


def uncounted_id(settings: Settings) -> str:
    """The id of the one entry for all cards, if the driver cannot count them."""
    return f"{WITHOUT_UUID}{settings.host}"


def _no_answer(error: pynvml.NVMLError) -> str:
    """The refusal of a card whose driver fails: the driver's message, and what to do."""
    step = NEXT_STEPS.get(_code(error), "read the output of `nvidia-smi`")
    return f"the driver says '{str(error).rstrip('.')}'; {step}"


def _code(error: pynvml.NVMLError) -> int | None:
    return getattr(error, "value", None)


def _throttle_reasons(handle: Any) -> tuple[str, ...]:
    try:
        mask = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except pynvml.NVMLError_FunctionNotFound:  # the name in drivers before 535
        mask = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return tuple(word for bit, word in THROTTLE_REASONS.items() if mask & bit)


#: Getter of `Device` -> its NVML query. If energy, power or memory temperature is 0, there is no
#: sensor: return None.
_QUERIES: dict[str, Callable[[Any], Any]] = {
    # Ticks every 100 ms on the H200.
    "energy_counter_mj": lambda handle: (
        float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) or None
    ),
    "power_instant_w": lambda handle: (
        field_value(handle, pynvml.NVML_FI_DEV_POWER_INSTANT) / 1e3 or None
    ),
    # This is an average over 1 s on Hopper, and on Ampere except the A100: use it only without
    # another power source.
    "power_average_w": lambda handle: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3 or None,
    "sm_clock_mhz": lambda handle: float(
        pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
    ),
    "memory_clock_mhz": lambda handle: float(
        pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)
    ),
    "temperature_c": lambda handle: float(
        pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
    ),
    "memory_temperature_c": lambda handle: (
        float(field_value(handle, pynvml.NVML_FI_DEV_MEMORY_TEMP)) or None
    ),
    "power_limit_w": lambda handle: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
    "throttle_reasons": _throttle_reasons,
    "compute_processes": lambda handle: frozenset(
        entry.pid for entry in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    ),
}


class NvidiaDevice(QueriedDevice):
    """One card, found by its UUID (CUDA_VISIBLE_DEVICES has no effect)."""

    queries = _QUERIES

    def __init__(self, card: Card) -> None:
        self._lock = threading.Lock()
        try:
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(card.id)
        except pynvml.NVMLError as error:
            text = f"The card {card} does not answer: {error}."
            raise NoSuchCard(text, "Read the output of `nvidia-smi`.") from error
        super().__init__(card, handle)

    def _is_lacking(self, error: Exception) -> bool | None:
        if isinstance(error, pynvml.NVMLError):
            return _code(error) in LACKS
        return True if isinstance(error, pynvml.NVMLLibraryMismatchError) else None

    def close(self) -> None:
        with self._lock:
            if self._open:
                super().close()
                optional(pynvml.nvmlShutdown)


class Nvidia(Vendor):
    """NVIDIA's GPUs. Every PyTorch build but that for ROCm measures on them."""

    name = "NVIDIA"
    kind = "cuda"

    def serves(self, torch: Installed | None) -> bool:
        return torch is None or not torch.hip

    def cards(self, settings: Settings) -> list[Card]:
        """The NVIDIA cards of this host in NVML's order; [] if there is no driver.

        A card whose driver fails is in the list with its refusal. If the driver cannot count the
        cards, the list has one entry for all cards."""
        try:
            with opened():
                return [_describe(index, settings) for index in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            if _code(error) in ABSENT:
                return []
            uncounted = Card(
                uncounted_id(settings), "cuda", "all NVIDIA cards", 0, host=settings.host
            )
            return [dataclasses.replace(uncounted, refusal=_no_answer(error))]

    def visible_cards(self, settings: Settings) -> list[Card]:
        return visible_cards(self.cards(settings), settings)

    def open(self, card: Card) -> Device:
        return NvidiaDevice(card)

    def links(self, card: Card) -> dict[str, Any]:
        links = nvidia_links.links(card.id)
        with contextlib.suppress(NoSuchCard):
            communication = self._communication(card, links.get("peers", ()))
            if communication:
                links["communication"] = communication
        return links

    def error_counters(self, card: Card) -> ErrorCounters | None:
        return nvidia_errors.error_counters(card.id)

    def _communication(self, card: Card, peers: Sequence[str]) -> str:
        """The software with which a card and all its peers communicate; "" if it is unknown."""
        version = packaged_version("nccl")
        names = {self.link_between([card.id, peer])[0] for peer in peers}
        names = names or {self.link_between([card.id])[0]}
        if not version or len(names) > 1:  # readings over one link serve no cards with another
            return ""
        (name,) = names
        return f"{nccl_of(version)} over {name}" if name else nccl_of(version)

    def link_between(self, card_ids: Sequence[str]) -> tuple[str, float | None]:
        if all(card_id.startswith("GPU-") for card_id in card_ids):
            return nvidia_links.link_between(card_ids)
        return "", None

    def visible_only(self, card_ids: Sequence[str]) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(card_ids)}

    def is_installed(self, software: Software, card: Card, torch: Installed) -> bool:
        # unknown if cuDNN comes from conda or the system: only loading it would tell its version
        cudnn = None
        with contextlib.suppress(ValueError):
            major, minor, patch = map(int, packaged_version("cudnn").split(".")[:3])
            cudnn = str(major * 10_000 + minor * 100 + patch)  # 9.19.0 is "91900"
        installed = (torch.version, torch.cuda, cudnn, card.driver)
        return (software.torch, software.cuda, software.cudnn, software.driver) == installed
