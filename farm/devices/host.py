"""The cards and the software of this host, and the live device of a card.

No torch: importing it takes seconds, and it may be broken. Its version is read from its files.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import platform
import runpy
from dataclasses import dataclass
from pathlib import Path

from farm import __version__
from farm.devices import cpu, nvidia, simulated
from farm.devices.device import Card, Device
from farm.errors import NoSuchCard
from farm.settings import Settings
from farm.types.protocol import Software


def discover(settings: Settings) -> list[Card]:
    """The cards of this host: simulated ones if the settings ask for them, else its GPUs, else its CPU.

    GPUs that CUDA_VISIBLE_DEVICES hides (Slurm sets it) are left out. A GPU that cannot be measured (it is in MIG mode
    or does not answer) is listed with its `refusal`; the CPU does not replace it.
    """
    if settings.simulated_cards:
        return simulated.simulated_cards(settings)
    return nvidia.visible_cards(nvidia.nvidia_cards(settings), settings) or [cpu.cpu_card(settings)]


def find_card(card_id: str, settings: Settings) -> Card:
    """The card of this host with that id.

    Raises:
        NoSuchCard: there is no such card here, or it cannot be measured; the message says why.
    """
    if card_id.startswith("SIM-"):
        candidates = simulated.simulated_cards(settings)
    elif card_id.startswith("CPU-"):
        candidates = [cpu.cpu_card(settings)]
    else:
        candidates = nvidia.nvidia_cards(settings)
    if card := next((card for card in candidates if card.id == card_id), None):
        return _measurable(card)
    if silent := "; ".join(f"{c}: {c.refusal}" for c in candidates if c.id.startswith(nvidia.WITHOUT_UUID)):
        raise NoSuchCard(
            f"No card of this host ({settings.host}) that answers is '{card_id}'. {silent}",
            "Repair the cards that do not answer.",
        )
    raise NoSuchCard(f"This host ({settings.host}) has no card '{card_id}'.", "List its cards with `farm cards`.")


def open_device(card: Card) -> Device:
    """The live device of a card.

    Raises:
        NoSuchCard: the card cannot be measured, or is gone.
    """
    devices = {"cuda": nvidia.NvidiaDevice, "cpu": cpu.CpuDevice, "simulated": simulated.SimulatedDevice}
    return devices[_measurable(card).kind](card)


def _measurable(card: Card) -> Card:
    if card.refusal:
        raise NoSuchCard(f"The card {card} cannot be measured on: {card.refusal}", "Choose another card.")
    return card


@dataclass(frozen=True)
class Installed:
    """The contents of torch's version file. ``cuda`` is None in a build for CPUs."""

    version: str
    cuda: str | None


def installed_torch() -> Installed | None:
    """The torch that would be imported; None if there is none."""
    found = importlib.util.find_spec("torch")
    for folder in (found.submodule_search_locations or []) if found else []:
        with contextlib.suppress(OSError, SyntaxError):
            values = runpy.run_path(str(Path(folder, "version.py")))
            return Installed(str(values.get("__version__", "")), values.get("cuda"))
    return None


def torch_version() -> str:
    """The version of the torch that would be imported ("2.11.0+cu130").

    The package's metadata may lack the build after the plus sign, which decides which kernels run.

    Raises:
        importlib.metadata.PackageNotFoundError: torch is not installed.
    """
    torch = installed_torch()
    return torch.version if torch else importlib.metadata.version("torch")


def program_versions() -> dict[str, str]:
    """The versions of the farm, Python, torch and torchvision on this host; packages that are missing are left out."""
    found = {"farm": __version__, "Python": platform.python_version()}
    if torch := installed_torch():
        found["torch"] = torch.version
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["torchvision"] = importlib.metadata.version("torchvision")
    return found


def is_installed(software: Software, card: Card) -> bool:
    """True if the software that a worker of this host's card registered is still installed; False if unknown."""
    torch = installed_torch()
    if torch is None or card.kind != "cuda":
        return torch is not None and software.torch == torch.version
    cudnn = None  # if it was installed another way (conda, a system package), its version is known only after loading
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
        package = f"nvidia-cudnn-cu{(torch.cuda or '').partition('.')[0]}"  # required by the wheels of torch
        major, minor, patch = map(int, importlib.metadata.version(package).split(".")[:3])
        cudnn = str(major * 10_000 + minor * 100 + patch)  # 9.19.0 is "91900"
    installed = (torch.version, torch.cuda, cudnn, card.driver)
    return (software.torch, software.cuda, software.cudnn, software.driver) == installed
