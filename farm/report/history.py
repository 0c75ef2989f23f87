"""The cost of whole models, and of code that `farm_benchmark` measured, over git revisions and software versions."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from sqlmodel import Session, and_, col, select

from farm.errors import NoReadings, did_you_mean
from farm.report.gate import student_t
from farm.store.content import DISTURBED
from farm.store.tables import Item, Job, ModelVariant, ProtocolRow, ReadingRow, SoftwareRow
from farm.types.fields import names_of
from farm.types.protocol import Protocol, Variant
from farm.types.reading import Details, Revision
from farm.types.request import Request
from farm.verdict.figures import Figure, ReadingView, figure_json


@dataclass(frozen=True)
class HistoryRow:
    """The mean of the readings of one revision with one software. Time in µs, energy in mJ. Changes are b / a - 1."""

    revision: Revision | None  # None: of a model of the catalog, or of code outside of git
    torch: str
    measured_at_s: float  # of the newest reading
    readings: int
    flags: tuple[str, ...]
    time: Figure
    energy: Figure | None
    time_change: Figure | None = None  # from the row before
    energy_change: Figure | None = None

    def to_json(self) -> dict[str, Any]:
        data = {**vars(self), "revision": self.revision.to_json() if self.revision else None}
        for name, unit in (("time", "us"), ("energy", "mj"), ("time_change", ""), ("energy_change", "")):
            data |= figure_json(name, unit, data.pop(name))
        return data


@dataclass(frozen=True)
class Series:
    """The rows of one model and size on one card under one protocol, the oldest revision first."""

    title: str
    card_model: str
    card_id: str
    protocol: str
    method: int | None
    rows: tuple[HistoryRow, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "rows": [row.to_json() for row in self.rows]}


def history(session: Session, wanted: str) -> list[Series]:
    """Return the histories of the models with this name, this location (my_models.py:net) or a name of this pattern.

    Raises:
        NoReadings: no such model has a reading.
    """
    is_whole = col(ReadingRow.subject_id) == col(ModelVariant.id)
    known = session.exec(select(ModelVariant.model).join(ReadingRow, is_whole).distinct()).all()
    names = {wanted, wanted.rpartition("/")[2].replace(".py:", ":")}.intersection(known)
    names = names or set(fnmatch.filter(known, wanted))
    if not names:
        step = did_you_mean(wanted, known) or "Measure it with `farm run`, or in pytest with farm_benchmark."
        raise NoReadings(f"The database has no measurement of '{wanted}'.", step)
    its_item = and_(col(Item.reading_id) == col(ReadingRow.id), col(Item.reused).is_(False))
    query = (
        select(ReadingRow, ModelVariant, SoftwareRow.torch, ProtocolRow.spec, Job.request)  # type: ignore[call-overload]
        .join(ModelVariant, is_whole)
        .join(SoftwareRow, col(SoftwareRow.id) == col(ReadingRow.software_id))
        .join(ProtocolRow, col(ProtocolRow.id) == col(ReadingRow.protocol_id))
        .join(Item, its_item, isouter=True)
        .join(Job, col(Job.id) == col(Item.job_id), isouter=True)
        .where(col(ModelVariant.model).in_(names))
        .order_by(col(ReadingRow.created_at_s))
    )
    found: dict[Series, dict[Any, list[ReadingRow]]] = defaultdict(lambda: defaultdict(list))
    for reading, row, torch, protocol, request in session.exec(query):
        variant = Variant(**{name: getattr(row, name) for name in names_of(Variant) if name != "version"})
        # The inputs of a function that farm_benchmark measured are unknown: its name is that of a test.
        title = variant.model if "::" in variant.model else str(variant)
        about = (reading.card_model, reading.card_id, str(Protocol.from_json(protocol)), reading.method)
        revision = Details.from_json(reading.details).revision
        if request and revision is None:
            revision = Request.from_json(request).revision
        found[Series(title, *about)][revision, row.version, torch].append(reading)
    made = [dataclasses.replace(one, rows=_rows(points)) for one, points in found.items()]
    return sorted(made, key=lambda one: (one.title, one.card_model, one.card_id, one.protocol, one.method or 0))


def _rows(points: dict[Any, list[ReadingRow]]) -> tuple[HistoryRow, ...]:
    rows = list[HistoryRow]()
    for (revision, _, torch), every in points.items():
        sound = [one for one in every if not DISTURBED.intersection(one.flags)] or every
        flags = tuple(sorted({flag for one in sound for flag in one.flags}))
        views = [ReadingView.of(one) for one in sound]
        time, energy = mean_of([view.time for view in views]), mean_of([view.energy for view in views])
        assert time is not None
        rows.append(HistoryRow(revision, torch, every[-1].created_at_s, len(sound), flags, time, energy))
    # Without a revision, the code is as old as its measurement.
    rows.sort(key=lambda row: (row.revision.committed_at_s if row.revision else row.measured_at_s, row.measured_at_s))
    for number, (a, b) in enumerate(itertools.pairwise(rows), 1):
        energy = b.energy.deviation_from(a.energy) if a.energy and b.energy else None
        rows[number] = dataclasses.replace(b, time_change=b.time.deviation_from(a.time), energy_change=energy)
    return tuple(rows)


def mean_of(figures: Sequence[Figure | None]) -> Figure | None:
    """The mean of repeated readings; None if one is unknown.

    Its half-width is the larger one of two: from the half-widths of the readings, and from their spread.
    """
    known = [figure for figure in figures if figure is not None]
    if len(known) < len(figures):
        return None
    count, values = len(known), [figure.value for figure in known]
    half_width = math.hypot(*(figure.half_width for figure in known)) / count
    spread = student_t(0.975, count - 1) * stdev(values) / math.sqrt(count) if count > 1 else 0.0
    return Figure(fmean(values), max(half_width, spread))
