"""The CPU of a host as a card, so that everything runs without a GPU: its energy by RAPL, and its NUMA nodes."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from pathlib import Path

from farm.devices.device import Card, Device
from farm.settings import Settings

POWERCAP = Path("/sys/class/powercap")
NODES = Path("/sys/devices/system/node")
ONE_NODE = "This host has one NUMA node: none of its memory is slower than the other."
CPUINFO = Path("/proc/cpuinfo")


def cpu_card(settings: Settings) -> Card:
    return Card(
        id=settings.cpu_card_id,
        kind="cpu",
        model=_model(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        driver=platform.release(),
        host=settings.host,
    )


def _model() -> str:
    with contextlib.suppress(OSError):
        for line in CPUINFO.read_text().splitlines():
            if line.lower().startswith(("model name", "cpu model", "hardware")):
                return " ".join(line.split(":", 1)[1].split())
    return platform.processor() or platform.machine() or "CPU"


class _Package:
    """The RAPL domain of one socket. Its counter wraps at `range_uj`."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._range_uj = int((folder / "max_energy_range_uj").read_text())
        self._total_uj = int(self._file.read_text())

    def energy_uj(self) -> int:
        self._total_uj += (int(self._file.read_text()) - self._total_uj) % self._range_uj
        return self._total_uj


class CpuDevice(Device):
    """The sum of RAPL's package domains; no energy if the kernel hides them (virtual machines, missing permission).

    A CPU always runs foreign processes: it reports their CPU time, not their ids.
    """

    def __init__(self, card: Card, powercap: Path = POWERCAP) -> None:
        self.card = card
        self._packages: list[_Package] = []
        # "intel-rapl:0" is a socket (AMD uses the same names); "intel-rapl:0:0" is a part of it, already counted.
        folders = [folder for folder in sorted(powercap.glob("intel-rapl:*")) if folder.name.count(":") == 1]
        with contextlib.suppress(OSError, ValueError):  # since 2020 only root may read the counter
            self._packages = [_Package(at) for at in folders if (at / "name").read_text().startswith("package")]

    @property
    def capabilities(self) -> frozenset[str]:
        return frozenset({"energy_counter_mj"}) if self._packages else frozenset()

    def energy_counter_mj(self) -> float | None:
        with contextlib.suppress(OSError, ValueError):
            return sum(package.energy_uj() for package in self._packages) / 1e3 if self._packages else None
        return None

    def foreign_cpu_s(self) -> float | None:
        import psutil

        cores = os.sched_getaffinity(0)
        try:
            times = [core for number, core in enumerate(psutil.cpu_times(percpu=True)) if number in cores]
        except (OSError, ValueError, psutil.Error):
            return None
        # The host of a virtual machine takes time as well (steal).
        busy_s = sum(core.user + core.nice + core.system + core.irq + core.softirq + core.steal for core in times)
        return (busy_s - time.process_time()) / len(times) if busy_s else None


def no_slow_memory(card: Card, nodes: Path = NODES) -> str:
    """Why a card of this host has no slow memory; "" if it has, or if only the card itself can tell."""
    return ONE_NODE if card.kind == "cpu" and farthest_node(nodes) is None else ""


def farthest_node(nodes: Path = NODES) -> int | None:
    """The NUMA node whose memory is farthest from the cores of this process; None if there is only one node."""
    own = min(os.sched_getaffinity(0))
    folders = sorted(nodes.glob("node[0-9]*"), key=lambda folder: int(folder.name[4:]))
    if len(folders) < 2:
        return None
    here = next((folder for folder in folders if (folder / f"cpu{own}").exists()), folders[0])
    distances = list(map(int, (here / "distance").read_text().split()))
    far = max(range(len(folders)), key=lambda place: distances[place])
    return int(folders[far].name[4:])
