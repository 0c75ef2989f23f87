"""The cost of whole models, and of code that `farm_benchmark` measured, over git revisions and
versions of PyTorch.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from sqlmodel import Session, col, select

from farm.errors import NoReadings, did_you_mean
from farm.report.gate import student_t
from farm.store.content import stored_variant
from farm.store.reuse import UNSOUND
from farm.store.tables import Job, ModelVariant, ProtocolRow, ReadingRow, SoftwareRow
from farm.types.fields import cost_json, figure_json
from farm.types.figure import Figure, PassCost, figure_of
from farm.types.protocol import Protocol


@dataclass(frozen=True)
class Series:
    """What readings have in common that are compared over revisions and versions of PyTorch."""

    title: str
    card_model: str
    card_id: str
    protocol: str
    method: int

    @property
    def order(self) -> list[str]:
        return [self.title, self.card_model, self.card_id, self.protocol, str(self.method)]


@dataclass(frozen=True)
class HistoryRow:
    """The readings of a series at one revision, with one torch."""

    series: Series
    torch: str
    revision: str  # of git; "" for code without one
    dirty: bool  # True if the working tree had changes
    committed_at_s: float | None
    measured_at_s: float  # of the newest reading
    readings: int
    flags: tuple[str, ...]
    cost: PassCost  # of one pass
    # relative to the row before in the series, b / a - 1
    time_change: Figure | None = None
    energy_change: Figure | None = None

    @property
    def order(self) -> tuple[float, bool, float]:
        """A key that sorts a series by age. Code without a revision is as old as its
        measurement.
        """
        return self.committed_at_s or self.measured_at_s, self.dirty, self.measured_at_s

    def changed_from(self, before: HistoryRow) -> HistoryRow:
        """Return the row with its change from the row before; unchanged for another series."""
        if before.series != self.series:
            return self
        return replace(
            self,
            time_change=_change(before.cost.time_us, self.cost.time_us),
            energy_change=_change(before.cost.energy_mj, self.cost.energy_mj),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with units in the key names. Changes are fractions, b / a - 1."""
        return {
            "title": self.series.title,
            "card_model": self.series.card_model,
            "card_id": self.series.card_id,
            "protocol": self.series.protocol,
            "method": self.series.method,
            "torch": self.torch,
            "revision": self.revision,
            "dirty": self.dirty,
            "committed_at_s": self.committed_at_s,
            "measured_at_s": self.measured_at_s,
            "readings": self.readings,
            "flags": list(self.flags),
            **cost_json(self.cost),
            **figure_json("time_change", "", self.time_change),
            **figure_json("energy_change", "", self.energy_change),
        }


def _change(before: Figure | None, after: Figure | None) -> Figure | None:
    return after.deviation_from(before) if before and after else None


@dataclass(frozen=True)
class _Code:
    """The code that readings of a series measured."""

    revision: str | None  # as stored: commit, time of the commit and state
    version: str  # of a user's own model
    torch: str
    software_id: str


def history(session: Session, wanted: str) -> list[HistoryRow]:
    """Return a row for each revision and torch of each series, the oldest first, with the change to
    the row before. ``wanted``: a model's name, its location (my_models.py:net), or a pattern of
    names. Raises `NoReadings` if no such model has a reading."""
    names = _names(session, wanted)
    titles = _titles_of_own_models(session)
    groups: dict[tuple[Series, _Code], list[ReadingRow]] = defaultdict(list)
    for reading, stored, torch, protocol in session.exec(_query(names)):
        series = Series(
            title=_title(stored, titles),
            card_model=reading.card_model,
            card_id=reading.card_id,
            protocol=str(Protocol.from_json(protocol)),
            method=reading.method or 1,
        )
        revision = reading.details.get("revision")
        code = _Code(revision, stored.version, torch, reading.software_id)
        groups[series, code].append(reading)

    rows = [_row(series, code, readings) for (series, code), readings in groups.items()]
    rows.sort(key=lambda row: row.order)
    rows.sort(key=lambda row: row.series.order)
    changed = [after.changed_from(before) for before, after in itertools.pairwise(rows)]
    return [*rows[:1], *changed]


def _names(session: Session, wanted: str) -> set[str]:
    """Return the names of the measured models that are meant."""
    measured = select(ModelVariant.model).join(
        ReadingRow, col(ReadingRow.subject_id) == col(ModelVariant.id)
    )
    models = session.exec(measured.distinct()).all()
    location = wanted.rpartition("/")[2].replace(".py:", ":")
    names = {wanted, location}.intersection(models) or set(fnmatch.filter(models, wanted))
    if not names:
        measure = "Measure it with `farm run`, or in pytest with farm_benchmark."
        step = did_you_mean(wanted, models) or measure
        raise NoReadings(f"The database has no measurement of '{wanted}'.", step)
    return names


def _query(names: set[str]) -> Any:
    """Select the readings of models with their variant, torch and protocol, the oldest first."""
    return (
        select(ReadingRow, ModelVariant, SoftwareRow.torch, ProtocolRow.spec)  # type: ignore[call-overload]
        .join(ModelVariant, col(ReadingRow.subject_id) == col(ModelVariant.id))
        .join(SoftwareRow, col(SoftwareRow.id) == col(ReadingRow.software_id))
        .join(ProtocolRow, col(ProtocolRow.id) == col(ReadingRow.protocol_id))
        .where(col(ModelVariant.model).in_(names), col(ReadingRow.simulated).is_(False))
        .order_by(col(ReadingRow.created_at_s))
    )


def _titles_of_own_models(session: Session) -> dict[str | None, str]:
    """Return variant id -> the title of a job, which has the sizes of the example inputs."""
    titles = select(Job.variant_id, Job.title).join(ModelVariant).where(ModelVariant.version != "")
    return dict(session.exec(titles).all())


def _title(stored: ModelVariant, titles: Mapping[str | None, str]) -> str:
    """Return the title of a variant without its version."""
    columns = stored.model_dump()
    variant = stored_variant(columns)
    if "::" in variant.model:  # the name of a test: the sizes of its inputs may be unknown
        return variant.model
    return titles.get(stored.id, str(variant)).removesuffix(variant.with_version(""))


def _row(series: Series, code: _Code, readings: Sequence[ReadingRow]) -> HistoryRow:
    sound = [reading for reading in readings if not UNSOUND.intersection(reading.flags)]
    sound = sound or list(readings)
    commit, committed_at_s, state = (code.revision or "  ").split(" ")
    flags: set[str] = set()
    energies = []
    for reading in sound:
        flags.update(reading.flags)
        energy = figure_of(reading.energy_mj, reading.energy_half_width_mj)
        if energy and energy.value:
            energies.append(energy)
    time_us = mean_of([Figure(row.time_us, row.time_half_width_us) for row in sound])
    assert time_us is not None, "a row has at least one reading"
    return HistoryRow(
        series=series,
        torch=code.torch,
        revision=commit,
        dirty=state == "dirty",
        committed_at_s=float(committed_at_s or 0) or None,
        measured_at_s=readings[-1].created_at_s,
        readings=len(sound),
        flags=tuple(sorted(flags)),
        cost=PassCost(time_us, mean_of(energies)),
    )


def mean_of(figures: Sequence[Figure]) -> Figure | None:
    """The mean of repeated readings; its half-width follows from theirs or from their spread,
    whichever is larger.
    """
    count = len(figures)
    if not count:
        return None
    values = [figure.value for figure in figures]
    spread = 0.0
    if count > 1:
        spread = student_t(0.975, count - 1) * stdev(values) / math.sqrt(count)
    stated = math.hypot(*(figure.half_width for figure in figures)) / count
    return Figure(fmean(values), max(spread, stated))
