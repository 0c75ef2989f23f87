"""Time calls within their model, with some of their tensors in slow memory.

This module replays the calls of a model from its tuples (`farm.benchmark.call_context`). A changed
call runs twice. The first time it uses copies of its tensors in slow memory, and two events time
it. The second time it runs as usual, so later calls find the same data and cache. One run can
change many calls if they share no tensor and are not neighbours.

As a program it is the benchmark process of a study: it also answers an `InSituRequest`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from farm.addons.memory.memory_tier import SlowMemory, slow_memory_of
from farm.addons.memory.offload import Outputs, slow_outputs
from farm.benchmark.call_context import Player
from farm.benchmark.passes import applied
from farm.benchmark.subjects import passes_of
from farm.benchmark.torch_device import capture_graph, one_stream, synchronize
from farm.benchmark_process.requests import SubjectRequest
from farm.benchmark_process.server import TorchRunner, main
from farm.devices.device import Device
from farm.errors import Unmeasurable
from farm.operators.captured import CapturedCall, CapturedPass
from farm.operators.rebuild import Rebuilt, placements_of
from farm.subjects.label import label_of
from farm.types import intervals
from farm.types.placement import Placement
from farm.types.protocol import Protocol
from farm.types.subject import Subject

REPLAYS = 8  # timed replays of each run, after a warm-up replay


@dataclass(frozen=True)
class InSituRequest(SubjectRequest[dict[str, Any]]):
    """Time calls of a variant with tensors in slow memory; the answer is that of `compare`."""

    name, answer, doing, uses_slow_memory = (
        "in_situ",
        dict[str, Any],
        "time calls in their model",
        True,
    )
    most: int | None = None  # configurations


class StudyRunner(TorchRunner):
    """Answers an `InSituRequest`, too."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.handlers = {
            **self.handlers,
            InSituRequest: lambda one, on_phase: compare(
                one.subject, one.protocol, self._torch_device, one.most
            ),
        }


@dataclass(frozen=True)
class ChangedCall:
    """The index of a call, and the placement that puts some of its tensors in slow memory."""

    call: int
    placement: str


@dataclass(frozen=True)
class CallTime:
    """Time of a changed call, and the half-width of its 95 % interval."""

    time_us: float
    half_width_us: float


@dataclass(frozen=True)
class InSituTimes:
    """Times of the changed calls, and for each impossible change the reason."""

    found: dict[ChangedCall, CallTime]
    left_out: dict[ChangedCall, str] = field(default_factory=dict)
    runs: int = 0
    took_s: float = 0.0


def changes_of(capture: CapturedPass, how: str, most: int | None = None) -> list[ChangedCall]:
    """Return all placements (`farm.types.placement.configurations`) of all tuples, each for the
    first call of its tuple. If there are more than `most`, return `most` of them, spread evenly
    over the model."""
    first = {call.tuple_id: call.index for call in reversed(capture.calls)}
    found = [
        ChangedCall(first[tuple_id], word)
        for tuple_id in capture.counts
        for word in placements_of(capture.tuples[tuple_id], how)
    ]
    if most is None or len(found) <= most:
        return found
    return [found[number * len(found) // most] for number in range(most)]


def together(capture: CapturedPass, wanted: Sequence[ChangedCall]) -> list[list[ChangedCall]]:
    """Group changes into runs, greedily. The calls of one run share no tensor and are not
    neighbours.
    """
    runs: list[
        tuple[list[ChangedCall], set[int], set[int]]
    ] = []  # changes, tensors and calls of each run
    for one in wanted:
        tensors = {*capture.calls[one.call].reads, *capture.calls[one.call].writes}
        for run, touched, calls in runs:
            if not (tensors & touched or calls & {one.call - 1, one.call, one.call + 1}):
                run.append(one)
                touched |= tensors
                calls.add(one.call)
                break
        else:
            runs.append(([one], tensors, {one.call}))
    return [run for run, _, _ in runs]


def time_changes(
    capture: CapturedPass,
    runs: Sequence[Sequence[ChangedCall]],
    memory: Callable[[], SlowMemory],
    device: torch.device,
) -> InSituTimes:
    """Time the changed calls of each run. ``memory()`` creates the slow memory of one run."""
    began_s = time.perf_counter()
    player = Player(capture, device)
    found: dict[ChangedCall, CallTime] = {}
    left_out: dict[ChangedCall, str] = {}
    for changes in runs:
        run = _Run(changes, memory(), device)
        player.play(run.prepare)
        left_out |= run.left_out
        if run.ready:
            found |= run.time(player)
    return InSituTimes(found, left_out, len(runs), time.perf_counter() - began_s)


def compare(
    subject: Subject, protocol: Protocol, device: torch.device, most: int | None
) -> dict[str, Any]:
    """Compare runs that change many calls ("together") with runs that change one call ("alone").
    The changes put each tensor of a variant's tuples in slow memory alone, and all tensors of a
    tuple at once.

    Returns:
        ``changes`` (tuple_id, label, placement, and time_us and half_width_us for both kinds of
        runs), ``left_out`` (tuple_id, label, placement, why), and for both kinds ``runs`` (their
        number) and ``took_s``.

    Raises:
        Unmeasurable: the card has no slow memory, or the model does not fit.
    """
    slow_memory_of(device)
    one_stream(device)
    with applied(protocol):
        order = passes_of(subject, protocol, device).order
        assert order is not None
        capture = order()
        changes = changes_of(capture, "each", most)
        memory = functools.partial(slow_memory_of, device)
        many = time_changes(capture, together(capture, changes), memory, device)
        single = time_changes(capture, [[one] for one in changes], memory, device)

    def about(one: ChangedCall) -> dict[str, Any]:
        tuple_id = capture.calls[one.call].tuple_id
        return {
            "tuple_id": tuple_id,
            "label": label_of(capture.tuples[tuple_id]),
            "placement": one.placement,
        }

    return {
        "changes": [
            about(one) | {"together": vars(many.found[one]), "alone": vars(single.found[one])}
            for one in changes
            if one in many.found and one in single.found
        ],
        "left_out": [about(one) | {"why": why} for one, why in many.left_out.items()],
        "runs": {"together": many.runs, "alone": single.runs},
        "took_s": {"together": round(many.took_s, 3), "alone": round(single.took_s, 3)},
    }


class _Run:
    """One replay of the model with some changed calls."""

    def __init__(
        self, changes: Sequence[ChangedCall], memory: SlowMemory, device: torch.device
    ) -> None:
        self._changes = {one.call: one for one in changes}
        self._memory, self._device = memory, device
        self.ready: dict[int, tuple[dict[int, torch.Tensor], Outputs | None]] = {}
        self.left_out: dict[ChangedCall, str] = {}
        self._stopwatches: dict[int, _Stopwatch] = {}

    def prepare(self, call: CapturedCall, operator: Rebuilt) -> object:
        """Run a call. If it is changed, also allocate its slow memory and find out how to write its
        outputs there.
        """
        out = operator.run()
        if (change := self._changes.get(call.index)) is None:
            return out
        placement = Placement.parse(change.placement)
        try:
            slow = {
                number: self._memory.like(operator.storages[number])
                for number in sorted(placement.inputs)
            }
            outputs = None
            if placement.outputs:
                outputs = slow_outputs(operator, sorted(placement.outputs), self._memory)
                if outputs.pool is not None:
                    raise Unmeasurable(
                        "not_available",
                        "The output cannot be in slow memory inside the model: it needs its own "
                        "memory pool.",
                    )
        except Unmeasurable as error:
            self.left_out[change] = error.message
        else:
            self.ready[call.index] = (slow, outputs)
            self._stopwatches[call.index] = _Stopwatch(self._device)
        return out

    def time(self, player: Player) -> dict[ChangedCall, CallTime]:
        empty = _Stopwatch(self._device)

        def once() -> None:
            empty.time(lambda: None)
            player.play(self._step)

        replay: Callable[[], Any] = once
        if self._device.type == "cuda":
            replay = capture_graph([once], self._device).replay
        stopwatches = [empty, *self._stopwatches.values()]
        samples = []
        for _ in range(REPLAYS + 1):
            replay()
            synchronize(self._device)
            samples.append([stopwatch.took_us() for stopwatch in stopwatches])
        nothing, *found = zip(*samples[1:], strict=True)
        events_us = intervals.midmean(nothing)
        times = {}
        for index, values in zip(self._stopwatches, found, strict=True):
            half_width_us = intervals.batch_half_width(values, intervals.midmean)
            times[self._changes[index]] = CallTime(
                intervals.midmean(values) - events_us, half_width_us
            )
        return times

    def _step(self, call: CapturedCall, operator: Rebuilt) -> object:
        if call.index not in self.ready:
            return operator.run()
        slow, outputs = self.ready[call.index]
        for number, tensor in slow.items():
            tensor.copy_(operator.storages[number])
        storages = [slow.get(number, base) for number, base in enumerate(operator.storages)]
        moved = Rebuilt(operator.spec, operator.device, storages)
        self._stopwatches[call.index].time(outputs.run(moved) if outputs is not None else moved.run)
        return operator.run()


class _Stopwatch:
    """Times one function: on a GPU with events inside a CUDA graph, on a CPU with the host's
    clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._took_us = 0.0
        if self._cuda:
            self._begin, self._end = (
                torch.cuda.Event(enable_timing=True, external=True) for _ in range(2)
            )

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


if __name__ == "__main__":
    main(StudyRunner)
