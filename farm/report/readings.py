"""Single readings: found by the beginning of their id, with the time series that was sampled while they were taken."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from sqlmodel import Session, col, select

from farm.errors import UsageError
from farm.store import tables
from farm.types.protocol import Variant
from farm.types.reading import Trace


@dataclass(frozen=True)
class Traced:
    """A reading with its time series."""

    reading: tables.Reading
    label: str  # of its subject
    trace: Trace

    @property
    def title(self) -> str:
        figures = f"{self.reading.time_us:.4g} µs"
        if self.reading.power_w is not None and self.reading.energy_mj is not None:
            figures += f", {self.reading.power_w:.1f} W, {self.reading.energy_mj:.4g} mJ"
        return f"{self.label}\n{figures} on {self.reading.card_model}, reading {self.reading.id[:12]}"

    @property
    def levels_w(self) -> dict[str, float]:
        """The card's power at rest and at full clocks with nothing to do, where it was read. Unit: W."""
        levels = {"idle": self.reading.idle_power_w, "base": self.reading.base_power_w}
        return {name: value for name, value in levels.items() if value is not None}


def find_traced(session: Session, beginning: str) -> Traced:
    """The one reading whose id begins so.

    Raises:
        UsageError: none or several begin so, it is empty, or the reading has no time series.
    """
    if not beginning.strip():
        raise UsageError("The id of a reading is empty.", "`farm report JOB --readings` lists the ids.")
    found = session.exec(
        select(tables.Reading).where(col(tables.Reading.id).startswith(beginning, autoescape=True)).limit(3)
    ).all()
    where = "`farm report JOB --readings` lists the ids."
    if len(found) != 1:
        problem = "No reading has" if not found else "Several readings have"
        raise UsageError(f"{problem} an id that begins with '{beginning}'.", where)
    reading = found[0]
    kept = session.get(tables.Trace, reading.id)
    if kept is None:
        card = session.get_one(tables.Card, reading.card_id)
        if card.kind == "cuda":
            why = f"came with the export of {reading.origin}" if reading.origin else "is kept"
            raise UsageError(
                f"The reading {reading.id} has no time series: none {why}.",
                "`farm export --traces` takes them along, and `farm db prune` deletes them.",
            )
        raise UsageError(
            f"The reading {reading.id} has no time series: its card tells nothing that could be sampled.",
            "Only readings of cards with power sensors have one: GPUs, but no CPUs.",
        )
    return Traced(reading, label_of(session, reading), Trace.unpack(kept.packed))


def label_of(session: Session, reading: tables.Reading) -> str:
    """What a reading is about, in words."""
    if reading.subject_kind == "operator":
        operator = session.get(tables.Operator, reading.subject_id)
        return operator.label if operator else reading.subject_id
    job = tables.Job
    titled = select(job.title).where(job.variant_id == reading.subject_id).order_by(col(job.created_at_s).desc())
    if title := session.exec(titled.limit(1)).first():
        return title
    row = session.get(tables.ModelVariant, reading.subject_id)  # a study's, which has no job
    if row is None:
        return reading.subject_id
    return str(Variant(**{one.name: getattr(row, one.name) for one in dataclasses.fields(Variant)}))
