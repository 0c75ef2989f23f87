"""The cost of whole models, and of code that `farm_benchmark` measured, over git revisions and
versions of PyTorch.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections import defaultdict
from statistics import fmean, stdev
from typing import Any

from sqlmodel import Session, col, select

from farm.errors import NoReadings, did_you_mean
from farm.report.gate import student_t
from farm.store.content import UNSOUND
from farm.store.tables import Job, ModelVariant, ProtocolRow, ReadingRow, SoftwareRow
from farm.types.fields import figure_json, names_of
from farm.types.figure import Figure
from farm.types.protocol import Protocol, Variant

SERIES = (
    "title",
    "card_model",
    "card_id",
    "protocol",
    "method",
)  # rows that are equal in these keys are compared


def history(session: Session, wanted: str) -> list[dict[str, Any]]:
    """Return a row for each revision and torch of each series, the oldest first, with the change to
    the row before. ``wanted``: a model's name, its location (my_models.py:net), or a pattern of
    names. Raises `NoReadings` if no such model has a reading."""
    is_whole = col(ReadingRow.subject_id) == col(ModelVariant.id)
    known = session.exec(select(ModelVariant.model).join(ReadingRow, is_whole).distinct()).all()
    names = {wanted, wanted.rpartition("/")[2].replace(".py:", ":")}.intersection(known)
    names = names or set(fnmatch.filter(known, wanted))
    if not names:
        step = (
            did_you_mean(wanted, known)
            or "Measure it with `farm run`, or in pytest with farm_benchmark."
        )
        raise NoReadings(f"The database has no measurement of '{wanted}'.", step)
    query = (
        select(ReadingRow, ModelVariant, SoftwareRow.torch, ProtocolRow.spec)  # type: ignore[call-overload]
        .join(ModelVariant, is_whole)
        .join(SoftwareRow, col(SoftwareRow.id) == col(ReadingRow.software_id))
        .join(ProtocolRow, col(ProtocolRow.id) == col(ReadingRow.protocol_id))
        .where(col(ModelVariant.model).in_(names), col(ReadingRow.simulated).is_(False))
        .order_by(col(ReadingRow.created_at_s))
    )
    # The title of a job has the sizes of an own model's example inputs.
    own = select(Job.variant_id, Job.title).join(ModelVariant).where(ModelVariant.version != "")
    titles = dict(session.exec(own).all())
    found = defaultdict[Any, list[ReadingRow]](list)
    for reading, row, torch, protocol in session.exec(query):
        variant = Variant(**{one: getattr(row, one) for one in names_of(Variant)})
        # The name of a test: the sizes of its inputs may be unknown.
        title = titles.get(row.id, str(variant)).removesuffix(variant.with_version(""))
        title = variant.model if "::" in variant.model else title
        series = (
            title,
            reading.card_model,
            reading.card_id,
            str(Protocol.from_json(protocol)),
            reading.method or 1,
        )
        found[
            series, reading.details.get("revision"), row.version, torch, reading.software_id
        ].append(reading)
    rows = [
        {**dict(zip(SERIES, series, strict=True)), "torch": torch, **_row(revision, readings)}
        for (series, revision, _, torch, _), readings in found.items()
    ]
    # Code without a revision is as old as its measurement.
    rows.sort(
        key=lambda row: (
            row["committed_at_s"] or row["measured_at_s"],
            row["dirty"],
            row["measured_at_s"],
        )
    )
    rows.sort(key=lambda row: [str(row[key]) for key in SERIES])
    for before, one in itertools.pairwise([{}, *rows]):
        alike = all(before.get(key) == one[key] for key in SERIES)
        for name in ("time", "energy"):
            a, b = before[name] if alike else None, one[name]
            one[f"{name}_change"] = b.deviation_from(a) if a and b else None
    return rows


def to_json(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with plain numbers in place of figures. Changes are fractions, b / a - 1."""
    plain = {key: value for key, value in row.items() if not key.startswith(("time", "energy"))}
    for name, unit in (
        ("time", "us"),
        ("energy", "mj"),
        ("time_change", ""),
        ("energy_change", ""),
    ):
        plain |= figure_json(name, unit, row[name])
    return plain


def _row(revision: str | None, readings: list[ReadingRow]) -> dict[str, Any]:
    sound = [one for one in readings if not UNSOUND.intersection(one.flags)] or readings
    commit, at_s, state = (revision or "  ").split(" ")
    return {
        "revision": commit,
        "dirty": state == "dirty",
        "committed_at_s": float(at_s or 0) or None,
        "measured_at_s": readings[-1].created_at_s,
        "readings": len(sound),
        "flags": sorted({flag for one in sound for flag in one.flags}),
        "time": mean_of([Figure(one.time_us, one.time_half_width_us) for one in sound]),
        "energy": mean_of(
            [
                Figure(one.energy_mj, one.energy_half_width_mj or 0.0)
                for one in sound
                if one.energy_mj
            ]
        ),
    }


def mean_of(figures: list[Figure]) -> Figure | None:
    """The mean of repeated readings; its half-width follows from theirs or from their spread,
    whichever is larger.
    """
    if not (count := len(figures)):
        return None
    values = [figure.value for figure in figures]
    spread = student_t(0.975, count - 1) * stdev(values) / math.sqrt(count) if count > 1 else 0.0
    return Figure(
        fmean(values), max(spread, math.hypot(*(figure.half_width for figure in figures)) / count)
    )
