"""Tensors of a step that are in slow memory while they wait, and what a card measured: plain values, no torch."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

from farm.training.tensor_lifetime import Inactive, Life


@dataclass(frozen=True)
class Move:
    """One tensor in slow memory for one period. Each moment is the index of the call before which something happens;
    the number of calls stands for the end of the step.

    Attributes:
        out: the copy to slow memory begins.
        gone: the copy to slow memory must be done: other tensors use the room.
        back: the copy back begins. It is at or before `out` if it is in the next step; so are `gone` and `used`.
        used: the copy back must be done.
    """

    tensor: int
    out: int
    gone: int
    back: int
    used: int


def moves_of(life: Life, moved: Iterable[tuple[int, int]], bytes_per_s: float) -> list[Move]:
    """The moves of a plan (`OffloadPlan.moved`). A copy out begins at once; a copy back ends just before the tensor is
    used."""
    moves = []
    for tensor, index in moved:
        period = life.periods[tensor][index]
        ranges = away_while(life, period, life.sizes_bytes[tensor] / bytes_per_s * 1e6)
        moves.append(Move(tensor, period.begin, ranges[0][0], ranges[-1][1], period.end))
    return moves


def away_while(life: Life, period: Inactive, copy_us: float) -> list[tuple[int, int]]:
    """The calls, as ranges [first, behind), during which a tensor is in slow memory, if one copy takes `copy_us`; two
    ranges if the period crosses the end of the step."""
    gone_us, back_us = period.begin_us + copy_us, period.end_us - copy_us
    begins, calls, ranges = life.begins_us, len(life.times_us), []
    for shift_us in (0.0, life.step_us) if period.over_the_end else (0.0,):
        first = bisect.bisect_left(begins, gone_us - shift_us)
        behind = min(bisect.bisect_right(begins, back_us - shift_us) - 1, calls)
        if 0 <= first < behind:
            ranges.append((first, behind))
    return ranges


@dataclass(frozen=True)
class Offload:
    """The memory that a step saves if inactive tensors are elsewhere, at one bandwidth each way.

    Attributes:
        periods: all inactive periods of the step.
        long_enough: the number of periods that are longer than the two copies.
        hidden: the long periods for whose copies the link has time, by byte-seconds, most first.
        moved_bytes: bytes that are copied out, and back, in one step.
        link_share: the share of the step in which the link is busy, for each way.
        held_bytes: bytes in fast memory during each call.
    """

    bytes_per_s: float
    periods: int
    long_enough: int
    hidden: tuple[Inactive, ...]
    moved_bytes: int
    link_share: float
    held_bytes: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        return max(self.held_bytes)


def offload(life: Life, bytes_per_s: float) -> Offload:
    """Estimate the memory that copies to slow memory save.

    Copies of both ways run beside the calls and beside each other, each at full bandwidth. All copies of one way
    together take no longer than the step.
    """
    sizes = life.sizes_bytes
    periods = [period for found in life.periods.values() for period in found if sizes[period.tensor]]
    copy_us = {number: size / bytes_per_s * 1e6 for number, size in sizes.items()}
    enough = [period for period in periods if period.time_us > 2 * copy_us[period.tensor]]
    enough.sort(key=lambda period: -sizes[period.tensor] * (period.time_us - 2 * copy_us[period.tensor]))
    left_us, hidden, held_bytes = life.step_us, [], list(life.held_bytes)
    for period in enough:
        if copy_us[period.tensor] <= left_us:
            left_us -= copy_us[period.tensor]
            hidden.append(period)
            for first, behind in away_while(life, period, copy_us[period.tensor]):
                for call in range(first, behind):
                    held_bytes[call] -= sizes[period.tensor]
    moved = sum(sizes[period.tensor] for period in hidden)
    share = 1 - left_us / life.step_us if life.step_us else 0.0
    return Offload(bytes_per_s, len(periods), len(enough), tuple(hidden), moved, share, tuple(held_bytes))


@dataclass(frozen=True)
class Copied:
    """The bandwidth of consecutive copies, one way or both ways at once; None for a way without copies.

    Attributes:
        step_us: the time of the step that ran meanwhile; None if no step ran.
    """

    out_bytes_per_s: float | None
    back_bytes_per_s: float | None
    step_us: float | None = None

    @property
    def rates(self) -> list[float]:
        return [rate for rate in (self.out_bytes_per_s, self.back_bytes_per_s) if rate is not None]


@dataclass(frozen=True)
class Wire:
    """Copies between a card's memory and slow memory, alone and during a step with all tensors in fast memory.

    Attributes:
        step_us: the time of the step without copies.
        beside: empty on a CPU, which does not copy beside its calls.
    """

    step_us: float
    alone: tuple[Copied, ...]
    beside: tuple[Copied, ...]

    @property
    def bytes_per_s(self) -> float:
        """The lowest bandwidth during the step: a plan can count on it."""
        return min(rate for one in self.beside or self.alone for rate in one.rates)


@dataclass(frozen=True)
class Run:
    """A step as a card ran it.

    Attributes:
        half_width_us: half-width of the 95 % interval.
        graphs: graphs launched for one step; 0 if Python launches the calls.
        stayed_fast: numbers of tensors that the plan has in slow memory and the card could not put there.
        moves: moves in one step.
        moved_bytes: bytes copied out, and back, by these moves.
        launch_us: time in which Python launches one step on an idle card. If it exceeds `time_us`, the card waited for
            Python.
    """

    time_us: float
    half_width_us: float
    graphs: int = 0
    stayed_fast: tuple[int, ...] = ()
    moves: int = 0
    moved_bytes: int = 0
    launch_us: float = 0.0


@dataclass(frozen=True)
class AsRun:
    """A step as a card ran it, with all tensors fast and under each plan.

    Attributes:
        slow_memory: the name of the slow memory.
        plans: in the plans' order; the reason, for a plan that could not be run.
    """

    slow_memory: str
    fast: Run
    plans: tuple[Run | str, ...]
    took_s: float
