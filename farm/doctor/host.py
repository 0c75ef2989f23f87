"""Checks of this host: its driver, torch and cards, and the folders that the farm writes to.

The checks do not import torch, so that they can tell a broken installation from a broken card.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pynvml

from farm import settings as farm_settings
from farm.devices import nvidia
from farm.devices.amd import UNTESTED
from farm.devices.device import Card
from farm.devices.host import (
    SHARED_MEMORY_STEP,
    Installed,
    discover,
    installed_torch,
    open_device,
    semaphore_problem,
)
from farm.devices.lock import holder_of, lock_problems, registered_processes
from farm.doctor import Check, ok, problem, warning
from farm.errors import FarmError
from farm.errors.safe_text import printable
from farm.jobs.item_driver import Spool
from farm.settings import Settings
from farm.settings.shared_files import UntrustedPath, open_folder
from farm.types.format import plural

DISK_PROBLEM_BYTES = 2**30
DISK_WARNING_BYTES = 10 * 2**30


def host_checks(current: Settings) -> Iterator[Check]:
    """Check the driver, torch, the cards and the folders of this host."""
    yield from _hardware_checks(current)
    yield from _folder_checks(current)


def _hardware_checks(current: Settings) -> Iterator[Check]:
    """Check the driver, whether torch supports it, and every card of this host."""
    torch = installed_torch()
    if torch is None:
        yield problem(
            "torch",
            "torch is not installed",
            "Install torch, or install farm again with its dependencies.",
        )
    cards = discover(current)
    yield from (
        _amd_driver(cards, torch.hip)
        if torch and torch.hip
        else _nvidia_driver(cards, torch, current)
    )
    for card in cards:
        name = "cpu here" if card.kind == "cpu" else f"card {card.index} here"
        if card.kind == "cpu" and not _worker_of(
            card, current
        ):  # a worker's measurement would cause the load
            yield _load()
        if not card.refusal:
            yield from _card_here(name, card, current)
        elif all(other.refusal for other in cards):
            step = "Correct the cause; until then, `--card cpu` measures on the CPU."
            yield problem(name, f"the farm cannot measure on {card}: {card.refusal}", step)
        else:
            step = "Correct the cause, or use the other cards of this host only."
            yield warning(name, f"the farm cannot measure on {card}: {card.refusal}", step)


def _amd_driver(cards: Sequence[Card], rocm: str) -> Iterator[Check]:
    yield ok("torch", f"built for ROCm {rocm}")
    if driver := next((card.driver for card in cards if card.kind == "cuda" and card.driver), ""):
        yield ok("driver", f"amdgpu {driver}")
        yield warning(
            "AMD",
            UNTESTED,
            "Compare readings with another tool before you use them (docs/devices.md).",
        )


def _nvidia_driver(
    cards: Sequence[Card], torch: Installed | None, current: Settings
) -> Iterator[Check]:
    driver, cuda, trouble = _driver()
    yield from _all_listed(cards, current)
    if driver:
        yield ok("driver", f"{driver}, supports CUDA up to {cuda[0]}.{cuda[1]}")
    elif has_nvidia_hardware() or any(card.kind == "cuda" for card in cards):
        yield problem(
            "driver",
            f"this host has an NVIDIA card, but its driver does not answer: {trouble}",
            "Install or reload the driver until `nvidia-smi` lists the card; give a container "
            "access to the card.",
        )
    else:
        yield ok("driver", "this host has no NVIDIA card; it measures on its CPU")
    if torch is not None:
        yield torch_against_driver(torch, cuda if driver else None)


def disturbances(cards: Sequence[Card], current: Settings) -> Iterator[Check]:
    """Report what would disturb readings on these cards: a busy CPU, or other processes on a
    GPU.
    """
    for card in cards:
        with contextlib.suppress(FarmError):
            if card.kind == "cpu" and (busy := _load()).level != "ok":
                yield busy
            elif card.kind == "cuda":
                with contextlib.closing(open_device(card)) as device:
                    yield from _foreign(
                        f"card {card.index}", card, device.compute_processes(), current
                    )


def _driver() -> tuple[str, tuple[int, int], str]:
    """Return the driver's version, the newest CUDA version that it supports, and its error ("" if
    it answers).
    """
    try:
        with nvidia.opened():
            version = pynvml.nvmlSystemGetDriverVersion()
            number = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return (
            version if isinstance(version, str) else version.decode(),
            (number // 1000, number % 1000 // 10),
            "",
        )
    except pynvml.NVMLError as error:
        return "", (0, 0), str(error)


def _all_listed(listed: Sequence[Card], current: Settings) -> Iterator[Check]:
    """Report GPUs that the driver counts but the farm did not list: no worker uses them."""
    counted = [] if current.simulated_cards else nvidia.nvidia_cards(current)
    if any(card.id == f"{nvidia.WITHOUT_UUID}{current.host}" for card in counted):
        return  # another check reports that the driver does not count GPUs
    if left_out := [card for card in counted if card.id not in {other.id for other in listed}]:
        named = ", ".join(f"{card.index} ({card.id})" for card in left_out[:8])
        yield warning(
            "GPUs",
            f"the farm sees {len(counted) - len(left_out)} of the {len(counted)} GPUs that the "
            "driver lists; "
            f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')} leaves out {named}",
            "Unset CUDA_VISIBLE_DEVICES to use all GPUs. Leave it if a scheduler gave you only "
            "some of them.",
        )
    elif counted:
        yield ok("GPUs", f"the farm sees all {len(counted)} GPUs that the driver lists")


def has_nvidia_hardware(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """True if an NVIDIA display or 3D controller is on the PCI bus. Does not ask the driver."""
    for device in devices.glob("*"):
        with contextlib.suppress(OSError):
            vendor, kind = (
                (device / "vendor").read_text().strip(),
                (device / "class").read_text().strip(),
            )
            if vendor == "0x10de" and kind.startswith("0x03"):
                return True
    return False


def torch_against_driver(torch: Installed, driver_cuda: tuple[int, int] | None) -> Check:
    """Check that torch can use the driver. A CUDA program runs on every driver with the same major
    CUDA version.
    """
    if driver_cuda is None:
        return ok(
            "torch",
            f"{torch.version}{f', built for CUDA {torch.cuda}' if torch.cuda else ', for CPUs'}",
        )
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


def _card_here(name: str, card: Card, current: Settings) -> Iterator[Check]:
    try:
        device = open_device(card)
    except FarmError as error:
        yield problem(name, error.message, error.next_step)
        return
    with contextlib.closing(device):
        if card.kind == "simulated" or "energy_counter_mj" in device.capabilities:
            yield ok(name, str(card))
        elif device.capabilities & {"power_instant_w", "power_average_w"}:
            message = f"{card} has no energy counter; energy is computed from sampled power"
            yield warning(name, message, "Readings have a flag for it.")
        else:
            rapl = "Let the farm's user read /sys/class/powercap (RAPL, the CPU's energy counter)."
            step = rapl if card.kind == "cpu" else "Read the output of `nvidia-smi -q -d POWER`."
            yield warning(
                name, f"{card} reports neither energy nor power: only time is measured", step
            )
        yield from _foreign(name, card, device.compute_processes(), current)


def _load() -> Check:
    """Check that the CPU is idle enough for a measurement."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    message = f"load average {load:.1f} in the last minute on {cores} {plural('core', cores)}"
    if load <= cores:
        return ok("load", message)
    busy = f"{message}: this host is busy, so readings on its CPU are unreliable"
    return warning("load", busy, "Measure when the host is idle.")


def _foreign(
    name: str, card: Card, processes: frozenset[int] | None, current: Settings
) -> Iterator[Check]:
    """Report processes that compute on the card, except the worker that holds the card's lock and
    its children.
    """
    import psutil

    def command(pid: int) -> str:
        with contextlib.suppress(psutil.Error):
            return psutil.Process(pid).name()
        return "of another container or user"

    own = (
        _worker_of(card, current) | registered_processes(current.lock_dir)
        if processes
        else frozenset()
    )
    foreign = sorted((processes or frozenset()) - own)
    unseen = [pid for pid in foreign if not Path(f"/proc/{pid}").exists()]
    if not foreign or (own and len(unseen) == len(foreign) == 1):
        return  # in a container the driver reports host ids: one unknown id is the worker's
    named = ", ".join(f"{pid} ({command(pid)})" for pid in foreign[:5])
    message = (
        f"other processes compute on {card}: {named}; readings taken meanwhile get the flag "
        "`shared`"
    )
    yield warning(name, message, "End these processes, or choose another card.")


def _worker_of(card: Card, current: Settings) -> frozenset[int]:
    """Return the ids of the process that holds the card's lock and of its children."""
    import psutil

    pid = holder_of(card.id, current.lock_dir)
    if pid is None:
        return frozenset()
    with contextlib.suppress(psutil.Error):
        return frozenset(
            {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
        )
    return frozenset()


def _folder_checks(current: Settings) -> Iterator[Check]:
    """Check write permission, free disk space, and that other users cannot read passwords and
    state.
    """
    step = "Set FARM_STATE_DIR to a folder that this user may write to."
    yield _writable("state folder", current.state_dir, step)
    yield from _private(current)
    yield _locks(current.lock_dir)
    for message, step in lock_problems(current.lock_dir):
        yield warning("locks", printable(message), printable(step))
    yield from _temporary_folder()
    if reason := semaphore_problem():
        yield problem("shared memory", f"workers cannot start: {reason}", SHARED_MEMORY_STEP)
    yield from _disk(current)
    spool = Spool(current.state_dir / "spool")
    if aside := spool.put_aside():
        named = printable(", ".join(path.name for path in aside[:5]))
        yield problem(
            "spool",
            f"{len(aside)} {plural('reading', len(aside))} in {spool.folder} could not be stored: "
            f"{named}",
            "The log of the card's worker has the reason. Delete the files: their items are "
            "measured again.",
        )
    if waiting := len(spool):
        message = (
            f"{waiting} {plural('reading', waiting)} in {spool.folder}, not yet in the database"
        )
        yield warning(
            "spool",
            message,
            "Start `farm worker`: the card's worker stores them when the database answers.",
        )
    path = os.environ.get("FARM_CONFIG", "")
    with contextlib.suppress(OSError):
        mode = Path(path).stat().st_mode if path else 0
        if mode & (stat.S_IROTH | stat.S_IWGRP | stat.S_IWOTH):
            message = (
                f"{path} holds passwords, and other users can read or change it "
                f"({stat.filemode(mode)})"
            )
            yield warning(
                "settings file",
                message,
                f"Run `chmod 0640 {path}`; its group must be the farm's group.",
            )
        elif path:
            yield ok("settings file", path)


def _private(current: Settings) -> Iterator[Check]:
    """Check that other users of this host cannot read the state folder and the database."""
    for path in (current.state_dir, *_database_files(current)):
        with contextlib.suppress(OSError):
            mode = path.stat().st_mode
            reached = all(folder.stat().st_mode & stat.S_IXOTH for folder in path.resolve().parents)
            if reached and mode & (stat.S_IRWXO | stat.S_IWGRP):
                message = f"other users of this host can access {path} ({stat.filemode(mode)})"
                yield warning(
                    "privacy", message, f"Run `chmod go-rwx {path}`, unless you trust these users."
                )


def _database_files(current: Settings) -> list[Path]:
    """Return the file of an SQLite database and the files of its write-ahead log."""
    if not current.database.startswith("sqlite:///"):
        return []
    file = current.database.removeprefix("sqlite:///").partition("?")[0]
    return [Path(file + suffix) for suffix in ("", "-wal", "-shm")]


def _locks(folder: Path) -> Check:
    name, service = "lock folder", farm_settings.SERVICE_LOCK_DIR
    check = _writable(
        name, folder, "Set FARM_LOCK_DIR to a folder that all workers of this host may write to."
    )
    if check.level != "ok":
        return check
    if folder.is_dir() and stat.S_IMODE(folder.stat().st_mode) & 0o1777 != 0o1777:
        message = (
            f"not all users of this host may write to {folder}, so a worker of another user "
            "cannot lock a card"
        )
        return warning(name, message, f"Run `chmod 1777 {folder}`.")
    if service.is_dir() and folder.resolve() != service.resolve():
        message = (
            f"this farm uses {folder}, but other workers use {service}: both could measure on one "
            "card at a time"
        )
        return warning(name, message, "Unset FARM_LOCK_DIR.")
    return check


def _temporary_folder() -> Iterator[Check]:
    """Check that other users cannot replace the folders in which the farm's own broker has its
    socket.
    """
    folder = Path(tempfile.gettempdir())
    with contextlib.suppress(OSError):
        mode = folder.stat().st_mode
        if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
            message = (
                f"users of this host can rename each other's folders in {folder} "
                f"({stat.filemode(mode)})"
            )
            yield warning(
                "temporary folder",
                message,
                f"Run `chmod +t {folder}`, or set TMPDIR to another folder.",
            )


def _writable(name: str, folder: Path, next_step: str) -> Check:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        try:
            open_folder(folder).close()
        except UntrustedPath as error:
            message = printable(f"{error.filename} {error.strerror}, so {folder} is not used")
            return problem(name, message, f"Delete this link, or: {next_step}")
    there = _existing(folder)
    if not there.is_dir():
        return problem(name, f"the folder {folder} cannot be created: {there} is a file", next_step)
    try:
        # Permission bits are not enough: a file system can be full, read-only, virtual or mapped to
        # another user.
        with tempfile.TemporaryFile(dir=there):
            return ok(
                name, str(folder) if there == folder else f"{folder} (created when it is needed)"
            )
    except OSError as error:
        cannot = "" if there == folder else f"{folder} cannot be created: "
        return problem(
            name, f"{cannot}this user cannot write to {there}: {error.strerror}", next_step
        )


def _disk(current: Settings) -> Iterator[Check]:
    folders = {current.state_dir, *(file.parent for file in _database_files(current))}
    # If a path is not a folder, the check of the folder or the database reports it.
    found = [
        (folder, there)
        for folder in sorted(folders, reverse=True)
        if (there := _existing(folder)).is_dir()
    ]
    devices = {there.stat().st_dev: (folder, there) for folder, there in found}
    for folder, there in reversed(devices.values()):
        free_bytes = shutil.disk_usage(there).free
        message = f"{free_bytes / 2**30:.1f} GiB free on the disk of {folder}"
        if free_bytes < DISK_WARNING_BYTES:
            result = problem if free_bytes < DISK_PROBLEM_BYTES else warning
            yield result(
                "disk",
                message,
                "Free disk space, or set FARM_STATE_DIR to a folder on another disk.",
            )
        else:
            yield ok("disk", message)


def _existing(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder
