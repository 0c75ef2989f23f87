"""A card check as plain values: the figures that a job measured on one card, each compared with the
other cards of its model and with earlier readings of the card."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal

from sqlmodel import Session, col, select

from farm.addons.check.deviation import (
    Reference,
    limit_of,
    share_below,
    smallest_found,
    smallest_outside,
)
from farm.addons.check.figures import CheckFigure, Quantity, check_figures
from farm.addons.check.population import Comparable, comparable_readings
from farm.errors import NoSuchJob
from farm.exchange.packaged import packaged_database
from farm.jobs.card_checks import Outcome, is_of_card
from farm.store.database import Database
from farm.store.reuse import UNSOUND
from farm.store.tables import CardRow, Item, Job, JobState, ReadingRow
from farm.types.details import Details
from farm.types.error_counters import ERROR_COUNTERS, ErrorCounters
from farm.types.fields import figure_json
from farm.types.figure import Figure, figure_of
from farm.types.protocol import Protocol
from farm.types.request import CHECKS, Request

LEAST_CARDS = 5  # other cards of a model, for a judgement against them
LEAST_EARLIER = 5  # earlier readings of the card, for a judgement against them
#: Flags of readings that another process disturbed. A card that is too hot is slow itself.
DISTURBED = frozenset(UNSOUND - {"throttled_thermal", "canary_off"})

QUANTITIES: tuple[Quantity, ...] = ("time", "power")
ReferenceName = Literal["cards", "earlier"]


@dataclass(frozen=True)
class FigureComparison:
    """A figure compared with other cards, or with earlier readings of the same card.

    Attributes:
        reference: `cards` (other cards of the model) or `earlier` (readings of this card).
        count: the number of these cards or readings.
        difference: from their median, as a fraction; positive is slower or hungrier.
        spread: the standard deviation of the reference, as a fraction.
        above: the share of the reference that is smaller.
        score: a standard normal deviate if the card is like its reference; None: not judged.
        found_from: the smallest increase that this check finds in 95 % of the cases; None: not
            judged.
        outside_from: the smallest increase that is outside; None: not judged.
        is_outside: True if the score exceeds the limit of the check.
        differences: those of the reference from its median, as fractions.
    """

    reference: ReferenceName
    count: int
    difference: float
    spread: float
    above: float
    score: float | None = None
    found_from: float | None = None
    outside_from: float | None = None
    is_outside: bool = False
    differences: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "differences"}


@dataclass(frozen=True)
class CheckedFigure:
    """One figure of a check: the time or the power of an operator tuple.

    `value` is None if it was not measured; then `reason` says why. With a value, `reason` says why
    it is not judged. Units: us or W.
    """

    name: str
    label: str
    quantity: Quantity
    value: Figure | None
    reason: str = ""
    comparisons: tuple[FigureComparison, ...] = ()
    wire_bytes: int = 0

    @property
    def title(self) -> str:
        """The name for people, which differs between time and power."""
        return self.label if self.quantity == "time" else f"{self.label}: power"

    @property
    def bytes_per_s(self) -> float | None:
        """The bytes that crossed a link in one direction in each second; None: it measures no
        link."""
        if not self.wire_bytes or self.value is None:
            return None
        return self.wire_bytes / self.value.value * 1e6

    @property
    def is_outside(self) -> bool:
        return any(comparison.is_outside for comparison in self.comparisons)

    def to_json(self) -> dict[str, Any]:
        unit = "us" if self.quantity == "time" else "w"
        return {
            "figure": self.name,
            "label": self.label,
            "quantity": self.quantity,
            **figure_json(self.quantity, unit, self.value),
            "bytes_per_s": self.bytes_per_s,
            "reason": self.reason,
            "outside": self.is_outside,
            "comparisons": [comparison.to_json() for comparison in self.comparisons],
        }


@dataclass(frozen=True)
class CheckConditions:
    """The state of the card during the check. None: the card has no such sensor.

    Attributes:
        counters: the card's error counters at the end of the check; None: not read.
        increases: the counters that have increased since the check before.
    """

    idle_power_w: float | None = None
    highest_power_w: float | None = None
    power_limit_w: float | None = None
    lowest_sm_clock_mhz: float | None = None
    highest_temperature_c: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    counters: ErrorCounters | None = None
    increases: Mapping[str, int] = field(default_factory=dict)

    def counters_text(self) -> str:
        """The error counters that are not zero, their increases, and those that could not be
        read."""
        if self.counters is None:
            return "not read"
        texts = []
        for name, count in self.counters.counts.items():
            if count:
                increase = f" (+{self.increases[name]})" if name in self.increases else ""
                texts.append(f"{name} {count}{increase}")
        zeros = list(self.counters.counts.values()).count(0)
        if zeros:
            texts.append(f"{zeros} of {len(self.counters.counts)} are 0")
        for name, reason in self.counters.not_read.items():
            texts.append(f"{name} not read ({reason})")
        return ", ".join(texts)

    def to_json(self) -> dict[str, Any]:
        lists = {"throttle_reasons": list(self.throttle_reasons), "flags": list(self.flags)}
        counters = "not read" if self.counters is None else vars(self.counters)
        return vars(self) | lists | {"counters": counters}


@dataclass(frozen=True)
class CardCheck:
    """The result of a check of one card, or of the link between two cards.

    `limit` is that of the largest score; None if nothing was judged.
    """

    job_id: str
    card_ids: tuple[str, ...]
    card_model: str
    checked_at_s: float
    ended_at_s: float
    figures: tuple[CheckedFigure, ...]
    conditions: CheckConditions
    limit: float | None

    @property
    def is_of_link(self) -> bool:
        return len(self.card_ids) > 1

    @property
    def subject(self) -> str:
        """What was checked, for people."""
        return " and ".join(self.card_ids)

    @property
    def outcome(self) -> Outcome:
        """`inside`, `outside`, `not judged` (nothing to compare with), or `not measured` (fewer
        than half of the figures have a reading).
        """
        measured = [figure for figure in self.figures if figure.value is not None]
        if 2 * len(measured) < len(self.figures):
            return "not measured"
        if self.limit is None:
            return "not judged"
        return "outside" if any(figure.is_outside for figure in self.figures) else "inside"

    def outside(self) -> list[str]:
        """Each figure that is outside, with its largest difference: "copy of 67 MB, bf16 +3.0%"."""
        texts = []
        for figure in self.figures:
            differences = [each.difference for each in figure.comparisons if each.is_outside]
            if differences:
                texts.append(f"{figure.title} {max(differences):+.1%}")
        return texts

    def to_json(self) -> dict[str, Any]:
        return {
            "job": self.job_id,
            "card_id": self.card_ids[0],
            "cards": list(self.card_ids),
            "card_model": self.card_model,
            "checked_at_s": self.checked_at_s,
            "outcome": self.outcome,
            "limit": self.limit,
            "figures": [figure.to_json() for figure in self.figures],
            "conditions": self.conditions.to_json(),
        }


def results(database: Database, job_ids: Iterable[str]) -> list[CardCheck]:
    """The results of checks, compared with the readings of this database and the packaged ones.
    Raises as `card_check`.
    """
    with (
        contextlib.closing(packaged_database()) as packaged,
        database.read() as session,
        packaged.read() as others,
    ):
        return [card_check(session, job_id, [others]) for job_id in job_ids]


def card_check(session: Session, job_id: str, others: Sequence[Session] = ()) -> CardCheck:
    """Return the result of a check.

    Args:
        job_id: a job that `farm cards check` made.
        others: further databases with readings of cards of this model, such as the packaged ones.

    Raises:
        NoSuchJob: there is no such job, or it is not a check.
    """
    job = session.get(Job, job_id)
    sweep = Request.from_json(job.request).sweep if job is not None else None
    if job is None or sweep is None or sweep.operator not in CHECKS:
        raise NoSuchJob(f"There is no card check '{job_id}'.", "Run `farm cards check`.")
    usual = Protocol.from_json(job.request["protocol"]).of_whole
    card = session.get_one(CardRow, job.request["cards"][0])
    readings, reasons = _readings(session, job_id)
    comparable = comparable_readings([session, *others], list(readings.values()))
    figures = []
    for figure in check_figures(sweep.operator):
        subject = figure.subject(usual)
        reason = reasons.get(subject, "not part of this check")
        for quantity in QUANTITIES:
            if figure.spread(quantity):
                reading = readings.get(subject)
                figures.append(_measured(figure, quantity, reading, reason, comparable))
    judged, limit = judged_figures(figures)
    return CardCheck(
        job_id=job_id,
        card_ids=tuple(job.request["cards"]),
        card_model=card.model,
        checked_at_s=job.created_at_s,
        ended_at_s=job.ended_at_s or job.created_at_s,
        figures=judged,
        conditions=_conditions(card, list(readings.values()), _counters_before(session, job)),
        limit=limit,
    )


def _readings(
    session: Session, job_id: str
) -> tuple[dict[tuple[str, str], ReadingRow], dict[tuple[str, str], str]]:
    """(tuple id, protocol id) -> the reading of a check, and -> why there is none."""
    readings = {}
    reasons = {}
    for item in session.exec(select(Item).where(Item.job_id == job_id)):
        subject = item.subject_id, item.protocol_id
        reading = session.get(ReadingRow, item.reading_id) if item.reading_id else None
        if reading is not None:
            readings[subject] = reading
        reasons[subject] = item.message or item.reason or item.state
    return readings, reasons


def checks_of(session: Session, card_id: str) -> list[str]:
    """Return the ids of the jobs that checked a card, the oldest first."""
    ended = select(Job).where(Job.kind == "sweep", Job.state == JobState.DONE)
    checks = []
    for job in session.exec(ended.order_by(col(Job.created_at_s))):
        if is_of_card(job, card_id):
            checks.append(job.id)
    return checks


def _counters_before(session: Session, job: Job) -> ErrorCounters | None:
    """The error counters at the end of the check before, if it has any."""
    cards = job.request["cards"]
    checks = checks_of(session, cards[0]) if len(cards) == 1 else []
    if job.id in checks:
        checks = checks[: checks.index(job.id)]
    if not checks:
        return None
    readings, _ = _readings(session, checks[-1])
    return _counters(list(readings.values()))


def _counters(readings: Sequence[ReadingRow]) -> ErrorCounters | None:
    """The error counters of the newest reading that has them."""
    for reading in sorted(readings, key=lambda reading: reading.created_at_s, reverse=True):
        details = Details.from_json(reading.details)
        counters = details.recorded(ERROR_COUNTERS, ErrorCounters)
        if counters is not None:
            return counters
    return None


def _measured(
    figure: CheckFigure,
    quantity: Quantity,
    reading: ReadingRow | None,
    reason: str,
    comparable: Mapping[str, Sequence[Comparable]],
) -> CheckedFigure:
    """One figure with its comparisons, without a judgement."""
    checked = CheckedFigure(
        figure.name, figure.label, quantity, None, reason, wire_bytes=figure.wire_bytes
    )
    if reading is None:
        return checked
    if quantity == "time":
        value = figure_of(reading.time_us, reading.time_half_width_us)
    else:
        value = figure_of(reading.power_w, reading.power_half_width_w)
    if value is None:
        return replace(checked, reason="the card has no power sensor")
    disturbed = sorted(DISTURBED.intersection(reading.flags))
    if disturbed:
        return replace(checked, value=value, reason=f"disturbed: {', '.join(disturbed)}")
    comparisons = []
    log_value = math.log(value.value)
    for name, reference in references(figure, quantity, reading.card_id, comparable[reading.id]):
        comparisons.append(compared(name, reference, log_value))
    return replace(checked, value=value, reason="", comparisons=tuple(comparisons))


def references(
    figure: CheckFigure, quantity: Quantity, card_id: str, comparable: Iterable[Comparable]
) -> list[tuple[ReferenceName, Reference]]:
    """Return what a figure of a card is compared with: other cards, and earlier readings of it."""
    earlier: list[float] = []
    by_card: dict[str, list[float]] = {}
    for reading in comparable:
        value = reading.time_us if quantity == "time" else reading.power_w
        if not value:
            continue
        if reading.card_id == card_id:
            earlier.append(math.log(value))
        else:
            by_card.setdefault(reading.card_id, []).append(math.log(value))
    named: list[tuple[ReferenceName, Reference]] = []
    if by_card:
        medians = []
        for values in by_card.values():
            medians.append(median(values))
        named.append(("cards", Reference(tuple(medians), figure.spread(quantity))))
    if earlier:
        named.append(("earlier", Reference(tuple(earlier), figure.repetition(quantity))))
    return named


def compared(name: ReferenceName, reference: Reference, log_value: float) -> FigureComparison:
    """Compare a figure, a natural logarithm, with its reference. With too few values it has no
    score."""
    least = LEAST_CARDS if name == "cards" else LEAST_EARLIER
    count = len(reference.values)
    comparison = FigureComparison(
        name,
        count,
        difference=math.expm1(log_value - reference.center),
        spread=reference.spread,
        above=share_below(reference.values, log_value),
        differences=tuple(math.expm1(value - reference.center) for value in reference.values),
    )
    if count < least:
        return comparison
    return replace(comparison, score=reference.score(log_value))


def judged_figures(
    figures: Sequence[CheckedFigure],
) -> tuple[tuple[CheckedFigure, ...], float | None]:
    """Judge the figures of one check together. Return them, and the limit of the largest score."""
    counts = []
    for figure in figures:
        for comparison in figure.comparisons:
            if comparison.score is not None:
                counts.append(comparison.count)
    if not counts:
        return tuple(figures), None
    limit = limit_of(counts)
    judged = []
    for figure in figures:
        comparisons = [_judged(comparison, limit) for comparison in figure.comparisons]
        judged.append(replace(figure, comparisons=tuple(comparisons)))
    return tuple(judged), limit


def _judged(comparison: FigureComparison, limit: float) -> FigureComparison:
    if comparison.score is None:
        return comparison
    return replace(
        comparison,
        found_from=smallest_found(comparison.count, comparison.spread, limit),
        outside_from=smallest_outside(comparison.count, comparison.spread, limit),
        is_outside=comparison.score > limit,
    )


def _conditions(
    card: CardRow, readings: Sequence[ReadingRow], counters_before: ErrorCounters | None
) -> CheckConditions:
    def values(name: str) -> list[float]:
        columns = [reading.model_dump(include={name})[name] for reading in readings]
        return [value for value in columns if value is not None]

    throttles: set[str] = set()
    flags: set[str] = set()
    for reading in readings:
        throttles.update(reading.throttle_reasons)
        flags.update(reading.flags)
    counters = _counters(readings)
    increases = {}
    if counters is not None and counters_before is not None:
        increases = counters.increases(counters_before)
    return CheckConditions(
        idle_power_w=min(values("idle_power_w"), default=None),
        highest_power_w=max(values("power_w"), default=None),
        power_limit_w=card.fingerprint.get("power_limit_w"),
        lowest_sm_clock_mhz=min(values("sm_clock_mhz"), default=None),
        highest_temperature_c=max(values("temperature_c"), default=None),
        throttle_reasons=tuple(sorted(throttles)),
        flags=tuple(sorted(flags)),
        counters=counters,
        increases=increases,
    )
