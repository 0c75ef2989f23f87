"""Plan which tensors of a step are in slow memory. An integer program finds the fastest step that
fits fast memory.

A tensor is fast (in fast memory) or slow (in slow memory) for its whole lifetime. A slow tensor has
a cost for each call that uses it. If a call uses several slow tensors, the program adds their
costs. With moves, a fast tensor may be in slow memory during an inactive period, if the period is
long enough for both copies and the link is free.

    minimize    Σ slow_us[t] x[t]
    subject to  Σ size[t] (1 - x[t]) - Σ size[t] y[p] <= fast, at each call, over its held tensors t
    and moved periods p
                y[p] <= 1 - x[t]
                Σ y[p] <= 1, over the transfers of one direction that would overlap

x[t]: tensor t is slow. y[p]: tensor t is moved in period p. HiGHS (`scipy.optimize.milp`) solves it
in a time limit."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farm.addons.memory.transfers import AsRun, Wire, away_while
from farm.errors import UsageError, needing
from farm.operators.captured import CapturedTensor
from farm.training.tensor_lifetime import ALLOCATED_BYTES, Inactive, Life
from farm.types.format import count_of

TIME_LIMIT_S = 10.0  # limit for solving one integer program
GAP = 1e-3  # the solver stops if no plan can be better by more than this share
POINTS = 9  # points of the curve
_STDOUT_LOCK = threading.Lock()
_TINY_US = 1e-6  # added to each cost, so that a tensor without a cost stays fast


@dataclass(frozen=True)
class SlowCosts:
    """The time that each tensor of a step adds if it is in slow memory for its whole lifetime."""

    slow_us: Mapping[int, float]  # added time over all calls, by number of the tensor
    # the share of all costs from readings, 0 to 1; the rest is estimated from a bandwidth
    read_share: float
    bytes_per_s: float  # of the link
    source: str  # where the costs come from, as text
    # A check of the assumption that added times of tensors can be summed. Time of a tuple with no
    # slow tensor plus the time that each tensor adds alone, divided by the measured time with all
    # tensors slow. Median over the tuples that have these readings; None if no tuple has them.
    together: float | None = None


@dataclass(frozen=True)
class OffloadPlan:
    """A plan for one amount of fast memory."""

    fast_bytes: int
    slow: frozenset[int]  # numbers of the slow tensors
    # (tensor, index of the inactive period in which a fast tensor is slow)
    moved: tuple[tuple[int, int], ...]
    time_us: float  # predicted for the step
    peak_bytes: int  # of fast memory
    # Bound of the solver: no plan adds less than (1 - gap) of this plan's added time. 0: this plan
    # is the best.
    gap: float
    ended_in_time: bool  # True if the solver reached its gap; False if it reached the time limit


@dataclass(frozen=True)
class OffloadPlans:
    """Plans for the requested amounts of fast memory, and the curve of step time over fast
    memory.
    """

    costs: SlowCosts
    plans: tuple[OffloadPlan, ...]  # one plan for each requested amount
    curve: tuple[OffloadPlan, ...]
    unsolved: tuple[int, ...]  # amounts of the curve without a plan within the time limit
    all_fast: OffloadPlan  # all tensors are in fast memory
    # bytes that the largest operator reads and writes; the least allowed amount of fast memory
    least_bytes: int
    # assumed bandwidth of moves in each direction; None without moves
    moves_bytes_per_s: float | None = None
    wire: Wire | None = None  # measured bandwidths of copies; None if not measured
    # results of running the step under these plans; None if it was not run
    run: AsRun | None = None

    @property
    def all_slow_us(self) -> float:
        """The predicted time of the step with all tensors in slow memory."""
        return self.all_fast.time_us + sum(self.costs.slow_us.values())

    @property
    def plan(self) -> OffloadPlan:
        """The first plan."""
        return self.plans[0]

    def slow(self, life: Life, plan: OffloadPlan) -> list[CapturedTensor]:
        """Return the slow tensors of a plan, the largest first."""
        slow = (tensor for tensor in life.tensors if tensor.number in plan.slow)
        return sorted(slow, key=lambda tensor: (-tensor.size_bytes, tensor.number))


def plan_offload(
    life: Life, costs: SlowCosts, *amounts_bytes: int, moves_bytes_per_s: float | None = None
) -> OffloadPlans:
    """Plan a step for each amount of fast memory. Without ``moves_bytes_per_s``, no tensor is
    moved. Raises `UsageError` if an amount is less than the largest operator needs, SciPy is not
    installed, or the solver found no plan in time."""
    program = _Program(life, costs, moves_bytes_per_s)
    if (fast_bytes := min(amounts_bytes)) < program.least_bytes:
        call = life.capture.calls[program.largest]
        spec = life.capture.tuples.get(call.tuple_id)
        raise UsageError(
            f"{count_of(fast_bytes, 'B')} of fast memory are too little for the largest operator: "
            f"{spec.operator if spec else 'the operator'} (call {call.index}) reads and writes "
            f"{count_of(program.least_bytes, 'B')}.",
            f"Give --fast {-(-program.least_bytes // 10**6)}MB or more.",
        )
    plans = []
    for fast_bytes in amounts_bytes:
        if (plan := program.solve(fast_bytes)) is None:
            what = (
                f"The solver found no plan with {count_of(fast_bytes, 'B')} of fast memory in "
                f"{TIME_LIMIT_S:g} s."
            )
            raise UsageError(what, "Give more fast memory with --fast.")
        plans.append(plan)
    steps = (program.peak_bytes - program.least_bytes) / (POINTS - 1)
    amounts = sorted({program.least_bytes + round(number * steps) for number in range(POINTS)})
    curve = {amount: program.solve(amount) for amount in amounts}
    return OffloadPlans(
        costs=costs,
        plans=tuple(plans),
        curve=tuple(plan for plan in curve.values() if plan is not None),
        unsolved=tuple(amount for amount, plan in curve.items() if plan is None),
        all_fast=program.all_fast(program.peak_bytes),
        least_bytes=program.least_bytes,
        moves_bytes_per_s=moves_bytes_per_s,
    )


@dataclass(frozen=True)
class _Move:
    """A move that a plan may have: a fast tensor is in slow memory during an inactive period."""

    position: int  # of the tensor in `_Program.tensors`
    pieces: int  # of the tensor
    index: int  # of the period, among those of the tensor
    period: Inactive
    calls: tuple[int, ...]  # during which the tensor is in slow memory


class _Program:
    def __init__(self, life: Life, costs: SlowCosts, moves_bytes_per_s: float | None) -> None:
        self.life = life
        calls = len(life.times_us)
        self.tensors = [tensor for tensor in life.tensors if tensor.size_bytes]
        self.pieces = [-(-tensor.size_bytes // ALLOCATED_BYTES) for tensor in self.tensors]
        self.slow_us = [costs.slow_us.get(tensor.number, 0.0) for tensor in self.tensors]
        self.held: list[list[int]] = [[] for _ in range(calls)]  # indices into `tensors`
        for position, tensor in enumerate(self.tensors):
            for call in range(max(tensor.born, 0), life.capture.last_held(tensor) + 1):
                self.held[call].append(position)
        self.held_pieces = [
            sum(self.pieces[position] for position in positions) for positions in self.held
        ]
        position_of = {tensor.number: position for position, tensor in enumerate(self.tensors)}
        used = [
            sum(
                self.pieces[position_of[number]]
                for number in {*call.reads, *call.writes} & position_of.keys()
            )
            for call in life.capture.calls
        ]
        self.largest = used.index(max(used))
        self.least_bytes = max(used) * ALLOCATED_BYTES
        self.peak_bytes = max(self.held_pieces) * ALLOCATED_BYTES
        self.moves: list[_Move] = []
        self.copies_us: list[float] = []  # the time of a copy of each move, in one direction
        if moves_bytes_per_s is not None:
            self._add_moves(moves_bytes_per_s)
        self.away: list[list[int]] = [[] for _ in range(calls)]  # indices into `moves`
        for number, move in enumerate(self.moves):
            for call in move.calls:
                self.away[call].append(number)

    def _add_moves(self, bytes_per_s: float) -> None:
        """Add the moves whose periods are long enough for both copies."""
        for position, tensor in enumerate(self.tensors):
            copy_us = tensor.size_bytes / bytes_per_s * 1e6
            for index, period in enumerate(self.life.periods[tensor.number]):
                if period.time_us <= 2 * copy_us:
                    continue
                ranges = away_while(self.life, period, copy_us)
                calls = tuple(itertools.chain.from_iterable(itertools.starmap(range, ranges)))
                if calls:
                    self.moves.append(_Move(position, self.pieces[position], index, period, calls))
                    self.copies_us.append(copy_us)

    def solve(self, fast_bytes: int) -> OffloadPlan | None:
        """Return the best plan for an amount of fast memory; None if the solver found none in
        time.
        """
        fast = fast_bytes // ALLOCATED_BYTES
        rows = self._memory_rows(fast)
        if not rows:
            return self.all_fast(fast_bytes)
        costs = [*(slow_us + _TINY_US for slow_us in self.slow_us), *[_TINY_US] * len(self.moves)]
        solution = _solve(costs, [*rows, *self._other_rows()])
        if solution.x is None:
            return None
        chosen = [value > 0.5 for value in solution.x]
        slow, moved = chosen[: len(self.tensors)], chosen[len(self.tensors) :]
        self._repair(fast, slow, moved)
        self._leave_in_place(fast, slow, moved)
        added_us = sum(itertools.compress(costs, [*slow, *moved]))
        least_us = solution.mip_dual_bound or 0.0
        gap = max(0.0, 1.0 - least_us / added_us) if added_us > _TINY_US * len(costs) else 0.0
        return self._plan(fast_bytes, slow, moved, gap, solution.status == 0)

    def all_fast(self, fast_bytes: int) -> OffloadPlan:
        """Return the plan with all tensors in fast memory."""
        return self._plan(
            fast_bytes, [False] * len(self.tensors), [False] * len(self.moves), 0.0, True
        )

    def _memory_rows(self, fast: int) -> list[Constraint]:
        """Return a constraint for each call that holds more than fast memory, unless another call
        holds its tensors.
        """
        ends = {self.life.capture.last_held(tensor) for tensor in self.tensors}
        rows = []
        for call, positions in enumerate(self.held):
            if self.held_pieces[call] > fast and (self.moves or call in ends):
                terms = {position: float(self.pieces[position]) for position in positions}
                for number in self.away[call]:
                    terms[len(self.tensors) + number] = float(self.moves[number].pieces)
                rows.append(Constraint(terms, float(self.held_pieces[call] - fast), float("inf")))
        return rows

    def _other_rows(self) -> list[Constraint]:
        """Return the other constraints: a slow tensor is not moved, and each direction has one
        copy at a time.
        """
        first = len(self.tensors)
        rows = [
            Constraint({move.position: 1.0, first + number: 1.0}, 0.0, 1.0)
            for number, move in enumerate(self.moves)
        ]
        moves = list(zip(self.moves, self.copies_us, strict=True))
        rows += self._one_at_a_time([move.period.begin_us for move, _ in moves])
        rows += self._one_at_a_time([move.period.end_us - copy_us for move, copy_us in moves])
        return rows

    def _one_at_a_time(self, begins_us: Sequence[float]) -> list[Constraint]:
        """Return the constraints of the copies in one direction: of those that would run at the
        begin of a copy, only one does. ``begins_us``: of the copy of each move.
        """
        first, step_us = len(self.tensors), self.life.step_us
        begins = [begin_us % step_us for begin_us in begins_us]
        ends = [begin + copy_us for begin, copy_us in zip(begins, self.copies_us, strict=True)]
        order = sorted(range(len(begins)), key=lambda number: begins[number])
        rows = []
        for number in order:
            at_us = begins[number]
            together = {}
            for other in order:
                runs = begins[other] <= at_us < ends[other]
                runs_from_last_step = ends[other] - step_us > at_us
                if runs or runs_from_last_step:
                    together[first + other] = 1.0
            if len(together) > 1:
                rows.append(Constraint(together, 0.0, 1.0))
        return rows

    def _repair(self, fast: int, slow: list[bool], moved: list[bool]) -> None:
        """Make the cheapest tensor slow where the solver's rounding left a few bytes too many in
        fast memory.
        """
        for call, positions in enumerate(self.held):
            while self._fast_pieces(call, slow, moved) > fast:
                position = min(
                    (position for position in positions if not slow[position]),
                    key=lambda position: self.slow_us[position],
                )
                slow[position] = True
                for number, move in enumerate(self.moves):
                    moved[number] = moved[number] and move.position != position

    def _leave_in_place(self, fast: int, slow: Sequence[bool], moved: list[bool]) -> None:
        """Drop unnecessary moves, the smallest first. The solver may keep them, because they cost
        almost nothing.
        """
        used = [self._fast_pieces(call, slow, moved) for call in range(len(self.held))]
        for number in sorted(range(len(moved)), key=lambda number: self.moves[number].pieces):
            move = self.moves[number]
            fits = all(used[call] + move.pieces <= fast for call in move.calls)
            if moved[number] and fits:
                moved[number] = False
                for call in move.calls:
                    used[call] += move.pieces

    def _fast_pieces(self, call: int, slow: Sequence[bool], moved: Sequence[bool]) -> int:
        in_place = sum(self.pieces[position] for position in self.held[call] if not slow[position])
        return in_place - sum(
            self.moves[number].pieces for number in self.away[call] if moved[number]
        )

    def _plan(
        self,
        fast_bytes: int,
        slow: Sequence[bool],
        moved: Sequence[bool],
        gap: float,
        ended_in_time: bool,
    ) -> OffloadPlan:
        numbers = frozenset(tensor.number for tensor in itertools.compress(self.tensors, slow))
        periods = tuple(
            (self.tensors[move.position].number, move.index)
            for move in itertools.compress(self.moves, moved)
        )
        time_us = self.life.step_us + sum(itertools.compress(self.slow_us, slow))
        peak = max(self._fast_pieces(call, slow, moved) for call in range(len(self.held)))
        return OffloadPlan(
            fast_bytes, numbers, periods, time_us, peak * ALLOCATED_BYTES, gap, ended_in_time
        )


@dataclass(frozen=True)
class Constraint:
    """A constraint: least <= Σ factor * variable <= most."""

    factors: Mapping[int, float]
    least: float
    most: float


def _solve(costs: Sequence[float], rows: Sequence[Constraint]) -> Any:
    """Solve an integer program whose variables are 0 or 1; raises `UsageError` if SciPy is not
    installed.
    """
    with needing("Plans for slow memory need SciPy", "placement"):
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    positions = [(number, position) for number, row in enumerate(rows) for position in row.factors]
    factors = [factor for row in rows for factor in row.factors.values()]
    matrix = csr_array(
        (factors, tuple(zip(*positions, strict=True))), shape=(len(rows), len(costs))
    )
    with _quiet():
        return milp(
            costs,
            integrality=[1] * len(costs),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(
                matrix, [row.least for row in rows], [row.most for row in rows]
            ),
            options={"time_limit": TIME_LIMIT_S, "mip_rel_gap": GAP},
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Discard the text that some versions of HiGHS print, because standard output is for the
    command's result.
    """
    if sys.stdout is None:  # the parent process closed it
        yield
        return
    with _STDOUT_LOCK:
        sys.stdout.flush()
        kept = os.dup(1)
        try:
            with open(os.devnull, "w") as nothing:
                os.dup2(nothing.fileno(), 1)
                yield
        finally:
            ctypes.CDLL(None).fflush(None)  # also C's buffer
            os.dup2(kept, 1)
            os.close(kept)
