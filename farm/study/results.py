"""Running a study, and its findings: a table with notes and charts, stored so that they can be shown again.

The readings are in the database. The findings are one JSON file on the host that ran the study, since each kind of
study has its own columns and nothing queries across studies.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from farm.devices.device import Card
from farm.errors import FarmError, UsageError
from farm.jobs.spool import write_whole
from farm.pages.plots import Chart, Line
from farm.settings import settings
from farm.store.database import Database
from farm.study import STUDIES, Study
from farm.study.laboratory import Laboratory, StudyOptions
from farm.types.protocol import Variant

Kind = Literal["text", "count", "seconds", "time_us", "energy_mj", "power_w", "clock_mhz", "change", "share"]


@dataclass(frozen=True)
class ResultColumn:
    """The head and the format of one key of the rows. `change` is a signed fraction, `share` an unsigned one."""

    key: str
    head: str
    kind: Kind = "text"


@dataclass(frozen=True)
class Findings:
    """The result of one study. Keys of rows carry their unit; changes, gaps and shares are fractions.

    `variant` is the measured variant if it differs from the requested one.
    """

    columns: tuple[ResultColumn, ...]
    rows: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    variant: Variant | None = None

    @property
    def drawable(self) -> tuple[Chart, ...]:
        """The charts that are not empty."""
        return tuple(chart for chart in self.charts if not chart.empty)

    def to_json(self) -> dict[str, Any]:
        return {
            "columns": [dataclasses.asdict(column) for column in self.columns],
            "rows": [dict(row) for row in self.rows],
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """From JSON with `charts`, which are stored but not printed."""
        return cls(
            tuple(ResultColumn(**column) for column in data["columns"]),
            tuple(data["rows"]),
            tuple(data["notes"]),
            tuple(
                Chart(**{**chart, "lines": tuple(Line(**line) for line in chart["lines"])}) for chart in data["charts"]
            ),
        )


def change(value: float | None, reference: float | None) -> float | None:
    """``value / reference - 1``; None where either is missing."""
    return value / reference - 1 if value is not None and reference else None


def known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


@dataclass(frozen=True)
class StudyResult:
    """The findings of a study with their provenance."""

    study: Study
    id: str
    created_at_s: float  # when the study ended, seconds since 1970
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
    """Where the results of this host are stored."""
    return settings().state_dir / "studies"


def keep(made: StudyResult) -> Path:
    """Store a result as one JSON file, atomically.

    Raises:
        OSError: the disk is full, or the folder cannot be written to.
    """
    path = folder() / f"{made.id}.json"
    write_whole(path, {**made.to_json(), "charts": [dataclasses.asdict(chart) for chart in made.findings.charts]})
    return path


def kept(say: Callable[[str], None] = lambda line: None) -> list[StudyResult]:
    """All stored results, newest first. Unreadable files are reported through `say` and left out."""
    found = []
    for path in folder().glob("*.json"):
        try:
            found.append(_read(path))
        except FarmError as error:
            say(f"Left out: {error.message}")
    return sorted(found, key=lambda made: -made.created_at_s)


def find_kept(beginning: str) -> StudyResult:
    """The only stored result whose id begins so.

    Raises:
        UsageError: no id begins so, several do, or the beginning is empty.
        FarmError: the file cannot be read.
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


def _read(path: Path) -> StudyResult:
    try:
        return StudyResult.from_json(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
        raise FarmError(
            f"{path} cannot be read: {type(error).__name__}: {error}.", "It may be of another version of farm."
        ) from error


def perform(
    study: Study, database: Database, card: Card, options: StudyOptions, say: Callable[[str], None] = lambda line: None
) -> StudyResult:
    """Run a study on a card. Each reading is stored in the database at once, the findings in a file at the end.

    Raises:
        CardBusy: a worker or another command holds the card.
        CardUnavailable, UnhealthyCard: the card is in quarantine, or fails its health check.
        FarmError: nothing could be measured.
    """
    known = STUDIES[STUDIES.index(study)]  # a module of a fixed list, not a name from outside
    measure = getattr(importlib.import_module(f"farm.study.{known.module}"), known.name)
    with Laboratory(database, card, study.name, say) as laboratory:
        findings = measure(laboratory, options)
        made = StudyResult(
            study,
            laboratory.id,
            time.time(),
            findings.variant or options.variant,
            card,
            laboratory.software.to_json(),
            options.quick,
            findings,
            tuple(laboratory.readings),
            dict(laboratory.failures),
            laboratory.card_time_s,
        )
    try:
        keep(made)
    except OSError as error:  # the readings and the printed findings remain
        say(f"These findings are not kept: {error}")
    return made
