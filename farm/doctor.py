"""What an operator would look at first when a farm misbehaves, as data: each check says ok, or what to do.

Nothing here changes anything, and nothing raises for what it finds: a part that does not answer is a finding. torch is
not imported, only its version file read, so that a broken installation can be told from a broken card.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from farm.devices.device import Card, discover, open_device
from farm.errors import DatabaseUnreachable, FarmError, SchemaMismatch
from farm.settings import Settings
from farm.spool import Spool

Level = Literal["ok", "warning", "problem"]

DISK_PROBLEM_BYTES = 2**30
DISK_WARNING_BYTES = 10 * 2**30
#: Leases live on the database's clock and bear any skew; logs, certificates and graphs do not.
SKEW_WARNING_S = 2.0
SKEW_PROBLEM_S = 300.0


@dataclass(frozen=True)
class Check:
    """One finding. A warning may stay as it is; a problem keeps the farm from working or its readings from counting."""

    name: str
    level: Level
    message: str
    next_step: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def ok(name: str, message: str) -> Check:
    return Check(name, "ok", message)


def examine(current: Settings) -> Iterator[Check]:
    """Every check of this host and of the farm's database; the broker is asked by `tasks.diagnosis`."""
    yield from database_checks(current)
    yield from driver_checks(current)
    yield from folder_checks(current)


# ------------------------------------------------------------------------------------------ the database


def database_checks(current: Settings) -> Iterator[Check]:
    """Does it answer, has it this program's schema, does its clock agree, and what do its cards say?"""
    from sqlmodel import select

    from farm.store.database import Database, database_now

    try:
        database = Database(current.database)
    except FarmError as error:
        yield Check("database", "problem", error.message, error.next_step)
        return
    sqlite = database.engine.dialect.name == "sqlite"
    if sqlite and database.url.database and not Path(database.url.database).exists():
        if current.broker_url or current.database_url:
            yield Check("database", "problem", f"{database} is not there.", "Create it with `farm db upgrade`.")
        else:
            yield ok("database", f"{database} is not there yet; `farm run` makes it")
        return
    try:
        database.check_schema()
        with database.read() as session:
            begun_s, clock_s, ended_s = time.time(), session.exec(select(database_now())).one(), time.time()
            yield _where_the_database_is(current, str(database), sqlite, database.url)
            yield ok("schema", f"{database.schema_version()}, as this program needs it")
            yield _clock(0.0 if sqlite else (begun_s + ended_s) / 2 - clock_s, (ended_s - begun_s) / 2)
            yield from card_checks(session, current)
    except (DatabaseUnreachable, SchemaMismatch) as error:
        name = "schema" if isinstance(error, SchemaMismatch) else "database"
        yield Check(name, "problem", error.message, error.next_step)
    finally:
        database.close()


def _where_the_database_is(current: Settings, shown: str, sqlite: bool, url: Any) -> Check:
    if sqlite and current.broker_url and not _is_local(current.broker_url):
        return Check(
            "database",
            "warning",
            f"{shown} is a file of this host, but the broker is another host's.",
            "Farms of several hosts share one PostgreSQL: set FARM_DATABASE_URL.",
        )
    if not sqlite and not _is_local_host(url.host or "") and url.query.get("sslmode") != "verify-full":
        return Check(
            "database",
            "warning",
            f"{shown} is asked without a checked certificate.",
            "Add sslmode=verify-full and sslrootcert to FARM_DATABASE_URL (docs/operate.md).",
        )
    return ok("database", shown)


def _clock(ahead_s: float, uncertain_s: float) -> Check:
    told = f"this host is {abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} the database"
    beyond = abs(ahead_s) - uncertain_s
    if beyond > SKEW_WARNING_S:
        level: Level = "problem" if beyond > SKEW_PROBLEM_S else "warning"
        return Check("clock", level, told, "Start a time service (chrony, systemd-timesyncd) on both.")
    return ok("clock", f"within {max(abs(ahead_s), uncertain_s, 0.001):.3f} s of the database's")


def card_checks(session: Any, current: Settings) -> Iterator[Check]:
    """The cards as the database knows them: which serve, which do not, and whether their software agrees."""
    from farm import cards

    views = cards.views(session, current.heartbeat_s)
    serving = [view for view in views if view.state in ("idle", "busy", "starting")]
    for view in views:
        name = f"card {view.card.host}:{view.card.index}"
        if view.state == "quarantined":
            yield Check(
                name,
                "problem",
                f"{view.card.id} is quarantined: {view.card.state_reason or 'no reason is given'}",
                f"Mend it, then `farm cards release {view.card.id}` (docs/operate.md).",
            )
        elif view.state == "lost":
            yield Check(
                name,
                "warning",
                f"{view.card.id} was last seen {view.seen_ago_s:.0f} s ago; {view.waiting} items wait for it",
                f"Look at the worker on {view.card.host} (`journalctl -u farm-worker`).",
            )
        elif view.state == "draining":
            yield Check(name, "warning", f"{view.card.id} drains", f"`farm cards resume {view.card.id}` ends that.")
    if serving:
        hosts = len({view.card.host for view in serving})
        yield ok("cards", f"{len(serving)} serve, on {hosts} {'host' if hosts == 1 else 'hosts'}")
    elif current.broker_url:
        yield Check("cards", "warning", "no card serves this farm", "Start `farm worker` on a host with cards.")
    yield from _software_checks(session, [view.card for view in serving])


def _software_checks(session: Any, serving: Sequence[Any]) -> Iterator[Check]:
    from farm.store import tables

    by_model: dict[str, dict[str, list[Any]]] = {}
    for card in serving:
        if card.software_id:
            by_model.setdefault(card.model, {}).setdefault(card.software_id, []).append(card)
    for model, groups in by_model.items():
        if len(groups) < 2:
            continue
        rows = {software_id: session.get(tables.Software, software_id) for software_id in groups}
        fields = ("torch", "torchvision", "cuda", "cudnn", "driver", "python", "platform")
        differing = [field for field in fields if len({getattr(row, field) for row in rows.values()}) > 1]
        told = "; ".join(
            f"{', '.join(sorted({card.host for card in cards}))}: "
            + " ".join(f"{field} {getattr(rows[software_id], field)}" for field in differing)
            for software_id, cards in groups.items()
        )
        yield Check(
            "versions",
            "warning",
            f"the cards of model {model} run different software ({told})",
            "Readings of different software are never mixed, so each measures all anew: install the same on all hosts.",
        )
    if by_model and all(len(groups) == 1 for groups in by_model.values()):
        yield ok("versions", "the same on all cards of a model")


# ------------------------------------------------------------------------------------------ driver, torch, cards


@dataclass(frozen=True)
class Installed:
    """What a package's version file says. ``cuda`` is None in a build for CPUs."""

    version: str
    cuda: str | None


def installed_torch() -> Installed | None:
    """The torch that would be imported, without importing it; None where there is none."""
    found = importlib.util.find_spec("torch")
    folders = (found.submodule_search_locations or []) if found else []
    for folder in folders:
        with contextlib.suppress(OSError, SyntaxError):
            return _read_version(Path(folder, "version.py").read_text())
    return None


def _read_version(text: str) -> Installed:
    given: dict[str, Any] = {}
    for node in ast.parse(text).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant):
            given.update({target.id: value.value for target in targets if isinstance(target, ast.Name)})
    return Installed(str(given.get("__version__", "")), given.get("cuda"))


def driver_checks(current: Settings) -> Iterator[Check]:
    """The driver, torch against it, and every card of this host."""
    torch = installed_torch()
    if torch is None:
        yield Check("torch", "problem", "torch is not installed", "Install the project with its dependencies.")
    driver, cuda, trouble = _driver()
    gpus = has_nvidia_hardware()
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
    found = discover(current)
    for card in found:
        yield from _card_here(card, current)


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


def _card_here(card: Card, current: Settings) -> Iterator[Check]:
    name = f"card {card.index} here" if card.kind != "cpu" else "cpu here"
    if card.refusal:
        yield Check(name, "warning", f"{card} is left out: {card.refusal}", "Turn that off, or leave it as it is.")
        return
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


# ------------------------------------------------------------------------------------------ folders and files


def folder_checks(current: Settings) -> Iterator[Check]:
    """May this user write where the farm writes, is there room, and who may read its passwords?"""
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
    return _writable("state folder", folder, "Give FARM_STATE_DIR a folder that this user may write to.")


def _locks(folder: Path) -> Check:
    check = _writable("lock folder", folder, "Give FARM_LOCK_DIR a folder that all workers of this host may write to.")
    if check.level == "ok" and folder.is_dir() and stat.S_IMODE(folder.stat().st_mode) & 0o1777 != 0o1777:
        return Check(
            "lock folder",
            "warning",
            f"{folder} is not open to all users of this host, so another's worker cannot meet the lock",
            f"chmod 1777 {folder}",
        )
    return check


def _writable(name: str, folder: Path, next_step: str) -> Check:
    if not folder.is_dir():
        parent = _existing(folder)
        if parent.is_dir() and os.access(parent, os.W_OK | os.X_OK):
            return ok(name, f"{folder} (made when it is needed)")
        return Check(name, "problem", f"{folder} cannot be made: {parent} is not writable", next_step)
    try:
        # Asking the mode is not enough: a file system may be full, read-only or mapped to another user.
        with tempfile.TemporaryFile(dir=folder):
            return ok(name, str(folder))
    except OSError as error:
        return Check(name, "problem", f"{folder} cannot be written to: {error.strerror}", next_step)


def _disk(current: Settings) -> Iterator[Check]:
    folders = {current.state_dir}
    if current.database.startswith("sqlite:///"):
        folders.add(Path(current.database.removeprefix("sqlite:///").partition("?")[0]).parent)
    seen: set[int] = set()
    for folder in sorted(folders):
        there = _existing(folder)
        if (device := there.stat().st_dev) in seen:
            continue
        seen.add(device)
        free_bytes = shutil.disk_usage(there).free
        told = f"{free_bytes / 2**30:.1f} GiB free for {folder}"
        if free_bytes < DISK_WARNING_BYTES:
            level: Level = "problem" if free_bytes < DISK_PROBLEM_BYTES else "warning"
            yield Check("disk", level, told, "Make room, or move it with FARM_STATE_DIR.")
        else:
            yield ok("disk", told)


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


def _is_local(url: str) -> bool:
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    return "+socket" in parts.scheme or _is_local_host(parts.hostname or "")


def _is_local_host(host: str) -> bool:
    return host in ("", "localhost", "::1") or host.startswith(("127.", "/"))


def summary(checks: Sequence[Check]) -> Mapping[str, int]:
    """How many checks ended how."""
    return {level: sum(check.level == level for check in checks) for level in ("ok", "warning", "problem")}
