"""The constants of intervals and of the temperature that were measured on this project's own cards.

``measured_constants.toml`` has each value with its unit, its cards and its source. They apply to
every card model, so a change of a value changes verdicts of all cards."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType


@dataclass(frozen=True)
class MeasuredConstant:
    """A constant, for example 0.0020 ± 0.0014 of the power per degree.

    Attributes:
        half_width: of its 95 % interval; 0 if it is not known.
        cards: the card models on which it was measured.
        source: the readings from which it comes.
    """

    value: float
    unit: str
    cards: tuple[str, ...]
    source: str
    half_width: float = 0.0


def _read() -> Mapping[str, MeasuredConstant]:
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    constants = {}
    for name, table in tables.items():
        constants[name] = MeasuredConstant(
            value=table["value"],
            unit=table["unit"],
            cards=tuple(table["cards"]),
            source=table["source"],
            half_width=table.get("half_width", 0.0),
        )
    return MappingProxyType(constants)


#: Name -> constant.
MEASURED = _read()
