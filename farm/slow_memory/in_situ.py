"""What a call takes where it stands in its model when some of its tensors lie in slow memory.

The calls of a model are played again from its tuples, as for `farm.benchmark.call_context`. A changed call is run twice: first on
copies of its tensors that lie as they are asked for, between two events, then as ever, so that whatever comes after it finds
what it finds in the model. Many calls may be changed in one run, if none of them touches another: then no tensor of the one is
a tensor of the other, and neither stands right behind the other.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from farm.benchmark import intervals
from farm.benchmark.call_context import Player
from farm.benchmark.cuda_graph import capture_graph
from farm.errors import Unmeasurable
from farm.slow_memory.memory_tier import SlowMemory, slow_memory_of
from farm.types.memory_tiers import Placement
from farm.types.protocol import Protocol, Subject

if TYPE_CHECKING:
    from farm.operators.captured import Capture, CapturedCall
    from farm.operators.rebuild import Rebuilt
    from farm.slow_memory.offload import Outputs

REPLAYS = 8  # of each run, after one that is not counted


@dataclass(frozen=True)
class Changed:
    """A call, by its index, with tensors in slow memory."""

    call: int
    placement: str


@dataclass(frozen=True)
class InPlace:
    """What the changed call took, and the half-width of its 95 % interval."""

    time_us: float
    half_width_us: float


@dataclass(frozen=True)
class Runs:
    """``found`` has an entry for every change that could be made; ``left_out`` says why others could not."""

    found: dict[Changed, InPlace]
    left_out: dict[Changed, str] = field(default_factory=dict)
    runs: int = 0
    took_s: float = 0.0


def changes_of(capture: Capture, how: str, most: int | None = None) -> list[Changed]:
    """The configurations of all tuples, of each at its first call.

    Args:
        how: see `farm.types.memory_tiers.configurations`.
        most: at most so many, evenly over the model.
    """
    from farm.operators.replay import placements_of

    first: dict[str, int] = {}
    for call in capture.calls:
        first.setdefault(call.tuple_id, call.index)
    found = [
        Changed(index, word)
        for tuple_id, index in first.items()
        for word in placements_of(capture.tuples[tuple_id], how)
    ]
    if most is None or len(found) <= most:
        return found
    return [found[number * len(found) // most] for number in range(most)]


def together(capture: Capture, wanted: Sequence[Changed]) -> list[list[Changed]]:
    """As few runs as come of taking, for each, whatever touches nothing that is in it already."""
    runs, left = [], list(wanted)
    while left:
        run: list[Changed] = []
        touched: set[int] = set()
        calls: set[int] = set()
        rest = []
        for one in left:
            call = capture.calls[one.call]
            its = {*call.reads, *call.writes}
            if its & touched or calls & {one.call - 1, one.call, one.call + 1}:
                rest.append(one)
            else:
                run.append(one)
                touched |= its
                calls.add(one.call)
        runs.append(run)
        left = rest
    return runs


def read_in_place(
    capture: Capture, runs: Sequence[Sequence[Changed]], memory: Callable[[], SlowMemory], device: torch.device
) -> Runs:
    """Time changed calls, all of a run together.

    Args:
        memory: makes the slow memory of one run.
    """
    began_s = time.perf_counter()
    player = Player(capture, device)
    found: dict[Changed, InPlace] = {}
    left_out: dict[Changed, str] = {}
    for run in runs:
        play = _Play(run, memory(), device)
        player.play(play.prepare)
        left_out |= play.left_out
        if play.ready:
            found |= play.read(player)
    return Runs(found, left_out, len(runs), time.perf_counter() - began_s)


def compare(subject: Subject, protocol: Protocol, device: torch.device, most: int | None) -> dict[str, Any]:
    """Many changed calls a run, against one a run: the same configurations of a variant's tuples, each slow alone and all.

    Returns:
        ``changes`` (tuple_id, label, placement, and time_us and half_width_us of both ways), ``left_out`` (label, placement,
        why), and of both ways ``runs`` and ``took_s``.

    Raises:
        Unmeasurable: the card has no slow memory, or the model does not fit.
    """
    from farm.benchmark.cuda_graph import one_stream
    from farm.benchmark.passes import grad_mode, numeric_flags, variant_passes
    from farm.types.label import label_of

    slow_memory_of(device)
    if device.type == "cuda":
        one_stream(device)
    with numeric_flags(protocol), grad_mode(protocol):
        order = variant_passes(subject, protocol, device).order
        assert order is not None
        capture = order()
        changes = changes_of(capture, "each", most)
        memory = functools.partial(slow_memory_of, device)
        many = read_in_place(capture, together(capture, changes), memory, device)
        single = read_in_place(capture, [[one] for one in changes], memory, device)

    def about(one: Changed) -> dict[str, Any]:
        tuple_id = capture.calls[one.call].tuple_id
        return {"tuple_id": tuple_id, "label": label_of(capture.tuples[tuple_id]), "placement": one.placement}

    return {
        "changes": [
            {
                **about(one),
                "together": dataclasses.asdict(many.found[one]),
                "alone": dataclasses.asdict(single.found[one]),
            }
            for one in changes
            if one in many.found and one in single.found
        ],
        "left_out": [{**about(one), "why": why} for one, why in many.left_out.items()],
        "runs": {"together": many.runs, "alone": single.runs},
        "took_s": {"together": round(many.took_s, 3), "alone": round(single.took_s, 3)},
    }


class _Play:
    """One run."""

    def __init__(self, run: Sequence[Changed], memory: SlowMemory, device: torch.device) -> None:
        self._changes = {one.call: one for one in run}
        self._memory, self._device = memory, device
        self.ready: dict[int, tuple[dict[int, torch.Tensor], Outputs | None]] = {}
        self.left_out: dict[Changed, str] = {}
        self._clocks: dict[int, _Clock] = {}

    def prepare(self, call: CapturedCall, operator: Rebuilt) -> object:
        """Take slow memory for what is changed, and learn how its outputs come to lie there."""
        out = operator.run()
        if (change := self._changes.get(call.index)) is None:
            return out
        from farm.slow_memory.offload import slow_outputs

        placement = Placement.parse(change.placement)
        try:
            slow = {number: self._memory.like(operator.storages[number]) for number in sorted(placement.inputs)}
            outputs = None
            if placement.outputs:
                outputs = slow_outputs(operator, sorted(placement.outputs), self._memory)
                if outputs.pool is not None:
                    raise Unmeasurable("not_available", "Its output needs a pool of its own.")
        except Unmeasurable as error:
            self.left_out[change] = error.message
        else:
            self.ready[call.index] = (slow, outputs)
            self._clocks[call.index] = _Clock(self._device)
        return out

    def read(self, player: Player) -> dict[Changed, InPlace]:
        empty = _Clock(self._device)

        def once() -> None:
            empty.time(lambda: None)
            player.play(self._step)

        replay: Callable[[], Any] = once
        if self._device.type == "cuda":
            replay = capture_graph([once], self._device).replay
        samples: dict[int, list[float]] = {index: [] for index in self.ready}
        nothing: list[float] = []
        for number in range(REPLAYS + 1):
            replay()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            if number:
                nothing.append(empty.took_us())
                for index, values in samples.items():
                    values.append(self._clocks[index].took_us())
        events_us = intervals.midmean(nothing)
        return {
            self._changes[index]: InPlace(
                intervals.midmean(values) - events_us, intervals.batch_half_width(values, intervals.midmean)
            )
            for index, values in samples.items()
        }

    def _step(self, call: CapturedCall, operator: Rebuilt) -> object:
        from farm.operators.rebuild import Rebuilt

        if call.index not in self.ready:
            return operator.run()
        slow, outputs = self.ready[call.index]
        for number, tensor in slow.items():
            tensor.copy_(operator.storages[number])
        storages = [slow.get(number, base) for number, base in enumerate(operator.storages)]
        moved = Rebuilt(operator.spec, operator.device, storages)
        self._clocks[call.index].time(outputs.run(moved) if outputs is not None else moved.run)
        return operator.run()


class _Clock:
    """Times one thing: by events of a graph on a GPU, else by the clock."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._took_us = 0.0
        if self._cuda:
            self._begin, self._end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))

    def time(self, run: Callable[[], object]) -> None:
        if self._cuda:
            self._begin.record()
            run()
            self._end.record()
            return
        began_s = time.perf_counter()
        run()
        self._took_us = (time.perf_counter() - began_s) * 1e6

    def took_us(self) -> float:
        return float(self._begin.elapsed_time(self._end)) * 1e3 if self._cuda else self._took_us
