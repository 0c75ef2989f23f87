"""Checks of this host: its driver, torch and cards, and the folders that the farm writes to.

The checks do not import torch, so that they can tell a broken installation from a broken card.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from farm import settings as farm_settings
from farm.devices.device import Card
from farm.devices.host import (
    SHARED_MEMORY_STEP,
    discover,
    open_device,
    semaphore_problem,
    vendor_of,
)
from farm.devices.lock import holder_of, lock_problems, registered_processes
from farm.devices.software import installed_torch
from farm.errors import CardBusy, FarmError
from farm.errors.safe_text import printable
from farm.jobs.spool import Spool
from farm.settings import Settings, misspelt_variables
from farm.settings.shared_files import UntrustedPath, open_folder
from farm.types.format import plural
from tasks.doctor import Check, drivers, ok, problem, warning

#: Processes that have just ended may still be on a card for so long. Unit: s.
ALONE_WITHIN_S = 5.0
DISK_PROBLEM_BYTES = 2**30
DISK_WARNING_BYTES = 10 * 2**30


def host_checks(current: Settings) -> Iterator[Check]:
    """Check the settings, the driver, torch, the cards and the folders of this host."""
    for name, setting in misspelt_variables().items():
        yield warning("settings", f"{name} is not a setting", f"Rename it to {setting}.")
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
    driver_checks = drivers.CHECKS.get(vendor_of("cuda").name)
    if driver_checks is not None:
        yield from driver_checks(cards, torch, current)
    for card in cards:
        name = "cpu here" if card.is_cpu else f"card {card.index} here"
        # A worker's measurement would cause the load.
        if card.is_cpu and not _worker_of(card, current):
            yield _load()
        if not card.refusal:
            yield from _card_here(name, card, current)
        elif all(other.refusal for other in cards):
            step = "Correct the cause; until then, `--card cpu` measures on the CPU."
            yield problem(name, f"the farm cannot measure on {card}: {card.refusal}", step)
        else:
            step = "Correct the cause, or use the other cards of this host only."
            yield warning(name, f"the farm cannot measure on {card}: {card.refusal}", step)


def disturbances(cards: Sequence[Card], current: Settings) -> Iterator[Check]:
    """Report what would disturb readings on these cards: a busy CPU, or other processes on a
    GPU.
    """
    for card in cards:
        with contextlib.suppress(FarmError):
            if card.is_cpu and (busy := _load()).level != "ok":
                yield busy
            elif card.is_gpu:
                with contextlib.closing(open_device(card)) as device:
                    yield from _foreign(
                        f"card {card.index}", card, device.compute_processes(), current
                    )


def check_alone(cards: Sequence[Card], current: Settings) -> None:
    """Raise `CardBusy` if other processes still compute on one of these GPUs after
    `ALONE_WITHIN_S`: each reading would have the flag `shared`, and the job no verdict. The setting
    `allow_shared` omits the check.
    """
    until_s = time.monotonic() + ALONE_WITHIN_S
    while not current.allow_shared:
        on_gpus = [card for card in cards if card.is_gpu]
        busy = next(disturbances(on_gpus, current), None)
        if busy is None:
            return
        if time.monotonic() > until_s:
            step = (
                "End these processes, or choose another card with --card. With FARM_ALLOW_SHARED=1 "
                "the same command measures beside them; a job gets no verdict then."
            )
            raise CardBusy(f"{busy.message}.", step)
        time.sleep(0.2)


def _card_here(name: str, card: Card, current: Settings) -> Iterator[Check]:
    try:
        device = open_device(card)
    except FarmError as error:
        yield problem(name, error.message, error.next_step)
        return
    with contextlib.closing(device):
        if card.is_simulated or "energy_counter_mj" in device.capabilities:
            yield ok(name, str(card))
        elif device.capabilities & {"power_instant_w", "power_average_w"}:
            message = f"{card} has no energy counter; energy is computed from sampled power"
            yield warning(name, message, "Readings have a flag for it.")
        else:
            rapl = "Let the farm's user read /sys/class/powercap (RAPL, the CPU's energy counter)."
            step = rapl if card.is_cpu else "Read the output of `nvidia-smi -q -d POWER`."
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

    if not processes:
        return

    def command(pid: int) -> str:
        if pid == os.getpid():
            return "this command: the model's code, or a package that it imports, uses the card"
        with contextlib.suppress(psutil.Error):
            return psutil.Process(pid).name()
        return "of another container or user"

    of_farm = _worker_of(card, current) | registered_processes(current.lock_dir)
    foreign = sorted(processes - of_farm)
    unseen = [pid for pid in foreign if not Path(f"/proc/{pid}").exists()]
    if not foreign or (of_farm and len(unseen) == len(foreign) == 1):
        return  # in a container the driver reports host ids: one unknown id is the worker's
    names = ", ".join(f"{pid} ({command(pid)})" for pid in foreign[:5])
    yield warning(
        name,
        f"other processes compute on {card}: {names}; readings taken meanwhile get the flag "
        "`shared`",
        "End these processes, or choose another card.",
    )


def _worker_of(card: Card, current: Settings) -> frozenset[int]:
    """Return the ids of the process that holds the card's lock and of its children."""
    import psutil

    pid = holder_of(card.id, current.lock_dir)
    if pid is None:
        return frozenset()
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(pid).children(recursive=True)
        return frozenset([pid, *(child.pid for child in children)])
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
    reason = semaphore_problem()
    if reason:
        yield problem("shared memory", f"workers cannot start: {reason}", SHARED_MEMORY_STEP)
    yield from _disk(current)
    yield from _spool(Spool(current.state_dir / "spool"))
    yield from _settings_file()


def _spool(spool: Spool) -> Iterator[Check]:
    """Report readings that are not in the database."""
    aside = spool.put_aside()
    if aside:
        names = printable(", ".join(path.name for path in aside[:5]))
        yield problem(
            "spool",
            f"{len(aside)} {plural('reading', len(aside))} in {spool.folder} could not be stored: "
            f"{names}",
            "The log of the card's worker has the reason. Delete the files: their items are "
            "measured again.",
        )
    waiting = len(spool)
    if waiting:
        yield warning(
            "spool",
            f"{waiting} {plural('reading', waiting)} in {spool.folder}, not yet in the database",
            "Start `farm worker`: the card's worker stores them when the database answers.",
        )


def _settings_file() -> Iterator[Check]:
    """Check that other users cannot read the settings file, or change it."""
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
    existing = _existing(folder)
    if not existing.is_dir():
        message = f"the folder {folder} cannot be created: {existing} is a file"
        return problem(name, message, next_step)
    try:
        # Permission bits are not enough: a file system can be full, read-only, virtual or mapped to
        # another user.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        cannot = "" if existing == folder else f"{folder} cannot be created: "
        message = f"{cannot}this user cannot write to {existing}: {error.strerror}"
        return problem(name, message, next_step)
    return ok(name, str(folder) if existing == folder else f"{folder} (created when it is needed)")


def _disk(current: Settings) -> Iterator[Check]:
    folders = {current.state_dir, *(file.parent for file in _database_files(current))}
    #: Device -> a folder of the farm on it, and the folder that exists.
    devices: dict[int, tuple[Path, Path]] = {}
    for folder in sorted(folders, reverse=True):
        existing = _existing(folder)
        if existing.is_dir():  # otherwise the check of the folder or the database reports it
            devices[existing.stat().st_dev] = folder, existing
    for folder, existing in reversed(devices.values()):
        free_bytes = shutil.disk_usage(existing).free
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
