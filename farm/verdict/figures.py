"""The inputs of a verdict: readings and wholes; and what a sum uses of a reading."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, Self

from farm.types.details import Details
from farm.types.figure import Figure, PassCost, figure_of
from farm.types.format import ENERGY, count_of, plural, quantity
from farm.types.variant import Variant

Used = Literal["steady", "burst", "interpolated"]

NOT_IN_SCOPE = "not in scope"
NOT_SHOWN = "no card has shown the values that decide how much work it does"

#: The columns of a reading that `ReadingView.of` needs.
VIEW_COLUMNS = (
    "id",
    "time_us",
    "time_half_width_us",
    "energy_mj",
    "energy_half_width_mj",
    "idle_power_w",
    "base_power_w",
    "sm_clock_mhz",
    "temperature_c",
    "card_id",
    "throttle_reasons",
    "flags",
    "details",
)


@dataclass(frozen=True)
class ReadingView(PassCost):
    """The columns of a stored reading that a verdict uses. Figures are for one call, or one pass of
    the whole model.
    """

    idle_power_w: float | None = None
    base_power_w: float | None = None
    sm_clock_mhz: float | None = None
    temperature_c: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    details: Details = field(default_factory=Details)
    card_id: str = ""
    reading_id: str = ""

    @classmethod
    def of(cls, row: Any) -> Self:
        """Create a view from a row of the table of readings."""
        return cls(
            time_us=Figure(row.time_us, row.time_half_width_us),
            energy_mj=figure_of(row.energy_mj, row.energy_half_width_mj),
            idle_power_w=row.idle_power_w,
            base_power_w=row.base_power_w,
            sm_clock_mhz=row.sm_clock_mhz,
            temperature_c=row.temperature_c,
            throttle_reasons=tuple(row.throttle_reasons),
            flags=tuple(row.flags),
            details=Details.from_json(row.details),
            card_id=row.card_id,
            reading_id=row.id,
        )

    def on_cards(self, cards: int) -> Self:
        """The reading if this number of cards runs the subject at the same time. It has the energy
        of all cards.

        A tuple of a split model is measured on one card, and each card runs it. A group's reading
        is unchanged."""
        factor = cards / len(self.details.cards.ranks or (None,))
        if factor == 1:
            return self

        details = self.details
        burst = details.burst
        if burst:
            burst_mj = burst.energy_mj.times(factor) if burst.energy_mj else None
            details = replace(details, burst=replace(burst, energy_mj=burst_mj))
        return replace(
            self,
            energy_mj=self.energy_mj.times(factor) if self.energy_mj else None,
            idle_power_w=_times(self.idle_power_w, factor),
            base_power_w=_times(self.base_power_w, factor),
            details=details,
        )

    def restated(self, time_ratio: float, energy_ratio: float) -> Self:
        """The reading with its times and energies, also those of bursts, times these ratios."""
        details = self.details
        burst = details.burst
        if burst is not None:
            burst_mj = burst.energy_mj.times(energy_ratio) if burst.energy_mj else None
            burst = replace(burst, time_us=burst.time_us.times(time_ratio), energy_mj=burst_mj)
        return replace(
            self,
            time_us=self.time_us.times(time_ratio),
            energy_mj=self.energy_mj.times(energy_ratio) if self.energy_mj else None,
            details=replace(details, burst=burst),
        )

    def towards_bursts(self, share: float) -> Self:
        """The reading between its steady figures (0) and those of its bursts (1), without the
        bursts.
        """
        burst = self.details.burst
        if burst is None or not burst.time_us.value:
            return self

        time_us = self.time_us.value + share * (burst.time_us.value - self.time_us.value)
        energy = self.energy_mj
        if energy is not None and burst.energy_mj is not None:
            energy_mj = energy.value + share * (burst.energy_mj.value - energy.value)
            energy = replace(energy, value=energy_mj)
        return replace(
            self,
            time_us=replace(self.time_us, value=time_us),
            energy_mj=energy,
            details=replace(self.details, burst=None),
        )

    @property
    def power_throttled(self) -> bool:
        """True if the card lowered its clocks for power (not for heat) during this reading."""
        if "throttled_power" in self.flags:
            return True
        return any("power" in reason.lower() for reason in self.throttle_reasons)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


@dataclass(frozen=True)
class Whole:
    """The whole model on one card; `reason` says why there is no reading: in its first line, with
    details below.
    """

    card_id: str
    reading: ReadingView | None = None
    reason: str = ""
    launch: str = ""  # "": the launch of the verdict

    @property
    def short_reason(self) -> str:
        return self.reason.partition("\n")[0]

    def without_replay(self) -> Whole:
        if self.reading is None:
            return self
        details = self.reading.details
        details = replace(details, order=replace(details.order, in_order=None))
        return replace(self, reading=replace(self.reading, details=details))


@dataclass(frozen=True)
class CallCost(PassCost):
    """Time and energy that one call adds to the sum over a model's calls, computed from the reading
    of its tuple.
    """

    used: Used = "steady"
    why: str = ""
    # part of the time: the effect of neighbouring operators, relative to the loop
    context_us: float = 0.0
    context_mj: float = 0.0  # part of the energy: the same effect
    # the same effect at the operator's own power, minus that at the card's power without work
    waiting_mj: float = 0.0
    warmth_mj: float = 0.0  # part of the energy: the whole model had another temperature
    # Half-widths of errors that each tuple has for itself: `settled` adds them in quadrature.
    own_us: tuple[float, ...] = ()
    # Half-widths of errors that all tuples share: they add linearly.
    unsure_us: float = 0.0
    loop_unsure_mj: float = 0.0  # of the figures of the loop
    context_unsure_mj: float = 0.0  # of the effect of neighbouring operators

    @property
    def unsure_mj(self) -> float:
        return self.loop_unsure_mj + self.context_unsure_mj

    def settled(self) -> Self:
        """Return the figures with all errors of the tuple itself in the half-width of the time."""
        half_width = math.hypot(self.time_us.half_width, *self.own_us)
        return replace(self, time_us=replace(self.time_us, half_width=half_width), own_us=())


class HasValue(Protocol):
    """A measured or predicted quantity."""

    @property
    def value(self) -> float: ...


@dataclass(frozen=True)
class PerToken:
    """Tokens per second and energy per token; None if the time or energy is unknown. `tokens` is
    the number of tokens of one pass: all tokens of a prompt or text; in a decode, one per
    sequence."""

    tokens: int
    tokens_per_s: float | None
    energy_per_token_mj: float | None

    @classmethod
    def of(
        cls, variant: Variant | None, time: HasValue | None, energy: HasValue | None
    ) -> PerToken:
        """Compute the cost per token from the time (µs) and energy (mJ) of one pass of the whole
        model.
        """
        if variant is None or not variant.tokens:
            return cls(0, None, None)
        tokens_per_s = variant.tokens / time.value * 1e6 if time and time.value else None
        return cls(variant.tokens, tokens_per_s, energy.value / variant.tokens if energy else None)

    def __str__(self) -> str:
        """``8 tokens a pass: 12.3 k tokens/s, 4.2 mJ a token``; "" for a model without tokens."""
        if not self.tokens:
            return ""
        figures = []
        if self.tokens_per_s:
            figures.append(f"{count_of(self.tokens_per_s, '').strip()} tokens/s")
        if self.energy_per_token_mj:
            figures.append(f"{quantity(self.energy_per_token_mj, ENERGY)} a token")
        a_pass = f"{self.tokens} {plural('token', self.tokens)} a pass"
        return f"{a_pass}: {', '.join(figures)}" if figures else a_pass
