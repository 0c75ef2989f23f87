"""The cards and the software of this host, and the live device of a card.

No torch: importing it takes seconds, and it may be broken. Its version is read from its files.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import importlib.util
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farm import __version__
from farm.devices import cpu, nvidia, simulated
from farm.devices.device import Card, Device
from farm.errors import NoSuchCard
from farm.settings import Settings
from farm.types.protocol import Software

# ------------------------------------------------------------------------------------------ cards


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
    if silent := [card for card in candidates if card.id.startswith(nvidia.WITHOUT_UUID)]:
        reasons = "; ".join(f"{card}: {card.refusal}" for card in silent)
        raise NoSuchCard(
            f"No card of this host ({settings.host}) that answers is '{card_id}'. {reasons}",
            "Repair the cards that do not answer.",
        )
    raise NoSuchCard(f"This host ({settings.host}) has no card '{card_id}'.", "List its cards with `farm cards`.")


def open_device(card: Card) -> Device:
    """The live device of a card.

    Raises:
        NoSuchCard: the card cannot be measured, or is gone.
    """
    _measurable(card)
    if card.kind == "cuda":
        return nvidia.NvidiaDevice(card)
    if card.kind == "cpu":
        return cpu.CpuDevice(card)
    return simulated.SimulatedDevice(card)


def _measurable(card: Card) -> Card:
    if card.refusal:
        raise NoSuchCard(f"The card {card} cannot be measured on: {card.refusal}", "Choose another card.")
    return card


# ------------------------------------------------------------------------------------------ software


@dataclass(frozen=True)
class Installed:
    """The contents of torch's version file. ``cuda`` is None in a build for CPUs."""

    version: str
    cuda: str | None


def installed_torch() -> Installed | None:
    """The torch that would be imported; None if there is none."""
    found = importlib.util.find_spec("torch")
    folders = (found.submodule_search_locations or []) if found else []
    for folder in folders:
        with contextlib.suppress(OSError, SyntaxError):
            return _read_version(Path(folder, "version.py").read_text())
    return None


def torch_version() -> str:
    """The version of the torch that would be imported ("2.11.0+cu130").

    The package's metadata may lack the build after the plus sign, which decides which kernels run.

    Raises:
        importlib.metadata.PackageNotFoundError: torch is not installed.
    """
    torch = installed_torch()
    return torch.version if torch is not None else importlib.metadata.version("torch")


def program_versions() -> dict[str, str]:
    """The versions of the farm, Python, torch and torchvision on this host; packages that are missing are left out."""
    found = {"farm": __version__, "Python": platform.python_version()}
    if (torch := installed_torch()) is not None:
        found["torch"] = torch.version
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["torchvision"] = importlib.metadata.version("torchvision")
    return found


def _read_version(text: str) -> Installed:
    given: dict[str, Any] = {}
    for node in ast.parse(text).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant):
            given.update({target.id: value.value for target in targets if isinstance(target, ast.Name)})
    return Installed(str(given.get("__version__", "")), given.get("cuda"))


def _installed_cudnn(cuda: str) -> str | None:
    """The version number of cuDNN ("91900" for 9.19.0), from the wheel that torch's own wheels require.

    None if cuDNN was installed another way (conda, a system package): its version is known only after loading it.
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
        major, minor, patch = importlib.metadata.version(f"nvidia-cudnn-cu{cuda.partition('.')[0]}").split(".")[:3]
        return str(int(major) * 10_000 + int(minor) * 100 + int(patch))
    return None


def is_installed(software: Software, card: Card) -> bool:
    """True if the software that a worker of this host's card registered is still installed; False if that is
    unknown."""
    torch = installed_torch()
    if torch is None or software.torch != torch.version:
        return False
    if card.kind != "cuda":
        return True
    installed = (torch.cuda, _installed_cudnn(torch.cuda or ""), card.driver)
    return (software.cuda, software.cudnn, software.driver) == installed
