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

from farm.devices.device import Card, Device
from farm.devices.queried import QueriedDevice
from farm.devices.software import Installed
from farm.devices.vendor import Vendor
from farm.errors import NoSuchCard
from farm.settings import Settings
from farm.types.software import Software

UNTESTED = "AMD cards are untested on hardware: the farm's tests use recorded answers of AMD SMI"

KFD = Path("/dev/kfd")  # the device file of ROCm's driver
#: amdsmi_status_t with which the card will never support a query: not supported, not yet
#: implemented, no permission.
LACKS = (2, 3, 10)
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


def _describe(handle: Any, index: int, settings: Settings) -> Card:
    smi = _library()
    card_id, hip_index = _identity(handle)
    card = Card(
        id=card_id,
        kind="cuda",
        model=str(smi.amdsmi_get_gpu_asic_info(handle)["market_name"]),
        memory_bytes=int(smi.amdsmi_get_gpu_memory_total(handle, smi.AmdSmiMemoryType.VRAM)),
        driver=str(smi.amdsmi_get_gpu_driver_info(handle)["driver_version"]),
        index=index if hip_index is None else hip_index,
        host=settings.host,
    )
    mode = ""
    with contextlib.suppress(smi.AmdSmiException):
        mode = smi.amdsmi_get_gpu_compute_partition(handle)
    if mode not in PARTITIONED:
        return card
    return dataclasses.replace(
        card,
        refusal=(
            f"it is in partition mode {mode}, and power and clocks cannot be measured per "
            "partition; `amd-smi set --compute-partition SPX` ends the mode"
        ),
    )


def _identity(handle: Any) -> tuple[str, int | None]:
    """HIP's UUID of a card ("GPU-" and 16 digits, from its serial number), and its index in HIP if
    known.
    """
    smi = _library()
    answer: dict[str, Any] = {}
    with contextlib.suppress(smi.AmdSmiException, AttributeError):
        answer = smi.amdsmi_get_gpu_enumeration_info(handle)
    uuid = str(answer.get("hip_uuid", "N/A"))
    if uuid == "N/A":  # the process may lack the right to read it
        uuid = f"GPU-{smi.amdsmi_get_gpu_asic_info(handle)['asic_serial'].removeprefix('0x')}"
    index = answer.get("hip_id")
    return uuid.lower().replace("gpu-", "GPU-"), index if isinstance(index, int) else None


def visible_cards(cards: Sequence[Card]) -> list[Card]:
    """The cards that ROCR_VISIBLE_DEVICES names, and of these the ones that HIP_ or
    CUDA_VISIBLE_DEVICES names.
    """
    second = "CUDA_VISIBLE_DEVICES"
    if "HIP_VISIBLE_DEVICES" in os.environ:
        second = "HIP_VISIBLE_DEVICES"
    visible = list(cards)
    for variable in ("ROCR_VISIBLE_DEVICES", second):
        if variable in os.environ:
            visible = _named_by(os.environ[variable], visible)
    return visible


def _named_by(value: str, cards: Sequence[Card]) -> list[Card]:
    """The cards that a variable names by place or id. An entry for all cards stays, unless the
    variable hides all.
    """
    names = [name.strip().lower() for name in value.split(",")]
    hides_all = names in ([""], ["-1"])
    named = []
    for position, card in enumerate(cards):
        is_uncounted = not card.id.startswith("GPU-")
        if str(position) in names or card.id.lower() in names or (is_uncounted and not hides_all):
            named.append(card)
    return named


def _handle_of(card_id: str) -> Any:
    """The library's handle of a card; None if the card does not answer."""
    for handle in _library().amdsmi_get_processor_handles():
        if _identity(handle)[0] == card_id:
            return handle
    return None


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
    counters = {name: metrics[name] for name in RESIDENCIES if isinstance(metrics.get(name), int)}
    before = card.residencies
    card.residencies = counters
    if counters:
        grown = [name for name, value in counters.items() if value > before.get(name, value)]
        return tuple(dict.fromkeys(RESIDENCIES[name] for name in grown))
    status = metrics.get("throttle_status")
    if isinstance(status, bool):
        return ("hardware_slowdown",) if status else ()
    return None


def _temperature_c(card: _Handle, kind: str) -> float | None:
    sensor = card.smi.AmdSmiTemperatureType[kind]
    current = card.smi.AmdSmiTemperatureMetric.CURRENT
    return _number(card.smi.amdsmi_get_temp_metric(card.raw, sensor, current))


def _clock_mhz(card: _Handle, kind: str) -> float | None:
    clock = card.smi.amdsmi_get_clock_info(card.raw, card.smi.AmdSmiClkType[kind])
    return _number(clock["clk"])


def _power_w(card: _Handle, kind: str) -> float | None:
    return _number(card.smi.amdsmi_get_power_info(card.raw)[f"{kind}_socket_power"])


def _power_limit_w(card: _Handle) -> float | None:
    return card.smi.amdsmi_get_power_cap_info(card.raw)["power_cap"] / 1e6 or None


def _compute_processes(card: _Handle) -> frozenset[int]:
    processes = card.smi.amdsmi_get_gpu_process_list(card.raw)
    return frozenset(process["pid"] for process in processes)


class AmdDevice(QueriedDevice):
    """One card, found by its UUID."""

    times_pauses = False  # the clock by which ROCm counts a pause depends on the card

    queries: ClassVar = {
        "energy_counter_mj": _energy_mj,
        "power_instant_w": lambda card: _power_w(card, "current"),
        "power_average_w": lambda card: _power_w(card, "average"),
        "sm_clock_mhz": lambda card: _clock_mhz(card, "GFX"),
        "memory_clock_mhz": lambda card: _clock_mhz(card, "MEM"),
        "temperature_c": lambda card: _temperature_c(card, "HOTSPOT"),
        "memory_temperature_c": lambda card: _temperature_c(card, "VRAM"),
        "power_limit_w": _power_limit_w,
        "throttle_reasons": _throttle_reasons,
        "compute_processes": _compute_processes,
    }

    def __init__(self, card: Card) -> None:
        raw = _handle_of(card.id)
        if raw is None:
            raise NoSuchCard(
                f"The card {card} does not answer.", "Read the output of `amd-smi list`."
            )
        # The two dies of an MI250 share one power sensor: power of one die is unknown.
        lacks = POWER_SENSORS if "MI250" in card.model else frozenset()
        super().__init__(card, _Handle(_library(), raw), lacks)

    def _is_lacking(self, error: Exception) -> bool | None:
        if not isinstance(error, self._handle.smi.AmdSmiException):
            return None
        return getattr(error, "err_code", None) in LACKS


class Amd(Vendor):
    """AMD's GPUs, if PyTorch is built for ROCm."""

    name = "AMD"
    kind = "cuda"

    def serves(self, torch: Installed | None) -> bool:
        return torch is not None and bool(torch.hip)

    def cards(self, settings: Settings) -> list[Card]:
        """The AMD cards of this host in HIP's order; [] without ROCm's driver. If AMD SMI fails,
        one entry with refusal.
        """
        if not KFD.exists():
            return []
        try:
            handles = _library().amdsmi_get_processor_handles()
            cards = [_describe(handle, index, settings) for index, handle in enumerate(handles)]
            return sorted(cards, key=lambda card: card.index)
        except ImportError:
            step = "install the version of your ROCm: `pip install 'operator-farm[amd]'`"
            reason = f"the Python package amdsmi is not installed; {step}"
        except Exception as error:  # of an old library also OSError, KeyError and AttributeError
            text = " ".join(str(error).split())
            reason = f"AMD SMI says '{text}'; read the output of `amd-smi list`"
        uncounted = Card(f"AMD-{settings.host}", "cuda", "all AMD cards", 0, host=settings.host)
        return [dataclasses.replace(uncounted, refusal=reason)]

    def visible_cards(self, settings: Settings) -> list[Card]:
        return visible_cards(self.cards(settings))

    def open(self, card: Card) -> Device:
        return AmdDevice(card)

    def visible_only(self, card_ids: Sequence[str]) -> dict[str, str]:
        if not card_ids:
            return {"HIP_VISIBLE_DEVICES": "-1", "CUDA_VISIBLE_DEVICES": "-1"}
        # ROCm's runtime selects by UUID; HIP's variables then count the selected cards.
        numbers = ",".join(map(str, range(len(card_ids))))
        return {
            "ROCR_VISIBLE_DEVICES": ",".join(card_ids),
            "HIP_VISIBLE_DEVICES": numbers,
            "CUDA_VISIBLE_DEVICES": numbers,
        }

    def is_installed(self, software: Software, card: Card, torch: Installed) -> bool:
        return (software.torch, software.driver) == (torch.version, card.driver)

    def note_about(self, model: str) -> str:
        return UNTESTED if "AMD" in model else ""
