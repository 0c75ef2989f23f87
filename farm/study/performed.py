"""A study that was made, and where its findings stay: so that its table and drawing can be had again.

The readings are in the database. What a study found in them is one JSON file on the host that made it: nothing asks
across studies, and each kind of them has columns of its own.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from farm.devices.device import Card
from farm.errors import FarmError, UsageError
from farm.jobs.spool import write_whole
from farm.settings import settings
from farm.study import Study
from farm.study.findings import Findings
from farm.types.protocol import Variant


@dataclass(frozen=True)
class Performed:
    """A study that was made: findings and provenance."""

    study: Study
    id: str
    created_at_s: float  # when it ended, since 1970
    variant: Variant
    card: Card
    software: dict[str, Any]
    quick: bool
    findings: Findings
    readings: tuple[str, ...]
    failures: dict[str, str]
    card_time_s: float

    @property
    def title(self) -> str:
        return f"{self.study.name}: {self.variant} on {self.card.model}{' (quick)' if self.quick else ''}"

    def to_json(self) -> dict[str, Any]:
        return {
            "study": self.study.name,
            "question": self.study.question,
            "id": self.id,
            "created_at_s": self.created_at_s,
            "variant": self.variant.to_json(),
            "card": self.card.to_json(),
            "software": self.software,
            "quick": self.quick,
            **self.findings.to_json(),
            "unmeasured": self.failures,
            "card_time_s": round(self.card_time_s, 2),
            "readings": list(self.readings),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(
            Study(data["study"], data["question"]),
            data["id"],
            data["created_at_s"],
            Variant.from_json(data["variant"]),
            Card.from_json(data["card"]),
            data["software"],
            data["quick"],
            Findings.from_json(data),
            tuple(data["readings"]),
            data["unmeasured"],
            data["card_time_s"],
        )


def folder() -> Path:
    return settings().state_dir / "studies"


def keep(made: Performed) -> Path:
    """Write the findings down, whole or not at all.

    Raises:
        OSError: the disk is full, or the folder cannot be written to.
    """
    path = folder() / f"{made.id}.json"
    write_whole(path, {**made.to_json(), "charts": [dataclasses.asdict(chart) for chart in made.findings.charts]})
    return path


def kept(say: Callable[[str], None] = lambda line: None) -> list[Performed]:
    """All studies that were kept, newest first. What cannot be read is said and left out."""
    found = []
    for path in folder().glob("*.json"):
        try:
            found.append(_read(path))
        except FarmError as error:
            say(f"Left out: {error.message}")
    return sorted(found, key=lambda made: -made.created_at_s)


def find_kept(beginning: str) -> Performed:
    """The one study whose id begins so.

    Raises:
        UsageError: none or several begin so, or it is empty.
        FarmError: its file cannot be read.
    """
    if not beginning.strip():
        raise UsageError("The id of a study is empty.", "`farm study show` lists those of this host.")
    found = [path for path in folder().glob("*.json") if path.stem.startswith(beginning)]
    if len(found) != 1:
        problem = "No study has" if not found else "Several studies have"
        raise UsageError(
            f"{problem} an id that begins with '{beginning}'.", "`farm study show` lists those of this host."
        )
    return _read(found[0])


def _read(path: Path) -> Performed:
    try:
        return Performed.from_json(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
        raise FarmError(
            f"{path} cannot be read: {type(error).__name__}: {error}.", "It may be of another version of farm."
        ) from error
