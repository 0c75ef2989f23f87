"""Checks that find out why a farm misbehaves. Each check returns "ok", or a problem and what to do
next.

The checks leave nothing behind and raise nothing: if a part of the farm does not answer, the check
reports a problem. `tasks.doctor.host` checks this host, `tasks.doctor.database` the database, and
`tasks.doctor.broker` the broker."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from farm.errors.safe_text import without_secrets

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Check:
    """The result of one check. A problem stops work or makes readings worthless; a warning does
    not.
    """

    name: str
    level: Level
    message: str
    next_step: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", without_secrets(self.message))


def ok(name: str, message: str) -> Check:
    return Check(name, "ok", message)


def warning(name: str, message: str, next_step: str) -> Check:
    return Check(name, "warning", message, next_step)


def problem(name: str, message: str, next_step: str) -> Check:
    return Check(name, "problem", message, next_step)
