"""The data files of the installed package, and their checksums in `farm/data/checksums.json`.

A program that uses such a file for the first time checks it. So a file that an interrupted
installation or a failing disk has damaged is named, with the way to repair it."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from farm.errors import DamagedPackage

DATA = Path(__file__).resolve().parents[1] / "data"
CHECKSUMS = DATA / "checksums.json"


def check_package_files(paths: Iterable[Path]) -> None:
    """Compare files with their checksums; files outside of `farm/data` are not compared. Raises
    `DamagedPackage`.
    """
    for path in paths:
        if path.is_relative_to(DATA):
            _check(path)


@functools.cache
def _check(path: Path) -> None:
    expected = _checksums().get(path.relative_to(DATA).as_posix())
    try:
        checksum = checksum_of(path)
    except OSError as error:
        raise DamagedPackage.of(path, f"cannot be read: {error.strerror or error}") from error
    if checksum != expected:
        raise DamagedPackage.of(path, "differs from the file that was published")


def checksum_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@functools.cache
def _checksums() -> dict[str, str]:
    try:
        checksums = json.loads(CHECKSUMS.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DamagedPackage.of(CHECKSUMS, "cannot be read") from error
    if not isinstance(checksums, dict):
        raise DamagedPackage.of(CHECKSUMS, "has no checksums")
    return checksums
