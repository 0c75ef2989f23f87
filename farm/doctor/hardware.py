"""Examining what this host measures with: its driver, torch, and each of its cards.

torch is not imported, so that a broken installation can be told from a broken card.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from farm.devices.device import Card
from farm.devices.host import Installed, discover, installed_torch, open_device
from farm.doctor.check import Check, ok
from farm.errors import FarmError
from farm.settings import Settings


def hardware_checks(current: Settings) -> Iterator[Check]:
    """The driver, torch against it, and every card of this host."""
    torch = installed_torch()
    if torch is None:
        yield Check("torch", "problem", "torch is not installed", "Install the project with its dependencies.")
    driver, cuda, trouble = _driver()
    cards = discover(current)
    yield from _all_listed(cards, current)
    gpus = has_nvidia_hardware() or any(card.kind == "cuda" for card in cards)
    if driver:
        yield ok("driver", f"{driver}, for CUDA up to {cuda[0]}.{cuda[1]}")
    elif gpus:
        yield Check(
            "driver",
            "problem",
            f"this host has an NVIDIA card, but its driver does not answer: {trouble}",
            "Install or reload the driver until `nvidia-smi` lists the card; in a container, give it the card.",
        )
    else:
        yield ok("driver", "no NVIDIA card here; this host measures on its CPU")
    if torch is not None:
        yield torch_against_driver(torch, cuda if driver else None)
    for card in cards:
        if card.kind == "cpu" and not _family(_lock_holder(card, current)):  # else the load is a measurement's own
            yield _load()
        if card.refusal:
            yield _left_out(card, only_refused=all(other.refusal for other in cards))
        else:
            yield from _card_here(card, current)


def disturbances(cards: Sequence[Card], current: Settings) -> Iterator[Check]:
    """What would make readings on these cards worth little, before any is taken: a busy CPU, foreign processes on a GPU."""
    for card in cards:
        with contextlib.suppress(FarmError):
            if card.kind == "cpu" and (busy := _load()).level != "ok":
                yield busy
            elif card.kind == "cuda":
                device = open_device(card)
                try:
                    yield from _foreign(f"card {card.index}", card, device.compute_processes(), current)
                finally:
                    device.close()


def _driver() -> tuple[str, tuple[int, int], str]:
    """(driver version, the newest CUDA it runs, why it does not answer)."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return "", (0, 0), str(error)
    try:
        version = pynvml.nvmlSystemGetDriverVersion()
        number = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return version if isinstance(version, str) else version.decode(), (number // 1000, number % 1000 // 10), ""
    except pynvml.NVMLError as error:
        return "", (0, 0), str(error)
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _all_listed(listed: Sequence[Card], current: Settings) -> Iterator[Check]:
    """The GPUs that the driver counts against those that are listed: what is left out works for nobody."""
    from farm.devices import nvidia

    counted = [] if current.simulated_cards else nvidia.nvidia_cards(current)
    if any(card.id == f"{nvidia.WITHOUT_UUID}{current.host}" for card in counted):
        return  # the driver does not even count them, which is a finding of its own
    left_out = [card for card in counted if card.id not in {other.id for other in listed}]
    if left_out:
        told = f"{len(counted) - len(left_out)} of the {len(counted)} that the driver counts are listed here"
        yield Check(
            "GPUs",
            "warning",
            f"{told}; CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')} leaves out "
            + ", ".join(f"{card.index} ({card.id})" for card in left_out[:8]),
            "Unset it where a worker is to serve them all; a scheduler that lends single cards sets it by itself.",
        )
    elif counted:
        yield ok("GPUs", f"all {len(counted)} that the driver counts are listed")


def has_nvidia_hardware(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Is there an NVIDIA display or 3D controller on the bus, whatever the driver says?"""
    for device in devices.glob("*"):
        with contextlib.suppress(OSError):
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
            if vendor == "0x10de" and kind.startswith("0x03"):
                return True
    return False


def torch_against_driver(torch: Installed, driver_cuda: tuple[int, int] | None) -> Check:
    """Can this torch use that driver? CUDA promises that a program runs on any driver of its own major version."""
    if driver_cuda is None:
        return ok("torch", f"{torch.version}{f', built for CUDA {torch.cuda}' if torch.cuda else ', for CPUs'}")
    if not torch.cuda:
        return Check(
            "torch",
            "problem",
            f"torch {torch.version} is built for CPUs, but this host has an NVIDIA driver",
            "Install the torch that is built for CUDA (the default of the package index on Linux).",
        )
    major, minor = (int(part) for part in torch.cuda.split(".")[:2])
    told = (
        f"torch {torch.version} is built for CUDA {torch.cuda}, the driver runs up to {driver_cuda[0]}.{driver_cuda[1]}"
    )
    if major > driver_cuda[0]:
        return Check("torch", "problem", told, "Update the driver, or install a torch built for its CUDA.")
    if (major, minor) > driver_cuda:
        return Check(
            "torch",
            "warning",
            told,
            "It runs, but kernels compiled at run time may not; update the driver when you can.",
        )
    return ok("torch", told)


def _left_out(card: Card, *, only_refused: bool) -> Check:
    told = f"{card} is left out: {card.refusal}"
    if only_refused:
        return Check(_name(card), "problem", told, "Mend that; `--card cpu` measures on the CPU meanwhile.")
    return Check(_name(card), "warning", told, "Mend that, or leave it as it is: the other cards work.")


def _name(card: Card) -> str:
    return f"card {card.index} here" if card.kind != "cpu" else "cpu here"


def _card_here(card: Card, current: Settings) -> Iterator[Check]:
    name = _name(card)
    try:
        device = open_device(card)
    except FarmError as error:
        yield Check(name, "problem", error.message, error.next_step)
        return
    try:
        yield _energy_source(name, card, device.capabilities)
        yield from _foreign(name, card, device.compute_processes(), current)
    finally:
        device.close()


def _energy_source(name: str, card: Card, capabilities: frozenset[str]) -> Check:
    if card.kind == "simulated" or "energy_counter_mj" in capabilities:
        return ok(name, str(card))
    if capabilities & {"power_instant_w", "power_average_w"}:
        return Check(name, "warning", f"{card} has no energy counter; its power is integrated", "Readings say so.")
    return Check(
        name,
        "warning",
        f"{card} tells neither energy nor power: only time is measured",
        "On a CPU, let the farm's user read /sys/class/powercap (RAPL)."
        if card.kind == "cpu"
        else "Look at `nvidia-smi -q -d POWER`.",
    )


def _load() -> Check:
    """Whether the CPU has time for a measurement."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    told = f"{load:.1f} in the last minute on {cores} {'core' if cores == 1 else 'cores'}"
    if load > cores:
        return Check(
            "load",
            "warning",
            f"{told}: this host is busy, and readings on its CPU are worth little",
            "Measure when it is idle.",
        )
    return ok("load", told)


def _foreign(name: str, card: Card, processes: frozenset[int] | None, current: Settings) -> Iterator[Check]:
    """What computes on the card and is not of the worker that holds its lock."""
    if not processes:
        return
    own = _family(_lock_holder(card, current))
    foreign = sorted(processes - own)
    unseen = [pid for pid in foreign if not Path(f"/proc/{pid}").exists()]
    if not foreign or (own and len(unseen) == len(foreign) == 1):
        return  # in a container the driver tells the host's ids: one that is not seen here is the worker's own
    told = ", ".join(f"{pid} ({_command(pid)})" for pid in foreign[:5])
    yield Check(
        name,
        "warning",
        f"other processes compute on it: {told}; readings beside them are flagged as shared",
        "End them, or choose another card.",
    )


def _lock_holder(card: Card, current: Settings) -> int | None:
    from farm.devices.lock import CardLock

    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads(CardLock(card.id, current.lock_dir).path.read_text())["pid"])
    return None


def _family(pid: int | None) -> frozenset[int]:
    import psutil

    if pid is None:
        return frozenset()
    with contextlib.suppress(psutil.Error):
        return frozenset({pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))})
    return frozenset()


def _command(pid: int) -> str:
    import psutil

    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).name()
    return "not visible here"
