"""NVIDIA cards through NVML (`pynvml`), without torch and without a CUDA context.

Cards differ in their sensors: there is no energy counter before Volta, no instant power on consumer
cards, and no process list in some containers. If a card lacks a sensor, the getter returns None,
the capabilities lack its name, and the farm does not query it again. If a card's driver fails, the
card is listed with a refusal that quotes the driver: the other cards still work, and the farm does
not use the CPU as if the host had no GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pynvml

from farm.devices.device import Card, QueriedDevice
from farm.errors import NoSuchCard
from farm.settings import Settings

T = TypeVar("T")

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

_MOST_LINKS = 36  # NVLinks of one card

#: The ids of cards with unknown UUID begin with this prefix.
WITHOUT_UUID = "NVIDIA-"

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


@contextlib.contextmanager
def opened() -> Iterator[None]:
    """Use NVML during a block. Raises `pynvml.NVMLError` if there is no driver."""
    pynvml.nvmlInit()
    try:
        yield
    finally:
        _optional(pynvml.nvmlShutdown)


def nvidia_cards(settings: Settings) -> list[Card]:
    """The NVIDIA cards of this host in NVML's order; [] if there is no driver.

    A card whose driver fails is in the list with its refusal. If the driver cannot count the cards,
    the list has one entry for all cards."""
    try:
        with opened():
            return [_describe(index, settings) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        if _code(error) in ABSENT:
            return []
        uncounted = Card(_uncounted_id(settings), "cuda", "all NVIDIA cards", 0, host=settings.host)
        return [dataclasses.replace(uncounted, refusal=_no_answer(error))]


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
        if card.id == _uncounted_id(settings):
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
        f"{WITHOUT_UUID}{settings.host}-{index}",
        "cuda",
        "NVIDIA card",
        0,
        index=index,
        host=settings.host,
    )
    card = dataclasses.replace(card, driver=_optional(pynvml.nvmlSystemGetDriverVersion) or "")
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        card = dataclasses.replace(card, id=pynvml.nvmlDeviceGetUUID(handle))
        card = dataclasses.replace(card, model=pynvml.nvmlDeviceGetName(handle))
        card = dataclasses.replace(
            card, memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
        )
    except pynvml.NVMLError as error:
        # If only the memory size is unknown, the card is usable, and its memory size stays 0.
        if card.model == "NVIDIA card" or _code(error) in GONE:
            return dataclasses.replace(card, refusal=_no_answer(error))
    if _optional(lambda: pynvml.nvmlDeviceGetMigMode(handle)[0]) == 1:
        return dataclasses.replace(card, refusal=f"it is in MIG mode, and {MIG_REFUSAL}")
    return card


def links(card_id: str) -> dict[str, Any]:
    """The active ``nvlinks`` of a card, and the ``peers``, whose memory it can access, as far as
    NVML reports them.
    """
    found: dict[str, Any] = {}
    with contextlib.suppress(pynvml.NVMLError), opened():
        own = pynvml.nvmlDeviceGetHandleByUUID(card_id)
        if (number := _nvlinks(own)) is not None:
            found["nvlinks"] = number
        for index in range(pynvml.nvmlDeviceGetCount()):
            other = _optional(pynvml.nvmlDeviceGetHandleByIndex, index)
            other_id = _optional(pynvml.nvmlDeviceGetUUID, other)
            status = _peer_status(own, other, pynvml.NVML_P2P_CAPS_INDEX_READ)
            if other_id not in (None, card_id) and status is not None:
                found.setdefault("peers", []).extend(
                    [other_id] if status == pynvml.NVML_P2P_STATUS_OK else []
                )
    return found


def _nvlinks(handle: Any) -> int | None:
    """The number of active NVLinks of a card; None if NVML does not report them."""
    states = [
        _optional(pynvml.nvmlDeviceGetNvLinkState, handle, number) for number in range(_MOST_LINKS)
    ]
    return (
        states.count(pynvml.NVML_FEATURE_ENABLED)
        if any(state is not None for state in states)
        else None
    )


def _uncounted_id(settings: Settings) -> str:
    return f"{WITHOUT_UUID}{settings.host}"


def _no_answer(error: pynvml.NVMLError) -> str:
    """The refusal of a card whose driver fails: the driver's message, and what to do."""
    step = NEXT_STEPS.get(_code(error), "read the output of `nvidia-smi`")
    return f"the driver says '{str(error).rstrip('.')}'; {step}"


def _code(error: pynvml.NVMLError) -> int | None:
    return getattr(error, "value", None)


def _optional(ask: Callable[..., T], *arguments: Any) -> T | None:
    try:
        return ask(*arguments)
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError):
        return None


def _field_value(handle: Any, field_id: int) -> int:
    field = pynvml.nvmlDeviceGetFieldValues(handle, [field_id])[0]
    if field.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(field.nvmlReturn)
    return int(field.value.uiVal)


#: Bytes/s of one NVLink in one direction (data sheets), by part of the card's name, if the driver
#: does not report it.
_NVLINK_BYTES_PER_S = {
    "V100": 25e9,
    "A100": 25e9,
    "H100": 25e9,
    "H200": 25e9,
    "B200": 50e9,
    "B300": 50e9,
}
#: Bytes/s of one lane of PCI Express in one direction, by generation.
_LANE_BYTES_PER_S = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


def link_between(card_ids: Sequence[str]) -> tuple[str, float | None]:
    """See `farm.devices.host.link_between`. A user who switches peer access off (NCCL_P2P_DISABLE)
    needs none.
    """
    with contextlib.suppress(pynvml.NVMLError), opened():
        handles = [(one, _optional(pynvml.nvmlDeviceGetHandleByUUID, one)) for one in card_ids]
        pairs = list(itertools.combinations([pair for pair in handles if pair[1] is not None], 2))
        for (one, first), (other, second) in pairs if "NCCL_P2P_DISABLE" not in os.environ else ():
            access = _peer_status(first, second, pynvml.NVML_P2P_CAPS_INDEX_READ)
            by_nvlink = _peer_status(first, second, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
            if access is not None and pynvml.NVML_P2P_STATUS_OK not in (access, by_nvlink):
                raise NoSuchCard(
                    f"The cards {one} and {other} cannot access each other's memory.",
                    "Choose cards with peer access (`nvidia-smi topo -p2p r`), or set "
                    "NCCL_P2P_DISABLE=1 to"
                    " communicate through the host's memory.",
                )
        if not pairs:
            return "", None
        status = (
            _peer_status(one, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
            for (_, one), (_, other) in pairs
        )
        first = pairs[0][0][1]
        if all(one == pynvml.NVML_P2P_STATUS_OK for one in status):
            links = _nvlinks(first) or 0
            each_mb = _optional(_field_value, first, pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON)
            model = _optional(pynvml.nvmlDeviceGetName, first) or ""
            known = (rate for name, rate in _NVLINK_BYTES_PER_S.items() if name in model)
            return f"NVLink x{links}", links * (
                each_mb * 1e6 if each_mb else next(known, 0.0)
            ) or None
        generation = _optional(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, first) or 0
        lanes = _optional(pynvml.nvmlDeviceGetMaxPcieLinkWidth, first) or 0
        return f"PCIe {generation} x{lanes}", _LANE_BYTES_PER_S.get(generation, 0) * lanes or None
    return "", None


def _peer_status(one: Any, other: Any, capability: Any) -> int | None:
    capability = (
        capability[0] if isinstance(capability, tuple) else capability
    )  # a constant of pynvml is, by mistake
    return _optional(pynvml.nvmlDeviceGetP2PStatus, one, other, capability)


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
        _field_value(handle, pynvml.NVML_FI_DEV_POWER_INSTANT) / 1e3 or None
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
        float(_field_value(handle, pynvml.NVML_FI_DEV_MEMORY_TEMP)) or None
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
                _optional(pynvml.nvmlShutdown)
