"""Run a study and store its findings: a table with notes and charts.

The readings are in the database. The findings are in a JSON file on the host that ran the study:
each kind of study has its own columns, and no query needs several studies."""

from __future__ import annotations

import dataclasses
import importlib
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import TypeAdapter

from benchmarks.studies import Study
from benchmarks.studies.laboratory import Laboratory, StudyOptions
from farm.addons.pages.plots import Chart, Line
from farm.devices.device import Card
from farm.errors import FarmError, UsageError
from farm.settings import settings
from farm.settings.shared_files import PRIVATE, open_folder
from farm.store.database import Database
from farm.types.variant import Variant

Kind = Literal[
    "text", "count", "seconds", "time_us", "energy_mj", "power_w", "clock_mhz", "change", "share"
]
QUANTITIES: tuple[tuple[str, Kind], ...] = (
    ("time", "time_us"),
    ("energy", "energy_mj"),
)  # per pass


@dataclass(frozen=True)
class ResultColumn:
    """The JSON key, the table heading and the format of a value. A value without a heading is only
    in the JSON.

    The kind `change` is a signed fraction, the kind `share` an unsigned fraction.
    """

    key: str
    head: str = ""
    kind: Kind = "text"


ResultRow = dict[ResultColumn, Any]


@dataclass(frozen=True)
class Findings:
    """The result of one study. The keys of rows end with the unit; changes, gaps and shares are
    fractions.
    """

    columns: tuple[ResultColumn, ...]
    rows: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...]
    charts: tuple[Chart, ...]
    variant: Variant  # the measured variant

    @property
    def drawable(self) -> tuple[Chart, ...]:
        """The charts that are not empty."""
        return tuple(chart for chart in self.charts if not chart.empty)


def tabulated(
    rows: Iterable[ResultRow],
) -> tuple[tuple[ResultColumn, ...], tuple[dict[str, Any], ...]]:
    """The columns with a heading; and each row as a dict from column key to value."""
    rows = list(rows)
    columns = dict.fromkeys(column for row in rows for column in row if column.head)
    return tuple(columns), tuple(
        {column.key: value for column, value in row.items()} for row in rows
    )


def change(value: float | None, reference: float | None) -> float | None:
    """``value / reference - 1``; None if one of them is missing."""
    return value / reference - 1 if value is not None and reference else None


def change_of(reading: object, reference: object, name: str) -> float | None:
    """The change of the field `name` relative to the reference; None if a reading or its field is
    None.
    """
    return change(getattr(reading, name, None), getattr(reference, name, None))


def known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def median_and_most(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The median, and the value with the largest absolute value; (None, None) if there are no
    values.
    """
    return statistics.median(values) if values else None, max(values, key=abs, default=None)


def bar_chart(
    title: str, rows: Iterable[Mapping[str, Any]], label: str, series: Mapping[str, str]
) -> Chart:
    """A chart with a group of bars for each row: fractions in %. Rows without values have no group.

    Args:
        label: the key of the group's label in a row.
        series: the name of each bar -> the key of its value in a row.
    """
    bars = {
        row[label]: {name: row[key] * 100 for name, key in series.items() if row[key] is not None}
        for row in rows
    }
    return Chart(
        title, y_name="%", bars={name: values for name, values in bars.items() if values}, zero=True
    )


def scatter_chart(
    title: str, x_name: str, rows: Sequence[Mapping[str, Any]], x: str, series: Mapping[str, str]
) -> Chart:
    """A chart of fractions in % over the values with key `x`. `series` maps a name of points to the
    key of their y.
    """
    lines = []
    for name, key in series.items():
        if points := sorted((row[x], row[key] * 100) for row in rows if row[key] is not None):
            lines.append(Line(name, *map(list, zip(*points, strict=True)), alone=True))
    return Chart(title, x_name, "%", tuple(lines), x_log=True, zero=True)


@dataclass(frozen=True, kw_only=True)
class StudyResult(Findings):
    """The findings of a study, with the card, the software and the readings from which they
    come.
    """

    study: str
    question: str
    id: str
    created_at_s: float  # when the study ended, seconds since 1970
    card: Card
    software: dict[str, Any]
    quick: bool
    readings: tuple[str, ...]
    unmeasured: dict[str, str]  # label and protocol -> reason
    card_time_s: float

    @property
    def title(self) -> str:
        return (
            f"{self.study}: {self.variant} on {self.card.model}{' (quick)' if self.quick else ''}"
        )

    def to_json(self) -> dict[str, Any]:
        """The result as JSON without charts: `--json` does not print them."""
        data = TypeAdapter(type(self)).dump_python(self, mode="json", exclude={"charts"})
        return {**data, "variant": self.variant.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The result from JSON that includes `charts`, as `keep` stores it."""
        return TypeAdapter(cls).validate_python(
            {**data, "variant": Variant.from_json(data["variant"])}
        )


def folder() -> Path:
    """The folder that contains the stored results of this host."""
    return settings().state_dir / "studies"


def keep(made: StudyResult) -> None:
    """Store a result as one JSON file, atomically.

    Raises:
        OSError: the disk is full, or the folder cannot be written to.
    """
    charts = [dataclasses.asdict(chart) for chart in made.charts]
    data = {**made.to_json(), "charts": charts}
    with open_folder(folder(), create=PRIVATE) as opened:
        opened.write(f"{made.id}.json", json.dumps(data).encode())


def kept(say: Callable[[str], None] = lambda line: None) -> list[StudyResult]:
    """All stored results, newest first. Unreadable files are skipped; `say` is called with the
    reason.
    """
    found = []
    for path in folder().glob("*.json"):
        try:
            found.append(_read(path))
        except FarmError as error:
            say(f"Left out: {error.message}")
    return sorted(found, key=lambda made: -made.created_at_s)


def find_kept(beginning: str) -> StudyResult:
    """The only stored result with an id that starts with `beginning`.

    Raises:
        UsageError: no id or several ids start with `beginning`, or it is empty.
        FarmError: the file cannot be read.
    """
    found = [path for path in folder().glob("*.json") if path.stem.startswith(beginning)]
    if beginning.strip() and len(found) == 1:
        return _read(found[0])
    problem = (
        f"{'Several studies have' if found else 'No study has'} an id that begins with "
        f"'{beginning}'."
    )
    raise UsageError(
        problem if beginning.strip() else "The id of a study is empty.",
        "`python -m benchmarks.studies show` lists the studies of this host.",
    )


def _read(path: Path) -> StudyResult:
    try:
        return StudyResult.from_json(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
        raise FarmError(
            f"{path} cannot be read: {type(error).__name__}: {error}.",
            "Another version of farm may have written it: delete the file, and repeat the study "
            "if you need it.",
        ) from error


def perform(
    study: Study,
    database: Database,
    card: Card,
    options: StudyOptions,
    say: Callable[[str], None] = lambda line: None,
) -> StudyResult:
    """Run a study on a card. Store each reading in the database at once, and the findings in a file
    at the end.

    Raises:
        CardBusy: a worker or another command uses the card.
        CardUnavailable, UnhealthyCard: the card is in quarantine, or fails its health check.
        FarmError: nothing could be measured.
    """
    measure: Callable[[Laboratory, StudyOptions], Findings]
    measure = getattr(importlib.import_module(f"benchmarks.studies.{study.module}"), study.name)
    with Laboratory(database, card, study.name, say) as laboratory:
        made = StudyResult(
            **vars(measure(laboratory, options)),
            study=study.name,
            question=study.question,
            id=laboratory.id,
            created_at_s=time.time(),
            card=card,
            software=laboratory.software.to_json(),
            quick=options.quick,
            readings=tuple(laboratory.readings),
            unmeasured=laboratory.failures,
            card_time_s=round(laboratory.card_time_s, 2),
        )
    try:
        keep(made)
    except OSError as error:  # the readings are stored, and the caller can still print the findings
        say(f"The findings are not stored (the readings are): {error}")
    return made
