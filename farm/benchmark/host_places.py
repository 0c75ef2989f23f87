"""Time the calls of a whole model in their order on a CPU (docs/design/cpu-places.md).

A loop of one operator finds its code, its weights and its output in the caches of the core, or in
none of them. In a model, the other calls decide. So the calls are replayed from their tuples, in
the order of the model, with its weights and the lifetimes of its tensors
(`farm.benchmark.call_context.Player`). Each call runs twice: the other calls have left the caches
for the first run, and the first run has left them for the second. The difference is the time that
the place in the model adds to a loop on warm data. Before each run its inputs are written again, as
in a loop. Little Python runs between the calls: the objects of a player would fill the cache of the
core. The clock is the CPU time of this thread, and the fastest replays count, as for passes
(`farm.benchmark.host_clock`)."""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from farm.benchmark.cache import write_again
from farm.benchmark.call_context import Player
from farm.benchmark.passes import MEMORY_SHARE, free_bytes
from farm.operators.captured import CapturedCall, CapturedPass
from farm.operators.rebuild import Rebuilt, needed_bytes
from farm.types import intervals
from farm.types.details import Place
from farm.types.figure import Figure

MOST_REPLAYS = 16  # in one turn
DIGITS = 4  # of a time in us

#: Index of a call -> for each replay, the CPU time of its first and its second run in s.
Runs = dict[int, list[tuple[float, float]]]


@dataclass(frozen=True)
class _ReadyCall:
    """A call of a capture whose inputs are in memory."""

    index: int
    operator: Rebuilt
    inputs: list[torch.Tensor]  # that other calls write

    @classmethod
    def of(cls, call: CapturedCall, operator: Rebuilt) -> _ReadyCall:
        return cls(call.index, operator, operator.read_memory)

    def run_s(self) -> float:
        """Run the operator on inputs that were just written. Returns the CPU time in s."""
        write_again(self.inputs)
        begin_s = time.thread_time()
        self.operator.run()
        return time.thread_time() - begin_s


class HostPlaces:
    """Times the calls of a model in order, in several turns.

    Raises:
        FarmError: a tuple cannot be built.
        torch.OutOfMemoryError: the inputs of all calls do not fit in the memory.
    """

    def __init__(self, capture: CapturedPass, device: torch.device) -> None:
        self.capture = capture
        self.turns: list[Runs] = []
        input_bytes = sum(needed_bytes(capture.tuples[call.tuple_id]) for call in capture.calls)
        if input_bytes > MEMORY_SHARE * free_bytes(device):
            raise torch.OutOfMemoryError("The inputs of all calls do not fit in the memory.")
        self._calls: list[_ReadyCall] = []

        def kept(call: CapturedCall, operator: Rebuilt) -> object:
            self._calls.append(_ReadyCall.of(call, operator))
            return operator.run()

        Player(capture, device).play(kept, once=True)

    def visit(self, longest_s: float) -> None:
        """Replay all calls for about this time, at least once. A first replay does not count: it
        leaves the caches as a pass of the model does."""
        end_s = time.perf_counter() + longest_s
        of_turn: Runs = defaultdict(list)
        self._replay(defaultdict(list))
        for _ in range(MOST_REPLAYS):
            self._replay(of_turn)
            if time.perf_counter() >= end_s:
                break
        self.turns.append(of_turn)

    def _replay(self, runs: Runs) -> None:
        for call in self._calls:
            runs[call.index].append((call.run_s(), call.run_s()))

    def places(self) -> dict[str, Place]:
        """Tuple id -> what one call takes longer at its place: the mean over the calls. The
        half-widths come from the differences between turns."""
        effects_us = self._effects_us(self.turns)
        without_turn = []
        if len(self.turns) > 1:
            for number in range(len(self.turns)):
                others = [*self.turns[:number], *self.turns[number + 1 :]]
                without_turn.append(self._effects_us(others))

        places = {}
        for tuple_id, effect_us in effects_us.items():
            half_width = intervals.jackknife_half_width([each[tuple_id] for each in without_turn])
            figure = intervals.finite_figure(effect_us, half_width)
            rounded = Figure(round(figure.value, DIGITS), round(figure.half_width, DIGITS))
            places[tuple_id] = Place(rounded, self.capture.counts[tuple_id])
        return places

    def _effects_us(self, turns: Sequence[Runs]) -> dict[str, float]:
        """Tuple id -> the mean effect over its calls in us."""
        of_tuple: dict[str, list[float]] = defaultdict(list)
        for call in self.capture.calls:
            pairs = itertools.chain.from_iterable(of_turn[call.index] for of_turn in turns)
            of_tuple[call.tuple_id].append(_effect_us(pairs))
        return {
            tuple_id: math.fsum(effects_us) / len(effects_us)
            for tuple_id, effects_us in of_tuple.items()
        }


def _effect_us(pairs: Iterable[tuple[float, float]]) -> float:
    """The difference between the fastest first runs and the fastest second runs, in us."""
    first_s, second_s = zip(*pairs, strict=True)
    return (intervals.fastest(first_s) - intervals.fastest(second_s)) * 1e6
