"""Find the cards and the software of this host, and open the device of a card.

This module does not import torch, which takes seconds and may be broken. It finds torch's version
in torch's files."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import multiprocessing
import os
import platform
import runpy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farm import __version__
from farm.devices import amd, nvidia, simulated
from farm.devices.device import Card, Device
from farm.errors import FarmUnavailable, NoSuchCard
from farm.settings import Settings
from farm.types.protocol import Software

SHARED_MEMORY_STEP = (
    "Mount a tmpfs at /dev/shm with mode 1777. In a container: `docker run --shm-size 1g`."
)
#: Settings of NCCL that change no algorithm, and its files with settings.
_NEUTRAL = (
    "NCCL_DEBUG",
    "NCCL_DEBUG_FILE",
    "NCCL_DEBUG_SUBSYS",
    "NCCL_SOCKET_IFNAME",
    "NCCL_VERSION",
)
_NCCL_FILES = ("/etc/nccl.conf", "~/.nccl.conf")


def discover(settings: Settings) -> list[Card]:
    """The cards of this host: simulated cards if the settings request them, else its GPUs, else its
    CPU.

    The GPUs are those of the vendor that the installed PyTorch supports, without GPUs that
    CUDA_VISIBLE_DEVICES hides (Slurm sets it). A GPU that cannot be measured (it is in MIG mode, or
    its driver fails) is in the list with its `refusal`: the CPU is listed only if there is no GPU.
    """
    if settings.simulated_cards:
        return simulated.simulated_cards(settings)
    if for_rocm():
        return amd.visible_cards(amd.amd_cards(settings)) or [cpu_card(settings)]
    return nvidia.visible_cards(nvidia.nvidia_cards(settings), settings) or [cpu_card(settings)]


def semaphore_problem() -> str:
    """Why this host cannot create a semaphore, which every worker of a card needs; "" if it can."""
    try:
        multiprocessing.get_context("fork").Lock()
    except (OSError, ImportError) as error:
        return (
            "a semaphore cannot be created (on Linux, in /dev/shm): "
            f"{getattr(error, 'strerror', None) or error}"
        )
    return ""


def check_semaphores() -> None:
    """Raise `FarmUnavailable` if workers cannot start because this host cannot create a
    semaphore.
    """
    if reason := semaphore_problem():
        raise FarmUnavailable(f"Workers cannot start: {reason}.", SHARED_MEMORY_STEP)


def find_card(card_id: str, settings: Settings) -> Card:
    """The card of this host with that id. Raises `NoSuchCard` with the reason if it is missing or
    not measurable.
    """
    if card_id.startswith("SIM-"):
        candidates = simulated.simulated_cards(settings)
    elif card_id.startswith("CPU-"):
        candidates = [cpu_card(settings)]
    else:
        candidates = amd.amd_cards(settings) if for_rocm() else nvidia.nvidia_cards(settings)
    if card := next((card for card in candidates if card.id == card_id), None):
        return _measurable(card)
    if silent := "; ".join(
        f"{c}: {c.refusal}" for c in candidates if c.refusal and not c.id.startswith("GPU-")
    ):
        text = (
            f"This host ({settings.host}) has no card '{card_id}' that answers. Cards that do not "
            f"answer: {silent}"
        )
        raise NoSuchCard(text, "Repair the cards that do not answer, or choose another card.")
    raise NoSuchCard(
        f"This host ({settings.host}) has no card '{card_id}'.", "List its cards with `farm cards`."
    )


def open_device(card: Card) -> Device:
    """Open the device of a card. Raises `NoSuchCard` if the card has a refusal, or no longer
    responds.
    """
    gpu: type[Device] = amd.AmdDevice if for_rocm() else nvidia.NvidiaDevice
    devices: dict[str, type] = {
        "cuda": gpu,
        "cpu": CpuDevice,
        "simulated": simulated.SimulatedDevice,
    }
    return devices[_measurable(card).kind](card)


def links_of(card: Card) -> dict[str, Any]:
    """The links of a card to other cards of its host (`farm.devices.nvidia.links`), as far as they
    are known.

    With the key ``communication``: the software with which this card and all its peers communicate,
    as in a reading of them (`Software.communication`)."""
    if card.kind != "cuda":
        return {"communication": "gloo" if card.kind == "cpu" else card.kind}
    if for_rocm():
        return {}
    found = nvidia.links(card.id)
    peers = found.get("peers", ())
    with contextlib.suppress(NoSuchCard):
        names = {link_between([card.id, one])[0] for one in peers} or {link_between([card.id])[0]}
        version = packaged_version("nccl")
        if version and len(names) == 1:  # readings over one link serve no cards with another
            found["communication"] = nccl_of(version) + "".join(
                f" over {name}" for name in names if name
            )
    return found


def packaged_version(library: str) -> str:
    """The version of a library of NVIDIA in the package that torch's wheels require; "" if it comes
    from elsewhere.
    """
    torch = installed_torch()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(
            f"nvidia-{library}-cu{((torch and torch.cuda) or '').partition('.')[0]}"
        )
    return ""


def nccl_of(version: str) -> str:
    """NCCL with the settings of the environment and of nccl.conf that can change its algorithms."""
    settings: dict[str, str] = {}
    for name in _NCCL_FILES:
        path = Path(os.environ.get("NCCL_CONF_FILE") or name).expanduser()
        lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
        settings |= dict(
            line.split("=", 1) for line in lines if line.startswith("NCCL_") and "=" in line
        )
    settings |= {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    return " ".join(
        ["nccl", version, *(f"{k}={v}" for k, v in sorted(settings.items()) if k not in _NEUTRAL)]
    )


def link_between(card_ids: Sequence[str]) -> tuple[str, float | None]:
    """The link between cards of this host ("NVLink x18") and its peak in bytes/s in one direction;
    "" if unknown. Raises `NoSuchCard` if two of the cards cannot access each other's memory."""
    if for_rocm() or not all(card_id.startswith("GPU-") for card_id in card_ids):
        return "", None
    return nvidia.link_between(card_ids)


def _measurable(card: Card) -> Card:
    if card.refusal:
        raise NoSuchCard(
            f"The farm cannot measure on {card}: {card.refusal}", "Choose another card."
        )
    return card


@dataclass(frozen=True)
class Installed:
    """The contents of torch's version file. ``cuda`` and ``hip`` (ROCm) are None in a build for
    CPUs.
    """

    version: str
    cuda: str | None
    hip: str | None = None


def installed_torch() -> Installed | None:
    """The version of the torch package that `import torch` would find; None if there is none."""
    found = importlib.util.find_spec("torch")
    for folder in (found.submodule_search_locations or []) if found else []:
        with contextlib.suppress(OSError, SyntaxError):
            values = runpy.run_path(str(Path(folder, "version.py")))
            return Installed(
                str(values.get("__version__", "")), values.get("cuda"), values.get("hip")
            )
    return None


def for_rocm() -> bool:
    """True if the installed torch is built for ROCm, and so for AMD cards."""
    return bool((torch := installed_torch()) and torch.hip)


def visible_only(gpu_ids: Sequence[str]) -> dict[str, str]:
    """The environment variables that show a process only these GPUs; [] hides all. Set them before
    Python starts.
    """
    if not for_rocm():
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpu_ids)}
    if not gpu_ids:
        return dict.fromkeys(("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), "-1")
    # ROCm's runtime selects by UUID; HIP's variables then count the selected cards.
    counted = dict.fromkeys(
        ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), ",".join(map(str, range(len(gpu_ids))))
    )
    return {"ROCR_VISIBLE_DEVICES": ",".join(gpu_ids), **counted}


def torch_version() -> str:
    """The version of the torch package that `import torch` would find ("2.11.0+cu130"). Raises if
    there is none.

    The package's metadata may lack the part after the plus sign. This part names the build, which
    decides the kernels."""
    torch = installed_torch()
    return torch.version if torch else importlib.metadata.version("torch")


def program_versions() -> dict[str, str]:
    """The versions of the farm, Python, torch and torchvision on this host, without packages that
    are not installed.
    """
    found = {"farm": __version__, "Python": platform.python_version()}
    if torch := installed_torch():
        found["torch"] = torch.version
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["torchvision"] = importlib.metadata.version("torchvision")
    return found


def is_installed(software: Software, card: Card) -> bool:
    """True if `software`, which a worker registered for this card, is still installed; False if it
    is unknown.
    """
    torch = installed_torch()
    if torch is None or card.kind != "cuda":
        return torch is not None and software.torch == torch.version
    if torch.hip:
        return (software.torch, software.driver) == (torch.version, card.driver)
    # unknown if cuDNN comes from conda or the system: only loading it would tell its version
    cudnn = None
    with contextlib.suppress(ValueError):
        major, minor, patch = map(int, packaged_version("cudnn").split(".")[:3])
        cudnn = str(major * 10_000 + minor * 100 + patch)  # 9.19.0 is "91900"
    installed = (torch.version, torch.cuda, cudnn, card.driver)
    return (software.torch, software.cuda, software.cudnn, software.driver) == installed


# ---- the CPU as a card


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

    def __init__(self, card: Card, powercap: Path = POWERCAP) -> None:
        self.card = card
        self._packages: list[_Package] = []
        # "intel-rapl:0" is a socket (AMD uses the same names); it includes its part
        # "intel-rapl:0:0".
        folders = [
            folder
            for folder in sorted(powercap.glob("intel-rapl:*"))
            if folder.name.count(":") == 1
        ]
        with contextlib.suppress(OSError, ValueError):  # since 2020 only root may read the counter
            self._packages = [
                _Package(at) for at in folders if (at / "name").read_text().startswith("package")
            ]

    @property
    def capabilities(self) -> frozenset[str]:
        return frozenset({"energy_counter_mj"}) if self._packages else frozenset()

    def energy_counter_mj(self) -> float | None:
        with contextlib.suppress(OSError, ValueError):
            return (
                sum(package.energy_uj() for package in self._packages) / 1e3
                if self._packages
                else None
            )
        return None


def no_slow_memory(card: Card, nodes: Path = NODES) -> str:
    """The reason why a card of this host has no slow memory; "" if it has, or if this is unknown
    (GPUs).
    """
    return ONE_NODE if card.kind == "cpu" and farthest_node(nodes) is None else ""


def farthest_node(nodes: Path = NODES) -> int | None:
    """The NUMA node whose memory is farthest from the cores of this process; None if there is only
    one node.
    """
    own = min(os.sched_getaffinity(0))
    folders = sorted(nodes.glob("node[0-9]*"), key=lambda folder: int(folder.name[4:]))
    if len(folders) < 2:
        return None
    here = next((folder for folder in folders if (folder / f"cpu{own}").exists()), folders[0])
    distances = list(map(int, (here / "distance").read_text().split()))
    far = max(range(len(folders)), key=lambda place: distances[place])
    return int(folders[far].name[4:])
