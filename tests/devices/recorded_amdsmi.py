"""A stand-in for the Python package `amdsmi`, with answers of real cards: no AMD card runs these
tests.

Recorded, all published by AMD or by users of its cards:

- NAVI21: identity, clocks, temperatures, power, power limit and processes, from the output of the
  library's own integration tests (README of the Python tests of ROCm/amdsmi); its energy counter is
  0, as on other Radeon cards (recorded on a Navi 23 with the metrics used here).
- MI100: the energy counter (AMDResearch/hpcfund, issue 21); the older key `power` has today's
  `energy_accumulator`.
- MI300: the counters of throttling (changelog of AMD SMI for ROCm 6.3); hip_uuid and hip_id have
  the form of ROCm 6.4.

Values that no record has (the power of an MI300, its clocks, its memory) are made up and say so
with `MADE_UP`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from farm.devices import amd, software

MADE_UP = 137.0
UUID = "GPU-bb0ac32b1c2c644a"
RADEON_UUID = "GPU-f8ffeb47a027de4d"
NOT_SUPPORTED = 2


class AmdSmiException(Exception):
    """The base of the library's exceptions."""


class AmdSmiLibraryException(AmdSmiException):
    def __init__(self, code: int) -> None:
        super().__init__(f"Error code:\n\t{code} | AMDSMI_STATUS")
        self.err_code = code

    def get_error_code(self) -> int:
        return self.err_code


Kind = Enum("Kind", ["GFX", "MEM", "HOTSPOT", "VRAM", "CURRENT"])


def radeon() -> dict[str, Any]:
    return {
        "gpu_asic_info": {"market_name": "NAVI21", "asic_serial": "0xF8FFEB47A027DE4D"},
        "gpu_memory_total": 17_163_091_968,
        "gpu_driver_info": {
            "driver_name": "amdgpu",
            "driver_version": "6.9.2",
            "driver_date": "2015/01/01 00:00",
        },
        "gpu_enumeration_info": {"drm_render": 128, "hsa_id": 1, "hip_id": 1, "hip_uuid": "N/A"},
        "gpu_compute_partition": AmdSmiLibraryException(NOT_SUPPORTED),
        "energy_count": {
            "power": 0,
            "energy_accumulator": 0,
            "counter_resolution": 15.3,
            "timestamp": 1,
        },
        "power_info": {
            "current_socket_power": "N/A",
            "average_socket_power": 39,
            "power_limit": 272_000_000,
        },
        "clock_info": {Kind.GFX: {"clk": 500}, Kind.MEM: {"clk": 96}},
        "temp_metric": {Kind.HOTSPOT: 35, Kind.VRAM: 32},
        "power_cap_info": {"power_cap": 272_000_000, "dpm_cap": 1},
        "gpu_metrics_info": {
            "throttle_status": False,
            "indep_throttle_status": False,
            "energy_accumulator": 0,
        },
        "gpu_process_list": [],
    }


def instinct() -> dict[str, Any]:
    residencies = {"prochot": 0, "ppt": 585_613, "socket_thm": 2190, "vr_thm": 0, "hbm_thm": 0}
    return {
        "gpu_asic_info": {
            "market_name": "AMD Instinct MI308X",
            "asic_serial": "0xBB0AC32B1C2C644A",
        },
        "gpu_memory_total": 192 * 2**30,
        "gpu_driver_info": {
            "driver_name": "amdgpu",
            "driver_version": "6.12.12",
            "driver_date": "N/A",
        },
        "gpu_enumeration_info": {"drm_render": 131, "hsa_id": 5, "hip_id": 0, "hip_uuid": UUID},
        "gpu_compute_partition": "SPX",
        "energy_count": {
            "energy_accumulator": 8_152_136,
            "counter_resolution": 15.300000190734863,
            "timestamp": 3,
        },
        "power_info": {
            "current_socket_power": MADE_UP,
            "average_socket_power": "N/A",
            "power_limit": 750_000_000,
        },
        "clock_info": {Kind.GFX: {"clk": MADE_UP}, Kind.MEM: {"clk": MADE_UP}},
        "temp_metric": {Kind.HOTSPOT: 43, Kind.VRAM: 38},
        "power_cap_info": {"power_cap": 750_000_000, "dpm_cap": 0},
        "gpu_metrics_info": {
            "throttle_status": "N/A",
            "accumulation_counter": 3_808_991,
            **{f"{name}_residency_acc": value for name, value in residencies.items()},
        },
        "gpu_process_list": [{"name": "python", "pid": 17, "mem": 0}],
    }


class RecordedAmdSmi(SimpleNamespace):
    """The package. `cards` has the answers of each card by the name of the function after
    ``amdsmi_get_``.
    """

    AmdSmiException, AmdSmiLibraryException = AmdSmiException, AmdSmiLibraryException
    AmdSmiClkType = AmdSmiTemperatureType = AmdSmiTemperatureMetric = Kind
    AmdSmiMemoryType = SimpleNamespace(VRAM=0)

    def __init__(self) -> None:
        self.cards = [radeon(), instinct()]
        self.fault: Exception | None = None

    def amdsmi_init(self) -> None:
        if self.fault:
            raise self.fault

    def amdsmi_get_processor_handles(self) -> list[int]:
        return list(range(len(self.cards)))

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("amdsmi_get_"):
            raise AttributeError(name)

        def call(handle: int, kind: Any = None, metric: Any = None) -> Any:
            answer = self.cards[handle][name.removeprefix("amdsmi_get_")]
            if isinstance(answer, Exception):
                raise answer
            return answer[kind] if isinstance(kind, Kind) else answer

        return call


@contextmanager
def rocm(
    monkeypatch: pytest.MonkeyPatch, kfd: Path = Path("/dev/null")
) -> Iterator[RecordedAmdSmi]:
    """A host with ROCm, a PyTorch for ROCm and two cards."""
    library = RecordedAmdSmi()
    with monkeypatch.context() as patch:
        for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
            patch.delenv(variable, raising=False)
        patch.setitem(sys.modules, "amdsmi", library)
        patch.setattr(amd, "KFD", kfd)
        patch.setattr(
            software,
            "installed_torch",
            lambda: software.Installed("2.11.0+rocm7.0", None, "7.0.51831"),
        )
        amd._library.cache_clear()
        yield library
    amd._library.cache_clear()
