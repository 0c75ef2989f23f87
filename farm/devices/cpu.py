"""The CPU of a host as a card: its model, its energy counter (RAPL) and its memory nodes."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path
from typing import Any

from farm.devices.device import Card, Device
from farm.devices.vendor import Vendor
from farm.settings import Settings

POWERCAP = Path("/sys/class/powercap")
NODES = Path("/sys/devices/system/node")
ONE_NODE = "This host has only one NUMA node, so it has no slower memory."
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
    """A CPU as a device. Its energy counter is the sum over RAPL's package domains.

    Virtual machines have no RAPL, and reading it needs permission. It lists no processes: all
    processes use a CPU."""

    counter_source = "rapl"

    def __init__(self, card: Card, powercap: Path = POWERCAP) -> None:
        self.card = card
        self._packages: list[_Package] = []
        with contextlib.suppress(OSError, ValueError):  # since 2020 only root may read the counter
            self._packages = _packages(powercap)

    @property
    def capabilities(self) -> frozenset[str]:
        return frozenset({"energy_counter_mj"}) if self._packages else frozenset()

    def energy_counter_mj(self) -> float | None:
        if not self._packages:
            return None
        with contextlib.suppress(OSError, ValueError):
            return sum(package.energy_uj() for package in self._packages) / 1e3
        return None


def _packages(powercap: Path) -> list[_Package]:
    """The RAPL domains of the sockets. Raises if one cannot be read."""
    packages = []
    for folder in sorted(powercap.glob("intel-rapl:*")):
        # "intel-rapl:0" is a socket (AMD uses the same names); it includes its part
        # "intel-rapl:0:0".
        if folder.name.count(":") == 1 and (folder / "name").read_text().startswith("package"):
            packages.append(_Package(folder))
    return packages


class Cpu(Vendor):
    """The CPU of this host: always one card."""

    name = "CPU"
    kind = "cpu"

    def cards(self, settings: Settings) -> list[Card]:
        return [cpu_card(settings)]

    def open(self, card: Card) -> Device:
        return CpuDevice(card)

    def links(self, card: Card) -> dict[str, Any]:
        return {"communication": "gloo"}


# ---- memory nodes


def no_slow_memory(card: Card, nodes: Path = NODES) -> str:
    """The reason why a card of this host has no slow memory; "" if it has, or if this is unknown
    (GPUs).
    """
    return ONE_NODE if card.is_cpu and farthest_node(nodes) is None else ""


def farthest_node(nodes: Path = NODES) -> int | None:
    """The NUMA node whose memory is farthest from the cores of this process; None if there is only
    one node.
    """
    core = min(os.sched_getaffinity(0))
    folders = sorted(nodes.glob("node[0-9]*"), key=lambda folder: int(folder.name[4:]))
    if len(folders) < 2:
        return None
    near = next((folder for folder in folders if (folder / f"cpu{core}").exists()), folders[0])
    distances = [int(distance) for distance in (near / "distance").read_text().split()]
    farthest = max(range(len(folders)), key=lambda position: distances[position])
    return int(folders[farthest].name[4:])
