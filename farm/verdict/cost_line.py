"""What an operator tuple costs (`CostLine`), sums over several tuples (`CostGroup`), and the change
of a cost between two sides (`Change`).

Verdicts, reports, comparisons and gates are tables of these lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, TypeVar

from farm.types.details import SeveralCards
from farm.types.fields import figure_from_json, figure_json
from farm.types.figure import Figure
from farm.types.format import TIME, count_of, percent, quantity
from farm.types.roofline import Roofline
from farm.types.tuple import NeededTuple
from farm.verdict.figures import CallCost, ReadingView

Origin = Literal["measured", "reused", "estimated", "missing"]
Group = TypeVar("Group", bound=Hashable)


@dataclass(frozen=True)
class TupleView:
    """The description of an operator tuple, with the data class of its inputs. Numbers are for one
    call.
    """

    operator_id: str
    short_name: str
    label: str
    data: str = "normal"
    flops: int = 0
    bytes_moved: int = 0
    estimated_us: float = 0.0  # from the roofline

    @classmethod
    def of_needed(cls, needed: NeededTuple, peaks: Roofline, data: str = "normal") -> Self:
        """The description of a tuple of a model, whose time is estimated with these peaks."""
        return cls(
            needed.operator_id,
            needed.short_name,
            needed.label,
            data,
            needed.flops,
            needed.bytes_moved,
            peaks.call_us(needed),
        )

    @property
    def key(self) -> tuple[str, str]:
        """The tuple's id and the data class: no two lines of a job have the same key."""
        return self.operator_id, self.data


@dataclass(frozen=True)
class CostLine:
    """The cost of one call of a subject, and the number of its calls.

    `cost` has the figures that a sum uses. It is None if the origin is "missing": `reason` says
    why; and before `farm.verdict.replay.measured_lines` has computed it from the reading."""

    subject: TupleView
    count: int
    origin: Origin
    cost: CallCost | None = None
    flags: tuple[str, ...] = ()
    reason: str = ""
    reading_id: str | None = None
    card_id: str = ""
    bus: str = ""  # of a collective: its bandwidth and overlap, in words
    in_model_us: float | None = None  # one call in the running model: the median over its calls
    # launches of one call, if a card was observed
    kernels: Mapping[str, int] = field(default_factory=dict)
    # The inputs of a verdict, which it does not store:
    # True if --operators selects its operator type
    in_scope: bool = field(default=True, compare=False)
    reading: ReadingView | None = field(default=None, compare=False)

    @classmethod
    def of_reading(
        cls, subject: TupleView, count: int, reading: ReadingView, *, reused: bool = False
    ) -> Self:
        """Return a line in scope, without the cost."""
        return cls(
            subject,
            count,
            origin="reused" if reused else "measured",
            flags=reading.flags,
            reading_id=reading.reading_id,
            card_id=reading.card_id,
            bus=_bus(reading.details.cards),
            reading=reading,
        )

    @property
    def time_us(self) -> Figure | None:
        return self.cost.time_us if self.cost else None

    @property
    def energy_mj(self) -> Figure | None:
        return self.cost.energy_mj if self.cost else None

    @property
    def measured(self) -> tuple[ReadingView, CallCost]:
        """The reading and the cost of a line from `farm.verdict.replay.measured_lines`."""
        assert self.reading
        assert self.cost
        return self.reading, self.cost

    @property
    def weight_us(self) -> float:
        """Estimated time of all calls in us."""
        return self.count * self.subject.estimated_us

    @property
    def total_us(self) -> float:
        """Time of all calls in us; 0 if the subject is not measured."""
        return self.count * (self.time_us.value if self.time_us else 0.0)

    @property
    def power_w(self) -> float | None:
        return self.cost.mean_power_w if self.cost else None

    def stored(self) -> dict[str, Any]:
        """Return the fields that a verdict stores. The others come from the capture's verification,
        which may be done later.
        """
        used, context_us = "", None
        if self.cost is not None:
            used, context_us = self.cost.used, self.cost.context_us
        return {
            "operator_id": self.subject.operator_id,
            "short_name": self.subject.short_name,
            "label": self.subject.label,
            "calls": self.count,
            "flops": self.subject.flops,
            "bytes_moved": self.subject.bytes_moved,
            "estimated_us": self.subject.estimated_us,
            **figure_json("time", "us", self.time_us),
            **figure_json("energy", "mj", self.energy_mj),
            "used": used,
            "card_id": self.card_id,
            "reading_id": self.reading_id,
            "reused": self.origin == "reused",
            "reason": self.reason,
            "flags": self.flags,
            "data": self.subject.data,
            "context_us": context_us,
            "bus": self.bus,
        }

    @classmethod
    def from_stored(cls, stored: Mapping[str, Any]) -> Self:
        """Parse the fields of `stored`. Old verdicts lack the last three."""
        subject = TupleView(
            stored["operator_id"],
            stored["short_name"],
            stored["label"],
            stored.get("data", "normal"),
            stored["flops"],
            stored["bytes_moved"],
            stored["estimated_us"],
        )
        time_us = figure_from_json(stored, "time", "us")
        origin: Origin = "missing"
        cost = None
        if time_us is not None:
            origin = "reused" if stored["reused"] else "measured"
            energy_mj = figure_from_json(stored, "energy", "mj")
            context_us: Any = stored.get("context_us")
            cost = CallCost(time_us, energy_mj, stored["used"], context_us=context_us)
        return cls(
            subject,
            stored["calls"],
            origin,
            cost,
            flags=tuple(stored["flags"]),
            reason=stored["reason"],
            reading_id=stored["reading_id"],
            card_id=stored["card_id"],
            bus=stored.get("bus", ""),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with units in the key names."""
        return {
            **self.stored(),
            "in_model_us": self.in_model_us,
            "kernels": self.kernels,
            "power_w": self.power_w,
        }


def _bus(cards: SeveralCards) -> str:
    """Text about a collective: its bus bandwidth, and how much of it a matrix product hides; "" for
    other operators.
    """
    texts = []
    bus, link, overlap = cards.bus_bytes_per_s, cards.link_bytes_per_s, cards.overlap
    if bus:
        share = f" ({percent(bus / link)} of the link)" if link else ""
        texts.append(f"bus {count_of(bus, 'B/s')}{share}")
    if overlap is not None:
        texts.append(f"{quantity(overlap.exposed_us, TIME)} exposed")
        texts.append(f"{quantity(overlap.hidden_us, TIME)} hidden")
    return ", ".join(texts)


@dataclass
class CostGroup:
    """Sums over all calls of some lines, such as those of one operator type.

    They have no intervals: how much of an error several tuples share is known for the sum of a
    verdict only. The field names are the keys of the stored JSON."""

    time_us: float = 0.0  # of the measured tuples
    energy_mj: float = 0  # of the measured tuples with an energy
    flops: int = 0
    bytes_moved: int = 0
    estimated_us: float = 0.0
    tuples: int = 0
    measured_tuples: int = 0
    without_energy: int = 0  # measured tuples without an energy
    calls: int = 0

    def add(self, line: CostLine, calls: int) -> None:
        """Add so many calls of a line."""
        subject = line.subject
        self.flops += calls * subject.flops
        self.bytes_moved += calls * subject.bytes_moved
        self.estimated_us += calls * subject.estimated_us
        self.tuples += 1
        self.calls += calls

        if line.time_us is None:
            return
        self.time_us += calls * line.time_us.value
        self.measured_tuples += 1
        if line.energy_mj is None:
            self.without_energy += 1
        else:
            self.energy_mj += calls * line.energy_mj.value

    def add_unknown(self, calls: int) -> None:
        """Add so many calls of a tuple of which nothing is known."""
        self.tuples += 1
        self.calls += calls

    def merge(self, other: CostGroup) -> None:
        """Add the sums of another group."""
        self.time_us += other.time_us
        self.energy_mj += other.energy_mj
        self.flops += other.flops
        self.bytes_moved += other.bytes_moved
        self.estimated_us += other.estimated_us
        self.tuples += other.tuples
        self.measured_tuples += other.measured_tuples
        self.without_energy += other.without_energy
        self.calls += other.calls

    @property
    def measured_us(self) -> float | None:
        """The time of the measured tuples; None if there are none."""
        return self.time_us if self.measured_tuples else None

    @property
    def measured_mj(self) -> float | None:
        """The energy of the measured tuples; None if there are none, or if one has no energy."""
        return self.energy_mj if self.measured_tuples and not self.without_energy else None

    @property
    def complete_us(self) -> float | None:
        """The time of all tuples; None if one is not measured."""
        return self.time_us if self.measured_tuples == self.tuples else None

    @property
    def complete_mj(self) -> float | None:
        """The energy of all tuples; None if one is not measured or has no energy."""
        return self.measured_mj if self.measured_tuples == self.tuples else None


def group(
    lines: Iterable[CostLine],
    by: Callable[[CostLine], Group],
    before: Mapping[Group, CostGroup] | None = None,
) -> dict[Group, CostGroup]:
    """Sum lines with their calls by a key, in the order of its first occurrence. `before`: groups
    to which they are added.
    """
    groups = {key: merged([sums]) for key, sums in (before or {}).items()}
    for line in lines:
        groups.setdefault(by(line), CostGroup()).add(line, line.count)
    return groups


def merged(groups: Iterable[CostGroup]) -> CostGroup:
    """Return the sum of groups."""
    total = CostGroup()
    for part in groups:
        total.merge(part)
    return total


@dataclass(frozen=True)
class Change:
    """One quantity on two sides, in the same unit. None: unknown, or absent on that side.

    `between_cards` is the relative half-width of the change for differences between single cards of
    one model."""

    a: Figure | None
    b: Figure | None
    between_cards: float = 0.0

    @property
    def change(self) -> Figure | None:
        """b / a - 1."""
        if self.a is None or self.b is None:
            return None
        if not self.a.value:
            return Figure(0.0)
        change = self.b.deviation_from(self.a)
        cards_half_width = (1 + change.value) * self.between_cards
        return replace(change, half_width=math.hypot(change.half_width, cards_half_width))

    @property
    def apart(self) -> bool:
        """True if the intervals do not overlap, and the change is larger than cards of one model
        differ.
        """
        if self.a is None or self.b is None:
            return False
        difference = abs(self.b.value - self.a.value)
        cards_half_width = self.between_cards * self.b.value
        return difference > max(self.a.half_width + self.b.half_width, cards_half_width)

    @property
    def order(self) -> tuple[bool, float]:
        """A key that sorts the largest difference first, and those with overlapping intervals
        last.
        """
        a = self.a.value if self.a else 0.0
        b = self.b.value if self.b else 0.0
        return self.verdict == "same", -abs(b - a)

    @property
    def verdict(self) -> Literal["faster", "slower", "same", "unknown"]:
        if self.a is None or self.b is None:
            return "unknown"
        if not self.apart:
            return "same"
        return "slower" if self.b.value > self.a.value else "faster"
