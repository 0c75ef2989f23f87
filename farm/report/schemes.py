"""Compare the schemes of quantisation of one model over its sizes: time, energy and memory of the
stored jobs, operators that gain and lose, and from which size on a scheme gains.

A *scheme* is a value of `Variant.quantize`; ``none`` is the model without quantisation. The *base*
is the first scheme that a person names: all ratios are relative to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from sqlmodel import Session, col, select

from farm.errors import NoReadings, UsageError
from farm.report.card_spread import Quantity, between_cards
from farm.report.compared_rows import model_rows, type_rows
from farm.report.compared_side import LoadedSide, load
from farm.report.comparison import ComparedRow, RowSide
from farm.report.crossover import Trend, ratio_of
from farm.store.database import fetch
from farm.store.tables import CardRow, Job, JobState
from farm.types.fields import figure_json
from farm.types.figure import value_of
from farm.types.request import Request
from farm.types.variant import Variant
from farm.verdict.cost_line import Change
from farm.verdict.figures import PerToken

#: The sizes over which schemes are compared: fields of `Variant`.
SIZES = ("batch", "length", "cache")
NONE = "none"  # the scheme of a model without quantisation


@dataclass(frozen=True)
class Cell:
    """One scheme at one size, as a person asks for it.

    Attributes:
        size: 0: not given; it is that of the request.
        requests: kind of card -> the request, if such a card can measure it.
        reasons: kind of card -> why it cannot.
        memory_bytes: parameters and buffers; None: unknown.
    """

    scheme: str
    size: int
    requests: Mapping[str, Request]
    reasons: Mapping[str, str]
    memory_bytes: int | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.scheme, self.size


@dataclass(frozen=True)
class OperatorChange:
    """What an operator type costs with a scheme, and without it. An operator that one side does not
    call costs nothing there."""

    row: ComparedRow

    @property
    def saved_us(self) -> float | None:
        """What the scheme saves in time; None if a figure is unknown."""
        return self._saved(self.row.time)

    @property
    def saved_mj(self) -> float | None:
        """What the scheme saves in energy; None if a figure is unknown."""
        return self._saved(self.row.energy)

    @property
    def lacks(self) -> str:
        """The tuples without a reading, in words; "" if there are none."""
        sides = ("before: ", self.row.a.lacks), ("after: ", self.row.b.lacks)
        return "; ".join(side + text for side, text in sides if text)

    def _saved(self, change: Change) -> float | None:
        base = _cost_of(self.row.a, value_of(change.a))
        scheme = _cost_of(self.row.b, value_of(change.b))
        return None if base is None or scheme is None else base - scheme

    def to_json(self) -> dict[str, Any]:
        return {
            "operator": self.row.operator,
            "base_calls": self.row.a.calls,
            "calls": self.row.b.calls,
            **figure_json("base_time", "us", self.row.time.a),
            **figure_json("time", "us", self.row.time.b),
            "saved_time_us": self.saved_us,
            **figure_json("base_energy", "mj", self.row.energy.a),
            **figure_json("energy", "mj", self.row.energy.b),
            "saved_energy_mj": self.saved_mj,
            "lacks": self.lacks,
        }


def _cost_of(side: RowSide, value: float | None) -> float | None:
    return 0.0 if value is None and not side.tuples and not side.lacks else value


@dataclass(frozen=True)
class SchemeRow:
    """One scheme at one size.

    Attributes:
        job_id: the newest job that has measured it; "" if none has.
        row: the whole model beside that of the base; None without a job. Its side A is empty if
            the base has no job, and both sides are equal for the base itself.
        operators: by the time that they save, the largest gain first; () for the base.
        outcome: of the job's verdict; "" without a job.
        lacks: why there are no figures; "" if there are.
        request: that would measure it; None if a job has, or if the card cannot.
    """

    scheme: str
    size: int
    job_id: str = ""
    row: ComparedRow | None = None
    per_token: PerToken = PerToken(0, None, None)  # noqa: RUF009 - a frozen value
    memory_bytes: int | None = None
    operators: tuple[OperatorChange, ...] = ()
    outcome: str = ""
    lacks: str = ""
    request: Request | None = None

    @property
    def time(self) -> Change:
        """The time of one pass beside that of the base."""
        return self.row.time if self.row else Change(None, None)

    @property
    def energy(self) -> Change:
        """The energy of one pass beside that of the base."""
        return self.row.energy if self.row else Change(None, None)

    @property
    def command(self) -> str:
        """Measures what no job has measured; "" if nothing does."""
        return self.request.command().removesuffix(" --reuse none") if self.request else ""

    def to_json(self) -> dict[str, Any]:
        time, energy = self.time, self.energy
        return {
            "scheme": self.scheme,
            "size": self.size,
            "job": self.job_id,
            **figure_json("time", "us", time.b),
            "time_ratio": ratio_of(time),
            "time_verdict": time.verdict,
            **figure_json("energy", "mj", energy.b),
            "energy_ratio": ratio_of(energy),
            "energy_verdict": energy.verdict,
            **vars(self.per_token),
            "memory_bytes": self.memory_bytes,
            "operators": [operator.to_json() for operator in self.operators],
            "outcome": self.outcome,
            "lacks": self.lacks,
            "command": self.command,
        }


@dataclass(frozen=True)
class SchemeComparison:
    """The schemes of a model over its sizes.

    Attributes:
        axis: the field of `Variant` that is the size: ``batch``, ``length`` or ``cache``.
        base: the scheme to which ratios are relative.
        card_model: of all jobs; "" if nothing is measured.
        other_card_models: those that have jobs, too.
        rows: by size, then in the order of the schemes.
    """

    model: str
    axis: str
    base: str
    card_model: str
    other_card_models: tuple[str, ...]
    rows: tuple[SchemeRow, ...]

    @cached_property
    def trends(self) -> Mapping[tuple[str, Quantity], Trend]:
        """(scheme, quantity) -> where it gains and loses; only those with a change."""
        changes: dict[tuple[str, Quantity], dict[int, Change]] = defaultdict(dict)
        for row in self.rows:
            if row.scheme != self.base:
                changes[row.scheme, "time"][row.size] = row.time
                changes[row.scheme, "energy"][row.size] = row.energy
        trends = {key: Trend.of(by_size) for key, by_size in changes.items()}
        return {key: trend for key, trend in trends.items() if trend.changes}

    @property
    def missing(self) -> list[Request]:
        """What no job has measured."""
        return [row.request for row in self.rows if row.request]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with units in the key names. Ratios are scheme / base."""
        trends: dict[str, dict[str, Any]] = defaultdict(dict)
        for (scheme, quantity), trend in self.trends.items():
            trends[scheme][quantity] = trend.to_json()
        return {
            "model": self.model,
            "axis": self.axis,
            "base": self.base,
            "card_model": self.card_model,
            "other_card_models": self.other_card_models,
            "rows": [row.to_json() for row in self.rows],
            "trends": trends,
        }


def axis_of(given: Sequence[Mapping[str, Any]]) -> str:
    """Return the size that has several values among given fields of requests; ``batch`` if none
    has. Raises `UsageError` if several have."""
    several = [name for name in SIZES if len({fields.get(name) for fields in given}) > 1]
    if len(several) > 1:
        raise UsageError(
            f"Schemes are compared over one size, not over {' and '.join(several)}.",
            f"Give one value of --{several[1]}.",
        )
    return several[0] if several else "batch"


@dataclass
class _CardModel:
    """The newest finished jobs on one card model: id of the request -> id of the job."""

    kind: str  # of card
    jobs: dict[str, str] = field(default_factory=dict)


def _by_card_model(
    session: Session, cells: Sequence[Cell], is_chosen: Callable[[CardRow], bool]
) -> dict[str, _CardModel]:
    """Return card model -> its jobs, that with the most jobs first."""
    ids = set[str]()
    for cell in cells:
        ids.update(request.id for request in cell.requests.values())
    done = select(Job).where(Job.state == JobState.DONE, col(Job.request_id).in_(ids))
    jobs = session.exec(done.order_by(col(Job.created_at_s))).all()
    first_cards = {job.id: next(iter(job.asked.get("cards", ())), "") for job in jobs}
    cards = fetch(session, CardRow, set(first_cards.values()))
    by_model: dict[str, _CardModel] = {}
    for job in jobs:
        card = cards.get(first_cards[job.id])
        if card is not None and is_chosen(card):
            of_model = by_model.setdefault(card.model, _CardModel(card.kind))
            of_model.jobs[job.request_id] = job.id
    return dict(sorted(by_model.items(), key=lambda model: -len(model[1].jobs)))


def compare_schemes(
    session: Session,
    cells: Sequence[Cell],
    model: str,
    axis: str,
    is_chosen: Callable[[CardRow], bool] = lambda _: True,
    card_kind: str = "",
) -> SchemeComparison:
    """Compare the stored jobs of schemes and sizes, on the card model that has the most of them.

    Args:
        cells: the first one has the base.
        is_chosen: True for a card that counts.
        card_kind: of the cards that will measure what is missing; "": none will.

    Raises:
        NoReadings: there is no job, and no card will measure one.
    """
    by_model = _by_card_model(session, cells, is_chosen)
    if not by_model and not card_kind:
        raise NoReadings(
            f"No job has measured {model} with these options.", "Add --run to measure it."
        )
    card_model, *others = by_model or [""]
    on_cards = by_model.get(card_model) or _CardModel(card_kind)
    base = cells[0].scheme
    sides, reasons = _sides(session, cells, on_cards)
    requests = [cell.requests.get(on_cards.kind) for cell in cells]
    usual_size = next((vars(request.variant)[axis] for request in requests if request), 0)
    rows = []
    for cell in cells:
        side = sides.get(cell.key)
        if side is None:
            size = cell.size or usual_size
            rows.append(_without_job(cell, size, on_cards.kind, reasons[cell.key]))
            continue
        of_base = sides.get((base, cell.size))
        rows.append(_row(session, cell, axis, of_base, side, is_base=cell.scheme == base))
    rows.sort(key=lambda row: row.size)
    return SchemeComparison(model, axis, base, card_model, tuple(others), tuple(rows))


def _sides(
    session: Session, cells: Sequence[Cell], on_cards: _CardModel
) -> tuple[dict[tuple[str, int], LoadedSide], dict[tuple[str, int], str]]:
    """The jobs of cells by `Cell.key`, and the reasons of cells without a job."""
    sides, reasons = {}, {}
    for cell in cells:
        request = cell.requests.get(on_cards.kind)
        if request is None:
            reasons[cell.key] = cell.reasons.get(on_cards.kind, "")
        elif request.id not in on_cards.jobs:
            reasons[cell.key] = "not measured"
        else:
            try:
                sides[cell.key] = load(session, on_cards.jobs[request.id], {})
            except UsageError as error:  # the job has no readings
                reasons[cell.key] = error.message
    return sides, reasons


def _without_job(cell: Cell, size: int, kind: str, reason: str) -> SchemeRow:
    request = cell.requests.get(kind)
    return SchemeRow(
        cell.scheme, size, memory_bytes=cell.memory_bytes, lacks=reason, request=request
    )


def _row(
    session: Session,
    cell: Cell,
    axis: str,
    of_base: LoadedSide | None,
    of_scheme: LoadedSide,
    *,
    is_base: bool,
) -> SchemeRow:
    whole, operators = _changes(session, of_base, of_scheme)
    variant = Variant.from_json(of_scheme.models[0].variant)
    return SchemeRow(
        scheme=cell.scheme,
        size=vars(variant)[axis],
        job_id=of_scheme.side.job_id,
        row=whole,
        per_token=PerToken.of(variant, whole.b.time_us, whole.b.energy_mj),
        memory_bytes=cell.memory_bytes,
        operators=() if is_base else operators,
        outcome=_outcome(of_scheme),
        lacks=whole.b.lacks,
    )


def _outcome(side: LoadedSide) -> str:
    return side.report.verdict.outcome if side.report else ""


def _changes(
    session: Session, of_base: LoadedSide | None, of_scheme: LoadedSide
) -> tuple[ComparedRow, tuple[OperatorChange, ...]]:
    """The whole model and the operator types of a scheme beside those of the base, if it has a
    job."""
    a, b = of_base or of_scheme, of_scheme
    whole, _ = model_rows(session, a.models[0], b.models[0])
    if of_base is None:
        return replace(whole, a=RowSide(), note=""), ()

    models = (*a.side.card_models, *b.side.card_models)
    between = between_cards(session, models, (a.side.cards, b.side.cards))
    types = [OperatorChange(row) for row in type_rows(a, b, (), own=True)]
    types.sort(key=lambda operator: -(operator.saved_us or 0.0))
    return replace(whole, between_cards=between), tuple(types)
