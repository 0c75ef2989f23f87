"""A card that a user describes in a file: its figures, with units and bounds.

The keys are those that makers' data sheets use, with the unit at the end. A figure outside its
bounds is refused: most often it has another unit.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farm.errors import UsageError, did_you_mean
from farm.types.data_sheets import GENERIC_GPU, DataSheet, NamedCard, sheet_name_of
from farm.types.fingerprint import is_number

_MOST_BYTES = 65536


@dataclass(frozen=True)
class _Figure:
    """A figure of a card file: its factor to the unit of a data sheet, its bounds and its unit."""

    field: str
    factor: float
    least: float
    most: float
    unit: str
    optional: bool = False


#: Key -> the figure of a data sheet.
_FIGURES = {
    "float32_tflop_per_s": _Figure("float32", 1e12, 0.1, 10_000, "TFLOP/s"),
    "half_tflop_per_s": _Figure("half", 1e12, 0.1, 100_000, "TFLOP/s"),
    "bandwidth_gb_per_s": _Figure("bytes_per_s", 1e9, 10, 100_000, "GB/s"),
    "memory_gb": _Figure("memory_bytes", 1e9, 0.5, 10_000, "GB"),
    "multiprocessors": _Figure("multiprocessors", 1, 1, 10_000, "multiprocessors"),
    "l2_mb": _Figure("l2_bytes", 1e6, 0.1, 10_000, "MB"),
    "power_limit_w": _Figure("power_limit_w", 1, 5, 10_000, "W"),
    "tf32_tflop_per_s": _Figure("tf32", 1e12, 0.1, 100_000, "TFLOP/s", optional=True),
    "launch_us": _Figure("launch_floor_us", 1, 0.1, 1_000, "us", optional=True),
}
_TEXTS = ("name", "source")


def card_of_file(path: Path) -> NamedCard:
    """The card that a TOML file describes.

    Args:
        path: a file with the keys ``name``, ``float32_tflop_per_s``, ``half_tflop_per_s``,
            ``bandwidth_gb_per_s``, ``memory_gb``, ``multiprocessors``, ``l2_mb`` and
            ``power_limit_w``. Optional keys: ``tf32_tflop_per_s`` (default: as float32),
            ``launch_us`` (time of an empty kernel, default: 2.5), ``source``.

    Raises:
        UsageError: the file cannot be read, or a key is unknown, missing or out of bounds.
    """
    table = _table(path)
    unknown = [key for key in table if key not in _FIGURES and key not in _TEXTS]
    if unknown:
        keys = ", ".join([*_TEXTS, *_FIGURES])
        step = did_you_mean(unknown[0], _FIGURES) or f"The keys are {keys}."
        raise UsageError(f"{path} has an unknown key '{unknown[0]}'.", step)
    name = _name(path, table)
    figures = {"tf32": 0.0, "launch_floor_us": GENERIC_GPU.launch_floor_us}
    for key, figure in _FIGURES.items():
        if key in table or not figure.optional:
            figures[figure.field] = _value(path, key, figure, table.get(key))
    figures["tf32"] = max(figures["tf32"], figures["float32"])
    sheet = DataSheet(
        float32=figures["float32"],
        tf32=figures["tf32"],
        half=figures["half"],
        bytes_per_s=figures["bytes_per_s"],
        launch_floor_us=figures["launch_floor_us"],
        multiprocessors=int(figures["multiprocessors"]),
        l2_bytes=int(figures["l2_bytes"]),
        power_limit_w=figures["power_limit_w"],
        memory_bytes=figures["memory_bytes"],
        names=(name,),
        source=str(table.get("source") or path),
    )
    return NamedCard(name, sheet)


def _table(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"The card file '{path}' cannot be read: {error.strerror or error}.",
            "Name a TOML file that describes the card.",
        ) from error
    if len(content) > _MOST_BYTES:
        raise UsageError(
            f"The card file '{path}' has more than {_MOST_BYTES} bytes.", "Name a card file."
        )
    try:
        return tomllib.loads(content.decode())
    except ValueError as error:  # of TOML or of UTF-8
        raise UsageError(
            f"The card file '{path}' is not TOML: {error}.",
            "Write lines such as: memory_gb = 24",
        ) from error


def _name(path: Path, table: Mapping[str, Any]) -> str:
    name = table.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= 100 or not name.isprintable():
        raise UsageError(
            f"{path} does not name the card.",
            'Add a line of at most 100 characters, such as: name = "My card"',
        )
    sheet = sheet_name_of(name)
    if sheet:
        raise UsageError(
            f"{path} describes the '{name}', of which the farm has a data sheet.",
            f"Use it with --card '{sheet}', or give your card another name.",
        )
    return name


def _value(path: Path, key: str, figure: _Figure, value: Any) -> float:
    """The figure in the unit of a data sheet."""
    bounds = f"from {figure.least:,g} to {figure.most:,g} {figure.unit}"
    if value is None:
        raise UsageError(f"{path} lacks {key}.", f"Add {key} = NUMBER, {bounds}.")
    if not is_number(value) or not figure.least <= value <= figure.most:
        raise UsageError(
            f"{path}: {key} = {value} is not a number {bounds}.",
            f"Give the figure of the maker's data sheet in {figure.unit}.",
        )
    return float(value) * figure.factor
