"""Peaks of cards by their makers' data sheets (``data_sheets.toml``).

A sheet belongs to the exact model of a card: an A10 is not an A100, and an L40S is not an L40. A
card of another model has no sheet, and gets typical values."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

#: Words of a card's model that say nothing about its figures.
_MAKERS = frozenset({"nvidia", "tesla", "geforce", "amd", "instinct", "radeon", "graphics"})


@dataclass(frozen=True)
class DataSheet:
    """The peaks of a card. All rates are dense."""

    float32: float  # FLOP/s without a loss of precision
    tf32: float  # FLOP/s
    half: float  # FLOP/s of float16 and bfloat16
    bytes_per_s: float
    launch_floor_us: float
    multiprocessors: int
    l2_bytes: int  # the last cache before the memory
    power_limit_w: float
    memory_bytes: float = 0.0  # 0: unknown
    names: tuple[str, ...] = ()  # of the card models, as drivers and people write them
    source: str = ""
    checked: str = ""  # with what the figures were compared, and which stand in none of them
    eight_bits: float = 0.0  # of products of int8 or fp8, the faster; 0: twice `half`


GENERIC_GPU = DataSheet(
    float32=20e12,
    tf32=80e12,
    half=160e12,
    bytes_per_s=1.0e12,
    launch_floor_us=2.5,
    multiprocessors=80,
    l2_bytes=32 << 20,
    power_limit_w=300.0,
)
#: A few server cores, as for a small CPU job, not a whole socket.
CPU = DataSheet(
    float32=1e11,
    tf32=1e11,
    half=1e11,
    bytes_per_s=2e10,
    launch_floor_us=8.0,
    multiprocessors=1,
    l2_bytes=32 << 20,
    power_limit_w=200.0,
)


class NamedCard(str):
    """The name of a card model, with its data sheet: of a card that a user describes in a file."""

    sheet: DataSheet

    def __new__(cls, name: str, sheet: DataSheet) -> Self:
        card = super().__new__(cls, name)
        card.sheet = sheet
        return card


@functools.cache
def data_sheets() -> Mapping[str, DataSheet]:
    """All data sheets by their names, such as ``RTX 4090``."""
    file = Path(__file__).with_name("data_sheets.toml")
    sheets = {}
    for name, table in tomllib.loads(file.read_text(encoding="utf-8")).items():
        sheets[name] = DataSheet(**table | {"names": tuple(table["names"])})
    return sheets


def sheet_name_of(model: str) -> str:
    """The name of the data sheet for a card's model or its short name; "" if there is none.

    >>> sheet_name_of("NVIDIA A100-SXM4-40GB"), sheet_name_of("A10"), sheet_name_of("NVIDIA A10G")
    ('A100 40GB', 'A10', '')
    """
    return model if isinstance(model, NamedCard) else _sheet_with_name(model)


@functools.cache
def _sheet_with_name(model: str) -> str:
    words = _words(model)
    for name, sheet in data_sheets().items():
        if any(_words(listed) == words for listed in sheet.names):
            return name
    return ""


def data_sheet(card_kind: str, card_model: str) -> DataSheet:
    """The data sheet of a card model; typical values for unknown ones."""
    if card_kind == "cpu":
        return CPU
    if isinstance(card_model, NamedCard):
        return card_model.sheet
    return data_sheets().get(sheet_name_of(card_model), GENERIC_GPU)


def _words(model: str) -> frozenset[str]:
    """The words of a model without those of makers: 'NVIDIA A100-SXM4-80GB' -> a100, sxm4, 80gb."""
    return frozenset(re.findall(r"[a-z0-9]+", model.lower())) - _MAKERS
