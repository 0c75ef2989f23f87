"""What is installed on this host, told from files: without importing torch, which takes seconds and may be broken."""

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
from farm.devices.device import Card
from farm.types.protocol import Software


@dataclass(frozen=True)
class Installed:
    """What torch's version file says. ``cuda`` is None in a build for CPUs."""

    version: str
    cuda: str | None


def installed_torch() -> Installed | None:
    """The torch that would be imported; None where there is none."""
    found = importlib.util.find_spec("torch")
    folders = (found.submodule_search_locations or []) if found else []
    for folder in folders:
        with contextlib.suppress(OSError, SyntaxError):
            return _read_version(Path(folder, "version.py").read_text())
    return None


def torch_version() -> str:
    """The version of the torch that would be imported ("2.11.0+cu130").

    The package's metadata may lack the build after the plus, which decides what runs.

    Raises:
        importlib.metadata.PackageNotFoundError: there is no torch.
    """
    torch = installed_torch()
    return torch.version if torch is not None else importlib.metadata.version("torch")


def program_versions() -> dict[str, str]:
    """The versions of what takes models apart and runs the farm on this host; what is missing here is left out."""
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
    """The number that cuDNN gives as its version ("91900" for 9.19.0), from the wheel that torch's own wheels need.

    None where cuDNN came another way (conda, a system's package): then only loading it tells.
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
        major, minor, patch = importlib.metadata.version(f"nvidia-cudnn-cu{cuda.partition('.')[0]}").split(".")[:3]
        return str(int(major) * 10_000 + int(minor) * 100 + int(patch))
    return None


def is_installed(software: Software, card: Card) -> bool:
    """Whether what a worker of this host's card registered is still what is installed; no where that cannot be told."""
    torch = installed_torch()
    if torch is None or software.torch != torch.version:
        return False
    if card.kind != "cuda":
        return True
    installed = (torch.cuda, _installed_cudnn(torch.cuda or ""), card.driver)
    return (software.cuda, software.cudnn, software.driver) == installed
