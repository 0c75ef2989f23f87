"""Moves of a step's inactive tensors to slow memory, and measured results of copies and runs.
Imports no torch.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from farm.training.tensor_lifetime import Inactive, Life
from farm.types.figure import Figure


@dataclass(frozen=True)
class Move:
    """One tensor that is in slow memory for one inactive period. Each attribute except `tensor` is
    the index of a call: the event happens before that call. The number of calls means the end of
    the step."""

    tensor: int
    out: int  # the copy to slow memory begins
    # the copy to slow memory must be complete, because other tensors then use the fast memory
    gone: int
    # the copy back begins. `gone`, `back` and `used` are at or before `out` if they are in the next
    # step.
    back: int
    used: int  # the copy back must be complete


def moves_of(life: Life, moved: Iterable[tuple[int, int]], bytes_per_s: float) -> list[Move]:
    """Return the moves of a plan (`OffloadPlan.moved`). A copy out begins when the inactive period
    begins; a copy back ends just before the next use."""
    moves = []
    for tensor, index in moved:
        period = life.periods[tensor][index]
        ranges = away_while(life, period, life.sizes_bytes[tensor] / bytes_per_s * 1e6)
        moves.append(Move(tensor, period.begin, ranges[0][0], ranges[-1][1], period.end))
    return moves


def away_while(life: Life, period: Inactive, copy_us: float) -> list[tuple[int, int]]:
    """Return ranges [first, end) of the calls during which a tensor is in slow memory, if one copy
    takes `copy_us`. There are two ranges if the period crosses the end of the step."""
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
    """The memory that a step saves if inactive tensors are in slow memory, with equal bandwidths in
    both directions.
    """

    bytes_per_s: float
    periods: int  # all inactive periods of the step
    long_enough: int  # number of periods that are longer than the two copies
    # These long periods as far as the link has time for their copies, the most byte-seconds first
    hidden: tuple[Inactive, ...]
    moved_bytes: int  # bytes that one step copies out; it copies as many back
    link_share: float  # the share of the step in which the link is busy, for each direction
    held_bytes: tuple[int, ...]  # bytes in fast memory during each call

    @property
    def peak_bytes(self) -> int:
        return max(self.held_bytes)


def offload(life: Life, bytes_per_s: float) -> Offload:
    """Estimate the memory that copies to slow memory save.

    The estimate assumes that calls, copies out and copies back run at the same time, at full
    bandwidth. All copies of one direction together take no longer than the step."""
    sizes = life.sizes_bytes
    every_period = itertools.chain.from_iterable(life.periods.values())
    periods = [period for period in every_period if sizes[period.tensor]]
    copy_us = {number: size / bytes_per_s * 1e6 for number, size in sizes.items()}
    enough = [period for period in periods if period.time_us > 2 * copy_us[period.tensor]]
    enough.sort(
        key=lambda period: -sizes[period.tensor] * (period.time_us - 2 * copy_us[period.tensor])
    )
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
    return Offload(
        bytes_per_s, len(periods), len(enough), tuple(hidden), moved, share, tuple(held_bytes)
    )


@dataclass(frozen=True)
class Copied:
    """The bandwidth of consecutive copies, in one direction or both at once; None for a direction
    without copies.
    """

    out_bytes_per_s: float | None
    back_bytes_per_s: float | None
    step_us: float | None = None  # of the step that ran at the same time

    @property
    def rates(self) -> list[float]:
        return [rate for rate in (self.out_bytes_per_s, self.back_bytes_per_s) if rate is not None]


@dataclass(frozen=True)
class Wire:
    """Copies between a card's memory and slow memory, alone and during a step with all tensors in
    fast memory.
    """

    step_us: float  # without copies
    alone: tuple[Copied, ...]
    # copies during the step; empty on a CPU, which copies between its calls
    beside: tuple[Copied, ...]

    @property
    def bytes_per_s(self) -> float:
        """The lowest measured bandwidth; plans use it."""
        return min(min(link.rates) for link in self.beside or self.alone)


@dataclass(frozen=True)
class Run:
    """The result of running a step on a card."""

    time_us: Figure
    graphs: int = 0  # graphs launched for one step; 0 if Python launches the calls
    stayed_fast: tuple[
        int, ...
    ] = ()  # numbers of the planned slow tensors that had to stay in fast memory
    moves: int = 0  # number of moves in one step
    moved_bytes: int = 0  # bytes that these moves copy out; they copy as many back
    # Time that Python needs to launch one step on an idle card. If it exceeds `time_us`, the card
    # waited for Python.
    launch_us: float = 0.0


@dataclass(frozen=True)
class AsRun:
    """The results of running a step on a card: with all tensors in fast memory, and under each
    plan.
    """

    slow_memory: str  # name of the slow memory
    fast: Run
    plans: tuple[Run | str, ...]  # in order; a text with the reason if the plan could not be run
    took_s: float
