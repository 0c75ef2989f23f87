"""The CPU of a host as a card, so that everything runs without a GPU. Energy from RAPL where the kernel shows it."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

from farm.devices.device import Card, Device
from farm.settings import Settings

POWERCAP = Path("/sys/class/powercap")
CPUINFO = Path("/proc/cpuinfo")
MEMINFO = Path("/proc/meminfo")


def cpu_card(settings: Settings) -> Card:
    return Card(
        id=settings.cpu_card_id,
        kind="cpu",
        model=_model(),
        memory_bytes=_memory_bytes(),
        driver=platform.release(),
        host=settings.host,
    )


def _model() -> str:
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.lower().startswith(("model name", "cpu model", "hardware")):
            return " ".join(line.split(":", 1)[1].split())
    return platform.processor() or platform.machine() or "CPU"


def _memory_bytes() -> int:
    try:
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


class _Package:
    """One RAPL domain of a whole socket. Its counter wraps at `range_uj`."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self.range_uj = int((folder / "max_energy_range_uj").read_text())
        self._last_uj = int(self._file.read_text())
        self._wraps = 0

    def energy_uj(self) -> int:
        value_uj = int(self._file.read_text())
        if value_uj < self._last_uj:
            self._wraps += 1
        self._last_uj = value_uj
        return self._wraps * self.range_uj + value_uj


class CpuDevice(Device):
    """RAPL's package domains added up; nothing at all where the kernel hides them (virtual machines, no permission).

    Foreign processes are not asked for, since a CPU always runs some, but how much they take is.
    """

    def __init__(self, card: Card, powercap: Path = POWERCAP) -> None:
        self.card = card
        self._packages: list[_Package] = []
        # "intel-rapl:0" is a socket (AMD shows the same names); "intel-rapl:0:0" a part of it that must not be
        # counted twice.
        for folder in sorted(powercap.glob("intel-rapl:*")) if powercap.is_dir() else []:
            if folder.name.count(":") != 1:
                continue
            try:
                if (folder / "name").read_text().startswith("package"):
                    self._packages.append(_Package(folder))
            except (OSError, ValueError):  # since 2020 the counter is readable by root alone
                self._packages = []
                break

    @property
    def capabilities(self) -> frozenset[str]:
        return frozenset({"energy_counter_mj"}) if self._packages else frozenset()

    def energy_counter_mj(self) -> float | None:
        if not self._packages:
            return None
        try:
            return sum(package.energy_uj() for package in self._packages) / 1e3
        except (OSError, ValueError):
            return None

    def foreign_cpu_s(self) -> float | None:
        import psutil

        cores = os.sched_getaffinity(0)
        try:
            times = [core for number, core in enumerate(psutil.cpu_times(percpu=True)) if number in cores]
        except (OSError, ValueError, psutil.Error):
            return None
        # A virtual machine's host takes its part as well (steal).
        busy_s = sum(core.user + core.nice + core.system + core.irq + core.softirq + core.steal for core in times)
        return (busy_s - time.process_time()) / len(times) if busy_s else None
