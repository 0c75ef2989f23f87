"""Computes the report of a job as plain values, for the terminal, JSON or an HTML page.

The report of a closed round shows the stored verdict with its tuples. If the round is open, or the
verdict is stored without tuples, they are computed as at the end of a round. The report of an open
round is marked as preliminary."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlalchemy.orm import defer
from sqlmodel import Session, col, select

from farm.errors import NoSuchJob
from farm.report.all_layers import AllLayers, all_layers
from farm.report.kernels import JobKernels, job_kernels
from farm.report.owners import OwnerRow, owners
from farm.report.placements import PlacementRow, placements
from farm.store import item_state, tables
from farm.store.captures import is_unlisted, tuples_of_capture
from farm.store.columns import ITEM, READING
from farm.store.database import fetch, values
from farm.store.tables import CLOSED, ItemRole, ItemState, JobState
from farm.types import format as formats
from farm.types.card_kind import OfCardKind
from farm.types.details import RankFigures
from farm.types.figure import share_of, value_of
from farm.types.protocol import Protocol
from farm.types.reading import inside_s
from farm.types.request import OfJobKind, Request
from farm.types.roofline import Roofline
from farm.types.stored import plain
from farm.types.variant import Variant
from farm.types.verification import OtherCalls, Verification
from farm.verdict.aggregate import launch_gap_us, sums_of
from farm.verdict.corrections import cost_in_model
from farm.verdict.cost_line import CostGroup, CostLine, merged
from farm.verdict.figures import CallCost, PerToken, ReadingView
from farm.verdict.job_results import JobResults
from farm.verdict.token_floor import TokenFloor, has_floor, implementation_of, token_floor
from farm.verdict.verdict import VERDICT_SCHEMA, Sums, Verdict

SCHEMA = 1

# tuple id -> time of each observed call in the running model, in µs
CallTimes = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class TypeRow:
    """One operator type: the sum over all its calls. Shares are shares of the sum over all
    types.
    """

    short_name: str
    cost: CostGroup
    total: CostGroup  # of all types
    in_model_us: float | None = None  # time of all calls in the running model

    @property
    def time_share(self) -> float | None:
        return share_of(self.cost.measured_us, self.total.measured_us)

    @property
    def energy_share(self) -> float | None:
        return share_of(self.cost.measured_mj, self.total.measured_mj)

    @property
    def estimated_share(self) -> float:
        return share_of(self.cost.estimated_us, self.total.estimated_us) or 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "short_name": self.short_name,
            "calls": self.cost.calls,
            "tuples": self.cost.tuples,
            "measured_tuples": self.cost.measured_tuples,
            "time_us": self.cost.measured_us,
            "time_share": self.time_share,
            "energy_mj": self.cost.measured_mj,
            "energy_share": self.energy_share,
            "estimated_us": self.cost.estimated_us,
            "estimated_share": self.estimated_share,
            "in_model_us": self.in_model_us,
        }


@dataclass(frozen=True)
class EagerRow(OtherCalls):
    """An operator that an eager pass calls more or less often than the measured pass."""

    cost: CallCost | None  # of one call; None: not measured for this job

    def to_json(self) -> dict[str, Any]:
        energy = self.cost.energy_mj if self.cost else None
        return {
            "operator_id": self.operator_id,
            "label": self.label,
            "launched": self.launched,
            "eager": self.eager,
            "time_us": self.cost.time_us.value if self.cost else None,
            "energy_mj": value_of(energy),
        }


@dataclass(frozen=True)
class ReportCard(OfCardKind):
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
    outcome: str | None = None
    #: Quantity -> accuracy, for time and energy.
    accuracies: Mapping[str, float | None] = field(default_factory=dict)
    coverage: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "reason": self.reason,
            "operators": self.operators,
            "items": self.items,
            "outcome": self.outcome,
            "accuracy_time": self.accuracies.get("time"),
            "accuracy_energy": self.accuracies.get("energy"),
            "coverage": self.coverage,
        }


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
class Report(OfJobKind):
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
    tuples: tuple[CostLine, ...]
    verdict: Verdict
    preliminary: bool
    rounds: tuple[RoundView, ...]
    readings: ReadingCounts
    capture_origin: str  # predicted | observed | ""
    verification: Verification  # verification of the capture, without the values of single tuples
    roofline: Roofline  # of the most frequent card; the JSON does not have it
    eagerly: tuple[EagerRow, ...] = ()  # operators that an eager pass calls more or less often
    origin: str = ""  # the farm from which the job was imported; "": this farm
    all_layers: AllLayers | None = None  # only if some layers of the model were measured
    owners: tuple[OwnerRow, ...] = ()  # only for a training step
    # only if tuples were measured with tensors in slow memory
    placements: tuple[PlacementRow, ...] = ()
    compiled: JobKernels | None = None  # only of a compiled model
    ranks: tuple[RankFigures, ...] = ()  # of the whole model on several cards
    floor: TokenFloor | None = None  # only of a decode

    @property
    def on_cpu(self) -> bool:
        return any(card.is_cpu for card in self.cards)

    @property
    def cost(self) -> CostGroup:
        """The cost of all operator types together."""
        return merged(row.cost for row in self.types)

    @property
    def implementation(self) -> str:
        """Which implementation tokens per second are of; "" for a model without tokens."""
        return implementation_of(Request.from_json(self.request).variant)

    @property
    def per_token(self) -> PerToken:
        """Cost per token of the whole model. If only the sum is complete, the cost of the sum."""
        verdict = self.verdict
        complete = verdict.measured == verdict.parts
        time = verdict.time.whole or (verdict.time.total if complete else None)
        energy = None
        if verdict.energy:
            energy = verdict.energy.whole or (verdict.energy.total if complete else None)
        return PerToken.of(Request.from_json(self.request).variant, time, energy)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON with units in the key names; shares and accuracies are
        fractions.
        """
        # `asdict` would deep-copy thousands of rows.
        optional = {
            "owners": [row.to_json() for row in self.owners],
            "placements": [row.to_json() for row in self.placements],
            "all_layers": self.all_layers and self.all_layers.to_json(),
            "compiled": self.compiled and self.compiled.to_json(),
            "ranks": [plain(rank) for rank in self.ranks],
            "implementation": self.implementation,
            "floor": self.floor and self.floor.to_json(),
        }
        data: dict[str, Any] = {"schema": SCHEMA}
        data |= {name: value for name, value in vars(self).items() if name not in optional}
        data |= {name: value for name, value in optional.items() if value}
        del data["roofline"]
        data |= asdict(self.per_token)
        data["cards"] = [vars(card) for card in self.cards]
        data["types"] = [row.to_json() for row in self.types]
        data["rounds"] = [view.to_json() for view in self.rounds]
        data["eagerly"] = [row.to_json() for row in self.eagerly]
        data["tuples"] = [line.to_json() for line in self.tuples]
        data["software"] = list(self.software)
        data["protocol"] = {**self.protocol.to_json(), "id": self.protocol.id}
        data["readings"] = asdict(self.readings)
        data["verdict"] = self.verdict.to_json()
        data["verification"] = self.verification.to_json()
        return data


def build(session: Session, job_id: str) -> Report:
    """Compute the report of a job's newest round. Raises `NoSuchJob`."""
    job = session.get(tables.Job, job_id)
    if job is None:
        raise NoSuchJob(f"There is no job '{job_id}'.", "List the jobs with `farm jobs`.")
    request, results = Request.from_json(job.request), JobResults(session, job, job.round)
    protocol, variant = request.protocol, request.variant
    verdicts = _verdict_rows(session, job_id)
    verdict, preliminary = _verdict(results, verdicts.get(job.round))
    verification = results.verification
    in_model_us = _in_model_us(verification)
    tuples = _with_observed(verdict.tuples, in_model_us, verification.tuple_kernels or {})
    sums = verdict.types or sums_of(tuples)
    capture = session.get(tables.Capture, results.capture_id) if results.capture_id else None
    origins = _origins(results)
    software_ids = dict.fromkeys(software_id for _, software_id in origins)

    layers = compiled = None
    rows_of_owners: tuple[OwnerRow, ...] = ()
    rows_of_placements: tuple[PlacementRow, ...] = ()
    if request.measures_slow_memory:
        rows_of_placements = placements(results)
    if variant and capture and capture.id:
        if variant.layers:
            layers = all_layers(results, variant, capture, verdict)
        rows_of_owners = owners(session, capture.id, tuples, protocol.data)
        if capture.compiled is not None:
            compiled = job_kernels(session, capture, tuples, results.roofline)
    return Report(
        job_id=job.id,
        title=job.title,
        kind=job.kind,
        state=job.state,
        round=job.round,
        created_at_s=job.created_at_s,
        ended_at_s=job.ended_at_s,
        request=job.request,
        protocol=protocol,
        cards=_cards(results, origins),
        software=tuple(
            row.model_dump() for row in fetch(session, tables.SoftwareRow, software_ids).values()
        ),
        flops=sum(group.flops for group in sums.values()),
        bytes_moved=sum(group.bytes_moved for group in sums.values()),
        types=_types(sums, tuples, in_model_us),
        tuples=tuples,
        verdict=verdict,
        preliminary=preliminary,
        rounds=_rounds(results, verdicts),
        readings=_counts(results),
        capture_origin=tables.captured_as(capture.origin) if capture else "",
        verification=_without_single_tuples(verification),
        roofline=results.roofline,
        eagerly=_eagerly(results),
        origin=_imported_from(session, job_id),
        all_layers=layers,
        owners=rows_of_owners,
        placements=rows_of_placements,
        compiled=compiled,
        ranks=_ranks(results),
        floor=_floor(results, variant, tuples),
    )


def _floor(
    results: JobResults, variant: Variant | None, lines: Sequence[CostLine]
) -> TokenFloor | None:
    """Return the floor of a decode that was captured."""
    if variant is None or not results.capture_id or not has_floor(variant):
        return None
    calls = Counter[str]()
    total_us: dict[str, float] = defaultdict(float)
    for line in lines:
        calls[line.subject.operator_id] += line.count
        total_us[line.subject.operator_id] += line.total_us
    times_us = {id_: total_us[id_] / number for id_, number in calls.items() if number}
    needed = tuples_of_capture(results.session, results.capture_id, variant.data_of_calls)
    return token_floor(needed, times_us, results.roofline)


def _verdict_rows(session: Session, job_id: str) -> dict[int, tables.VerdictRow]:
    """Return round -> its stored verdict, whose details are loaded at their first use."""
    of_job = select(tables.VerdictRow).where(tables.VerdictRow.job_id == job_id)
    without_details = of_job.options(defer(tables.VerdictRow.details))  # type: ignore[arg-type]
    return {row.round: row for row in session.exec(without_details)}


def _imported_from(session: Session, job_id: str) -> str:
    imported = tables.ImportedVerdict
    origins = select(imported.origin).where(imported.job_id == job_id)
    return session.exec(origins).first() or ""


def _in_model_us(verification: Verification) -> CallTimes:
    """Return tuple id -> the known times of its calls in the running model."""
    calls_us = (verification.in_model.calls_us if verification.in_model else None) or {}
    known_us = {}
    for operator_id, times_us in calls_us.items():
        known_us[operator_id] = [time_us for time_us in times_us if time_us is not None]
    return known_us


def _without_single_tuples(verification: Verification) -> Verification:
    in_model = replace(verification.in_model, calls_us=None) if verification.in_model else None
    return replace(verification, tuple_kernels=None, in_model=in_model)


def _ranks(results: JobResults) -> tuple[RankFigures, ...]:
    """Return the figures of the ranks of the first whole that has some."""
    for whole in results.wholes:
        if whole.reading and whole.reading.details.cards.ranks:
            return whole.reading.details.cards.ranks
    return ()


def _verdict(results: JobResults, row: tables.VerdictRow | None) -> tuple[Verdict, bool]:
    """Return (stored verdict, False). If there is none, return (verdict of the readings so far,
    True).
    """
    if row is not None and row.details.get("schema") == VERDICT_SCHEMA:
        stored = Verdict.from_json(row.details)
        if stored.launch_gap_us is None:
            # The other launch may be measured after the verdict. It does not affect the outcome.
            stored = replace(stored, launch_gap_us=launch_gap_us(results.wholes))
        return stored if stored.tuples else replace(stored, tuples=results.tuples), False
    verdict = results.verdict()
    states = _number_by(results, lambda tally: tally.state)
    if results.job.state == JobState.CANCELLED:
        begun = states[ItemState.DONE] + states[ItemState.FAILED]
        step = "Run the same command again to continue the job."
        if not results.job.farm:
            step = f"`farm resume --failed {results.job.id}` continues the job."
        reason = f"Cancelled after {begun} of {states.total()} items. {step}"
        verdict = verdict.withheld(reason)
    return verdict, True


def _with_observed(
    lines: tuple[CostLine, ...],
    in_model_us: CallTimes,
    kernels: Mapping[str, Mapping[str, int]],
) -> tuple[CostLine, ...]:
    """Add the observed times in the running model and the observed kernels to the tuples."""
    if not in_model_us and not kernels:
        return lines
    medians = {id_: statistics.median(values) for id_, values in in_model_us.items() if values}
    observed = []
    for line in lines:
        operator_id = line.subject.operator_id
        of_line = dict(kernels.get(operator_id, {}))
        observed.append(replace(line, in_model_us=medians.get(operator_id), kernels=of_line))
    return tuple(observed)


def _types(sums: Sums, lines: Sequence[CostLine], in_model_us: CallTimes) -> tuple[TypeRow, ...]:
    # Lines of one tuple with different data classes share its calls.
    operator_ids: dict[str, set[str]] = defaultdict(set)
    for line in lines:
        operator_ids[line.subject.short_name].add(line.subject.operator_id)

    total = merged(sums.values())
    rows = []
    for name, cost in sums.items():
        times_us: list[float] = []
        for operator_id in operator_ids[name]:
            times_us += in_model_us.get(operator_id, ())
        complete = cost.calls and len(times_us) == cost.calls
        rows.append(TypeRow(name, cost, total, math.fsum(times_us) if complete else None))
    rows.sort(key=lambda row: (-(row.cost.measured_us or 0.0), -row.cost.estimated_us))
    return tuple(rows)


def _eagerly(results: JobResults) -> tuple[EagerRow, ...]:
    """The operators that an eager pass calls more or less often, with the cost of a call if a round
    measured it.
    """
    if not results.verification.eagerly or not results.verification.eagerly.operators:
        return ()
    wholes = [whole.reading for whole in results.wholes if whole.reading]
    readings = {}
    for item in results.items_of("tuple"):
        if item.reading_id in results.readings:
            readings[item.subject_id] = results.readings[item.reading_id]

    rows = []
    for calls in results.verification.eagerly.operators:
        reading = readings.get(calls.operator_id)
        cost = (
            cost_in_model(ReadingView.of(reading), wholes, calls.operator_id) if reading else None
        )
        rows.append(EagerRow(calls.operator_id, calls.label, calls.launched, calls.eager, cost))

    def difference_us(row: EagerRow) -> float:
        return abs(row.launched - row.eager) * (row.cost.time_us.value if row.cost else 0.0)

    return tuple(sorted(rows, key=lambda row: -difference_us(row)))


def _number_by(results: JobResults, key: Callable[[Any], Any]) -> Counter[Any]:
    """Return the number of the job's items by a key of `JobResults.tallies`."""
    numbers = Counter[Any]()
    for tally in results.tallies:
        numbers[key(tally)] += tally.items
    return numbers


def _origins(results: JobResults) -> Counter[tuple[str, str]]:
    """Return (card id, software id) -> number of readings of the job."""
    of_items = sqlalchemy.select(ITEM.reading_id).where(*results.of_items)
    keys = (READING.card_id, READING.software_id)
    columns = (*keys, sqlalchemy.func.count().label("readings"))
    groups = values(results.session, columns, READING.id.in_(of_items), grouped_by=keys)
    return Counter({(group.card_id, group.software_id): group.readings for group in groups})


def _card_times(results: JobResults) -> tuple[list[float], list[float]]:
    """Return the card time of each reading that was measured for this job, and the part of it in
    warm-ups and windows. Unit: s.
    """
    measured = sqlalchemy.select(ITEM.reading_id).where(
        *results.of_items, ITEM.state == ItemState.DONE, ITEM.reused.is_(False)
    )
    costs = sqlalchemy.select(READING.cost_s).where(READING.id.in_(measured))
    totals_s, windows_s = [], []
    for cost_s in results.session.scalars(costs.execution_options(yield_per=5000)):
        totals_s.append(cost_s["total"] if "total" in cost_s else sum(cost_s.values()))
        windows_s.append(inside_s(cost_s))
    return totals_s, windows_s


def _cards(results: JobResults, origins: Mapping[tuple[str, str], int]) -> tuple[ReportCard, ...]:
    readings = Counter[str]()
    for (card_id, _), number in origins.items():
        readings[card_id] += number
    of_items = _number_by(results, lambda tally: tally.card_id)
    cards = fetch(results.session, tables.CardRow, dict.fromkeys([*readings, *of_items]))
    views = []
    for card in cards.values():
        views.append(
            ReportCard(
                id=card.id,
                kind=card.kind,
                model=card.model,
                host=card.host,
                memory_bytes=card.memory_bytes,
                driver=card.driver,
                readings=readings[card.id],
                simulated=card.is_simulated,
            )
        )
    return tuple(sorted(views, key=lambda view: (-view.readings, view.id)))


def _rounds(
    results: JobResults, verdicts: Mapping[int, tables.VerdictRow]
) -> tuple[RoundView, ...]:
    items = _number_by(results, lambda tally: tally.round)
    row = tables.Round
    of_job = select(row).where(row.job_id == results.job.id, row.number <= results.number)
    rounds = results.session.exec(of_job.order_by(col(row.number))).all()
    views = []
    for stored in rounds:
        verdict = verdicts.get(stored.number)
        view = RoundView(
            stored.number, stored.reason, tuple(stored.operators), items[stored.number]
        )
        if verdict:
            view = replace(
                view,
                outcome=verdict.outcome,
                accuracies={"time": verdict.accuracy_time, "energy": verdict.accuracy_energy},
                coverage=verdict.coverage,
            )
        views.append(view)

    if len(views) > 1 and is_unlisted(results.session, rounds[0].capture_id):
        views[0] = replace(views[0], outcome="listed")
    return tuple(views)


def _counts(results: JobResults) -> ReadingCounts:
    states = _number_by(results, lambda tally: tally.state)
    roles = _number_by(results, lambda tally: (tally.role, tally.state))
    listed = roles[ItemRole.COMPILE, ItemState.DONE]  # such an item has no reading
    not_run = _number_by(results, lambda tally: tally.reason)[item_state.NOT_RUN]
    reused = repeated = 0
    for tally in results.tallies:
        repeated += tally.repeated
        if tally.state == ItemState.DONE and tally.reused:
            reused += tally.items

    totals_s, windows_s = _card_times(results)
    return ReadingCounts(
        items=states.total() - listed,
        measured=states[ItemState.DONE] - reused - listed,
        reused=reused,
        failed=states[ItemState.FAILED],
        open=sum(number for state, number in states.items() if state not in CLOSED),
        cancelled=states[ItemState.CANCELLED] - not_run,
        not_run=not_run,
        repeated=repeated,
        card_time_s=math.fsum(totals_s),
        window_time_s=math.fsum(windows_s),
        card_time_median_s=statistics.median(totals_s) if totals_s else None,
    )


def remarks(report: Report) -> Iterator[tuple[str, str]]:
    """Yield (topic, text) of each remark, from the blocks of ``remarks.txt``. `farm help` explains
    the topics.
    """
    template = _remarks_template()
    empty = 0
    for line in report.tuples:
        _, _, filling = line.subject.data.partition("/")
        empty += "zeros-100" in filling.split(",")
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
    units = {"TIME": formats.TIME, "ENERGY": formats.ENERGY}
    environment.filters.update(
        percent=formats.percent,
        plural=formats.plural,
        span=formats.span,
        form=format,
        time=lambda time_us: formats.quantity(time_us, formats.TIME),
        energy=lambda energy_mj: formats.quantity(energy_mj, formats.ENERGY),
        interval=lambda figure, name: formats.interval(figure, units[name]),
        kernel_name=_kernel_name,
    )
    return environment.from_string(Path(__file__).with_name("remarks.txt").read_text("utf-8"))


def _kernel_name(name: str) -> str:
    """Shorten a kernel's name: no return type and no template arguments."""
    short = name.removeprefix("void ").split("<")[0].split("(")[0].strip() or name
    return short if len(short) <= 48 else f"{short[:47]}…"
