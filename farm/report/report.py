"""The report of a job: everything there is to say about it, as plain values, for a terminal, JSON or a plot.

A finished round has its verdict in the database, and that one is shown. While a round is open, what is there so
far is summed up in the same way and marked as preliminary.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlmodel import Session, col, select

from farm.errors import NoSuchJob
from farm.estimate.per_token import PerToken, per_token
from farm.jobs import item_state
from farm.report.all_layers import AllLayers, all_layers
from farm.report.memory_tiers import PlacementRow, placements
from farm.report.owners import OwnerRow, owners
from farm.store import tables
from farm.store.rows import fetch
from farm.store.tables import ItemState, JobState
from farm.types.protocol import Protocol
from farm.types.reading import Verification, inside_s
from farm.types.request import Request
from farm.verdict.aggregate import launch_gap_us
from farm.verdict.choice import choose
from farm.verdict.composing import Evidence, compose, evidence_of
from farm.verdict.figures import Chosen, Part, ReadingView, Whole
from farm.verdict.verdict import VERDICT_SCHEMA, Verdict

SCHEMA = 1

InModel = Mapping[str, Sequence[float | None]]  # tuple id -> what each of its calls took in the running model, in µs
Taken = tuple[Part, Chosen | None]  # a part, and what the sum takes of its reading


@dataclass(frozen=True)
class TupleRow:
    """One operator tuple of the job; figures are of one call, as they went into the sum."""

    operator_id: str
    short_name: str
    label: str
    calls: int
    flops: int
    bytes_moved: int
    estimated_us: float
    time_us: float | None
    time_half_width_us: float | None
    energy_mj: float | None
    energy_half_width_mj: float | None
    used: str  # steady | burst | interpolated | ""
    card_id: str
    reading_id: str | None
    reused: bool
    reason: str  # why it is not measured
    flags: tuple[str, ...]
    data: str = "normal"  # the class of data in its inputs
    in_model_us: float | None = None  # one call where it stands in the running model: the median over its calls
    context_us: float | None = None  # of the time: what its place among other operators changes
    kernels: Mapping[str, int] = field(default_factory=dict)  # launched by one call, on cards where that was looked at

    @property
    def power_w(self) -> float | None:
        return None if self.energy_mj is None or not self.time_us else self.energy_mj / self.time_us * 1e3


@dataclass(frozen=True)
class TypeRow:
    """One operator type, all its calls summed. Shares are of the sums over all types."""

    short_name: str
    calls: int
    tuples: int
    measured_tuples: int
    time_us: float | None  # None: none of its tuples was measured
    time_share: float | None
    energy_mj: float | None  # None: not available for all measured tuples
    energy_share: float | None
    estimated_us: float
    estimated_share: float
    in_model_us: float | None = None  # all its calls where they stand in the running model, a second opinion


@dataclass(frozen=True)
class EagerRow:
    """An operator that an eagerly launched pass calls more or less often than the one that is measured."""

    operator_id: str
    label: str
    launched: int  # calls in the run that is measured
    eager: int
    time_us: float | None  # of one call; None where nobody has read it for this job
    energy_mj: float | None


@dataclass(frozen=True)
class CardView:
    """A card that took part."""

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
    """One round: what it added, why, and how it was judged."""

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
    """Where the readings of the job came from. `repeated` is work that came too late to be accepted."""

    items: int
    measured: int
    reused: int
    failed: int
    open: int
    cancelled: int
    not_run: int  # predicted, and not measured: the card showed that the model does not run them
    repeated: int
    card_time_s: float  # what the card was held for the readings measured for this job, everything included
    window_time_s: float  # of that, inside warm-ups, windows and bursts
    card_time_median_s: float | None  # of one reading


@dataclass(frozen=True)
class Report:
    """A job as it stands. `preliminary`: its round is open, the verdict is of what is there so far."""

    job_id: str
    title: str
    kind: str  # model | sweep
    state: str
    round: int
    created_at_s: float
    ended_at_s: float | None
    request: dict[str, Any]
    protocol: Protocol
    cards: tuple[CardView, ...]
    software: tuple[dict[str, Any], ...]
    flops: int  # of one pass, as the sum of the tuples
    bytes_moved: int
    types: tuple[TypeRow, ...]
    tuples: tuple[TupleRow, ...]
    verdict: Verdict
    preliminary: bool
    rounds: tuple[RoundView, ...]
    readings: ReadingCounts
    capture_origin: str  # predicted | observed | ""
    verification: Verification  # of the capture; without what is told by tuple
    eagerly: tuple[EagerRow, ...] = ()  # what runs otherwise when the model is launched eagerly
    origin: str = ""  # the farm that it was imported from
    all_layers: AllLayers | None = None  # of a model of which some layers were read
    owners: tuple[OwnerRow, ...] = ()  # of a training step
    placements: tuple[PlacementRow, ...] = ()  # where tuples were read with tensors in slow memory, too

    @property
    def per_token(self) -> PerToken:
        """Of the whole model where it was read, else of the sum where all of it was."""
        time, energy, complete = self.verdict.time, self.verdict.energy, self.verdict.measured == self.verdict.parts
        return per_token(
            Request.from_json(self.request).variant,
            time.whole or (time.total if complete else None),
            (energy.whole or (energy.total if complete else None)) if energy else None,
        )

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain JSON with units in the key names; shares and accuracies are fractions."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("cards", "types", "rounds", "eagerly", "owners"):
            data[name] = [vars(entry) for entry in data[name]]
        data["placements"] = [{**vars(row), "times_fast": row.times_fast} for row in self.placements]
        data["tuples"] = [{**vars(row), "power_w": row.power_w} for row in self.tuples]  # asdict would copy each deeply
        if not self.owners:
            del data["owners"]
        if not self.placements:
            del data["placements"]
        if self.all_layers is None:
            del data["all_layers"]
        else:
            data["all_layers"] = self.all_layers.to_json()
        return {
            "schema": SCHEMA,
            **data,
            **dataclasses.asdict(self.per_token),
            "software": list(self.software),
            "protocol": {**self.protocol.to_json(), "id": self.protocol.id},
            "readings": dataclasses.asdict(self.readings),
            "verdict": self.verdict.to_json(),
            "verification": self.verification.to_json(),
        }


def build(session: Session, job_id: str, number: int | None = None) -> Report:
    """The report of a job, of its newest round or of round `number`.

    Raises:
        NoSuchJob: there is no job of that id, or it has no such round.
    """
    # Thousands of tuples make objects of which none goes away; the collector would look at them again and again.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _build(session, job_id, number)
    finally:
        if collecting:
            gc.enable()


def _build(session: Session, job_id: str, number: int | None) -> Report:
    job = session.get(tables.Job, job_id)
    if job is None:
        raise NoSuchJob(f"There is no job '{job_id}'.", "List the jobs with `farm jobs`.")
    shown = job.round if number is None else number
    if not 0 <= shown <= job.round:
        raise NoSuchJob(f"The job {job_id} has no round {shown}.", f"Its newest round is {job.round}.")
    protocol = Request.from_json(job.request).protocol
    evidence = evidence_of(session, job, shown)
    parts, wholes, seen, items = evidence.parts, evidence.wholes, evidence.seen, evidence.items
    stored = _stored_verdict(session, job_id, shown)
    verdict = stored or compose(session, job, evidence)
    if stored is not None and stored.launch_gap_us is None:
        # The other launch may have been read since: it judges nothing, so it may be told later.
        verdict = dataclasses.replace(stored, launch_gap_us=launch_gap_us(wholes))
    in_model = (seen.in_model.calls_us if seen.in_model else None) or {}
    taken = _taken(parts, wholes, protocol.launch)
    if stored is None and job.state == JobState.CANCELLED:
        verdict = _cancelled(verdict, items)
    round_row = session.get(tables.Round, (job_id, shown))
    capture = session.get(tables.Capture, round_row.capture_id) if round_row and round_row.capture_id else None
    return Report(
        job_id=job.id,
        title=job.title,
        kind=job.kind,
        state=job.state,
        round=shown,
        created_at_s=job.created_at_s,
        ended_at_s=job.ended_at_s,
        request=job.request,
        protocol=protocol,
        cards=_cards(session, items, evidence.readings),
        software=_software(session, evidence.readings),
        flops=sum(part.count * part.flops for part in parts),
        bytes_moved=sum(part.count * part.bytes_moved for part in parts),
        types=_types(taken, in_model),
        tuples=_tuples(taken, in_model, seen.tuple_kernels or {}),
        verdict=verdict,
        preliminary=stored is None,
        rounds=_rounds(session, job_id, shown, items),
        readings=_counts(items, evidence.readings),
        capture_origin=capture.origin.removeprefix(tables.IMPORTED) if capture else "",
        verification=_without_calls(seen),
        eagerly=_eagerly(evidence),
        origin=session.scalar(select(tables.ImportedVerdict.origin).where(tables.ImportedVerdict.job_id == job_id))
        or "",
        all_layers=all_layers(session, job, capture, evidence),
        owners=_owners(session, capture, taken, protocol.data),
        placements=placements(session, parts, items, evidence.readings) if job.asked.get("placements") else (),
    )


def _eagerly(evidence: Evidence) -> tuple[EagerRow, ...]:
    """What an eager pass runs otherwise, with what a call takes: what was predicted was read in an earlier round."""
    if not evidence.seen.eagerly or not evidence.seen.eagerly.operators:
        return ()
    wholes = [whole.reading for whole in evidence.wholes if whole.reading]
    read = {
        item.subject_id: row
        for item in evidence.items
        if item.role == "tuple" and (row := evidence.readings.get(item.reading_id or "")) is not None
    }
    found = []
    for entry in evidence.seen.eagerly.operators:
        row = read.get(entry.operator_id)
        taken = choose(ReadingView.of(row), wholes, entry.operator_id) if row else None
        energy = taken.energy if taken else None
        found.append(
            EagerRow(
                **vars(entry), time_us=taken.time.value if taken else None, energy_mj=energy.value if energy else None
            )
        )
    return tuple(sorted(found, key=lambda row: -abs(row.launched - row.eager) * (row.time_us or 0.0)))


def _stored_verdict(session: Session, job_id: str, number: int) -> Verdict | None:
    query = select(tables.Verdict).where(tables.Verdict.job_id == job_id, tables.Verdict.round == number)
    row = session.exec(query).first()
    # One of another version is worked out anew from the same readings.
    return Verdict.from_json(row.details) if row and row.details.get("schema") == VERDICT_SCHEMA else None


def _cancelled(verdict: Verdict, items: Sequence[Any]) -> Verdict:
    """What was read before the end is no basis for a verdict."""
    begun = sum(item.state in (ItemState.DONE, ItemState.FAILED) for item in items)
    return verdict.withheld(f"Cancelled after {begun} of {len(items)} items; the same command goes on.")


def _taken(parts: Sequence[Part], wholes: Sequence[Whole], launch: str) -> list[Taken]:
    own = [whole.reading for whole in wholes if whole.reading and whole.launch in ("", launch)]
    return [(part, choose(part.reading, own, part.operator_id) if part.reading else None) for part in parts]


def _owners(
    session: Session, capture: tables.Capture | None, taken: Sequence[Taken], data: str
) -> tuple[OwnerRow, ...]:
    if capture is None or capture.id is None:
        return ()
    return owners(session, capture.id, {part.key: chosen for part, chosen in taken if chosen}, data)


def _without_calls(seen: Verification) -> Verification:
    """The single calls' times and the kernels of tuples are told by tuple."""
    timed = dataclasses.replace(seen.in_model, calls_us=None) if seen.in_model else None
    return dataclasses.replace(seen, tuple_kernels=None, in_model=timed)


def _in_model_us(parts: Sequence[Part], in_model: InModel) -> float | None:
    """All calls of some tuples, None where one of them is not known. Data classes share their tuple's calls."""
    if not in_model:
        return None
    values = [value for operator_id in {part.operator_id for part in parts} for value in in_model.get(operator_id, ())]
    wanted = sum(part.count for part in parts)
    known = [value for value in values if value is not None]
    return math.fsum(known) if wanted and len(known) == wanted else None


def _tuples(
    taken: Sequence[Taken], in_model: InModel, kernels: Mapping[str, Mapping[str, int]]
) -> tuple[TupleRow, ...]:
    rows = []
    for part, chosen in taken:
        energy = chosen.energy if chosen else None
        timed = [value for value in in_model.get(part.operator_id, ()) if value is not None]
        rows.append(
            TupleRow(
                operator_id=part.operator_id,
                short_name=part.short_name,
                label=part.label,
                calls=part.count,
                flops=part.flops,
                bytes_moved=part.bytes_moved,
                estimated_us=part.estimated_us,
                time_us=chosen.time.value if chosen else None,
                time_half_width_us=chosen.time.half_width if chosen else None,
                energy_mj=energy.value if energy else None,
                energy_half_width_mj=energy.half_width if energy else None,
                used=chosen.used if chosen else "",
                card_id=part.card_id,
                reading_id=part.reading.reading_id if part.reading else None,
                reused=part.reused,
                reason=part.reason,
                flags=part.reading.flags if part.reading else (),
                in_model_us=statistics.median(timed) if timed else None,
                data=part.data,
                context_us=chosen.context_us if chosen else None,
                kernels=dict(kernels.get(part.operator_id, {})),
            )
        )
    return tuple(sorted(rows, key=lambda row: -(row.calls * (row.time_us or 0.0))))


def _types(taken: Sequence[Taken], in_model: InModel) -> tuple[TypeRow, ...]:
    groups: dict[str, list[Taken]] = defaultdict(list)
    for one in taken:
        groups[one[0].short_name].append(one)
    time_sum = sum(part.count * chosen.time.value for part, chosen in taken if chosen)
    energies = [(part.count, chosen.energy) for part, chosen in taken if chosen]
    energy_sum = sum(count * energy.value for count, energy in energies if energy)
    estimate_sum = sum(part.weight_us for part, _ in taken)
    # A share of a sum with holes in it would mislead.
    whole_energy = bool(energies) and all(energy for _, energy in energies)
    rows = []
    for name, group in groups.items():
        parts = [part for part, _ in group]
        read = [(part.count, chosen) for part, chosen in group if chosen]
        time_us = sum(count * chosen.time.value for count, chosen in read) if read else None
        known = [count * chosen.energy.value for count, chosen in read if chosen.energy]
        energy_mj = sum(known) if read and len(known) == len(read) else None
        estimated_us = sum(part.weight_us for part in parts)
        rows.append(
            TypeRow(
                short_name=name,
                calls=sum(part.count for part in parts),
                tuples=len(group),
                measured_tuples=len(read),
                time_us=time_us,
                time_share=time_us / time_sum if time_us is not None and time_sum else None,
                energy_mj=energy_mj,
                energy_share=energy_mj / energy_sum if energy_mj is not None and whole_energy and energy_sum else None,
                estimated_us=estimated_us,
                estimated_share=estimated_us / estimate_sum if estimate_sum else 0.0,
                in_model_us=_in_model_us(parts, in_model),
            )
        )
    return tuple(sorted(rows, key=lambda row: (-(row.time_us or 0.0), -row.estimated_us)))


def _cards(session: Session, items: Sequence[Any], rows: dict[str, Any]) -> tuple[CardView, ...]:
    readings = Counter(row.card_id for row in rows.values())
    ids = dict.fromkeys([*readings, *(item.card_id for item in items)])
    known = fetch(session, tables.Card, ids)
    views = [
        CardView(
            id=card.id,
            kind=card.kind,
            model=card.model,
            host=card.host,
            memory_bytes=card.memory_bytes,
            driver=card.driver,
            readings=readings[card.id],
            simulated=card.kind == "simulated",
        )
        for card in known.values()
    ]
    return tuple(sorted(views, key=lambda view: (-view.readings, view.id)))


def _software(session: Session, rows: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    found = fetch(session, tables.Software, (row.software_id for row in rows.values()))
    return tuple(software.model_dump() for software in found.values())


def _rounds(session: Session, job_id: str, shown: int, items: Sequence[Any]) -> tuple[RoundView, ...]:
    added = Counter(item.round for item in items)
    verdicts = {
        row.round: row for row in session.exec(select(tables.Verdict).where(tables.Verdict.job_id == job_id)).all()
    }
    rounds = session.exec(
        select(tables.Round)
        .where(tables.Round.job_id == job_id, col(tables.Round.number) <= shown)
        .order_by(col(tables.Round.number))
    ).all()
    views = []
    for row in rounds:
        verdict = verdicts.get(row.number)
        views.append(
            RoundView(
                number=row.number,
                reason=row.reason,
                operators=tuple(row.operators),
                items=added[row.number],
                outcome=verdict.outcome if verdict else None,
                accuracy_time=verdict.accuracy_time if verdict else None,
                accuracy_energy=verdict.accuracy_energy if verdict else None,
                coverage=verdict.coverage if verdict else None,
            )
        )
    return tuple(views)


def _counts(items: Sequence[Any], rows: dict[str, Any]) -> ReadingCounts:
    states = Counter(item.state for item in items)
    not_run = sum(item.reason == item_state.NOT_RUN for item in items)
    own = [item.reading_id for item in items if item.state == ItemState.DONE and not item.reused]
    costs = [rows[reading_id].cost_s for reading_id in dict.fromkeys(own) if reading_id in rows]
    totals = [cost["total"] if "total" in cost else sum(cost.values()) for cost in costs]
    return ReadingCounts(
        items=len(items),
        measured=len(own),
        reused=states[ItemState.DONE] - len(own),
        failed=states[ItemState.FAILED],
        open=sum(number for state, number in states.items() if not ItemState(state).closed),
        cancelled=states[ItemState.CANCELLED] - not_run,
        not_run=not_run,
        repeated=sum(item.repeated for item in items),
        card_time_s=math.fsum(totals),
        window_time_s=math.fsum(inside_s(cost) for cost in costs),
        card_time_median_s=statistics.median(totals) if totals else None,
    )
