"""AMD cards through AMD SMI (`amdsmi`), for PyTorch builds for ROCm. Untested on hardware.

The tests use answers that real cards gave (docs/devices.md). PyTorch for ROCm uses AMD cards as
device type "cuda". The names of the answers are those of ROCm 6.4 and later."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from farm.devices.device import Card, QueriedDevice
from farm.errors import NoSuchCard
from farm.settings import Settings

UNTESTED = "AMD cards are untested on hardware: the farm's tests use recorded answers of AMD SMI"

KFD = Path("/dev/kfd")  # the device file of ROCm's driver
NOT_SUPPORTED, NOT_YET_IMPLEMENTED, NO_PERMISSION = 2, 3, 10  # amdsmi_status_t
PARTITIONED = ("DPX", "TPX", "QPX", "CPX")
POWER_SENSORS = frozenset({"energy_counter_mj", "power_instant_w", "power_average_w"})

# Counters that grow while the clocks are reduced -> the farm's name of the reason.
RESIDENCIES = {
    "ppt_residency_acc": "power_cap",
    "socket_thm_residency_acc": "thermal",
    "hbm_thm_residency_acc": "thermal",
    "vr_thm_residency_acc": "hardware_thermal",
    "prochot_residency_acc": "hardware_thermal",
}


@functools.cache
def _library() -> Any:
    """The initialized library, which stays open: closing it would make the handles of all devices
    invalid.
    """
    with contextlib.redirect_stdout(io.StringIO()):  # it prints if it does not find libamd_smi.so
        import amdsmi
    amdsmi.amdsmi_init()
    return amdsmi


def amd_cards(settings: Settings) -> list[Card]:
    """The AMD cards of this host in HIP's order; [] without ROCm's driver. If AMD SMI fails, one
    entry with refusal.
    """
    if not KFD.exists():
        return []
    refusal = Card(f"AMD-{settings.host}", "cuda", "all AMD cards", 0, host=settings.host)
    try:
        handles = _library().amdsmi_get_processor_handles()
        cards = [_describe(handle, index, settings) for index, handle in enumerate(handles)]
        return sorted(cards, key=lambda card: card.index)
    except ImportError:
        step = "install the version of your ROCm: `pip install 'operator-farm[amd]'`"
        return [
            dataclasses.replace(
                refusal, refusal=f"the Python package amdsmi is not installed; {step}"
            )
        ]
    except (
        Exception
    ) as error:  # an old library raises OSError, KeyError or AttributeError at its import
        said = " ".join(str(error).split())
        return [
            dataclasses.replace(
                refusal, refusal=f"AMD SMI says '{said}'; read the output of `amd-smi list`"
            )
        ]


def _describe(handle: Any, index: int, settings: Settings) -> Card:
    smi, (card_id, hip_index) = _library(), _identity(handle)
    card = Card(
        id=card_id,
        kind="cuda",
        model=str(smi.amdsmi_get_gpu_asic_info(handle)["market_name"]),
        memory_bytes=int(smi.amdsmi_get_gpu_memory_total(handle, smi.AmdSmiMemoryType.VRAM)),
        driver=str(smi.amdsmi_get_gpu_driver_info(handle)["driver_version"]),
        index=index if hip_index is None else hip_index,
        host=settings.host,
    )
    with contextlib.suppress(smi.AmdSmiException):
        if (mode := smi.amdsmi_get_gpu_compute_partition(handle)) in PARTITIONED:
            step = "`amd-smi set --compute-partition SPX` ends the mode"
            why = (
                f"it is in partition mode {mode}, and power and clocks cannot be measured per "
                f"partition; {step}"
            )
            return dataclasses.replace(card, refusal=why)
    return card


def _identity(handle: Any) -> tuple[str, int | None]:
    """HIP's UUID of a card ("GPU-" and 16 digits, from its serial number), and its index in HIP if
    known.
    """
    smi, found = _library(), dict[str, Any]()
    with contextlib.suppress(smi.AmdSmiException, AttributeError):
        found = smi.amdsmi_get_gpu_enumeration_info(handle)
    uuid, index = str(found.get("hip_uuid", "N/A")), found.get("hip_id")
    if uuid == "N/A":  # the process may lack the right to read it
        uuid = f"GPU-{smi.amdsmi_get_gpu_asic_info(handle)['asic_serial'].removeprefix('0x')}"
    return uuid.lower().replace("gpu-", "GPU-"), index if isinstance(index, int) else None


def visible_cards(cards: Sequence[Card]) -> list[Card]:
    """The cards that ROCR_VISIBLE_DEVICES names, and of these the ones that HIP_ or
    CUDA_VISIBLE_DEVICES names.
    """
    found = list(cards)
    second = (
        "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in os.environ else "CUDA_VISIBLE_DEVICES"
    )
    for variable in ("ROCR_VISIBLE_DEVICES", second):
        if (chosen := os.environ.get(variable)) is not None:
            names = [name.strip().lower() for name in chosen.split(",")]
            hidden = names in ([""], ["-1"])
            found = [
                card
                for place, card in enumerate(found)
                if str(place) in names
                or card.id.lower() in names
                or (not card.id.startswith("GPU-") and not hidden)
            ]
    return found


@dataclass
class _Handle:
    smi: Any
    raw: Any
    residencies: dict[str, int] = field(default_factory=dict)
    energy_mj: float = 0.0


def _number(value: Any) -> float | None:
    """A positive value; None for 0 and "N/A", which stand for a sensor that the card lacks."""
    return float(value) if isinstance(value, int | float) and value > 0 else None


def _energy_mj(card: _Handle) -> float | None:
    answer = card.smi.amdsmi_get_energy_count(card.raw)
    energy_mj = _number(answer["energy_accumulator"] * answer["counter_resolution"] / 1e3)
    if energy_mj is None or energy_mj < card.energy_mj:  # some counters go back in rare cases
        return None
    card.energy_mj = energy_mj
    return energy_mj


def _throttle_reasons(card: _Handle) -> tuple[str, ...] | None:
    """The reasons whose counters have grown since the last call. Cards without counters report one
    reason for all.
    """
    metrics = card.smi.amdsmi_get_gpu_metrics_info(card.raw)
    now = {name: metrics[name] for name in RESIDENCIES if isinstance(metrics.get(name), int)}
    grown = [
        RESIDENCIES[name]
        for name, value in now.items()
        if value > card.residencies.get(name, value)
    ]
    card.residencies = now
    if not now and isinstance(status := metrics.get("throttle_status"), bool):
        return ("hardware_slowdown",) if status else ()
    return tuple(dict.fromkeys(grown)) if now else None


def _temperature_c(card: _Handle, kind: str) -> float | None:
    sensor, current = (
        getattr(card.smi.AmdSmiTemperatureType, kind),
        card.smi.AmdSmiTemperatureMetric.CURRENT,
    )
    return _number(card.smi.amdsmi_get_temp_metric(card.raw, sensor, current))


def _clock_mhz(card: _Handle, kind: str) -> float | None:
    return _number(
        card.smi.amdsmi_get_clock_info(card.raw, getattr(card.smi.AmdSmiClkType, kind))["clk"]
    )


class AmdDevice(QueriedDevice):
    """One card, found by its UUID."""

    queries: ClassVar = {
        "energy_counter_mj": _energy_mj,
        "power_instant_w": lambda card: _number(
            card.smi.amdsmi_get_power_info(card.raw)["current_socket_power"]
        ),
        "power_average_w": lambda card: _number(
            card.smi.amdsmi_get_power_info(card.raw)["average_socket_power"]
        ),
        "sm_clock_mhz": lambda card: _clock_mhz(card, "GFX"),
        "memory_clock_mhz": lambda card: _clock_mhz(card, "MEM"),
        "temperature_c": lambda card: _temperature_c(card, "HOTSPOT"),
        "memory_temperature_c": lambda card: _temperature_c(card, "VRAM"),
        "power_limit_w": lambda card: (
            card.smi.amdsmi_get_power_cap_info(card.raw)["power_cap"] / 1e6 or None
        ),
        "throttle_reasons": _throttle_reasons,
        "compute_processes": lambda card: frozenset(
            process["pid"] for process in card.smi.amdsmi_get_gpu_process_list(card.raw)
        ),
    }

    def __init__(self, card: Card) -> None:
        smi = _library()
        raw = next(
            (one for one in smi.amdsmi_get_processor_handles() if _identity(one)[0] == card.id),
            None,
        )
        if raw is None:
            raise NoSuchCard(
                f"The card {card} does not answer.", "Read the output of `amd-smi list`."
            )
        # The two dies of an MI250 share one power sensor: power of one die is unknown.
        super().__init__(
            card, _Handle(smi, raw), POWER_SENSORS if "MI250" in card.model else frozenset()
        )

    def _is_lacking(self, error: Exception) -> bool | None:
        if not isinstance(error, self._handle.smi.AmdSmiException):
            return None
        return getattr(error, "err_code", None) in (
            NOT_SUPPORTED,
            NOT_YET_IMPLEMENTED,
            NO_PERMISSION,
        )
