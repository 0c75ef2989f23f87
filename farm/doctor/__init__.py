"""Checks of a farm that misbehaves: each result says ok, or what to do next.

The checks change nothing and raise nothing: a part that does not answer is a result. One module for each place:
`farm.doctor.host`, `farm.doctor.database`, and `tasks.broker_checks` for the broker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from farm.settings import NEXT_STEP

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Check:
    """The result of one check. A problem stops the farm or makes its readings worthless; a warning does not."""

    name: str
    level: Level
    message: str
    next_step: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def ok(name: str, message: str) -> Check:
    return Check(name, "ok", message)


def summary(checks: Sequence[Check]) -> Mapping[str, int]:
    """Number of checks by level."""
    levels = Counter(check.level for check in checks)
    return {level: levels[level] for level in ("ok", "warning", "problem")}


def wrong_settings(problems: Iterable[str]) -> Iterator[Check]:
    """Wrong settings. Other checks use the defaults instead, and the broker is not asked."""
    for problem in problems:
        yield Check("settings", "problem", problem, NEXT_STEP)
