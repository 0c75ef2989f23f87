"""Tensors of a step that lie elsewhere while they wait: when they go and come back, by calls, and what the wire gives them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from farm.slow_memory.options import away_while
from farm.training.tensor_lifetime import Life


@dataclass(frozen=True)
class Move:
    """One period, by the calls before which something happens; their number is behind the last.

    Attributes:
        out: the copy out begins.
        gone: it has to be done, as others take the room.
        back: the copy back begins. Not behind ``out`` where that is in the next step; so for ``gone`` and ``used``.
        used: it has to be done.
    """

    tensor: int
    out: int
    gone: int
    back: int
    used: int


def moves_of(life: Life, moved: Iterable[tuple[int, int]], bytes_per_s: float) -> list[Move]:
    """The moves of a plan (`PlacementPlan.moved`): out at once, and back so that it is just done, by the times of the calls."""
    moves = []
    for tensor, index in moved:
        period = life.periods[tensor][index]
        ranges = away_while(life, period, life.sizes_bytes[tensor] / bytes_per_s * 1e6)
        moves.append(Move(tensor, period.begin, ranges[0][0], ranges[-1][1], period.end))
    return moves


@dataclass(frozen=True)
class Copied:
    """What copies one behind the other get, one way or both at once; None for a way that was left out.

    Attributes:
        step_us: of the step beside which they ran; None where they were alone.
    """

    out_bytes_per_s: float | None
    back_bytes_per_s: float | None
    step_us: float | None = None

    @property
    def rates(self) -> list[float]:
        return [rate for rate in (self.out_bytes_per_s, self.back_bytes_per_s) if rate is not None]


@dataclass(frozen=True)
class Wire:
    """Copies between a card's memory and slow memory, alone and beside a step all of whose tensors are fast.

    Attributes:
        step_us: without copies.
        beside: nothing on a CPU, which does one after the other.
    """

    step_us: float
    alone: tuple[Copied, ...]
    beside: tuple[Copied, ...]

    @property
    def bytes_per_s(self) -> float:
        """The slowest that a copy was beside the step: what a plan can count on."""
        return min(rate for one in self.beside or self.alone for rate in one.rates)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        alone, beside = (tuple(Copied(**one) for one in data[name]) for name in ("alone", "beside"))
        return cls(data["step_us"], alone, beside)
