"""Checks of a GPU vendor's driver, and of torch against it: one function per vendor.

`CHECKS` has them by the name of the vendor (`farm.devices.vendor.Vendor`). A vendor that is not in
the table has none."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pynvml

from farm.devices import nvidia, nvml
from farm.devices.amd import UNTESTED
from farm.devices.device import Card
from farm.devices.software import Installed
from farm.settings import Settings
from tasks.doctor import Check, ok, problem, warning

#: The cards of the host, the installed torch (None: none) and the settings -> checks.
DriverChecks = Callable[[Sequence[Card], Installed | None, Settings], Iterator[Check]]


def amd_checks(
    cards: Sequence[Card], torch: Installed | None, current: Settings
) -> Iterator[Check]:
    """Check that ROCm's driver answers."""
    if torch is not None:
        yield ok("torch", f"built for ROCm {torch.hip}")
    versions = [card.driver for card in cards if card.is_gpu and card.driver]
    if versions:
        yield ok("driver", f"amdgpu {versions[0]}")
        yield warning(
            "AMD",
            UNTESTED,
            "Compare readings with another tool before you use them (docs/devices.md).",
        )


@dataclass(frozen=True)
class NvidiaDriver:
    """The version of NVIDIA's driver, and the newest CUDA version that it supports."""

    version: str
    cuda: tuple[int, int]


def nvidia_checks(
    cards: Sequence[Card], torch: Installed | None, current: Settings
) -> Iterator[Check]:
    """Check that NVIDIA's driver answers, that the farm lists all GPUs, and that torch can use the
    driver.
    """
    driver: NvidiaDriver | None = None
    fault = ""
    try:
        driver = _nvidia_driver()
    except pynvml.NVMLError as error:
        fault = str(error)
    yield from _all_listed(cards, current)
    if driver:
        major, minor = driver.cuda
        yield ok("driver", f"{driver.version}, supports CUDA up to {major}.{minor}")
    elif has_nvidia_hardware() or any(card.is_gpu for card in cards):
        yield problem(
            "driver",
            f"this host has an NVIDIA card, but its driver does not answer: {fault}",
            "Install or reload the driver until `nvidia-smi` lists the card; give a container "
            "access to the card.",
        )
    else:
        yield ok("driver", "this host has no NVIDIA card; it measures on its CPU")
    if torch is not None:
        yield torch_against_driver(torch, driver.cuda if driver else None)


def _nvidia_driver() -> NvidiaDriver:
    """Raises `pynvml.NVMLError` if the driver does not answer."""
    with nvml.opened():
        version = pynvml.nvmlSystemGetDriverVersion()
        number = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    if isinstance(version, bytes):
        version = version.decode()
    return NvidiaDriver(version, (number // 1000, number % 1000 // 10))


def _all_listed(listed: Sequence[Card], current: Settings) -> Iterator[Check]:
    """Report GPUs that the driver counts but the farm did not list: no worker uses them."""
    counted = [] if current.simulated_cards else nvidia.Nvidia().cards(current)
    if any(card.id == nvidia.uncounted_id(current) for card in counted):
        return  # another check reports that the driver does not count GPUs
    listed_ids = {card.id for card in listed}
    hidden = [card for card in counted if card.id not in listed_ids]
    if hidden:
        names = ", ".join(f"{card.index} ({card.id})" for card in hidden[:8])
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        yield warning(
            "GPUs",
            f"the farm sees {len(counted) - len(hidden)} of the {len(counted)} GPUs that the "
            f"driver lists; CUDA_VISIBLE_DEVICES={chosen} leaves out {names}",
            "Unset CUDA_VISIBLE_DEVICES to use all GPUs. Leave it if a scheduler gave you only "
            "some of them.",
        )
    elif counted:
        yield ok("GPUs", f"the farm sees all {len(counted)} GPUs that the driver lists")


def has_nvidia_hardware(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """True if an NVIDIA display or 3D controller is on the PCI bus. Does not ask the driver."""
    for device in devices.glob("*"):
        with contextlib.suppress(OSError):
            vendor = (device / "vendor").read_text().strip()
            kind = (device / "class").read_text().strip()
            if vendor == "0x10de" and kind.startswith("0x03"):
                return True
    return False


def torch_against_driver(torch: Installed, driver_cuda: tuple[int, int] | None) -> Check:
    """Check that torch can use the driver. A CUDA program runs on every driver with the same major
    CUDA version.
    """
    if driver_cuda is None:
        built_for = f"built for CUDA {torch.cuda}" if torch.cuda else "for CPUs"
        return ok("torch", f"{torch.version}, {built_for}")
    if not torch.cuda:
        message = f"torch {torch.version} is built for CPUs, but this host has an NVIDIA driver"
        step = "Install a build of torch for CUDA (the default on Linux)."
        return problem("torch", message, step)
    major, minor = (int(part) for part in torch.cuda.split(".")[:2])
    runs = f"the driver supports CUDA up to {driver_cuda[0]}.{driver_cuda[1]}"
    message = f"torch {torch.version} is built for CUDA {torch.cuda}, {runs}"
    if major > driver_cuda[0]:
        step = (
            "Update the driver, or install a torch that is built for a CUDA version that the "
            "driver supports."
        )
        return problem("torch", message, step)
    if (major, minor) > driver_cuda:
        step = "torch runs, but kernels that are compiled at run time may fail: update the driver."
        return warning("torch", message, step)
    return ok("torch", message)


CHECKS: dict[str, DriverChecks] = {"NVIDIA": nvidia_checks, "AMD": amd_checks}
