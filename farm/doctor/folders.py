"""Examining where this host's farm writes: folders, room on the disk, and who may read what is secret."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from farm import settings as farm_settings
from farm.doctor.check import Check, Level, ok
from farm.jobs.spool import Spool
from farm.settings import Settings

DISK_PROBLEM_BYTES = 2**30
DISK_WARNING_BYTES = 10 * 2**30


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
    service = farm_settings.SERVICE_LOCK_DIR
    if check.level == "ok" and service.is_dir() and folder.resolve() != service.resolve():
        return Check(
            "lock folder",
            "warning",
            f"it is {folder}, but this host has {service} for everything that measures: workers there go unnoticed",
            "Unset FARM_LOCK_DIR.",
        )
    return check


def _writable(name: str, folder: Path, next_step: str) -> Check:
    there = _existing(folder)
    if not there.is_dir():
        return Check(name, "problem", f"{folder} cannot be a folder: {there} is a file", next_step)
    try:
        # Asking the mode is not enough: a file system may be full, read-only, the kernel's or mapped to another user.
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
            continue  # told where the folder or the database is looked at
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
