"""The comparison of two sides, as plain values: rows for whole models, sums, operator types, tuples
and parts of compiled models.

`farm.report.compare.compare` makes it. A row is faster or slower only if the intervals do not
overlap. If a row does not cover everything, it says what it covers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from farm.report.card_spread import Quantity
from farm.types.fields import figure_json
from farm.types.figure import Figure, PassCost, value_of
from farm.verdict.cost_line import Change

Weights = Literal["own calls", "calls of A", "calls of B", "once"]
#: Sums whose coverages differ by more are of different parts of a model.
COVERAGE_APART = 0.05


@dataclass(frozen=True)
class Side:
    """A job, or the readings that match filters."""

    text: str
    job_id: str  # "" if the side is given by filters
    card_models: tuple[str, ...]
    software: tuple[str, ...]
    dtypes: tuple[str, ...]
    tuples: int
    cards: tuple[str, ...]  # ids; if filters match several cards, some of them


@dataclass(frozen=True)
class RowSide:
    """What one side has of a row.

    Attributes:
        cost: of all calls; None: unknown.
        calls, tuples: the number of them in the figures.
        share: of the side's sum (time), with the side's own number of calls.
        coverage: share of the time that the row would have with all tuples of the side.
        job_id: the job of the verdict, for a whole or a sum.
        note: about the job, in words.
        lacks: what the figures lack, in words; "" if nothing.
    """

    cost: PassCost | None = None
    calls: int = 0
    tuples: int = 0
    share: float | None = None
    coverage: float | None = None
    job_id: str = ""
    note: str = ""
    lacks: str = ""

    @property
    def time_us(self) -> Figure | None:
        return self.cost.time_us if self.cost else None

    @property
    def energy_mj(self) -> Figure | None:
        return self.cost.energy_mj if self.cost else None


@dataclass(frozen=True)
class ComparedRow:
    """The comparison of one whole model, sum, operator type or tuple.

    `between_cards`: relative half-widths for differences between single cards of one model; {} if
    both sides are of one card. `own_calls`: each side has all its own tuples, not only those that
    both have."""

    name: str
    operator: str
    a: RowSide
    b: RowSide
    note: str = ""  # what concerns both sides
    between_cards: Mapping[Quantity, float] = field(default_factory=dict)
    own_calls: bool = False

    @property
    def incomplete(self) -> bool:
        """True if a side lacks readings of tuples that the other side has: the change then says
        nothing, and no text shows it.
        """
        if not self.own_calls or self.a.coverage is None or self.b.coverage is None:
            return False
        return abs(self.a.coverage - self.b.coverage) > COVERAGE_APART

    @property
    def time(self) -> Change:
        return Change(self.a.time_us, self.b.time_us, self.between_cards.get("time", 0.0))

    @property
    def energy(self) -> Change:
        return Change(self.a.energy_mj, self.b.energy_mj, self.between_cards.get("energy", 0.0))

    def change_of(self, quantity: Quantity) -> Change:
        return self.time if quantity == "time" else self.energy

    @property
    def covers(self) -> str:
        """What the row covers, in words; "" if it covers everything."""
        words = [
            ("A: ", self.a.note),
            ("B: ", self.b.note),
            ("A: ", self.a.lacks),
            ("B: ", self.b.lacks),
            ("", self.note),
        ]
        return "; ".join(side + text for side, text in words if text)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "operator": self.operator,
            "calls": self.a.calls,
            "tuples": self.a.tuples,
            "b_calls": self.b.calls,
            "b_tuples": self.b.tuples,
            "a_share": self.a.share,
            "b_share": self.b.share,
            "a_coverage": self.a.coverage,
            "b_coverage": self.b.coverage,
            "covers": self.covers,
            "a_job": self.a.job_id,
            "b_job": self.b.job_id,
            **_change_json("time", "us", self.time),
            **_change_json("energy", "mj", self.energy),
        }


def _change_json(name: str, unit: str, change: Change) -> dict[str, Any]:
    return {
        **figure_json(f"a_{name}", unit, change.a),
        **figure_json(f"b_{name}", unit, change.b),
        **figure_json(f"{name}_change", "", change.change),
        f"{name}_verdict": change.verdict,
    }


@dataclass(frozen=True)
class ComparedKernels:
    """A part of a model in an eager and a compiled job, or in two compiled jobs."""

    # the module paths (*: several numbers); () for the calls of a side that have no match
    modules: tuple[str, ...]
    a_operators: Mapping[str, int]  # operator type -> number of calls
    b_operators: Mapping[str, int]
    row: ComparedRow

    def saved(self, change: Change) -> float | None:
        """What B saves in time or energy; None if a side's figure is unknown. A side without calls
        costs nothing.
        """
        cost_a = value_of(change.a) if self.a_operators else 0.0
        cost_b = value_of(change.b) if self.b_operators else 0.0
        return None if cost_a is None or cost_b is None else cost_a - cost_b

    def to_json(self) -> dict[str, Any]:
        return {
            **self.row.to_json(),
            "modules": self.modules,
            "a_operators": self.a_operators,
            "b_operators": self.b_operators,
            "saved_time_us": self.saved(self.row.time),
            "saved_energy_mj": self.saved(self.row.energy),
        }


@dataclass(frozen=True)
class Made(Sequence[ComparedRow]):
    """Compared rows, each of them made when it is used: a table shows few of thousands."""

    rows: Sequence[Any]
    make: Callable[[Any], ComparedRow]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.make(row) for row in self.rows[index]]
        return self.make(self.rows[index])


@dataclass(frozen=True)
class SideComparison:
    """The comparison, largest changes of time first. `weights` says by which number of calls a
    tuple is multiplied.
    """

    a: Side
    b: Side
    wholes: tuple[ComparedRow, ...]  # for two jobs: their models; else the models on both sides
    sums: tuple[ComparedRow, ...]  # sums of the same models, with each side's own number of calls
    total: ComparedRow | None  # the sum over common tuples; None: no tuple is on both sides
    weights: Weights
    types: tuple[ComparedRow, ...]
    tuples: Sequence[ComparedRow]
    tuples_only_a: Sequence[ComparedRow]  # tuples only on side A, the largest share first
    tuples_only_b: Sequence[ComparedRow]
    kernels: tuple[ComparedKernels, ...] = ()  # only if a side is a job of a compiled model
    #: Relative half-widths for differences between single cards of one model; {} if both sides are
    #: of one card.
    between_cards: Mapping[Quantity, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        number = len(self.tuples)
        return f"<SideComparison {self.a.text} and {self.b.text}: {number} tuples on both sides>"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with units in the key names. Shares, coverages and changes (b / a - 1) are
        fractions.
        """
        return {
            "a": vars(self.a),
            "b": vars(self.b),
            "total": self.total.to_json() if self.total else None,
            "weights": self.weights,
            "between_cards": dict(self.between_cards),
            "wholes": [row.to_json() for row in self.wholes],
            "sums": [row.to_json() for row in self.sums],
            "types": [row.to_json() for row in self.types],
            "tuples": [row.to_json() for row in self.tuples],
            "tuples_only_a": [row.to_json() for row in self.tuples_only_a],
            "tuples_only_b": [row.to_json() for row in self.tuples_only_b],
            "kernels": [row.to_json() for row in self.kernels],
            "only_a": [row.name for row in self.tuples_only_a],
            "only_b": [row.name for row in self.tuples_only_b],
        }
