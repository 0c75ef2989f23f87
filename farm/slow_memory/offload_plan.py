"""Which tensors of a step lie in slow memory, so that it is fastest within a given fast memory: an integer program.

A tensor is fast or slow for its whole life. What it costs to have it slow is added up over its calls, one tensor at a time: what
several slow tensors of one call cost together is taken for the sum of what each costs alone. With moves, one that is fast may
also lie elsewhere in an inactive period that is long enough to go out and come back while the wire is free.

    least   Σ slow_us[t] x[t]
    so that Σ size[t] (1 - x[t]) - Σ size[t] y[p] <= fast, over the tensors held and the periods away at each call
            y[p] <= 1 - x[t]
            Σ y[p] <= 1, over the transfers of one direction that would run at once

HiGHS solves it (`scipy.optimize.milp`), within a time limit and to a gap that are both told.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import itertools
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farm.errors import UsageError
from farm.operators.captured import CapturedTensor
from farm.slow_memory.transfers import AsRun, Wire, away_while
from farm.training.tensor_lifetime import ALLOCATED_BYTES, Life
from farm.types.format import count_of

TIME_LIMIT_S = 10.0  # of one program
GAP = 1e-3  # a program ends when no plan can be better by more than this share
POINTS = 9  # of the curve
_ALONE = threading.Lock()
_NEXT_TO_NOTHING_US = 1e-6  # what is free either way stays fast


@dataclass(frozen=True)
class SlowCosts:
    """What each tensor of a step adds to it where it is slow for its life.

    Attributes:
        slow_us: by the tensor's number, over all its calls.
        read_us: of that, what comes from readings; the rest from sizes over ``bytes_per_s``.
        bytes_per_s: of the wire.
        told: where they come from, for people.
        together: median over the tuples that were read with all tensors slow: the sum of one at a time over that. None: unread.
    """

    slow_us: Mapping[int, float]
    read_us: Mapping[int, float]
    bytes_per_s: float
    told: str
    together: float | None = None

    @property
    def read_share(self) -> float:
        """Of all that slow tensors would add, 0 to 1."""
        total_us = sum(self.slow_us.values())
        return sum(self.read_us.values()) / total_us if total_us else 0.0


@dataclass(frozen=True)
class PlacementPlan:
    """One placement.

    Attributes:
        slow: numbers of tensors.
        moved: periods, as (tensor, number of its inactive period), in which a fast one lies elsewhere.
        time_us: of the step, predicted.
        peak_bytes: of fast memory.
        gap: share by which the best plan may be faster at most, in what slow tensors add; 0 where it is known to be the best.
        in_time: whether the program ended by its gap; else by its time limit.
    """

    fast_bytes: int
    slow: frozenset[int]
    moved: tuple[tuple[int, int], ...]
    time_us: float
    peak_bytes: int
    gap: float
    in_time: bool


@dataclass(frozen=True)
class Placing:
    """Plans for amounts of fast memory, and what less and more of it would give.

    Attributes:
        plans: one for each amount that was asked for.
        unsolved: amounts of the curve for which no plan was found in time.
        all_fast_us, all_slow_us: of the step.
        least_bytes: that the largest operator reads and writes: less is refused.
        moves_bytes_per_s: that moves were planned with, each way; None where nothing is moved.
        wire: as it was measured beside the step; None where it was not.
        run: the step as a card ran it under these plans; None where none did.
    """

    costs: SlowCosts
    plans: tuple[PlacementPlan, ...]
    curve: tuple[PlacementPlan, ...]
    unsolved: tuple[int, ...]
    all_fast_us: float
    all_slow_us: float
    least_bytes: int
    peak_bytes: int
    moves_bytes_per_s: float | None = None
    wire: Wire | None = None
    run: AsRun | None = None

    @property
    def plan(self) -> PlacementPlan:
        """The first."""
        return self.plans[0]

    def slow(self, life: Life, plan: PlacementPlan) -> list[CapturedTensor]:
        """The tensors that a plan has in slow memory, the largest first."""
        there = (tensor for tensor in life.tensors if tensor.number in plan.slow)
        return sorted(there, key=lambda tensor: (-tensor.size_bytes, tensor.number))


def allocated_bytes(tensor: CapturedTensor) -> int:
    return -(-tensor.size_bytes // ALLOCATED_BYTES) * ALLOCATED_BYTES


def placing(
    life: Life,
    costs: SlowCosts,
    *amounts_bytes: int,
    moves_bytes_per_s: float | None = None,
    time_limit_s: float = TIME_LIMIT_S,
) -> Placing:
    """
    Args:
        amounts_bytes: of fast memory, each to be planned for.
        moves_bytes_per_s: at which tensors may be moved while they wait, each way; None: nothing is moved.

    Raises:
        UsageError: the fast memory is less than the largest operator needs; SciPy is not installed; no plan was found in time.
    """
    program = _Program(life, costs, moves_bytes_per_s)
    if (fast_bytes := min(amounts_bytes)) < program.least_bytes:
        call = life.capture.calls[program.largest]
        spec = life.capture.tuples.get(call.tuple_id)
        raise UsageError(
            f"{count_of(fast_bytes, 'B')} of fast memory are less than the largest operator needs: "
            f"{spec.operator if spec else 'call'} at call {call.index} reads and writes {count_of(program.least_bytes, 'B')}.",
            f"Give --fast {-(-program.least_bytes // 10**6)}MB or more.",
        )
    plans = []
    for fast_bytes in amounts_bytes:
        if (plan := program.solved(fast_bytes, time_limit_s)) is None:
            raise UsageError(
                f"No placement within {count_of(fast_bytes, 'B')} was found in {time_limit_s:g} s.",
                "Give a larger --fast.",
            )
        plans.append(plan)
    steps = (program.peak_bytes - program.least_bytes) / (POINTS - 1)
    wanted = sorted({program.least_bytes + round(number * steps) for number in range(POINTS)})
    curve = {amount: program.solved(amount, time_limit_s) for amount in wanted}
    return Placing(
        costs=costs,
        plans=tuple(plans),
        curve=tuple(plan for plan in curve.values() if plan is not None),
        unsolved=tuple(amount for amount, plan in curve.items() if plan is None),
        all_fast_us=life.step_us,
        all_slow_us=life.step_us + sum(costs.slow_us.values()),
        least_bytes=program.least_bytes,
        peak_bytes=program.peak_bytes,
        moves_bytes_per_s=moves_bytes_per_s,
    )


class _Program:
    def __init__(self, life: Life, costs: SlowCosts, moves_bytes_per_s: float | None) -> None:
        self.life, self.costs = life, costs
        calls = len(life.times_us)
        self.tensors = [tensor for tensor in life.tensors if tensor.size_bytes]
        self.pieces = [allocated_bytes(tensor) // ALLOCATED_BYTES for tensor in self.tensors]
        self.held: list[list[int]] = [[] for _ in range(calls)]  # places among `tensors`
        for place, tensor in enumerate(self.tensors):
            for call in range(max(tensor.born, 0), life.capture.last_held(tensor) + 1):
                self.held[call].append(place)
        self.held_pieces = [sum(self.pieces[place] for place in there) for there in self.held]
        place_of = {tensor.number: place for place, tensor in enumerate(self.tensors)}
        used = [
            sum(self.pieces[place_of[number]] for number in {*call.reads, *call.writes} & place_of.keys())
            for call in life.capture.calls
        ]
        self.largest = max(range(calls), key=lambda call: used[call])
        self.least_bytes = used[self.largest] * ALLOCATED_BYTES
        self.peak_bytes = max(self.held_pieces) * ALLOCATED_BYTES
        self.periods: list[tuple[int, int, list[tuple[int, int]]]] = []  # place, number of the period, calls while away
        self.transfers: list[tuple[float, float, float]] = []  # way, when it goes out, when it comes back
        if moves_bytes_per_s is not None:
            self._find_periods(place_of, moves_bytes_per_s)

    def _find_periods(self, place_of: Mapping[int, int], bytes_per_s: float) -> None:
        for number, periods in self.life.periods.items():
            if (place := place_of.get(number)) is None:
                continue
            way_us = self.tensors[place].size_bytes / bytes_per_s * 1e6
            for index, period in enumerate(periods):
                if period.time_us > 2 * way_us and (ranges := away_while(self.life, period, way_us)):
                    self.periods.append((place, index, ranges))
                    self.transfers.append((way_us, period.begin_us, period.end_us - way_us))

    def solved(self, fast_bytes: int, time_limit_s: float) -> PlacementPlan | None:
        """None: no plan was found in time."""
        fast = fast_bytes // ALLOCATED_BYTES
        rows = self._memory_rows(fast)
        if not rows:
            return self._plan(fast_bytes, [False] * len(self.tensors), [False] * len(self.periods), 0.0, True)
        found = _solved(self._costs(), [*rows, *self._other_rows()], time_limit_s)
        if found.x is None:
            return None
        chosen = [value > 0.5 for value in found.x]
        slow, moved = chosen[: len(self.tensors)], chosen[len(self.tensors) :]
        self._repair(fast, slow, moved)
        self._leave_in_place(fast, slow, moved)
        gap = self._gap([*slow, *moved], found.mip_dual_bound)
        return self._plan(fast_bytes, slow, moved, gap, found.status == 0)

    def _gap(self, chosen: Sequence[bool], least_us: float | None) -> float:
        """By which share a plan is above the program's bound."""
        added_us = sum(cost for cost, there in zip(self._costs(), chosen, strict=True) if there)
        nothing_us = _NEXT_TO_NOTHING_US * len(chosen)
        return max(0.0, 1.0 - (least_us or 0.0) / added_us) if added_us > nothing_us else 0.0

    def _costs(self) -> list[float]:
        slow = [self.costs.slow_us.get(tensor.number, 0.0) + _NEXT_TO_NOTHING_US for tensor in self.tensors]
        return slow + [_NEXT_TO_NOTHING_US] * len(self.periods)

    def _memory_rows(self, fast: int) -> list[Row]:
        """What must leave at each call at which more is held than there is; calls whose tensors another one has all are left out."""
        ends = {self.life.capture.last_held(tensor) for tensor in self.tensors}
        away = self._away()
        rows = []
        for call, there in enumerate(self.held):
            if self.held_pieces[call] > fast and (self.periods or call in ends):
                terms = {place: float(self.pieces[place]) for place in there}
                terms |= {len(self.tensors) + one: float(self.pieces[self.periods[one][0]]) for one in away[call]}
                rows.append(Row(terms, float(self.held_pieces[call] - fast), float("inf")))
        return rows

    def _away(self) -> list[list[int]]:
        """The periods that are away at each call."""
        away: list[list[int]] = [[] for _ in self.held]
        for one, (_, _, ranges) in enumerate(self.periods):
            for call in itertools.chain.from_iterable(itertools.starmap(range, ranges)):
                away[call].append(one)
        return away

    def _other_rows(self) -> list[Row]:
        """What is slow is not moved; one transfer at a time each way."""
        first = len(self.tensors)
        rows = [Row({place: 1.0, first + one: 1.0}, 0.0, 1.0) for one, (place, _, _) in enumerate(self.periods)]
        step_us = self.life.step_us
        for way in (1, 2):
            spans = [(times[way] % step_us, times[0]) for times in self.transfers]
            order = sorted(range(len(spans)), key=lambda one: spans[one][0])
            begins = [spans[one][0] for one in order]
            for one in order:
                begin_us, _ = spans[one]
                together = [
                    other
                    for other in order[: bisect.bisect_right(begins, begin_us)]
                    if spans[other][0] + spans[other][1] > begin_us
                ]
                together += [other for other in order if spans[other][0] + spans[other][1] - step_us > begin_us]
                if len(together := list(dict.fromkeys(together))) > 1:
                    rows.append(Row({first + other: 1.0 for other in together}, 0.0, 1.0))
        return rows

    def _repair(self, fast: int, slow: list[bool], moved: list[bool]) -> None:
        """Where rounding left a few bytes too many: the cheapest tensor there leaves, too."""
        for call, there in enumerate(self.held):
            while self._fast_pieces(call, slow, moved) > fast:
                left = [place for place in there if not slow[place]]
                place = min(left, key=lambda one: self.costs.slow_us.get(self.tensors[one].number, 0.0))
                slow[place] = True
                for one, period in enumerate(self.periods):
                    moved[one] = moved[one] and period[0] != place

    def _leave_in_place(self, fast: int, slow: Sequence[bool], moved: list[bool]) -> None:
        """Drop moves that nobody needs, which cost the program next to nothing: the smallest first."""
        held = [self._fast_pieces(call, slow, moved) for call in range(len(self.held))]
        for one in sorted(range(len(moved)), key=lambda one: self.pieces[self.periods[one][0]]):
            place, _, ranges = self.periods[one]
            calls = list(itertools.chain.from_iterable(itertools.starmap(range, ranges)))
            if moved[one] and all(held[call] + self.pieces[place] <= fast for call in calls):
                moved[one] = False
                for call in calls:
                    held[call] += self.pieces[place]

    def _fast_pieces(self, call: int, slow: Sequence[bool], moved: Sequence[bool]) -> int:
        held = sum(self.pieces[place] for place in self.held[call] if not slow[place])
        gone = (
            self.pieces[place]
            for one, (place, _, ranges) in enumerate(self.periods)
            if moved[one] and any(begin <= call < end for begin, end in ranges)
        )
        return held - sum(gone)

    def _plan(
        self, fast_bytes: int, slow: Sequence[bool], moved: Sequence[bool], gap: float, in_time: bool
    ) -> PlacementPlan:
        numbers = frozenset(tensor.number for tensor, away in zip(self.tensors, slow, strict=True) if away)
        periods = tuple(
            (self.tensors[place].number, index)
            for (place, index, _), away in zip(self.periods, moved, strict=True)
            if away
        )
        added_us = sum(self.costs.slow_us.get(number, 0.0) for number in numbers)
        peak = max(self._fast_pieces(call, slow, moved) for call in range(len(self.held)))
        time_us = self.life.step_us + added_us
        return PlacementPlan(fast_bytes, numbers, periods, time_us, peak * ALLOCATED_BYTES, gap, in_time)


@dataclass(frozen=True)
class Row:
    """A constraint: least <= Σ factor * variable <= most."""

    factors: Mapping[int, float]
    least: float
    most: float


def _solved(costs: Sequence[float], rows: Sequence[Row], time_limit_s: float) -> Any:
    """Raises:
    UsageError: SciPy is not installed.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError as error:
        raise UsageError(
            "Placements are planned with SciPy, which is not installed.",
            "Install it with `pip install 'operator-farm[placement]'`.",
        ) from error
    places = [(number, place) for number, row in enumerate(rows) for place in row.factors]
    factors = [factor for row in rows for factor in row.factors.values()]
    matrix = csr_array((factors, tuple(zip(*places, strict=True))), shape=(len(rows), len(costs)))
    with _quiet():
        return milp(
            costs,
            integrality=[1] * len(costs),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, [row.least for row in rows], [row.most for row in rows]),
            options={"time_limit": time_limit_s, "mip_rel_gap": GAP},
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """HiGHS of some versions writes lines of its own to the process' standard output, where a command's result stands."""
    if sys.stdout is None:  # closed by who started the process
        yield
        return
    with _ALONE:
        sys.stdout.flush()
        kept = os.dup(1)
        try:
            with open(os.devnull, "w") as nothing:
                os.dup2(nothing.fileno(), 1)
                yield
        finally:
            ctypes.CDLL(None).fflush(None)  # what C has not written yet, too
            os.dup2(kept, 1)
            os.close(kept)
