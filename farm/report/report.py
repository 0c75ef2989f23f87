"""Computes the report of a job as plain values, for the terminal, JSON or an HTML page.

The report of a closed round shows the stored verdict with its tuples. If the round is open, or the
verdict is stored without tuples, they are computed as at the end of a round. The report of an open
round is marked as preliminary."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlalchemy.orm import defer
from sqlmodel import Session, col, select

from farm.errors import NoSuchJob
from farm.jobs import item_state
from farm.report.breakdowns import AllLayers, OwnerRow, PlacementRow, all_layers, owners, placements
from farm.report.operators import CompiledJob, compiled_job
from farm.store import tables
from farm.store.columns import ITEM
from farm.store.database import by_key, fetch
from farm.store.tables import CLOSED, ItemState, JobState
from farm.types import format as formats
from farm.types.figure import share_of
from farm.types.protocol import Protocol
from farm.types.reading import OtherCalls, RankFigures, Verification, inside_s
from farm.types.request import Request
from farm.verdict.aggregate import choose, launch_gap_us
from farm.verdict.evidence import Evidence
from farm.verdict.figures import PerToken, ReadingView
from farm.verdict.verdict import VERDICT_SCHEMA, Sums, TupleRow, Verdict, sums_of

SCHEMA = 1

CallTimes = Mapping[
    str, Sequence[float]
]  # tuple id -> time of each observed call in the running model, in µs
_OF_JOB = ("title", "kind", "state", "created_at_s", "ended_at_s", "request")
_OF_CARD = ("id", "kind", "model", "host", "memory_bytes", "driver")


@dataclass(frozen=True)
class TypeRow:
    """One operator type: the sum over all its calls. Shares are shares of the sum over all
    types.
    """

    short_name: str
    calls: int
    tuples: int
    measured_tuples: int
    time_us: float | None  # None: no tuple of this type is measured
    time_share: float | None
    energy_mj: float | None  # None: a measured tuple has no energy
    energy_share: float | None
    estimated_us: float
    estimated_share: float
    in_model_us: float | None = None  # time of all calls in the running model


@dataclass(frozen=True)
class EagerRow(OtherCalls):
    """An operator that an eager pass calls more or less often than the measured pass."""

    time_us: float | None  # time of one call; None: not measured for this job
    energy_mj: float | None


@dataclass(frozen=True)
class ReportCard:
    """A card of the job."""

    id: str
    kind: str
    model: str
    host: str
    memory_bytes: int
    driver: str
    readings: int
    simulated: bool = False


@dataclass(frozen=True)
class RoundView:
    """One round: its new operator types, why it was added, and its outcome (``listed``: it lists
    the kernels).
    """

    number: int
    reason: str
    operators: tuple[str, ...]
    items: int
    outcome: str | None
    accuracy_time: float | None
    accuracy_energy: float | None
    coverage: float | None


@dataclass(frozen=True)
class ReadingCounts:
    """The readings of a job, counted by origin. `repeated` counts results that came too late to be
    accepted.
    """

    items: int
    measured: int
    reused: int
    failed: int
    open: int
    cancelled: int
    # predicted tuples that were not measured, because the model did not call them on the card
    not_run: int
    repeated: int
    card_time_s: float  # total card time of the readings that were measured for this job
    window_time_s: float  # part of it in warm-ups, windows and bursts
    card_time_median_s: float | None  # median card time of one reading


@dataclass(frozen=True)
class Report:
    """The state of a job. If `preliminary`, the round is open and the verdict uses the readings so
    far.
    """

    job_id: str
    title: str
    kind: str  # model | sweep
    state: str
    round: int
    created_at_s: float
    ended_at_s: float | None
    request: dict[str, Any]
    protocol: Protocol
    cards: tuple[ReportCard, ...]
    software: tuple[dict[str, Any], ...]
    flops: int  # FLOPs of one pass: the sum over the tuples
    bytes_moved: int
    types: tuple[TypeRow, ...]
    tuples: tuple[TupleRow, ...]
    verdict: Verdict
    preliminary: bool
    rounds: tuple[RoundView, ...]
    readings: ReadingCounts
    capture_origin: str  # predicted | observed | ""
    verification: Verification  # verification of the capture, without the values of single tuples
    eagerly: tuple[EagerRow, ...] = ()  # operators that an eager pass calls more or less often
    origin: str = ""  # the farm from which the job was imported; "": this farm
    all_layers: AllLayers | None = None  # only if some layers of the model were measured
    owners: tuple[OwnerRow, ...] = ()  # only for a training step
    placements: tuple[
        PlacementRow, ...
    ] = ()  # only if tuples were measured with tensors in slow memory
    compiled: CompiledJob | None = None  # only of a compiled model
    ranks: tuple[RankFigures, ...] = ()  # of the whole model on several cards

    @property
    def per_token(self) -> PerToken:
        """Cost per token of the whole model. If only the sum is complete, the cost of the sum."""
        complete = self.verdict.measured == self.verdict.parts
        time, energy = (
            (one.whole or (one.total if complete else None)) if one else None
            for one in (self.verdict.time, self.verdict.energy)
        )
        return PerToken.of(Request.from_json(self.request).variant, time, energy)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON with units in the key names; shares and accuracies are
        fractions.
        """
        # `asdict` would deep-copy thousands of rows.
        optional = {
            "owners": [vars(row) for row in self.owners],
            "placements": [{**vars(row), "times_fast": row.times_fast} for row in self.placements],
            "all_layers": self.all_layers and self.all_layers.to_json(),
            "compiled": self.compiled and self.compiled.to_json(),
            "ranks": [vars(rank) for rank in self.ranks],
        }
        return {
            "schema": SCHEMA,
            **{name: value for name, value in vars(self).items() if name not in optional},
            **{
                name: [vars(row) for row in getattr(self, name)]
                for name in ("cards", "types", "rounds", "eagerly")
            },
            **{name: value for name, value in optional.items() if value},
            **asdict(self.per_token),
            "tuples": [{**vars(row), "power_w": row.power_w} for row in self.tuples],
            "software": list(self.software),
            "protocol": {**self.protocol.to_json(), "id": self.protocol.id},
            "readings": asdict(self.readings),
            "verdict": self.verdict.to_json(),
            "verification": self.verification.to_json(),
        }


def build(session: Session, job_id: str) -> Report:
    """Compute the report of a job's newest round. Raises `NoSuchJob`."""
    job = session.get(tables.Job, job_id)
    if job is None:
        raise NoSuchJob(f"There is no job '{job_id}'.", "List the jobs with `farm jobs`.")
    request, evidence = Request.from_json(job.request), Evidence(session, job, job.round)
    protocol, variant = request.protocol, request.variant
    of_rounds = select(tables.VerdictRow).where(tables.VerdictRow.job_id == job_id)
    without_details = of_rounds.options(defer(tables.VerdictRow.details))  # type: ignore[arg-type]
    verdicts = {row.round: row for row in session.exec(without_details)}
    verdict, preliminary = _verdict(evidence, verdicts.get(job.round))
    seen = evidence.seen
    calls_us = (seen.in_model.calls_us if seen.in_model else None) or {}
    known_us = {
        id_: [value for value in values if value is not None] for id_, values in calls_us.items()
    }
    tuples = _with_observed(verdict.tuples, known_us, seen.tuple_kernels or {})
    sums = verdict.types or sums_of(tuples)
    capture = session.get(tables.Capture, evidence.capture_id) if evidence.capture_id else None
    imported = select(tables.ImportedVerdict.origin).where(tables.ImportedVerdict.job_id == job_id)
    of_cards, software_ids, totals_s, within_s = _read(evidence)
    of_job: dict[str, Any] = {name: getattr(job, name) for name in _OF_JOB}
    return Report(
        **of_job,
        job_id=job.id,
        round=job.round,
        protocol=protocol,
        cards=_cards(evidence, of_cards),
        software=tuple(
            row.model_dump() for row in fetch(session, tables.SoftwareRow, software_ids).values()
        ),
        flops=sum(one["flops"] for one in sums.values()),
        bytes_moved=sum(one["bytes_moved"] for one in sums.values()),
        types=_types(sums, tuples, known_us),
        tuples=tuples,
        verdict=verdict,
        preliminary=preliminary,
        rounds=_rounds(evidence, verdicts),
        readings=_counts(evidence, totals_s, within_s),
        capture_origin=tables.captured_as(capture.origin) if capture else "",
        verification=replace(
            seen,
            tuple_kernels=None,
            in_model=replace(seen.in_model, calls_us=None) if seen.in_model else None,
        ),
        eagerly=_eagerly(evidence),
        origin=session.exec(imported).first() or "",
        all_layers=all_layers(evidence, variant, capture, verdict)
        if variant and variant.layers and capture
        else None,
        owners=owners(session, evidence.capture_id, tuples, protocol.data)
        if evidence.capture_id and variant and variant.step
        else (),
        placements=placements(evidence) if job.asked.get("placements") else (),
        compiled=compiled_job(session, capture, tuples, evidence.roofline) if capture else None,
        ranks=next(
            (
                found
                for one in evidence.wholes
                if one.reading and (found := one.reading.details.ranks)
            ),
            (),
        ),
    )


def _verdict(evidence: Evidence, row: tables.VerdictRow | None) -> tuple[Verdict, bool]:
    """Return (stored verdict, False). If there is none, return (verdict of the readings so far,
    True).
    """
    if row is not None and row.details.get("schema") == VERDICT_SCHEMA:
        stored = Verdict.from_json(row.details)
        if stored.launch_gap_us is None:
            # The other launch may be measured after the verdict. It does not affect the outcome.
            stored = replace(stored, launch_gap_us=launch_gap_us(evidence.wholes))
        return stored if stored.tuples else replace(stored, tuples=evidence.tuples), False
    verdict, states = evidence.verdict(), _number_by(evidence, "state")
    if evidence.job.state == JobState.CANCELLED:
        begun = states[ItemState.DONE] + states[ItemState.FAILED]
        reason = (
            f"Cancelled after {begun} of {states.total()} items. Run the same command again to "
            "continue the job."
        )
        verdict = verdict.withheld(reason)
    return verdict, True


def _with_observed(
    rows: tuple[TupleRow, ...], known_us: CallTimes, kernels: Mapping[str, Mapping[str, int]]
) -> tuple[TupleRow, ...]:
    """Add the observed times in the running model and the observed kernels to the tuples."""
    if not known_us and not kernels:
        return rows
    medians = {id_: statistics.median(values) for id_, values in known_us.items() if values}
    return tuple(
        replace(
            row,
            in_model_us=medians.get(row.operator_id),
            kernels=dict(kernels.get(row.operator_id, {})),
        )
        for row in rows
    )


def _types(sums: Sums, tuples: Sequence[TupleRow], known_us: CallTimes) -> tuple[TypeRow, ...]:
    groups = by_key(lambda row: row.short_name, tuples)
    total_us, total_mj, total_estimated_us = _figures(*sums.values())
    rows = []
    for name, one in sums.items():
        time_us, energy_mj, estimated_us = _figures(one)
        # Rows of one tuple with different data classes share its calls.
        in_model = [
            value
            for id_ in {row.operator_id for row in groups[name]}
            for value in known_us.get(id_, ())
        ]
        rows.append(
            TypeRow(
                short_name=name,
                **{key: one[key] for key in ("calls", "tuples", "measured_tuples")},
                time_us=time_us,
                time_share=share_of(time_us, total_us),
                energy_mj=energy_mj,
                energy_share=share_of(energy_mj, total_mj),
                estimated_us=estimated_us,
                estimated_share=share_of(estimated_us, total_estimated_us) or 0.0,
                in_model_us=math.fsum(in_model)
                if one["calls"] and len(in_model) == one["calls"]
                else None,
            )
        )
    return tuple(sorted(rows, key=lambda row: (-(row.time_us or 0.0), -row.estimated_us)))


def _figures(*sums: Mapping[str, Any]) -> tuple[float | None, float | None, float]:
    """Return time (µs) and energy (mJ; None if one is missing) of measured tuples, and the
    estimated time of all.
    """
    keys = ("measured_tuples", "without_energy", "time_us", "energy_mj", "estimated_us")
    measured, without, time_us, energy_mj, estimated_us = (
        sum(one[key] for one in sums) for key in keys
    )
    return (
        time_us if measured else None,
        energy_mj if measured and not without else None,
        estimated_us,
    )


def _eagerly(evidence: Evidence) -> tuple[EagerRow, ...]:
    """The operators that an eager pass calls more or less often, with the cost of a call if a round
    measured it.
    """
    if not evidence.seen.eagerly or not evidence.seen.eagerly.operators:
        return ()
    wholes = [whole.reading for whole in evidence.wholes if whole.reading]
    read = {
        item.subject_id: evidence.readings[item.reading_id]
        for item in evidence.items
        if item.role == "tuple" and item.reading_id in evidence.readings
    }
    found = []
    for entry in evidence.seen.eagerly.operators:
        row = read.get(entry.operator_id)
        chosen = choose(ReadingView.of(row), wholes, entry.operator_id) if row else None
        energy_mj = chosen.energy.value if chosen and chosen.energy else None
        found.append(
            EagerRow(
                **vars(entry), time_us=chosen.time.value if chosen else None, energy_mj=energy_mj
            )
        )
    return tuple(
        sorted(found, key=lambda row: -abs(row.launched - row.eager) * (row.time_us or 0.0))
    )


def _number_by(evidence: Evidence, name: str) -> Counter[Any]:
    """Return value of a column -> number of the job's items."""
    found = Counter[Any]()
    for row in evidence.tallies:
        found[getattr(row, name)] += row.items
    return found


def _read(evidence: Evidence) -> tuple[Counter[str], set[str], list[float], float]:
    """Return the number of readings by card, their software, and the card time in seconds of those
    that were measured for this job: each total, and the sum within warm-ups, windows and bursts."""
    cards, software_ids, totals_s, within_s = Counter[str](), set[str](), list[float](), 0.0
    for one in evidence.chunks():
        rows = one.origins_of_readings
        cards.update(row.card_id for row in rows.values())
        software_ids.update(row.software_id for row in rows.values())
        own = sqlalchemy.select(ITEM.reading_id).where(
            *one.its, ITEM.state == ItemState.DONE, ITEM.reused.is_(False)
        )
        costs = [
            rows[id_].cost_s for id_ in evidence.session.scalars(own.distinct()) if id_ in rows
        ]
        totals_s += [cost["total"] if "total" in cost else sum(cost.values()) for cost in costs]
        within_s += math.fsum(map(inside_s, costs))
    return cards, software_ids, totals_s, within_s


def _cards(evidence: Evidence, readings: Mapping[str, int]) -> tuple[ReportCard, ...]:
    views = []
    ids = dict.fromkeys([*readings, *_number_by(evidence, "card_id")])
    for card in fetch(evidence.session, tables.CardRow, ids).values():
        of_card: dict[str, Any] = {name: getattr(card, name) for name in _OF_CARD}
        views.append(
            ReportCard(
                **of_card, readings=readings.get(card.id, 0), simulated=card.kind == "simulated"
            )
        )
    return tuple(sorted(views, key=lambda view: (-view.readings, view.id)))


def _rounds(evidence: Evidence, verdicts: Mapping[int, tables.VerdictRow]) -> tuple[RoundView, ...]:
    added = _number_by(evidence, "round")
    row = tables.Round
    its = (
        select(row)
        .where(row.job_id == evidence.job.id, row.number <= evidence.number)
        .order_by(col(row.number))
    )
    of_verdict = ("outcome", "accuracy_time", "accuracy_energy", "coverage")
    rounds = evidence.session.exec(its).all()
    views = [
        RoundView(
            found.number,
            found.reason,
            tuple(found.operators),
            added[found.number],
            *(getattr(verdicts.get(found.number), name, None) for name in of_verdict),
        )
        for found in rounds
    ]
    first = (
        evidence.session.get(tables.Capture, rounds[0].capture_id)
        if views[1:] and rounds[0].capture_id
        else None
    )
    if first and first.card_model and first.compiled is None:
        views[0] = replace(views[0], outcome="listed")
    return tuple(views)


def _counts(evidence: Evidence, totals_s: Sequence[float], within_s: float) -> ReadingCounts:
    states = _number_by(evidence, "state")
    not_run = _number_by(evidence, "reason")[item_state.NOT_RUN]
    reused = sum(
        row.items for row in evidence.tallies if row.state == ItemState.DONE and row.reused
    )
    return ReadingCounts(
        items=states.total(),
        measured=states[ItemState.DONE] - reused,
        reused=reused,
        failed=states[ItemState.FAILED],
        open=sum(number for state, number in states.items() if state not in CLOSED),
        cancelled=states[ItemState.CANCELLED] - not_run,
        not_run=not_run,
        repeated=sum(row.repeated for row in evidence.tallies),
        card_time_s=math.fsum(totals_s),
        window_time_s=within_s,
        card_time_median_s=statistics.median(totals_s) if totals_s else None,
    )


def remarks(report: Report) -> Iterator[tuple[str, str]]:
    """Yield (topic, text) of each remark, from the blocks of ``remarks.txt``. `farm help` explains
    the topics.
    """
    template = _remarks_template()
    empty = sum("zeros-100" in row.data.partition("/")[2].split(",") for row in report.tuples)
    facts = {
        "report": report,
        "verdict": report.verdict,
        "seen": report.verification,
        "empty": empty,
    }
    context = template.new_context({**facts, "now_s": time.time()})
    for name, block in template.blocks.items():
        lines = map(str.strip, "".join(block(context)).splitlines())
        if text := " ".join(filter(None, lines)):
            yield name.replace("_", " "), text


@functools.cache
def _remarks_template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        {name: getattr(formats, name) for name in ("percent", "plural", "span")},
        form=format,
        time=lambda time_us: formats.quantity(time_us, formats.TIME),
        energy=lambda energy_mj: formats.quantity(energy_mj, formats.ENERGY),
        interval=lambda figure, units: formats.interval(figure, getattr(formats, units)),
        kernel_name=_kernel_name,
    )
    return environment.from_string(Path(__file__).with_name("remarks.txt").read_text("utf-8"))


def _kernel_name(name: str) -> str:
    """Shorten a kernel's name: no return type and no template arguments."""
    short = name.removeprefix("void ").split("<")[0].split("(")[0].strip() or name
    return short if len(short) <= 48 else f"{short[:47]}…"
