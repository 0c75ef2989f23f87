"""Time each tuple of a model in the context of its calls: between the calls that surround it in the model.

How much of an operator's code and data is still cached when it is called depends on the calls since its last run. So,
beside the window of a whole model, its calls are replayed from the tuples in one graph: in the model's order, with
weights of their own wherever the model has, and on the memory that earlier calls wrote, which lives as long as in the
model. Each call runs twice, between events of the graph: with the caches as its neighbours left them, then as its first
run left them. The difference is what the context adds to a tuple that is looped with warm caches.

The replay uses the order of the model's calls, the lifetimes of its storages and its own integers (token ids,
positions, masks: values computed from them are addresses of other reads), and nothing else of the model.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import torch

from farm.benchmark import intervals
from farm.benchmark.passes import MEMORY_SHARE, free_bytes
from farm.benchmark.torch_device import capture_graph
from farm.operators.encoding import tensors_in
from farm.types.reading import Place

if TYPE_CHECKING:
    from farm.operators.captured import CapturedCall, CapturedPass
    from farm.operators.rebuild import Rebuilt

BUDGET_S = 0.25  # for all replays together
REPLAYS = (6, 24)  # least and most, each after one that is not counted

#: Runs a call's operator once or more, and returns the result of the first run.
Step = Callable[["CapturedCall", "Rebuilt"], object]
#: Called with the memory of each live storage: before each call with its index, after the last with their number.
Before = Callable[[int, dict[int, torch.UntypedStorage]], None]


def time_in_order(capture: CapturedPass, pass_s: float, device: torch.device) -> dict[str, Place]:
    """Time the tuples of a capture in the order of its calls: tuple id -> time that the context adds.

    Args:
        pass_s: approximate time of one pass of the model.

    Raises:
        FarmError: a tuple cannot be built.
        torch.OutOfMemoryError: the tuples do not fit beside the model.
    """
    player = Player(capture, device)
    player.play(lambda _, operator: operator.run())  # libraries load and select their algorithms
    torch.cuda.synchronize(device)
    events = [tuple(torch.cuda.Event(enable_timing=True, external=True) for _ in range(3)) for _ in capture.calls]

    def timed(call: CapturedCall, operator: Rebuilt) -> object:
        first, second, third = events[call.index]
        first.record()
        out = operator.run()
        second.record()
        operator.run()
        third.record()
        return out

    graph = capture_graph([lambda: player.play(timed)], device)
    least, most = REPLAYS
    samples: dict[str, list[float]] = defaultdict(list)
    for _ in range(max(least, min(most, math.ceil(BUDGET_S / (6 * pass_s))))):
        graph.replay()
        graph.replay()  # this one counts: it finds the caches as one pass leaves them to the next
        torch.cuda.synchronize(device)
        for call, (first, second, third) in zip(capture.calls, events, strict=True):
            added_ms = first.elapsed_time(second) - second.elapsed_time(third)
            samples[call.tuple_id].append(added_ms * 1e3)
    places = {}
    for tuple_id, values in samples.items():
        half_width_us = intervals.batch_half_width(values, intervals.midmean)
        places[tuple_id] = Place(round(intervals.midmean(values), 4), round(half_width_us, 4), capture.counts[tuple_id])
    return places


class Player:
    """Replays the calls of a capture from its tuples. Later calls get the results of earlier calls, as in the model.

    Attributes:
        given: the memory of storages that no call makes (weights, inputs), by storage number.
    """

    def __init__(self, capture: CapturedPass, device: torch.device) -> None:
        from farm.operators.rebuild import rebuild

        self.capture, self.device = capture, device
        self._shapes = {tuple_id: rebuild(spec, "meta") for tuple_id, spec in capture.tuples.items()}
        self._last = {storage: call.index for call in capture.calls for storage in (*call.reads, *call.writes)}
        self.given: dict[int, torch.UntypedStorage] = {}
        made: set[int] = set()
        outside: set[int] = set()
        wanted: dict[str, list[CapturedCall]] = defaultdict(list)
        for call in capture.calls:
            if new := {storage for storage in call.reads if storage not in made}:
                wanted[call.tuple_id].append(call)
            outside |= new
            made.update(new, call.writes)
        size_bytes = sum(capture.tensors[storage].size_bytes for storage in outside)
        if size_bytes > MEMORY_SHARE * free_bytes(device):
            raise torch.OutOfMemoryError("The tuples do not fit beside the model.")
        for tuple_id, calls in wanted.items():
            pristine = rebuild(capture.tuples[tuple_id], device)
            for call in calls:
                for base, storage in zip(pristine.storages, self._numbers(call), strict=True):
                    if storage in outside and storage not in self.given:
                        integers = capture.integers.get(storage)  # the model's own, else the tuple's values
                        if integers is None or integers.device.type == "meta":
                            self.given[storage] = base.clone().untyped_storage()
                        else:
                            self.given[storage] = _bytes_of(integers).to(device, copy=True).untyped_storage()

    def with_copies(self, storages: Collection[int], copied: Callable[[torch.Tensor], torch.Tensor]) -> Player:
        """The same calls with copies of these storages. Storages on the host, or made by a call, are not copied."""
        other = copy.copy(self)
        other.given = {
            number: copied(_bytes_of(memory)).untyped_storage()
            if number in storages and memory.device.type == self.device.type
            else memory
            for number, memory in self.given.items()
        }
        return other

    def play(self, step: Step, *, once: bool = False, before: Before = lambda index, memory: None) -> None:
        """Run all calls. Memory that a call makes is freed after the last call that uses it.

        Args:
            once: `step` runs its operator once, so that counters need not be restored.
        """
        from farm.operators.rebuild import Rebuilt

        memory = dict(self.given)
        for call in self.capture.calls:
            before(call.index, memory)
            shapes = self._shapes[call.tuple_id]
            storages = [
                _on(memory.get(storage), base, self.device)
                for base, storage in zip(shapes.storages, self._numbers(call), strict=True)
            ]
            operator = Rebuilt(shapes.spec, self.device, storages)
            counters = [
                (base, base.clone())
                for number, base in zip(self._numbers(call), storages, strict=True)
                if not once and number in call.writes and not base.is_floating_point()
            ]
            out = step(call, operator)
            if counters:  # for example of tokens, which say where others write: leave them as one run does
                for counter, kept in counters:
                    counter.copy_(kept)
                operator.run()
            held = {tensor.untyped_storage()._cdata for tensor in storages}
            fresh = {
                one._cdata: one for one in map(torch.Tensor.untyped_storage, tensors_in(out)) if one._cdata not in held
            }
            new = [storage for storage in call.writes if storage not in call.reads]
            memory.update(zip(new, fresh.values(), strict=False))
            for storage in (*call.reads, *call.writes):
                if self._last[storage] == call.index and storage not in self.given:
                    memory.pop(storage, None)
        before(len(self.capture.calls), memory)

    def _numbers(self, call: CapturedCall) -> list[int]:
        """The capture's storage numbers of a call, in the order of its tuple's storages."""
        spec = self.capture.tuples[call.tuple_id]
        behind = dict(zip(dict.fromkeys(tensor.storage for tensor in spec.tensors), call.reads, strict=True))
        return [behind[number] for number in range(len(behind))]


def _bytes_of(memory: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)


def _on(memory: torch.UntypedStorage | None, base: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor with the shape of a meta tensor, in the given memory if it is large enough, else in new memory.

    The given memory may be on the host, where attention on a GPU passes its dropout seed from call to call.
    """
    if memory is None or memory.nbytes() < base.untyped_storage().nbytes():
        return torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device=device)
    return torch.empty(0, dtype=base.dtype, device=memory.device).set_(memory, 0, base.shape, base.stride())
