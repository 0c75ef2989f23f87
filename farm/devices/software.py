"""The versions of the software on this host, without importing torch.

Importing torch takes seconds, and it may be broken. So its version comes from its version file,
which is read as data: nothing in it is executed."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from farm.types.release import __version__

#: Settings of NCCL that change no algorithm, and its files with settings.
_NEUTRAL = (
    "NCCL_DEBUG",
    "NCCL_DEBUG_FILE",
    "NCCL_DEBUG_SUBSYS",
    "NCCL_SOCKET_IFNAME",
    "NCCL___version__",
)
_NCCL_FILES = ("/etc/nccl.conf", "~/.nccl.conf")


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
    package = importlib.util.find_spec("torch")
    folders = package.submodule_search_locations if package else None
    for folder in folders or ():
        file = Path(folder, "version.py")
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            return _read_version(file, file.stat().st_mtime_ns)
    return None


@functools.lru_cache(maxsize=8)
def _read_version(file: Path, changed_ns: int) -> Installed:
    """The contents of a version file. ``changed_ns``: the time of its last change; it is read again
    after a change.
    """
    values = dict(_assigned_texts(ast.parse(file.read_bytes())))
    return Installed(values.get("__version__", ""), values.get("cuda"), values.get("hip"))


def _assigned_texts(module: ast.Module) -> Iterator[tuple[str, str]]:
    """The names to which a module assigns a text, and the texts."""
    for statement in module.body:
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        else:
            continue
        if isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str):
            for target in targets:
                yield ast.unparse(target), statement.value.value


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
    versions = {"farm": __version__, "Python": platform.python_version()}
    torch = installed_torch()
    if torch:
        versions["torch"] = torch.version
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["torchvision"] = importlib.metadata.version("torchvision")
    return versions


def packaged_version(library: str) -> str:
    """The version of a library of NVIDIA in the package that torch's wheels require; "" if it comes
    from elsewhere.
    """
    torch = installed_torch()
    cuda = (torch and torch.cuda) or ""
    major = cuda.partition(".")[0]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(f"nvidia-{library}-cu{major}")
    return ""


def nccl_of(version: str) -> str:
    """NCCL with the settings of the environment and of nccl.conf that can change its algorithms."""
    settings: dict[str, str] = {}
    for name in _NCCL_FILES:
        path = Path(os.environ.get("NCCL_CONF_FILE") or name).expanduser()
        lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
        _take_nccl_settings(settings, lines)
    _take_nccl_settings(settings, [f"{name}={value}" for name, value in os.environ.items()])
    words = [f"{name}={value}" for name, value in sorted(settings.items()) if name not in _NEUTRAL]
    return " ".join(["nccl", version, *words])


def _take_nccl_settings(settings: dict[str, str], lines: list[str]) -> None:
    """Add the settings of NCCL in lines ``NAME=value``; a later one replaces an earlier one."""
    for line in lines:
        name, sign, value = line.partition("=")
        if sign and name.startswith("NCCL_"):
            settings[name] = value
