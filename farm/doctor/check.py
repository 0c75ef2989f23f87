"""One finding of an examination: how bad it is, in words, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["ok", "warning", "problem"]


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


def summary(checks: Sequence[Check]) -> Mapping[str, int]:
    """How many checks ended how."""
    return {level: sum(check.level == level for check in checks) for level in ("ok", "warning", "problem")}
