"""Time each tuple of a model in the context of its calls: the other calls that run before it in the
model.

These other calls decide how much of an operator's code and data is still cached when the operator
runs. So, after the window of a whole model, one CUDA graph replays all calls from their tuples, in
the model's order. Each call has its own weights if it has in the model. It reads the memory that
earlier calls wrote, and memory is freed at the same call as in the model. The graph runs each call
twice between CUDA events: the other calls have filled the caches for the first run, and the first
run has warmed them for the second. The difference is the time that the context adds.

The ranks of a split model replay their calls together. There, further replays time loops of the
calls in the ranks' processes, and what collectives add to a pass.

The replay uses the order of the model's calls, the lifetimes of its storages and the values of its
integer tensors (token ids, positions, masks: they decide which addresses the model reads). It uses
nothing else of the model. Segments that a tuple describes (the rows of each expert) are written
before the first call that uses them, unless the replayed calls themselves compute such segments.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch.utils._python_dispatch import _disable_current_modes

from farm.benchmark.cache import replay_us
from farm.benchmark.host_steps import HostSteps
from farm.benchmark.passes import MEMORY_SHARE, free_bytes
from farm.benchmark.torch_device import capture_graph
from farm.operators.captured import CapturedCall, CapturedPass
from farm.operators.deciding_values import describe, is_recorded, values_of
from farm.operators.rebuild import Rebuilt, needed_bytes, rebuild
from farm.subjects.collective_calls import without_communication
from farm.subjects.encoding import dtype_of, tensors_in
from farm.subjects.registry import kind_of
from farm.types import intervals
from farm.types.deciding import DecidingInput, deciding_input
from farm.types.details import Place
from farm.types.figure import Figure
from farm.types.tuple import OperatorTuple

BUDGET_S = 0.25  # for all replays together
REPLAYS = (6, 24)  # least and most counted replays; an uncounted replay comes before each
LOOP = 4  # more runs of a call in the loops of a split model
RANK_CALLS = 4  # calls of a tuple that are timed in a split model
MOST_COLLECTIVES = 6  # different collectives of a split model that `time_added` times
LAYOUTS = 5  # copies of a model's data, each at other addresses

#: Runs a call's operator once or more, and returns the result of the first run.
PlayedCall = Callable[[CapturedCall, Rebuilt], object]
#: Called before each call with its index, after the last with the number of calls; and with the
#: memory of each storage.
Before = Callable[[int, dict[int, torch.UntypedStorage]], None]


def time_in_order(player: Player, pass_s: float) -> dict[str, Place]:
    """Time the tuples of a capture in the order of its calls: tuple id -> time in us that the
    context adds.

    Collectives run once, without events: see `time_added`.

    Args:
        pass_s: approximate time of one pass of the model in s.
    """
    return {
        tuple_id: _place(
            [before - after for before, after in values], player.capture.counts[tuple_id]
        )
        for tuple_id, values in _runs_us(player, 1, pass_s).items()
    }


def time_loops(player: Player, pass_s: float) -> dict[str, float]:
    """Measure how long each tuple of a split model takes in a short loop in this rank: tuple id ->
    time in us.

    It takes longer than in a process without an NCCL communicator: 0.2 to 0.5 us per kernel on
    H100s and H200s."""

    def more_us(runs: int) -> dict[str, float]:
        return {
            tuple_id: intervals.midmean([us for _, us in values])
            for tuple_id, values in _runs_us(player, runs, pass_s).items()
        }

    short, long = more_us(1), more_us(1 + LOOP)
    return {tuple_id: round((us - short[tuple_id]) / LOOP, 4) for tuple_id, us in long.items()}


def _runs_us(player: Player, runs: int, pass_s: float) -> dict[str, list[tuple[float, float]]]:
    """The times in us of the first run of each call and of `runs` further ones, in order, by tuple
    id.
    """
    capture, device = player.capture, player.device
    of_one_card = {
        tuple_id for tuple_id, spec in capture.tuples.items() if kind_of(spec).cards(spec) == 1
    }
    chosen, split = (
        defaultdict[str, list[CapturedCall]](list),
        len(of_one_card) < len(capture.tuples),
    )
    for call in capture.calls:
        if call.tuple_id in of_one_card and (not split or len(chosen[call.tuple_id]) < RANK_CALLS):
            chosen[call.tuple_id].append(call)
    events = {
        call.index: tuple(torch.cuda.Event(enable_timing=True, external=True) for _ in range(3))
        for call in itertools.chain.from_iterable(chosen.values())
    }

    def timed(call: CapturedCall, operator: Rebuilt) -> object:
        if call.index not in events:
            return operator.run()
        first, second, third = events[call.index]
        first.record()
        out = operator.run()
        second.record()
        for _ in range(runs):
            operator.run()
        third.record()
        return out

    # libraries load and select their algorithms
    steps = HostSteps.of(lambda: player.play(timed), device)
    graph = capture_graph([steps.around(lambda: player.play(timed))], device)
    samples: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for _ in range(_replays((4 + 2 * runs) * pass_s)):
        for _ in range(
            2
            # only the second replay counts: the first has filled the caches like a pass
            # of the model
        ):
            graph.replay()
            # a graph with collectives is not queued behind another: the ranks begin each together
            if split:
                torch.cuda.synchronize(device)
        torch.cuda.synchronize(device)
        for tuple_id, calls in chosen.items():
            for first, second, third in (events[call.index] for call in calls):
                samples[tuple_id].append(
                    (first.elapsed_time(second) * 1e3, second.elapsed_time(third) * 1e3)
                )
    return samples


def time_added(player: Player, pass_s: float) -> dict[str, Place]:
    """Time what the collectives of a split model add to a pass: tuple id -> time in us of one call.

    All collectives add the difference between two replays of all calls: with them and without them.
    It contains what a loop of collectives does not show: the ranks wait for each other, and
    collectives and computation run at the same time and slow each other down. The replays have no
    events, which would delay the ranks. The largest collectives are also omitted in turn. These
    differences only share out the sum among the collectives: without one of them, the ranks may
    wait in another."""
    capture, device = player.capture, player.device
    of_model = (key for key, spec in capture.tuples.items() if kind_of(spec).cards(spec) > 1)
    collectives = sorted(
        of_model, key=lambda key: -capture.counts[key] * needed_bytes(capture.tuples[key])
    )
    largest = collectives[:MOST_COLLECTIVES] if len(collectives) > 1 else []
    runs: list[
        Callable[[], object]
    ] = []  # own the memory of their host steps, which the graphs use
    graphs = []
    pool = torch.cuda.graph_pool_handle()
    received: dict[
        str, torch.Tensor | None
    ] = {}  # made in the eager pass of `HostSteps.of`, not in a graph
    for omitted in ((), collectives, *([key] for key in largest)):

        def step(
            call: CapturedCall, operator: Rebuilt, omitted: Collection[str] = omitted
        ) -> object:
            if call.tuple_id not in omitted:
                return operator.run()
            if call.tuple_id not in received:
                received[call.tuple_id] = without_communication(operator.spec, operator.tensors[0])
            return received[call.tuple_id]

        run = functools.partial(player.play, step, once=True, overlapping=True)
        runs.append(HostSteps.of(run, device).around(run))
        graphs.append(capture_graph(runs[-1:], device, pool))
    all_us: list[float] = []
    each_us: dict[str, list[float]] = defaultdict(list)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # alternate the graphs, so that all run at the same clocks
    for _ in range(_replays(2 * len(graphs) * pass_s)):
        with_us, without_us, *without_one_us = (replay_us(graph, begin, end) for graph in graphs)
        all_us.append(with_us - without_us)
        for tuple_id, us in zip(largest, without_one_us, strict=True):
            each_us[tuple_id].append(with_us - us)
    weights = {
        key: max(0.0, intervals.midmean(each_us[key])) if key in each_us else 0.0
        for key in collectives
    }
    return shared_out(all_us, weights, capture.counts)


def shared_out(
    all_us: list[float], weights: Mapping[str, float], counts: Mapping[str, int]
) -> dict[str, Place]:
    """The time of one call of each collective, if all calls together take `all_us` (several
    measurements).

    The errors of the shares add up, in quadrature, to the error of the whole time.
    """
    total_us = max(0.0, intervals.midmean(all_us))
    half_width_us = intervals.batch_half_width(all_us, intervals.midmean)
    sum_us = math.fsum(weights.values())
    places = {}
    for tuple_id, weight in weights.items():
        share, calls = weight / sum_us if sum_us else 1 / len(weights), counts[tuple_id]
        half_width = half_width_us * math.sqrt(share) / calls
        effect_us = Figure(round(share * total_us / calls, 4), round(half_width, 4))
        places[tuple_id] = Place(effect_us, calls)
    return places


def time_layouts(player: Player, steps: HostSteps, pass_s: float) -> float | None:
    """Measure how much the time of a pass depends on the addresses of its data: the half-width (95
    %) in us of the difference between two passes with the same data at other addresses.

    Caches and address translation find some layouts faster than others, and each process has
    another one. Returns None if the copies do not fit in the card's memory.

    Args:
        steps: the host steps of the pass.
    """
    device = player.device
    given_bytes = sum(memory.nbytes() for memory in player.given.values())
    if LAYOUTS * given_bytes > MEMORY_SHARE * free_bytes(device):
        return None
    runs: list[Callable[[], object]] = []  # own the memory that the graphs use
    graphs = []
    try:
        for _ in range(LAYOUTS):
            runs.append(steps.around(player.with_copies(player.given, torch.clone).once))
            graphs.append(capture_graph(runs[-1:], device))
    except torch.OutOfMemoryError:
        return None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    rounds = [
        [replay_us(graph, begin, end) for graph in graphs]
        for _ in range(_replays(2 * LAYOUTS * pass_s))
    ]
    times_us = [intervals.midmean(of_layout) for of_layout in zip(*rounds, strict=True)]
    return round(intervals.student_t_95(LAYOUTS - 1) * math.sqrt(2) * statistics.stdev(times_us), 4)


def _replays(seconds: float) -> int:
    least, most = REPLAYS
    return max(least, min(most, math.ceil(BUDGET_S / seconds)))


def _place(values_us: list[float], calls: int) -> Place:
    half_width_us = intervals.batch_half_width(values_us, intervals.midmean)
    effect_us = Figure(round(intervals.midmean(values_us), 4), round(half_width_us, 4))
    return Place(effect_us, calls)


class Player:
    """Replays the calls of a capture from its tuples. Later calls get the results of earlier calls,
    as in the model.

    Raises:
        FarmError: a tuple cannot be built.
        torch.OutOfMemoryError: the model leaves too little memory for the tuples.
    """

    def __init__(self, capture: CapturedPass, device: torch.device) -> None:
        self.capture, self.device = capture, device
        self._lanes = _Lanes(capture, device) if capture.launches else None
        self._shapes = {
            tuple_id: rebuild(spec, "meta") for tuple_id, spec in capture.tuples.items()
        }
        self._last = {
            storage: call.index for call in capture.calls for storage in (*call.reads, *call.writes)
        }
        #: Storage number -> memory, for storages that exist before the first call (weights,
        #: inputs).
        self.given: dict[int, torch.UntypedStorage] = {}
        self._segments = {
            tuple_id: _segments(spec, device) for tuple_id, spec in capture.tuples.items()
        }
        #: Calls whose segments the replay writes, because its own calls compute other ones.
        self._corrected: set[int] = set()
        made: set[int] = set()
        outside: set[int] = set()
        calls_of_tuple: dict[str, list[CapturedCall]] = defaultdict(list)
        for call in capture.calls:
            if new := {storage for storage in call.reads if storage not in made} - self._outputs(
                call
            ):
                calls_of_tuple[call.tuple_id].append(call)
            outside |= new
            made.update(new, call.writes)
        size_bytes = sum(capture.tensors[storage].size_bytes for storage in outside)
        if size_bytes > MEMORY_SHARE * free_bytes(device):
            raise torch.OutOfMemoryError(
                "The inputs of the tuples do not fit in the card's memory beside the model."
            )
        for tuple_id, calls in calls_of_tuple.items():
            pristine = rebuild(capture.tuples[tuple_id], device)
            for call in calls:
                for base, storage in zip(pristine.storages, self._numbers(call), strict=True):
                    if storage in outside and storage not in self.given:
                        # the model's values; None: use the tuple's values
                        integers = capture.integers.get(storage)
                        if integers is None or integers.device.type == "meta":
                            self.given[storage] = base.clone().untyped_storage()
                        else:
                            self.given[storage] = (
                                bytes_of(integers).to(device, copy=True).untyped_storage()
                            )

    def with_copies(
        self, storages: Collection[int], copied: Callable[[torch.Tensor], torch.Tensor]
    ) -> Player:
        """A player of the same calls, in which `copied` has copied the given `storages` of this
        device.
        """
        other = copy.copy(self)
        other.given = {
            number: copied(bytes_of(memory)).untyped_storage()
            if number in storages and memory.device.type == self.device.type
            else memory
            for number, memory in self.given.items()
        }
        return other

    def play(
        self,
        played_call: PlayedCall,
        *,
        once: bool = False,
        overlapping: bool = False,
        before: Before = lambda *_: None,
    ) -> None:
        """Run all calls. Memory that a call allocates is freed after the last call that uses it.

        Args:
            once: `played_call` runs each operator only once, so that counters need no restoring.
            overlapping: run the calls of a split model on as many streams as the model does. Memory
                that two streams use at the same time is then freed after the last call.
        """
        memory = dict(self.given)
        lanes = self._lanes if overlapping else None
        if lanes:
            lanes.begin()
        for call in self.capture.calls:
            with lanes.lane(call.index) if lanes else contextlib.nullcontext():
                self._run(call, played_call, memory, once=once, before=before)
            for storage in (*call.reads, *call.writes):
                if self._last[storage] == call.index and storage not in self.given:
                    freed = memory.pop(storage, None)
                    if lanes and freed is not None and storage in lanes.others:
                        lanes.kept.append(freed)
        if lanes:
            lanes.join()
        before(len(self.capture.calls), memory)

    def _run(
        self,
        call: CapturedCall,
        played_call: PlayedCall,
        memory: dict[int, torch.UntypedStorage],
        *,
        once: bool,
        before: Before,
    ) -> None:
        before(call.index, memory)
        shapes = self._shapes[call.tuple_id]
        storages = [
            _on(memory.get(storage), base, self.device)
            for base, storage in zip(shapes.storages, self._numbers(call), strict=True)
        ]
        if outputs := self._outputs(call):
            for number, base in zip(self._numbers(call), storages, strict=True):
                if number in outputs:
                    memory.setdefault(number, base.untyped_storage())
        operator = Rebuilt(shapes.spec, self.device, storages)
        self._correct(call, operator)
        counters = [
            (base, base.clone())
            for number, base in zip(self._numbers(call), storages, strict=True)
            if not once and number in call.writes and not base.is_floating_point()
        ]
        out = played_call(call, operator)
        # for example a count of tokens, by which other calls index: keep the effect of one run only
        if counters:
            for counter, kept in counters:
                counter.copy_(kept)
            operator.run()
        held_storages = {tensor.untyped_storage()._cdata for tensor in storages}
        fresh = {
            storage._cdata: storage
            for storage in map(torch.Tensor.untyped_storage, tensors_in(out))
            if storage._cdata not in held_storages
        }
        # A collective may write the memory of which its input is a part.
        spec = self.capture.tuples[call.tuple_id]
        same = () if kind_of(spec).cards(spec) > 1 else call.reads
        new = [storage for storage in call.writes if storage not in same]
        memory.update(zip(new, fresh.values(), strict=False))

    def _correct(self, call: CapturedCall, operator: Rebuilt) -> None:
        """Write the segments of a call's tuple if the replayed calls compute other ones, as an
        eager replay shows.
        """
        segments = self._segments[call.tuple_id]
        if segments is None:
            return

        deciding, values = segments
        target = operator.tensors[deciding.index]
        if not is_recorded(self.device):
            with _disable_current_modes():  # this copy to the host is no host step of the pass
                computed = describe(deciding, target.cpu().numpy())
            if computed != operator.spec.tensors[deciding.index].values:
                self._corrected.add(call.index)
        if call.index in self._corrected:
            target.copy_(values)

    def once(self) -> None:
        self.play(lambda _, operator: operator.run(), once=True, overlapping=True)

    def _outputs(self, call: CapturedCall) -> set[int]:
        """The numbers of the storages that a call gets as arguments and only writes; the call
        allocates new ones.
        """
        spec = self.capture.tuples[call.tuple_id]
        if not (indices := kind_of(spec).outputs(spec)):
            return set()
        numbers = self._numbers(call)
        return {numbers[spec.tensors[index].storage] for index in indices}

    def _numbers(self, call: CapturedCall) -> list[int]:
        """The numbers that the capture gives to a call's storages, in the order of the storages in
        the call's tuple.
        """
        spec = self.capture.tuples[call.tuple_id]
        behind = dict(
            zip(dict.fromkeys(tensor.storage for tensor in spec.tensors), call.reads, strict=True)
        )
        return [behind[number] for number in range(len(behind))]


def _segments(
    spec: OperatorTuple, device: torch.device
) -> tuple[DecidingInput, torch.Tensor] | None:
    """The input of a call that divides a dimension, with its values; None if its tuple describes
    none.
    """
    deciding = deciding_input(spec)
    values = spec.tensors[deciding.index].values if deciding else None
    if deciding is None or values is None or not deciding.is_needed:
        return None
    made = values_of(deciding, values)
    assert made is not None
    tensor = spec.tensors[deciding.index]
    return deciding, made[: tensor.numel].view(tensor.shape).to(device, dtype_of(tensor.dtype))


class _Lanes:
    """The streams of a split model: one stream for each that its calls used
    (`CapturedPass.launches`).
    """

    def __init__(self, capture: CapturedPass, device: torch.device) -> None:
        self._capture, self._device = capture, device
        self._streams: dict[
            int, torch.cuda.Stream
        ] = {}  # kept: PyTorch reuses the memory of a stream only on it
        self._awaited = frozenset(itertools.chain.from_iterable(capture.waits))
        #: Storages whose memory another stream allocates, uses last, or reads while the stream of
        #: the pass goes on.
        self.others: set[int] = set()
        used_on: dict[int, list[int]] = defaultdict(list)
        for call, launch in zip(capture.calls, capture.launches, strict=True):
            for storage in (*call.reads, *call.writes):
                used_on[storage].append(launch.stream)
            if launch.stream:
                self.others |= set(call.reads) - set(call.writes)
        self.others |= {
            storage for storage, streams in used_on.items() if streams[0] or streams[-1]
        }

    def begin(self) -> None:
        """Begin a pass on the current stream, for which all others wait."""
        self._main = torch.cuda.current_stream(self._device)
        for launch in self._capture.launches:
            while launch.stream and launch.stream not in self._streams:
                stream = torch.cuda.Stream(self._device, launch.priority)
                # PyTorch returns a limited number in turn
                if stream not in (self._main, *self._streams.values()):
                    self._streams[launch.stream] = stream
        for stream in self._streams.values():
            stream.wait_stream(self._main)
        self._done: dict[int, torch.cuda.Event] = {}
        self.kept: list[
            torch.UntypedStorage
        ] = []  # memory that must not be used again before `join`

    @contextlib.contextmanager
    def lane(self, index: int) -> Iterator[None]:
        """While active, work goes to the stream of a call, after the calls for which it waits."""
        stream = self._streams.get(self._capture.launches[index].stream, self._main)
        for other in self._capture.waits[index]:
            stream.wait_event(self._done[other])
        with torch.cuda.stream(stream):
            yield
        if index in self._awaited:
            self._done[index] = stream.record_event()

    def join(self) -> None:
        """Let the stream of the pass wait for all others."""
        for stream in self._streams.values():
            self._main.wait_stream(stream)


def bytes_of(memory: torch.UntypedStorage) -> torch.Tensor:
    """A storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)


def _on(
    memory: torch.UntypedStorage | None, base: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """A tensor with the shape and strides of the meta tensor `base`: in `memory` if it is large
    enough, else in new.

    `memory` may be on the host: attention on a GPU keeps its dropout seed there.
    """
    if memory is None or memory.nbytes() < base.untyped_storage().nbytes():
        return torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device=device)
    return torch.empty(0, dtype=base.dtype, device=memory.device).set_(
        memory, 0, base.shape, base.stride()
    )
