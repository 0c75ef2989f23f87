"""Checks of this host: its driver, torch and cards, and the folders that the farm writes to.

torch is not imported, to distinguish a broken installation from a broken card.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from farm import settings as farm_settings
from farm.devices.device import Card
from farm.devices.host import Installed, discover, installed_torch, open_device
from farm.doctor import Check, Level, ok
from farm.errors import FarmError
from farm.jobs.spool import Spool
from farm.settings import Settings

DISK_PROBLEM_BYTES = 2**30
DISK_WARNING_BYTES = 10 * 2**30


def host_checks(current: Settings) -> Iterator[Check]:
    """The driver, torch, the cards and the folders of this host."""
    yield from _hardware_checks(current)
    yield from _folder_checks(current)


# ---------------------------------------------------------------------------------------- driver, torch, cards


def _hardware_checks(current: Settings) -> Iterator[Check]:
    """The driver, whether torch fits it, and every card of this host."""
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
        if card.kind == "cpu" and not _family(_lock_holder(card, current)):  # otherwise a measurement causes the load
            yield _load()
        if card.refusal:
            yield _left_out(card, only_refused=all(other.refusal for other in cards))
        else:
            yield from _card_here(card, current)


def disturbances(cards: Sequence[Card], current: Settings) -> Iterator[Check]:
    """Conditions that would spoil readings on these cards: a busy CPU, foreign processes on a GPU."""
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
    """(driver version, newest CUDA that it runs, why it does not answer)."""
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
    """Compare the GPUs that the driver counts with the listed ones: no worker uses a GPU that is not listed."""
    from farm.devices import nvidia

    counted = [] if current.simulated_cards else nvidia.nvidia_cards(current)
    if any(card.id == f"{nvidia.WITHOUT_UUID}{current.host}" for card in counted):
        return  # the driver does not count them, which is another check
    left_out = [card for card in counted if card.id not in {other.id for other in listed}]
    if left_out:
        message = f"{len(counted) - len(left_out)} of the {len(counted)} that the driver counts are listed here"
        yield Check(
            "GPUs",
            "warning",
            f"{message}; CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')} leaves out "
            + ", ".join(f"{card.index} ({card.id})" for card in left_out[:8]),
            "Unset it if a worker should serve them all. A scheduler that lends single cards sets it itself.",
        )
    elif counted:
        yield ok("GPUs", f"all {len(counted)} that the driver counts are listed")


def has_nvidia_hardware(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """True if an NVIDIA display or 3D controller is on the bus, whatever the driver says."""
    for device in devices.glob("*"):
        with contextlib.suppress(OSError):
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
            if vendor == "0x10de" and kind.startswith("0x03"):
                return True
    return False


def torch_against_driver(torch: Installed, driver_cuda: tuple[int, int] | None) -> Check:
    """Check that torch can use the driver. A CUDA program runs on every driver of its own major version."""
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
    message = (
        f"torch {torch.version} is built for CUDA {torch.cuda}, the driver runs up to {driver_cuda[0]}.{driver_cuda[1]}"
    )
    if major > driver_cuda[0]:
        return Check("torch", "problem", message, "Update the driver, or install a torch built for its CUDA.")
    if (major, minor) > driver_cuda:
        return Check(
            "torch",
            "warning",
            message,
            "It runs, but kernels compiled at run time may not; update the driver when you can.",
        )
    return ok("torch", message)


def _left_out(card: Card, *, only_refused: bool) -> Check:
    message = f"{card} is left out: {card.refusal}"
    if only_refused:
        return Check(_name(card), "problem", message, "Fix that; meanwhile `--card cpu` measures on the CPU.")
    return Check(_name(card), "warning", message, "Fix that, or leave it as it is: the other cards work.")


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
        f"{card} reports neither energy nor power: only time is measured",
        "On a CPU, let the farm's user read /sys/class/powercap (RAPL)."
        if card.kind == "cpu"
        else "Look at `nvidia-smi -q -d POWER`.",
    )


def _load() -> Check:
    """Check that the CPU is idle enough for a measurement."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    message = f"{load:.1f} in the last minute on {cores} {'core' if cores == 1 else 'cores'}"
    if load > cores:
        return Check(
            "load",
            "warning",
            f"{message}: this host is busy, so readings on its CPU are unreliable",
            "Measure when it is idle.",
        )
    return ok("load", message)


def _foreign(name: str, card: Card, processes: frozenset[int] | None, current: Settings) -> Iterator[Check]:
    """Processes that compute on the card and do not belong to the worker that holds its lock."""
    if not processes:
        return
    own = _family(_lock_holder(card, current))
    foreign = sorted(processes - own)
    unseen = [pid for pid in foreign if not Path(f"/proc/{pid}").exists()]
    if not foreign or (own and len(unseen) == len(foreign) == 1):
        return  # in a container the driver reports ids of the host: a single unseen one is the worker's
    message = ", ".join(f"{pid} ({_command(pid)})" for pid in foreign[:5])
    yield Check(
        name,
        "warning",
        f"other processes compute on it: {message}; readings beside them are flagged as shared",
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


# ------------------------------------------------------------------------------------------------- folders


def _folder_checks(current: Settings) -> Iterator[Check]:
    """Write permission, free space, and who can read the passwords."""
    yield _state(current.state_dir)
    yield _locks(current.lock_dir)
    yield from _disk(current)
    if waiting := len(Spool(current.state_dir / "spool")):
        yield Check(
            "spool",
            "warning",
            f"{waiting} readings wait on this disk for the database",
            "They are written when the card's worker and the database are both up: start `farm worker`.",
        )
    if path := os.environ.get("FARM_CONFIG"):
        with contextlib.suppress(OSError):
            yield _secrets_file(Path(path))


def _state(folder: Path) -> Check:
    return _writable("state folder", folder, "Set FARM_STATE_DIR to a folder that this user may write to.")


def _locks(folder: Path) -> Check:
    check = _writable(
        "lock folder", folder, "Set FARM_LOCK_DIR to a folder that all workers of this host may write to."
    )
    if check.level == "ok" and folder.is_dir() and stat.S_IMODE(folder.stat().st_mode) & 0o1777 != 0o1777:
        return Check(
            "lock folder",
            "warning",
            f"{folder} is not open to all users of this host, so a worker of another user cannot take the lock",
            f"chmod 1777 {folder}",
        )
    service = farm_settings.SERVICE_LOCK_DIR
    if check.level == "ok" and service.is_dir() and folder.resolve() != service.resolve():
        return Check(
            "lock folder",
            "warning",
            f"it is {folder}, but this host has {service} for all that measure: workers there are not noticed",
            "Unset FARM_LOCK_DIR.",
        )
    return check


def _writable(name: str, folder: Path, next_step: str) -> Check:
    there = _existing(folder)
    if not there.is_dir():
        return Check(name, "problem", f"{folder} cannot be a folder: {there} is a file", next_step)
    try:
        # The mode is not enough: a file system can be full, read-only, the kernel's or mapped to another user.
        with tempfile.TemporaryFile(dir=there):
            return ok(name, str(folder) if there == folder else f"{folder} (made when it is needed)")
    except OSError as error:
        cannot = "" if there == folder else f"{folder} cannot be made: "
        return Check(name, "problem", f"{cannot}{there} cannot be written to: {error.strerror}", next_step)


def _disk(current: Settings) -> Iterator[Check]:
    folders = {current.state_dir}
    if current.database.startswith("sqlite:///"):
        folders.add(Path(current.database.removeprefix("sqlite:///").partition("?")[0]).parent)
    seen: set[int] = set()
    for folder in sorted(folders):
        there = _existing(folder)
        if not there.is_dir():
            continue  # the check of the folder or the database reports it
        if (device := there.stat().st_dev) in seen:
            continue
        seen.add(device)
        free_bytes = shutil.disk_usage(there).free
        message = f"{free_bytes / 2**30:.1f} GiB free for {folder}"
        if free_bytes < DISK_WARNING_BYTES:
            level: Level = "problem" if free_bytes < DISK_PROBLEM_BYTES else "warning"
            yield Check("disk", level, message, "Make room, or move it with FARM_STATE_DIR.")
        else:
            yield ok("disk", message)


def _secrets_file(path: Path) -> Check:
    if path.stat().st_mode & (stat.S_IROTH | stat.S_IWGRP | stat.S_IWOTH):
        return Check(
            "settings file",
            "warning",
            f"{path} holds passwords and is open to others ({stat.filemode(path.stat().st_mode)})",
            f"chmod 0640 {path}, with the farm's group.",
        )
    return ok("settings file", str(path))


def _existing(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder
